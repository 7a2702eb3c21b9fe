//! What is to be told of a lab.

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, Ipv6Addr},
};

use serde::Serialize;

use crate::{
    cgroup,
    error::Result,
    lab::Lab,
    link::DuplexCounters,
    namespace::ProcessId,
    plan::{Host, Plan},
    spec::Reach,
    state::State,
    topology::Duplex,
};

/// What is to be told of a lab.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// The lab's name.
    pub name: String,
    /// Sizes and number.
    pub plan: Plan,
    /// The reach it was made for.
    pub reach: Reach,
    /// It outlives the process that made it.
    pub keep: bool,
    /// The service address on link in segment 0.
    pub service: (Ipv4Addr, Ipv6Addr),
    /// The service address on no segment.
    pub routed_service: (Ipv4Addr, Ipv6Addr),
    /// The hosts, nodes first.
    pub hosts: Vec<HostStatus>,
    /// Whether the link program runs; none where no link needs it.
    pub link_program: Option<bool>,
    /// Pairs of hosts that are cut off from each other.
    pub cut_between: Vec<(String, String)>,
}

/// What is to be told of a host.
#[derive(Clone, Debug, Serialize)]
pub struct HostStatus {
    /// Its place in the lab.
    #[serde(flatten)]
    pub host: Host,
    /// Its init process runs.
    pub alive: bool,
    /// How many processes it has, its init included.
    pub processes: usize,
    /// It is cut off from everybody.
    pub cut: bool,
    /// What its link is like; none for a plain one.
    pub link: Option<Duplex>,
    /// What its link has done; none for a plain one.
    pub counters: Option<DuplexCounters>,
}

impl Lab {
    /// What is to be told of the lab. The counters are up to 100 ms old.
    ///
    /// # Errors
    /// [`Error::NoLab`](crate::Error::NoLab) when it has been taken down since.
    pub fn status(&self) -> Result<Status> {
        let state = State::load(self.name())?;
        // Written in one step, so only its absence is to be expected: no link program, no counters.
        let counters = fs::read(state.counters_path()).unwrap_or_default();
        let counters: BTreeMap<String, DuplexCounters> =
            serde_json::from_slice(&counters).unwrap_or_default();
        let host_status = |host: &Host| HostStatus {
            alive: state.init(&host.name).is_ok_and(ProcessId::alive),
            processes: cgroup::processes(&state.host_cgroup(&host.name)).len(),
            cut: state.cut.contains(&host.name),
            link: state.links.get(&host.name).cloned(),
            counters: counters.get(&host.name).copied(),
            host: host.clone(),
        };
        Ok(Status {
            hosts: self.hosts().iter().map(host_status).collect(),
            link_program: state.link_program.as_ref().map(ProcessId::alive),
            service: state.plan.service(),
            routed_service: state.plan.routed_service(),
            cut_between: state.cut_between.iter().cloned().collect(),
            name: state.name,
            plan: state.plan,
            reach: state.reach,
            keep: state.keep,
        })
    }
}
