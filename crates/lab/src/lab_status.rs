//! The status of a lab.

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, Ipv6Addr},
};

use serde::Serialize;

use crate::{
    address_plan::{AddressPlan, LabHost},
    cgroup,
    error::Result,
    lab::Lab,
    lab_spec::ServiceReach,
    lab_state::LabState,
    link::DuplexCounters,
    namespace::ProcessRef,
    topology::DuplexLinkConfig,
};

/// The status of a lab.
#[derive(Clone, Debug, Serialize)]
pub struct LabStatus {
    /// The lab's name.
    pub name: String,
    /// Number of the lab, and how many nodes, clients and segments there are.
    pub plan: AddressPlan,
    /// The reach that the lab was made for.
    pub reach: ServiceReach,
    /// Processors of each node; none for all of the machine.
    pub processors: Option<f64>,
    /// True if the lab outlives the process that made it.
    pub keep: bool,
    /// The service address on link in segment 0.
    pub service: (Ipv4Addr, Ipv6Addr),
    /// The service address outside all segments.
    pub routed_service: (Ipv4Addr, Ipv6Addr),
    /// The hosts, nodes first.
    pub hosts: Vec<HostStatus>,
    /// True if the link program runs; none if no link needs it.
    pub link_program: Option<bool>,
    /// Pairs of hosts that are cut off from each other.
    pub cut_between: Vec<(String, String)>,
}

/// The status of a host.
#[derive(Clone, Debug, Serialize)]
pub struct HostStatus {
    /// The host's name and addresses.
    #[serde(flatten)]
    pub host: LabHost,
    /// True if the host's init process runs.
    pub alive: bool,
    /// Number of its processes, init included.
    pub processes: usize,
    /// True if the host is isolated from all others.
    pub cut: bool,
    /// Properties of its link; none for a plain one.
    pub link: Option<DuplexLinkConfig>,
    /// Counters of its link; none for a plain one.
    pub counters: Option<DuplexCounters>,
}

impl Lab {
    /// Returns the status of the lab. The counters are up to 100 ms old.
    ///
    /// # Errors
    /// [`Error::NoLab`](crate::Error::NoLab) when the lab has been taken down.
    pub fn status(&self) -> Result<LabStatus> {
        let state = LabState::load(self.name())?;
        // The file is written atomically, so only its absence is expected: no link program, no counters.
        let counters = fs::read(state.counters_path()).unwrap_or_default();
        let counters: BTreeMap<String, DuplexCounters> =
            serde_json::from_slice(&counters).unwrap_or_default();
        let host_status = |host: &LabHost| HostStatus {
            alive: state.host_init(&host.name).is_ok_and(ProcessRef::is_alive),
            processes: cgroup::processes(&state.host_cgroup(&host.name)).len(),
            cut: state.cut.contains(&host.name),
            link: state.links.get(&host.name).cloned(),
            counters: counters.get(&host.name).copied(),
            host: host.clone(),
        };
        Ok(LabStatus {
            hosts: self.hosts().iter().map(host_status).collect(),
            link_program: state.link_program.as_ref().map(ProcessRef::is_alive),
            service: state.plan.service_addresses(),
            routed_service: state.plan.routed_service_addresses(),
            cut_between: state.cut_between.iter().cloned().collect(),
            name: state.name,
            plan: state.plan,
            reach: state.reach,
            processors: state.processors,
            keep: state.keep,
        })
    }
}
