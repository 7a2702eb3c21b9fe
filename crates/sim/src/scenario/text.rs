//! The text form of a scenario.

use crate::node_group::{CountRange, FaultFrequencies};
use crate::pools::ObservationSharing;
use crate::zone_network::LinkProperties;
use serde::Deserialize;

/// The kind of a scenario; all other keys are ignored.
#[derive(Debug, Deserialize)]
pub(super) struct KindText {
    #[serde(default)]
    pub(super) kind: KindName,
}

#[derive(Debug, Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
pub(super) enum KindName {
    #[default]
    Pools,
    Handoff,
    Migration,
    Membership,
    Conductor,
    Balance,
    Policies,
    Replication,
}

/// Handoffs or migrations.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GroupScenarioText {
    #[serde(rename = "kind")]
    _kind: KindName,
    #[serde(default)]
    pub(super) about: String,
    pub(super) nodes: Option<CountRange>,
    pub(super) flows: Option<CountRange>,
    pub(super) processes: Option<CountRange>,
    pub(super) requests: Option<CountRange>,
    pub(super) runtime_s: Option<f64>,
    pub(super) rest_s: Option<f64>,
    pub(super) soon_ms: Option<f64>,
    #[serde(default)]
    pub(super) with_request: WithRequestText,
    #[serde(default)]
    pub(super) faults: FaultFrequencies,
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct WithRequestText {
    pub(super) crash: Option<f64>,
    pub(super) cut: Option<f64>,
    pub(super) close: Option<f64>,
    pub(super) open: Option<f64>,
    pub(super) cancel: Option<f64>,
    pub(super) kill: Option<f64>,
    pub(super) copy: Option<f64>,
}

/// The membership of a group.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MembershipScenarioText {
    #[serde(rename = "kind")]
    _kind: KindName,
    #[serde(default)]
    pub(super) about: String,
    pub(super) voters: Option<CountRange>,
    pub(super) server_nodes: Option<CountRange>,
    pub(super) incidents: Option<CountRange>,
    pub(super) runtime_s: Option<f64>,
    pub(super) lease_within_s: Option<f64>,
    pub(super) agreement_within_s: Option<f64>,
    pub(super) soon_ms: Option<f64>,
    pub(super) clock_drift_ppm: Option<u32>,
    pub(super) impatient: Option<f64>,
    pub(super) store: Option<f64>,
    pub(super) guest: Option<f64>,
    #[serde(default)]
    pub(super) incident: IncidentText,
    #[serde(default)]
    pub(super) faults: FaultFrequencies,
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct IncidentText {
    pub(super) crash: Option<f64>,
    pub(super) cut: Option<f64>,
    pub(super) isolate: Option<f64>,
    pub(super) partition: Option<f64>,
    pub(super) stop: Option<f64>,
    pub(super) leave: Option<f64>,
    pub(super) remove: Option<f64>,
    pub(super) promote: Option<f64>,
    pub(super) group_data: Option<f64>,
    pub(super) server_node_failed: Option<f64>,
    pub(super) store_down: Option<f64>,
    pub(super) store_cut: Option<f64>,
}

/// Pools.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PoolScenarioText {
    #[serde(default, rename = "kind")]
    _kind: KindName,
    #[serde(default)]
    pub(super) about: String,
    #[serde(default = "default_policy")]
    pub(super) policy: String,
    #[serde(default)]
    pub(super) dpf: f64,
    #[serde(default = "default_observation_sharing")]
    pub(super) sharing: ObservationSharing,
    #[serde(default)]
    pub(super) probes_with_way: bool,
    #[serde(default = "default_hot_quantile")]
    pub(super) probes_hot: f64,
    #[serde(default = "default_load_per_request")]
    pub(super) load_per_request: f64,
    #[serde(default = "million_calculations")]
    pub(super) capacity: f64,
    #[serde(default = "million_calculations")]
    pub(super) request_size: f64,
    pub(super) utilisation: Option<f64>,
    pub(super) request_interval_s: Option<f64>,
    #[serde(default = "default_runtime_s")]
    pub(super) runtime_s: f64,
    pub(super) distance_step_ms: Option<u32>,
    #[serde(default)]
    pub(super) setup_round_trips: u32,
    #[serde(default)]
    pub(super) overhead_ms: f64,
    #[serde(default)]
    pub(super) delivery_ms: f64,
    #[serde(default)]
    pub(super) update_interval_ms: f64,
    #[serde(default)]
    pub(super) zone: Vec<ZoneText>,
    pub(super) within: Option<LinkProperties>,
    pub(super) between: Option<LinkProperties>,
    #[serde(default)]
    pub(super) link: Vec<LinkText>,
    #[serde(default)]
    pub(super) event: Vec<EventText>,
    #[serde(default)]
    pub(super) window: Vec<WindowText>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ZoneText {
    pub(super) name: String,
    pub(super) elements: u32,
    pub(super) at_first: Option<u32>,
    pub(super) users: u32,
}

#[derive(Debug, Deserialize)]
pub(super) struct LinkText {
    pub(super) zones: [String; 2],
    #[serde(flatten)]
    pub(super) link: LinkProperties,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ElementText {
    pub(super) zone: String,
    pub(super) element: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EventText {
    pub(super) at_s: f64,
    #[serde(default)]
    pub(super) stop: Vec<ElementText>,
    #[serde(default)]
    pub(super) start: Vec<ElementText>,
    #[serde(default)]
    pub(super) kill: Vec<ElementText>,
    pub(super) kill_registrar: Option<String>,
    pub(super) start_registrar: Option<String>,
    pub(super) cut: Option<[String; 2]>,
    pub(super) mend: Option<[String; 2]>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WindowText {
    pub(super) name: String,
    pub(super) from_s: f64,
    pub(super) to_s: f64,
}

fn default_policy() -> String {
    "LU".to_owned()
}

fn default_hot_quantile() -> f64 {
    0.84
}

fn default_observation_sharing() -> ObservationSharing {
    ObservationSharing::Zone
}

fn default_load_per_request() -> f64 {
    0.01
}

fn million_calculations() -> f64 {
    1e6
}

fn default_runtime_s() -> f64 {
    900.0
}
