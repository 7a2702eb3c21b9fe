//! `[balance]`: limits and rules for moves that the conductor decides on.

use std::collections::BTreeSet;

use super::super::sections::BalanceConfigSection;
use super::super::{BalanceConfig, BalanceRule, ConfigError};
use super::ConfigChecker;

/// Most moves a minute that may be configured: as many as a drain makes.
const MOVES_PER_MINUTE_MAX: usize = 60;
/// Most characters of a process's name in the kernel (`TASK_COMM_LEN` less the final zero).
const PROCESS_NAME_LENGTH_MAX: usize = 15;

impl ConfigChecker<'_> {
    pub(super) fn balance(&self, raw: BalanceConfigSection) -> Result<BalanceConfig, ConfigError> {
        let mut names = BTreeSet::new();
        let mut rules = Vec::with_capacity(raw.rule.len());
        for rule in raw.rule {
            let name = rule.process.get_ref().clone();
            let problem = if name.is_empty() || name.len() > PROCESS_NAME_LENGTH_MAX {
                Some(format!(
                    "the kernel gives no process the name `{name}`: names have 1 to {PROCESS_NAME_LENGTH_MAX} bytes"
                ))
            } else if !names.insert(name.clone()) {
                Some(format!("process `{name}` has two rules"))
            } else if !rule.pinned && rule.together.is_none() && rule.apart.is_none() {
                Some(format!("the rule for process `{name}` says nothing"))
            } else {
                None
            };
            if let Some(problem) = problem {
                let advice = "use the name that `holdfast balance status` shows, once, with pinned, together or apart";
                return Err(self.file.error_for(&rule.process, problem, advice));
            }
            rules.push(BalanceRule {
                process: name,
                is_pinned: rule.pinned,
                together: rule.together,
                apart: rule.apart,
            });
        }
        Ok(BalanceConfig {
            moves_per_minute: self.in_range(&raw.moves_per_minute, 6, 1..=MOVES_PER_MINUTE_MAX)?,
            rules,
        })
    }
}
