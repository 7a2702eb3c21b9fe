//! Reports of the conductor to the operator.

use std::time::Duration;

use holdfast_api::control::{
    BalanceLog, BalanceLogEntry, BalancePlan, BalanceStatus, DrainReport, DrainState,
    DrainedProcess, KnownNodeLoad, ManagedProcessEntry, ObstacleEntry, PlannedMoveEntry,
    StuckProcess,
};
use holdfast_proto::conductor::{
    AuditOutcome, AuditRecord, AuditRole, Decision, Obstacle, ObstacleReason, PlannedMove,
    StayReason,
};
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{MovePurpose, ProcessKey};

use super::ConductorDriver;
use super::node_drain::{DrainMove, DrainPhase, NodeDrain};

/// Returns the name of a node.
type NodeNames<'a> = &'a dyn Fn(NodeId) -> String;

impl ConductorDriver {
    /// Returns the progress of the drain, without connections of server programs.
    pub fn drain_report(&self, now: Duration, names: NodeNames<'_>) -> DrainReport {
        let node = names(self.own);
        let Some(drain) = &self.drain else {
            return DrainReport {
                node,
                ..DrainReport::default()
            };
        };
        let mut report = DrainReport {
            node,
            state: DrainState::Draining,
            remaining: self.processes.len() as u64,
            moves: drain.moves.iter().map(|one| drained(one, names)).collect(),
            deadline_s: (drain.deadline).map(|at| at.saturating_sub(now).as_secs()),
            ..DrainReport::default()
        };
        if drain.forwarded > 0 {
            report.notes.push(format!(
                "this node forwards the packets of {} connections from its own address that moved with their processes: \
                 they end when the host goes down",
                drain.forwarded
            ));
        }
        self.add_progress(now, drain, &mut report);
        report
    }

    fn add_progress(&self, now: Duration, drain: &NodeDrain, report: &mut DrainReport) {
        let Some(status) = self.machine.drain_status(now) else {
            report.waiting = Some(match self.scanner {
                Some(_) => "the processes are being checked".to_owned(),
                None => "the daemon is starting".to_owned(),
            });
            return;
        };
        report.moved = status.moved as u64;
        report.remaining = status.remaining as u64;
        report.estimate_s = status.estimate.as_secs_f64();
        let is_surveyed = drain.phase == DrainPhase::Moving;
        report.safe_to_reboot = status.is_safe_to_reboot && drain.forwarded == 0 && is_surveyed;
        report.stuck = status.stuck.iter().map(|one| self.stuck(one)).collect();
        let is_moving = self.is_moving();
        let is_overdue = drain.deadline.is_some_and(|deadline| now >= deadline);
        if is_surveyed && !is_moving && (status.remaining == 0 || is_overdue) {
            report.state = DrainState::Ended;
        } else if !is_moving {
            report.waiting = match self.machine.plan(now) {
                Decision::Move(_) => None,
                Decision::Stay(reason) => Some(self.stay_text(&reason)),
            };
        }
    }

    fn stuck(&self, stuck: &Obstacle) -> StuckProcess {
        let process = self.processes.get(&stuck.process);
        let check = process.and_then(|process| process.check.as_ref()?.as_ref().ok());
        let blockers = check.map_or(&[][..], |check| &check.blockers[..]);
        let reasons = match (&stuck.reason, blockers) {
            (ObstacleReason::Blocked(_), [_, ..]) => blockers
                .iter()
                .map(|blocker| {
                    let descriptor = blocker.fd.map(|fd| format!(", descriptor {fd}"));
                    let path = blocker.path.as_ref().map(|path| format!(" ({path})"));
                    format!(
                        "process {}{}{}: {}",
                        blocker.pid,
                        descriptor.unwrap_or_default(),
                        path.unwrap_or_default(),
                        blocker.reason
                    )
                })
                .collect(),
            (reason, _) => vec![reason.to_string()],
        };
        StuckProcess {
            pid: process.map_or(0, |process| process.pid),
            name: self.name_of(stuck.process),
            reasons,
        }
    }

