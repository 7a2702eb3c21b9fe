//! What a lab is to be like.

use std::{path::PathBuf, sync::atomic::Ordering};

use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    init::PLAYS_HIDDEN_ROLES,
    topology::Topology,
};

/// How packets for the service address reach a flow's owner. The lab only records it for the programs that set up daemons:
/// its switch floods frames to an address it has not learnt in either case, which is all that `broadcast` needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reach {
    /// The contact node forwards each flow to its owner.
    #[default]
    Steer,
    /// Every node receives every packet, sent to [`SHARED_MAC`](crate::SHARED_MAC).
    Broadcast,
}

/// What a lab is to be like.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// The lab's name: 1 to 32 of `a-z`, `0-9` and `-`.
    pub name: String,
    /// How many nodes, 1 to 89.
    pub nodes: u16,
    /// How many clients, 0 to 150.
    pub clients: u16,
    /// Over how many segments nodes are spread, round robin, 1 to 200. With more than one, clients have a segment of their
    /// own.
    pub segments: u16,
    /// Recorded for the programs that set up daemons.
    pub reach: Reach,
    /// What the links are like.
    pub topology: Topology,
    /// The lab outlives the process that made it. Otherwise it ends when its [`Lab`](crate::Lab) is dropped or that process dies.
    pub keep: bool,
    /// The program that plays the hidden roles. If none: the one named by the environment variable `HOLDFAST_LAB_PROGRAM`;
    /// else the running program, if its `main` calls [`init_main`](crate::init_main); else `holdfast` or `holdfast-lab` in the
    /// running program's directory or the one above.
    pub program: Option<PathBuf>,
}

impl Spec {
    /// One node, one client, one segment, plain links.
    #[must_use]
    pub fn new(name: &str) -> Spec {
        Spec {
            name: name.into(),
            nodes: 1,
            clients: 1,
            segments: 1,
            reach: Reach::default(),
            topology: Topology::default(),
            keep: false,
            program: None,
        }
    }

    /// Sets the number of nodes.
    #[must_use]
    pub fn nodes(mut self, nodes: u16) -> Spec {
        self.nodes = nodes;
        self
    }

    /// Sets the number of clients.
    #[must_use]
    pub fn clients(mut self, clients: u16) -> Spec {
        self.clients = clients;
        self
    }

    /// Sets the number of segments.
    #[must_use]
    pub fn segments(mut self, segments: u16) -> Spec {
        self.segments = segments;
        self
    }

    /// Sets what the links are like.
    #[must_use]
    pub fn topology(mut self, topology: Topology) -> Spec {
        self.topology = topology;
        self
    }

    /// Sets the program that plays the hidden roles.
    #[must_use]
    pub fn program(mut self, program: impl Into<PathBuf>) -> Spec {
        self.program = Some(program.into());
        self
    }

    /// Finds the program that plays the hidden roles.
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
                let hint = "no program for a lab's hosts: call holdfast_lab::init_main() in main, or set HOLDFAST_LAB_PROGRAM";
                Error::Machine(hint.into())
            })
    }
}

/// Refuses a name that could lead out of the directories named after it.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if (1..=32).contains(&name.len()) && name.chars().all(good) && !name.starts_with('-') {
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
    fn names_cannot_lead_elsewhere() {
        for good in ["a", "default", "two-labs-2"] {
            check_name(good).unwrap();
        }
        for bad in ["", "..", "a/b", "A", "-a", "a b", &"x".repeat(33)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }
}
