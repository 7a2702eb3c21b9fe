//! The operator's rules for processes: rules of the node's file, and pins that are set at run time.

use std::collections::BTreeMap;

use holdfast_proto::conductor::PlacementRules;
use serde::{Deserialize, Serialize};

use super::{ConductorDriver, ScannedProcess};
use crate::config::BalanceRule;

/// A process that the operator has pinned to this node, or freed from the pin of the node's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessPin {
    /// PID of the root of the tree.
    pub pid: i32,
    /// Start of the root in ticks since boot.
    pub started_ticks: u64,
    /// True if the process stays here.
    pub is_pinned: bool,
}

/// Returns the rules by names of processes.
pub(super) fn rules_by_name(rules: &[BalanceRule]) -> BTreeMap<String, PlacementRules> {
    let entry = |rule: &BalanceRule| {
        let rules = PlacementRules {
            is_pinned: rule.is_pinned,
            affinity_label: rule.together.as_deref().map(label_number),
            anti_affinity_label: rule.apart.as_deref().map(label_number),
        };
        (rule.process.clone(), rules)
    };
    rules.iter().map(entry).collect()
}

/// Returns the number of a label, the same at all nodes: a hash (FNV-1a) of its text.
fn label_number(text: &str) -> u64 {
    super::fnv_1a(text.bytes())
}

impl ConductorDriver {
    /// Returns the rules for a process.
    pub(super) fn rules_of(&self, process: &ScannedProcess) -> PlacementRules {
        let mut rules = self.rules.get(&process.name).copied().unwrap_or_default();
        let identity = (process.pid, process.started_ticks);
        let mut pins = self.saved.pins.iter();
        if let Some(pin) = pins.find(|pin| (pin.pid, pin.started_ticks) == identity) {
            rules.is_pinned = pin.is_pinned;
        }
        rules
    }

    /// Pins a managed process to this node, or frees it. Returns false if there is no such process.
    ///
    /// # Errors
    /// The wish cannot be saved: a restart of the daemon would lose it, so nothing changes.
    pub fn pin(&mut self, pid: i32, is_pinned: bool) -> std::io::Result<bool> {
        let mut processes = self.processes.values();
        let Some(process) = processes.find(|process| process.pid == pid) else {
            return Ok(false);
        };
        let started_ticks = process.started_ticks;
        let former_pins = self.saved.pins.clone();
        self.saved.pins.retain(|pin| pin.pid != pid);
        self.saved.pins.push(ProcessPin {
            pid,
            started_ticks,
            is_pinned,
        });
        if let Err(error) = self.try_save() {
            self.saved.pins = former_pins;
            return Err(error);
        }
        let mut processes = self.processes.values_mut();
        if let Some(process) = processes.find(|process| process.pid == pid) {
            process.rules.is_pinned = is_pinned;
        }
        // The machine learns of the rule with the next sample.
        self.scan_at = std::time::Duration::ZERO;
        Ok(true)
    }

    /// Forgets pins of processes that have ended or left.
    pub(super) fn forget_pins(&mut self) {
        let processes = &self.processes;
        let is_here = |pin: &ProcessPin| {
            let mut here = processes.values();
            here.any(|process| (process.pid, process.started_ticks) == (pin.pid, pin.started_ticks))
        };
        let before = self.saved.pins.len();
        self.saved.pins.retain(is_here);
        if self.saved.pins.len() != before {
            self.save();
        }
    }
}