    fn name_of(&self, process: ProcessKey) -> String {
        self.names.get(&process).cloned().unwrap_or_default()
    }

    fn pid_of(&self, process: ProcessKey) -> Option<i32> {
        self.processes.get(&process).map(|process| process.pid)
    }

    /// Returns a reason in words, with the names of processes.
    fn stay_text(&self, reason: &StayReason) -> String {
        let (StayReason::NoBeneficialMove { obstacles, .. } | StayReason::Drained(obstacles)) =
            reason
        else {
            return reason.to_string();
        };
        let described = obstacles.iter().take(3).map(|obstacle| {
            let (name, pid) = (
                self.name_of(obstacle.process),
                self.pid_of(obstacle.process),
            );
            let pid = pid.map_or_else(String::new, |pid| format!(" ({pid})"));
            format!("{name}{pid}: {}", obstacle.reason)
        });
        let described: Vec<String> = described.collect();
        match (reason, self.drain.is_some()) {
            (StayReason::NoBeneficialMove { own, average, .. }, false) => format!(
                "no beneficial migration: this node has a load of {own}, the average is {average}"
            ),
            _ => described.join("; "),
        }
    }

    /// Returns the loads that this node knows.
    pub fn balance_status(&self, now: Duration, names: NodeNames<'_>) -> BalanceStatus {
        let own = self.machine.own_demand(now).map(|demand| KnownNodeLoad {
            name: names(self.own),
            load_percent: demand.utilization().points(),
            capacity: demand.capacity,
            age_ms: 0,
            is_open: self.drain.is_none(),
        });
        let mut others = self.machine.known_loads(now);
        others.sort_by_key(|report| report.node);
        let others = others.into_iter().map(|report| KnownNodeLoad {
            name: names(report.node),
            load_percent: report.demand.utilization().points(),
            capacity: report.demand.capacity,
            age_ms: report.age_ms,
            is_open: report.is_open,
        });
        let processes = self.processes.values().map(|process| ManagedProcessEntry {
            pid: process.pid,
            name: process.name.clone(),
            used: process.used,
            memory_kib: process.memory_kib,
            has_moved_here: process.has_moved_here,
            pinned: process.rules.is_pinned,
            blocked: match &process.check {
                None => None,
                Some(_) => process.obstacle().map(|failure| failure.to_string()),
            },
        });
        let mut processes: Vec<ManagedProcessEntry> = processes.collect();
        processes.sort_by_key(|process| process.pid);
        BalanceStatus {
            on: self.is_balancing,
            average_percent: self.machine.average(now).map(|average| average.points()),
            nodes: own.into_iter().chain(others).collect(),
            processes,
        }
    }

    /// Returns the decision that the machine would make now.
    pub fn plan(&self, now: Duration, names: NodeNames<'_>) -> BalancePlan {
        self.plan_entry(&self.machine.plan(now), names)
    }

    /// Returns a decision for the operator.
    pub fn plan_entry(&self, decision: &Decision, names: NodeNames<'_>) -> BalancePlan {
        match decision {
            Decision::Move(plan) => BalancePlan {
                planned: Some(self.planned(plan, names)),
                ..BalancePlan::default()
            },
            Decision::Stay(reason) => {
                let obstacles = match reason {
                    StayReason::NoBeneficialMove { obstacles, .. }
                    | StayReason::Drained(obstacles) => &obstacles[..],
                    _ => &[],
                };
                let text = match reason {
                    StayReason::Drained(_) => {
                        "this node has no process left that can move".to_owned()
                    }
                    _ => self.stay_text(reason),
                };
                BalancePlan {
                    planned: None,
                    reason: Some(text),
                    obstacles: obstacles
                        .iter()
                        .map(|one| self.obstacle_entry(one))
                        .collect(),
                }
            }
        }
    }

    fn obstacle_entry(&self, obstacle: &Obstacle) -> ObstacleEntry {
        ObstacleEntry {
            pid: self.pid_of(obstacle.process),
            name: self.name_of(obstacle.process),
            reason: obstacle.reason.to_string(),
        }
    }

