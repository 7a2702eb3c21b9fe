//! Scenarios of conductors as written in a file.

use super::group_scenario::{GroupScenario, invalid, set_if_given, shares};
use super::text::KindName;
use super::{BalanceScenario, PolicyScenario, ScenarioError};
use crate::conductor::{self, ChangingLoad};
use crate::node_group::{CountRange, FaultFrequencies};
use crate::time::Time;
use serde::Deserialize;

/// Conductors of a group.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConductorScenarioText {
    #[serde(rename = "kind")]
    _kind: KindName,
    #[serde(default)]
    pub(super) about: String,
    nodes: Option<CountRange>,
    processes_per_node: Option<CountRange>,
    incidents: Option<CountRange>,
    faults_end_s: Option<f64>,
    calm: Option<f64>,
    liar: Option<f64>,
    guest: Option<f64>,
    stale: Option<f64>,
    full: Option<f64>,
    pinned: Option<f64>,
    labelled: Option<f64>,
    #[serde(default)]
    incident: ConductorIncidentText,
    #[serde(default)]
    faults: FaultFrequencies,
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct ConductorIncidentText {
    crash: Option<f64>,
    isolate: Option<f64>,
    remove: Option<f64>,
    drain: Option<f64>,
    surge: Option<f64>,
    overload: Option<f64>,
}

impl ConductorScenarioText {
    pub(super) fn conductor(&self) -> Result<GroupScenario, ScenarioError> {
        let mut setting = conductor::DEFAULT;
        set_if_given(&mut setting.nodes, self.nodes);
        set_if_given(&mut setting.processes_per_node, self.processes_per_node);
        set_if_given(&mut setting.incidents, self.incidents);
        let faults_end = self.faults_end_s.map(Time::from_secs_f64);
        set_if_given(&mut setting.faults_end, faults_end);
        let incident = &self.incident;
        let probabilities = [
            (&mut setting.calm, self.calm),
            (&mut setting.liar, self.liar),
            (&mut setting.guest, self.guest),
            (&mut setting.stale, self.stale),
            (&mut setting.full, self.full),
            (&mut setting.pinned, self.pinned),
            (&mut setting.labelled, self.labelled),
            (&mut setting.crash, incident.crash),
            (&mut setting.isolate, incident.isolate),
            (&mut setting.remove, incident.remove),
            (&mut setting.drain, incident.drain),
            (&mut setting.surge, incident.surge),
            (&mut setting.overload, incident.overload),
        ];
        for (probability, given) in probabilities {
            set_if_given(probability, given);
        }
        setting.faults = self.faults;
        if !setting.nodes.is_within(2, 64) || !setting.processes_per_node.is_within(1, 1_000) {
            return invalid("nodes must be 2 to 64, processes_per_node 1 to 1000");
        }
        if !setting.incidents.is_within(0, 10_000) || setting.faults_end <= setting.incidents_begin
        {
            return invalid("incidents must be 0 to 10000, and faults_end_s more than 60");
        }
        shares(&setting.shares())?;
        shares(&setting.faults.shares())?;
        let setting = Box::new(setting);
        Ok(GroupScenario::Conductor { setting, bug: None })
    }
}

/// A large group without faults.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BalanceScenarioText {
    #[serde(rename = "kind")]
    _kind: KindName,
    #[serde(default)]
    pub(super) about: String,
    nodes: usize,
    processes_per_node: usize,
}

impl BalanceScenarioText {
    pub(super) fn balance(&self) -> Result<BalanceScenario, ScenarioError> {
        let is_valid =
            (2..=10_000).contains(&self.nodes) && (1..=1_000).contains(&self.processes_per_node);
        match is_valid {
            true => Ok(BalanceScenario {
                nodes: self.nodes,
                processes_per_node: self.processes_per_node,
            }),
            false => invalid("nodes must be 2 to 10000, processes_per_node 1 to 1000"),
        }
    }
}

/// A group without faults whose loads change all the time.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PolicyScenarioText {
    #[serde(rename = "kind")]
    _kind: KindName,
    #[serde(default)]
    pub(super) about: String,
    nodes: usize,
    processes_per_node: usize,
    loads: Vec<ChangingLoad>,
}

impl PolicyScenarioText {
    pub(super) fn policies(self) -> Result<PolicyScenario, ScenarioError> {
        let is_valid =
            (2..=1_000).contains(&self.nodes) && (1..=1_000).contains(&self.processes_per_node);
        match is_valid {
            true => Ok(PolicyScenario {
                nodes: self.nodes,
                processes_per_node: self.processes_per_node,
                loads: self.loads,
            }),
            false => invalid("nodes must be 2 to 1000, processes_per_node 1 to 1000"),
        }
    }
}
