//! The specification of a lab.

use std::{path::PathBuf, sync::atomic::Ordering};

use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    host_init::PLAYS_HIDDEN_ROLES,
    topology::Topology,
};

/// The way of packets for the service address to a flow's owner. The lab only records it for programs that configure
/// daemons: its switch always floods frames to an address it has not learnt, and `broadcast` needs no more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServiceReach {
    /// The contact node forwards each flow to its owner.
    #[default]
    Steer,
    /// Every node receives every packet, sent to [`SHARED_MAC`](crate::SHARED_MAC).
    Broadcast,
}

/// The specification of a lab.
#[derive(Clone, Debug, PartialEq)]
pub struct LabSpec {
    /// The lab's name: 1 to 32 of `a-z`, `0-9` and `-`.
    pub name: String,
    /// Number of nodes, 1 to 89.
    pub nodes: u16,
    /// Number of clients, 0 to 150.
    pub clients: u16,
    /// Number of segments for the nodes, assigned round robin, 1 to 200. With more than one, clients have a separate
    /// segment.
    pub segments: u16,
    /// Reach of the service address, recorded for programs that configure daemons.
    pub reach: ServiceReach,
    /// Properties of the links.
    pub topology: Topology,
    /// Processors of each node, such as 0.2; none for all of the machine. Clients and the switch have all.
    pub processors: Option<f64>,
    /// True if the lab outlives the process that made it. If false, the lab ends when its [`Lab`](crate::Lab) is
    /// dropped or that process dies.
    pub keep: bool,
    /// The program with the hidden roles. If none: the one named by the environment variable `HOLDFAST_LAB_PROGRAM`;
    /// otherwise the running program, if its `main` calls [`run_hidden_role`](crate::run_hidden_role); otherwise `holdfast` or
    /// `holdfast-lab` in the running program's directory or its parent.
    pub program: Option<PathBuf>,
}

impl LabSpec {
    /// Returns a lab of one node, one client, one segment, plain links.
    #[must_use]
    pub fn new(name: &str) -> LabSpec {
        LabSpec {
            name: name.into(),
            nodes: 1,
            clients: 1,
            segments: 1,
            reach: ServiceReach::default(),
            topology: Topology::default(),
            processors: None,
            keep: false,
            program: None,
        }
    }

    /// Sets the number of nodes.
    #[must_use]
    pub fn nodes(mut self, nodes: u16) -> LabSpec {
        self.nodes = nodes;
        self
    }

    /// Sets the number of clients.
    #[must_use]
    pub fn clients(mut self, clients: u16) -> LabSpec {
        self.clients = clients;
        self
    }

    /// Sets the number of segments.
    #[must_use]
    pub fn segments(mut self, segments: u16) -> LabSpec {
        self.segments = segments;
        self
    }

    /// Sets the properties of the links.
    #[must_use]
    pub fn topology(mut self, topology: Topology) -> LabSpec {
        self.topology = topology;
        self
    }

    /// Limits the processors of each node.
    #[must_use]
    pub fn processors(mut self, processors: f64) -> LabSpec {
        self.processors = Some(processors);
        self
    }

    /// Sets the program with the hidden roles.
    #[must_use]
    pub fn program(mut self, program: impl Into<PathBuf>) -> LabSpec {
        self.program = Some(program.into());
        self
    }

    /// Finds the program with the hidden roles.
    pub(crate) fn find_program(&self) -> Result<PathBuf> {
        if let Some(program) = &self.program {
            return Ok(program.clone());
        }
        if let Some(program) = std::env::var_os("HOLDFAST_LAB_PROGRAM") {
            return Ok(program.into());
        }
        let own = std::env::current_exe().ok();
        if PLAYS_HIDDEN_ROLES.load(Ordering::Relaxed)
            && let Some(own) = own
        {
            return Ok(own);
        }
        let nearby = own.iter().flat_map(|own| own.ancestors().skip(1).take(2));
        nearby
            .flat_map(|directory| [directory.join("holdfast"), directory.join("holdfast-lab")])
            .find(|candidate| candidate.is_file())
            .ok_or_else(|| {
                let hint = "cannot find the program to run in a lab's hosts: call holdfast_lab::run_hidden_role() in main, \
                            or set HOLDFAST_LAB_PROGRAM";
                Error::Machine(hint.into())
            })
    }
}

/// Refuses a name that could lead outside the directories named after it.
pub(crate) fn validate_name(name: &str) -> Result<()> {
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if (1..=32).contains(&name.len()) && name.chars().all(is_allowed) && !name.starts_with('-') {
        return Ok(());
    }
    let rule = "1 to 32 of a-z, 0-9 and -, not beginning with -";
    Err(Error::Invalid(format!(
        "{name:?} cannot be a lab's name: {rule}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_path_separators_are_refused() {
        for good in ["a", "default", "two-labs-2"] {
            validate_name(good).unwrap();
        }
        for bad in ["", "..", "a/b", "A", "-a", "a b", &"x".repeat(33)] {
            assert!(validate_name(bad).is_err(), "{bad:?}");
        }
    }
}
