//! Isolation of hosts, and its removal, at the switch: the host's interface keeps its carrier.

use std::fmt::Write as _;

use crate::{
    address_plan::SWITCH_NAME,
    error::{Error, Result},
    lab::Lab,
    lab_state::{LabLock, LabState},
    namespace::run_program,
    network_scripts,
};

/// Bridge port states as arguments of `bridge link`.
const DISABLED: &str = "0";
const FORWARDING: &str = "3";

impl Lab {
    /// Isolates a host from all others: its bridge port passes nothing in either direction. Repeating the call is
    /// harmless.
    ///
    /// # Errors
    /// [`Error::NoHost`]; otherwise the system's error.
    pub fn cut(&self, host: &str) -> Result<()> {
        self.change_faults(|lab, state| {
            lab.set_port(state, host, DISABLED)?;
            state.cut.insert(host.into());
            Ok(())
        })
    }

    /// Undoes [`Lab::cut`] and every [`Lab::cut_between`] of the host.
    ///
    /// # Errors
    /// [`Error::NoHost`]; otherwise the system's error.
    pub fn heal(&self, host: &str) -> Result<()> {
        self.change_faults(|lab, state| {
            lab.set_port(state, host, FORWARDING)?;
            state.cut.remove(host);
            let before = state.cut_between.len();
            state.cut_between.retain(|(a, b)| a != host && b != host);
            if state.cut_between.len() < before {
                lab.apply_filter(state)
            } else {
                Ok(())
            }
        })
    }

    /// Isolates two hosts from each other only, in both directions, for all their addresses and also across segments.
    ///
    /// # Errors
    /// [`Error::NoHost`], [`Error::Invalid`] for a host and itself; otherwise the system's error.
    pub fn cut_between(&self, a: &str, b: &str) -> Result<()> {
        self.change_faults(|lab, state| {
            state.cut_between.insert(lab.ordered_pair(a, b)?);
            lab.apply_filter(state)
        })
    }

    /// Undoes [`Lab::cut_between`].
    ///
    /// # Errors
    /// [`Error::NoHost`], [`Error::Invalid`] for a host and itself; otherwise the system's error.
    pub fn heal_between(&self, a: &str, b: &str) -> Result<()> {
        self.change_faults(|lab, state| {
            state.cut_between.remove(&lab.ordered_pair(a, b)?);
            lab.apply_filter(state)
        })
    }

    /// Changes the set of cuts, under the lab's lock.
    fn change_faults(&self, work: impl FnOnce(&Lab, &mut LabState) -> Result<()>) -> Result<()> {
        let _lock = LabLock::lock_existing(self.name())?;
        let mut state = LabState::load(self.name())?;
        work(self, &mut state)?;
        state.save()
    }

    fn ordered_pair(&self, a: &str, b: &str) -> Result<(String, String)> {
        let (a, b) = (&self.host(a)?.name, &self.host(b)?.name);
        if a == b {
            return Err(Error::Invalid(format!("{a} cannot be cut off from itself")));
        }
        Ok((a.min(b).clone(), a.max(b).clone()))
    }

    fn set_port(&self, state: &LabState, host: &str, port_state: &str) -> Result<()> {
        let port = network_scripts::bridge_port(self.host(host)?, state.is_spliced(host));
        let set = || {
            run_program(
                "bridge",
                &["link", "set", "dev", &port, "state", port_state],
                "",
            )
        };
        state.host_init(SWITCH_NAME)?.run_in_net_namespace(set)
    }

    /// Replaces the switch's filter with one for the pairs in `state`.
    fn apply_filter(&self, state: &LabState) -> Result<()> {
        let script = self.filter_script(state)?;
        state
            .host_init(SWITCH_NAME)?
            .run_in_net_namespace(|| run_program("nft", &["-f", "-"], &script))
    }

    /// Returns the filter's rules: a frame is marked with its source host, and dropped before it leaves to a host that
    /// is cut off from the source. A packet keeps the mark when the switch routes it. Without pairs there is no filter,
    /// because a filter costs time for every frame.
    fn filter_script(&self, state: &LabState) -> Result<String> {
        let mut script = String::from("add table bridge holdfast\ndelete table bridge holdfast\n");
        if state.cut_between.is_empty() {
            return Ok(script);
        }
        let mark_and_port = |name: &String| -> Result<(usize, String)> {
            let index = self
                .hosts()
                .iter()
                .position(|host| host.name == *name)
                .unwrap_or(0);
            let port = network_scripts::bridge_port(self.host(name)?, state.is_spliced(name));
            Ok((index + 1, port))
        };
        let (mut marks, mut drops) = (String::new(), String::new());
        for (a, b) in &state.cut_between {
            let ((mark_a, port_a), (mark_b, port_b)) = (mark_and_port(a)?, mark_and_port(b)?);
            // Writing to a string does not fail.
            let _ = writeln!(
                marks,
                "iifname {port_a} meta mark set {mark_a}\niifname {port_b} meta mark set {mark_b}"
            );
            let _ = writeln!(
                drops,
                "meta mark {mark_a} oifname {port_b} drop\nmeta mark {mark_b} oifname {port_a} drop"
            );
        }
        let _ = write!(
            script,
            "table bridge holdfast {{\n\
             chain marks {{ type filter hook prerouting priority 0;\n{marks}}}\n\
             chain drops {{ type filter hook postrouting priority 0;\n{drops}}}\n\
             }}\n"
        );
        Ok(script)
    }
}
