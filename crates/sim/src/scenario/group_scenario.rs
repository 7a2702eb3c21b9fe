//! A scenario of handoffs, of migrations, of membership, of conductors, or of replication.

use super::ScenarioError;
use super::text::{GroupScenarioText, MembershipScenarioText, WithRequestText};
use crate::bug_names::{UnknownBug, by_name};
use crate::node_group::{GroupRunOutcome, PlanDistribution};
use crate::time::Time;
use crate::{Violation, conductor, handoff, membership, migration, replication};

/// Scenario of a group of nodes, with handoffs, migrations, its own membership, conductors, or a replicated service: the
/// possible actions and faults, and the deliberate bug.
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
    /// Votes on views, leases and joins.
    Membership {
        /// The possible actions and faults.
        setting: Box<membership::MembershipPlanDistribution>,
        /// The deliberate bug, if any.
        bug: Option<membership::MembershipBug>,
    },
    /// Balance of loads, and drains.
    Conductor {
        /// The possible loads, actions and faults.
        setting: Box<conductor::ConductorPlanDistribution>,
        /// The deliberate bug, if any.
        bug: Option<conductor::ConductorBug>,
    },
    /// A replicated service.
    Replication {
        /// The possible faults.
        setting: Box<replication::ReplicationPlanDistribution>,
        /// The deliberate bug, if any.
        bug: Option<replication::ReplicationBug>,
    },
}

/// The smallest failing case of a seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShrunkFailure {
    /// The planned actions with their times, as text.
    pub plan: Vec<(Time, String)>,
    /// The violated invariant.
    pub violation: Violation,
    /// All events up to the violation.
    pub trace: Vec<String>,
}

impl GroupScenario {
    /// Returns the kind: `handoff`, `migration`, `membership`, `conductor` or `replication`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            GroupScenario::Handoff { .. } => "handoff",
            GroupScenario::Migration { .. } => "migration",
            GroupScenario::Membership { .. } => "membership",
            GroupScenario::Conductor { .. } => "conductor",
            GroupScenario::Replication { .. } => "replication",
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
            GroupScenario::Membership { setting, .. } => {
                let bug = Some(by_name(&membership::MembershipBug::all(), name)?);
                GroupScenario::Membership { setting, bug }
            }
            GroupScenario::Conductor { setting, .. } => {
                let bug = Some(by_name(&conductor::ConductorBug::ALL, name)?);
                GroupScenario::Conductor { setting, bug }
            }
            GroupScenario::Replication { setting, .. } => {
                let bug = Some(by_name(&replication::ReplicationBug::ALL, name)?);
                GroupScenario::Replication { setting, bug }
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
            GroupScenario::Membership { setting, bug } => membership::try_run(
                &membership::draw_run_config(setting, seed, *bug),
                seed,
                trace,
            ),
            GroupScenario::Conductor { setting, bug } => conductor::try_run(
                &conductor::draw_run_config(setting, seed, *bug),
                seed,
                trace,
            ),
            GroupScenario::Replication { setting, bug } => replication::try_run(
                &replication::draw_run_config(setting, seed, *bug),
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
                (
                    plan_text(&failure.config.plan),
                    failure.violation,
                    failure.trace,
                )
            }
            GroupScenario::Migration { setting, bug } => {
                let failure = migration::shrink(setting, seed, *bug)?;
                (
                    plan_text(&failure.config.plan),
                    failure.violation,
                    failure.trace,
                )
            }
            GroupScenario::Membership { setting, bug } => {
                let failure = membership::shrink(setting, seed, *bug)?;
                (
                    plan_text(&failure.config.plan),
                    failure.violation,
                    failure.trace,
                )
            }
            GroupScenario::Conductor { setting, bug } => {
                let failure = conductor::shrink(setting, seed, *bug)?;
                (
                    plan_text(&failure.config.plan),
                    failure.violation,
                    failure.trace,
                )
            }
            GroupScenario::Replication { setting, bug } => {
                let failure = replication::shrink(setting, seed, *bug)?;
                (
                    plan_text(&failure.config.plan),
                    failure.violation,
                    failure.trace,
                )
            }
        };
        Some(ShrunkFailure {
            plan,
            violation,
            trace,
        })
    }
}