    fn planned(&self, plan: &PlannedMove, names: NodeNames<'_>) -> PlannedMoveEntry {
        PlannedMoveEntry {
            pid: self.pid_of(plan.process),
            name: self.name_of(plan.process),
            to: names(plan.to),
            purpose: purpose_text(plan.purpose).to_owned(),
            average_percent: plan.average.points(),
            donor_before_percent: plan.donor.before.points(),
            donor_after_percent: plan.donor.after.points(),
            acceptor_before_percent: plan.acceptor.before.points(),
            acceptor_after_percent: plan.acceptor.after.points(),
        }
    }

    /// Returns the latest decisions, the latest last.
    pub fn balance_log(&self, now: Duration, names: NodeNames<'_>) -> BalanceLog {
        let records = self.machine.audit_records();
        BalanceLog {
            records: records
                .map(|record| self.log_entry(now, record, names))
                .collect(),
        }
    }

    fn log_entry(
        &self,
        now: Duration,
        record: &AuditRecord,
        names: NodeNames<'_>,
    ) -> BalanceLogEntry {
        let (role, process, peer, purpose, change) = match &record.role {
            AuditRole::Donor(plan) => ("gives", plan.process, plan.to, plan.purpose, plan.donor),
            AuditRole::Acceptor {
                process,
                from,
                purpose,
                own,
            } => ("takes", *process, *from, *purpose, *own),
        };
        BalanceLogEntry {
            age_s: now.saturating_sub(record.ended_at).as_secs(),
            duration_ms: milliseconds(record.ended_at.saturating_sub(record.at)),
            role: role.to_owned(),
            name: self.name_of(process),
            peer: names(peer),
            purpose: purpose_text(purpose).to_owned(),
            before_percent: change.before.points(),
            predicted_percent: change.after.points(),
            observed_percent: record.observed.map(|load| load.points()),
            outcome: outcome_text(&record.outcome),
        }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn drained(one: &DrainMove, names: NodeNames<'_>) -> DrainedProcess {
    DrainedProcess {
        number: one.number,
        pid: one.pid,
        name: one.name.clone(),
        to: names(one.to),
        freeze_us: one.freeze_us,
        failure: one.failure.clone(),
    }
}

fn purpose_text(purpose: MovePurpose) -> &'static str {
    match purpose {
        MovePurpose::Balance => "balance",
        MovePurpose::Drain => "drain",
    }
}

fn outcome_text(outcome: &AuditOutcome) -> String {
    use holdfast_wire::conductor_frames::OfferEnd;
    match outcome {
        AuditOutcome::Moved | AuditOutcome::ReportedByDonor(OfferEnd::Moved) => "moved".to_owned(),
        AuditOutcome::Declined(reason) => format!("declined: {reason}"),
        AuditOutcome::Unanswered => "the node did not answer in time".to_owned(),
        AuditOutcome::AcceptorLeft => "the node left the group".to_owned(),
        AuditOutcome::NotBeneficial(reason) => format!("not beneficial: {reason}"),
        AuditOutcome::ProcessGone => {
            "the process ended, or became unable to move, before the move".to_owned()
        }
        AuditOutcome::SwitchedOff => "the drain or the balancing was switched off".to_owned(),
        AuditOutcome::Failed(failure) => format!("failed: {failure}"),
        AuditOutcome::NoNews => "no news of the move's end in time".to_owned(),
        AuditOutcome::ReportedByDonor(OfferEnd::Kept) => {
            "the process stayed at the donor".to_owned()
        }
        AuditOutcome::ReportedByDonor(OfferEnd::Withdrawn) => {
            "the donor withdrew the offer".to_owned()
        }
        AuditOutcome::ReportedByDonor(OfferEnd::Unknown) => {
            "the donor's daemon has restarted and does not know the offer".to_owned()
        }
        AuditOutcome::DonorLeft => "the donor left the group".to_owned(),
    }
}
