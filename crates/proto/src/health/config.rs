//! Configuration of a health machine.

use super::event::CheckKind;
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::health_frames::ServiceEndpoint;
use std::collections::{BTreeMap, BTreeSet};

/// The settings of a [`super::Health`]. [`HealthConfig::new`] has the defaults; each is documented at its field.
#[derive(Debug, Clone)]
pub struct HealthConfig {
    /// Number of this node.
    pub node: NodeId,
    /// True if the contact node decides at run time where new clients go. If false, health is only reported.
    pub places_clients: bool,
    /// Silence of a node after which it gets no new clients (200 ms).
    pub silent_after: Duration,
    /// Time from the start in which a node that has not connected yet may get new clients (500 ms).
    pub startup_grace: Duration,
    /// Time between two reports without a change (1 s).
    pub report_interval: Duration,
    /// Shortest mean time between two reports of a node that count at once (20 ms). Of the reports of a node that sends more,
    /// the last one counts when the node may send again.
    pub report_gap_min: Duration,
    /// Number of reports of a node that may follow each other at once (8).
    pub report_burst_max: u32,
    /// Time between the announcement and the effect of shares that grow (20 ms): every node knows them before the first
    /// client is placed by them.
    pub announcement_lead: Duration,
    /// Shortest stay without new clients after a second failure (1 s); doubles with each further one.
    pub hold_down_min: Duration,
    /// Longest such stay (10 s).
    pub hold_down_max: Duration,
    /// As `hold_down_max`, for silent nodes (5 s).
    pub silence_hold_down_max: Duration,
    /// Time of good health after which earlier failures are forgotten (60 s).
    pub failure_memory: Duration,
}

impl HealthConfig {
    /// Returns the defaults for this node.
    pub fn new(node: NodeId) -> HealthConfig {
        HealthConfig {
            node,
            places_clients: true,
            silent_after: Duration::from_millis(200),
            startup_grace: Duration::from_millis(500),
            report_interval: Duration::from_secs(1),
            report_gap_min: Duration::from_millis(20),
            report_burst_max: 8,
            announcement_lead: Duration::from_millis(20),
            hold_down_min: Duration::from_secs(1),
            hold_down_max: Duration::from_secs(10),
            silence_hold_down_max: Duration::from_secs(5),
            failure_memory: Duration::from_secs(60),
        }
    }

    /// Returns the time between two inspections of the channels to the other nodes.
    pub(super) fn inspection_interval(&self) -> Duration {
        self.silent_after / 5
    }
}

/// A service whose servers are judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JudgedService {
    /// Protocol, address and port of the service.
    pub endpoint: ServiceEndpoint,
    /// Share of each node by the operator's wish.
    pub weights: BTreeMap<NodeId, u32>,
    /// Time after which a server that takes no waiting client hangs; `None`: never.
    pub stall_after: Option<Duration>,
    /// The active checks of the server. Results of other checks do not count.
    pub checks: BTreeSet<CheckKind>,
    /// Number of consecutive failed checks after which a server fails, at least 1.
    pub fall: u32,
    /// Number of consecutive good checks after which a failed server is well again, at least 1.
    pub rise: u32,
}