fn plan_text<A: ToString>(plan: &[(Time, A)]) -> Vec<(Time, String)> {
    let with_text = |(at, action): &(Time, A)| (*at, action.to_string());
    plan.iter().map(with_text).collect()
}

pub(super) fn invalid<T>(what: &'static str) -> Result<T, ScenarioError> {
    Err(ScenarioError::Number(what))
}

pub(super) fn set_if_given<T>(value: &mut T, given: Option<T>) {
    if let Some(said) = given {
        *value = said;
    }
}

impl GroupScenarioText {
    pub(super) fn handoff_scenario(&self) -> Result<GroupScenario, ScenarioError> {
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

    pub(super) fn migration_scenario(&self) -> Result<GroupScenario, ScenarioError> {
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

impl MembershipScenarioText {
    pub(super) fn membership(&self) -> Result<GroupScenario, ScenarioError> {
        let mut setting = membership::DEFAULT;
        set_if_given(&mut setting.voters, self.voters);
        set_if_given(&mut setting.server_nodes, self.server_nodes);
        set_if_given(&mut setting.incidents, self.incidents);
        let times = [
            (&mut setting.runtime, self.runtime_s),
            (&mut setting.lease_deadline, self.lease_within_s),
            (&mut setting.agreement_deadline, self.agreement_within_s),
            (
                &mut setting.action_delay_max,
                self.soon_ms.map(|ms| ms / 1e3),
            ),
        ];
        for (time, seconds) in times {
            set_if_given(time, seconds.map(Time::from_secs_f64));
        }
        set_if_given(&mut setting.clock_drift_ppm, self.clock_drift_ppm);
        let incident = &self.incident;
        let probabilities = [
            (&mut setting.impatient, self.impatient),
            (&mut setting.guest, self.guest),
            (&mut setting.store, self.store),
            (&mut setting.store_down, incident.store_down),
            (&mut setting.store_cut, incident.store_cut),
            (&mut setting.crash, incident.crash),
            (&mut setting.cut, incident.cut),
            (&mut setting.isolate, incident.isolate),
            (&mut setting.partition, incident.partition),
            (&mut setting.stop, incident.stop),
            (&mut setting.leave, incident.leave),
            (&mut setting.remove, incident.remove),
            (&mut setting.promote, incident.promote),
            (&mut setting.group_data, incident.group_data),
            (&mut setting.server_node_failed, incident.server_node_failed),
        ];
        for (probability, given) in probabilities {
            set_if_given(probability, given);
        }
        setting.faults = self.faults;
        if !setting.voters.is_within(1, 9) || !setting.server_nodes.is_within(0, 20) {
            return invalid("voters must be 1 to 9, server_nodes 0 to 20");
        }
        if !setting.incidents.is_within(0, 10_000) || setting.clock_drift_ppm > 500_000 {
            return invalid("incidents must be 0 to 10000, clock_drift_ppm 0 to 500000");
        }
        let is_ordered = setting.lease_deadline <= setting.agreement_deadline;
        if setting.runtime == Time::ZERO || !is_ordered {
            return invalid(
                "runtime_s must be above 0, and agreement_within_s not less than lease_within_s",
            );
        }
        shares(&setting.shares())?;
        shares(&setting.faults.shares())?;
        let setting = Box::new(setting);
        Ok(GroupScenario::Membership { setting, bug: None })
    }
}

pub(super) fn shares(shares: &[f64]) -> Result<(), ScenarioError> {
    match shares.iter().all(|share| (0.0..=1.0).contains(share)) {
        true => Ok(()),
        false => invalid(
            "shares of seeds and processes, and the values of [with_request], [incident], [fault] and [faults], must be 0 to 1",
        ),
    }
}
