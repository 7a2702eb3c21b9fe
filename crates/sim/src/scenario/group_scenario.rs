//! A scenario of handoffs or migrations.

use super::ScenarioError;
use super::text::{GroupScenarioText, WithRequestText};
use crate::bug_names::{UnknownBug, by_name};
use crate::node_group::{GroupAction, GroupRunOutcome, PlanDistribution};
use crate::time::Time;
use crate::{Violation, handoff, migration};

/// Scenario of handoffs or migrations in a group of nodes: the possible actions and faults, and the deliberate bug.
#[derive(Debug, Clone, PartialEq)]
pub enum GroupScenario {
    /// Handoffs of flows.
    Handoff {
        /// The possible actions and faults.
        setting: PlanDistribution,
        /// The deliberate bug, if any.
        bug: Option<handoff::HandoffBug>,
    },
    /// Migrations of processes.
    Migration {
        /// The possible actions and faults.
        setting: migration::MigrationPlanDistribution,
        /// The deliberate bug, if any.
        bug: Option<migration::MigrationBug>,
    },
}

/// The smallest failing case of a seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShrunkFailure {
    /// The planned actions with their times.
    pub plan: Vec<(Time, GroupAction)>,
    /// The violated invariant.
    pub violation: Violation,
    /// All events up to the violation.
    pub trace: Vec<String>,
}

impl GroupScenario {
    /// Returns the kind: `handoff` or `migration`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            GroupScenario::Handoff { .. } => "handoff",
            GroupScenario::Migration { .. } => "migration",
        }
    }

    /// Returns the group with a deliberate bug.
    ///
    /// # Errors
    /// There is no bug of this name.
    pub fn with_bug(self, name: &str) -> Result<GroupScenario, UnknownBug> {
        Ok(match self {
            GroupScenario::Handoff { setting, .. } => {
                let bug = Some(by_name(&handoff::HandoffBug::ALL, name)?);
                GroupScenario::Handoff { setting, bug }
            }
            GroupScenario::Migration { setting, .. } => {
                let bug = Some(by_name(&migration::MigrationBug::ALL, name)?);
                GroupScenario::Migration { setting, bug }
            }
        })
    }

    /// Simulates one seed. With `trace`, every event and every output of a state machine becomes a line of it.
    ///
    /// # Errors
    /// The first violated invariant.
    pub fn try_seed(
        &self,
        seed: u64,
        trace: Option<&mut Vec<String>>,
    ) -> Result<GroupRunOutcome, Violation> {
        match self {
            GroupScenario::Handoff { setting, bug } => {
                handoff::try_run(&handoff::draw_run_config(setting, seed, *bug), seed, trace)
            }
            GroupScenario::Migration { setting, bug } => migration::try_run(
                &migration::draw_run_config(setting, seed, *bug),
                seed,
                trace,
            ),
        }
    }

    /// Returns the smallest part of a failing seed's plan that still fails. None if the seed does not fail.
    #[must_use]
    pub fn shrink(&self, seed: u64) -> Option<ShrunkFailure> {
        let (plan, violation, trace) = match self {
            GroupScenario::Handoff { setting, bug } => {
                let failure = handoff::shrink(setting, seed, *bug)?;
                (failure.config.plan, failure.violation, failure.trace)
            }
            GroupScenario::Migration { setting, bug } => {
                let failure = migration::shrink(setting, seed, *bug)?;
                (failure.config.plan, failure.violation, failure.trace)
            }
        };
        Some(ShrunkFailure {
            plan,
            violation,
            trace,
        })
    }
}

fn invalid<T>(what: &'static str) -> Result<T, ScenarioError> {
    Err(ScenarioError::Number(what))
}

fn set_if_given<T>(value: &mut T, given: Option<T>) {
    if let Some(said) = given {
        *value = said;
    }
}

impl GroupScenarioText {
    pub(super) fn handoff(&self) -> Result<GroupScenario, ScenarioError> {
        let WithRequestText {
            cancel, kill, copy, ..
        } = self.with_request;
        if self.processes.is_some() || cancel.or(kill).or(copy).is_some() {
            return invalid("processes, cancel, kill and copy apply to migrations only");
        }
        let mut setting = handoff::DEFAULT;
        self.shared(&mut setting)?;
        if !setting.flows.is_within(1, 1_000) {
            return invalid("flows must be 1 to 1000");
        }
        Ok(GroupScenario::Handoff { setting, bug: None })
    }

    pub(super) fn migration(&self) -> Result<GroupScenario, ScenarioError> {
        let mut setting = migration::DEFAULT;
        self.shared(&mut setting.group)?;
        set_if_given(&mut setting.processes, self.processes);
        let with_request = &self.with_request;
        set_if_given(&mut setting.cancel, with_request.cancel);
        set_if_given(&mut setting.kill, with_request.kill);
        set_if_given(&mut setting.clone_share, with_request.copy);
        if !setting.processes.is_within(2, 100) || !setting.group.flows.is_within(0, 1_000) {
            return invalid("processes must be 2 to 100, flows 0 to 1000");
        }
        shares(&[setting.cancel, setting.kill, setting.clone_share])?;
        Ok(GroupScenario::Migration { setting, bug: None })
    }

    fn shared(&self, setting: &mut PlanDistribution) -> Result<(), ScenarioError> {
        set_if_given(&mut setting.nodes, self.nodes);
        set_if_given(&mut setting.flows, self.flows);
        set_if_given(&mut setting.requests, self.requests);
        set_if_given(
            &mut setting.runtime,
            self.runtime_s.map(Time::from_secs_f64),
        );
        set_if_given(
            &mut setting.idle_deadline,
            self.rest_s.map(Time::from_secs_f64),
        );
        set_if_given(
            &mut setting.action_delay_max,
            self.soon_ms.map(Time::from_ms_f64),
        );
        set_if_given(&mut setting.crash, self.with_request.crash);
        set_if_given(&mut setting.cut, self.with_request.cut);
        set_if_given(&mut setting.close, self.with_request.close);
        set_if_given(&mut setting.open, self.with_request.open);
        setting.faults = self.faults;
        if !setting.nodes.is_within(2, 64) || !setting.requests.is_within(0, 10_000) {
            return invalid("nodes must be 2 to 64, requests 0 to 10000");
        }
        // Programs work until 100 s after the end of all faults.
        let healed = setting.runtime + Time::from_secs_f64(100.0);
        if setting.runtime == Time::ZERO || setting.idle_deadline <= healed {
            return invalid(
                "runtime_s must be above 0, and rest_s more than 100 s above runtime_s",
            );
        }
        shares(&[setting.crash, setting.cut, setting.close, setting.open])?;
        shares(&setting.faults.shares())
    }
}

fn shares(shares: &[f64]) -> Result<(), ScenarioError> {
    match shares.iter().all(|share| (0.0..=1.0).contains(share)) {
        true => Ok(()),
        false => invalid("the values of [with_request] and [faults] must be 0 to 1"),
    }
}
