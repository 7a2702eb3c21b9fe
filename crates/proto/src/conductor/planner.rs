//! The decisions: which process moves to which node, or the reason for none.

use super::decision::{
    Decision, LoadChange, OBSTACLES_MAX, Obstacle, ObstacleReason, PlannedMove, StayReason,
    Unavailable,
};
use super::drain::DrainStatus;
use super::event::Event;
use super::load::ProcessLoad;
use super::policy::{LoadPosition, Location};
use super::{Conductor, Drain};
use core::time::Duration;
use holdfast_wire::conductor_frames::{MovePurpose, NodeDemand, Utilization};
use std::mem::discriminant;

/// Most nodes that one decision tries.
const LOCATIONS_TRIED_MAX: usize = 8;
/// Most processes that one decision tries for each node.
const PROCESSES_TRIED_MAX: usize = 8;

impl Conductor {
    /// Decides, and offers a process if that is the decision.
    pub(super) fn act(&mut self, now: Duration) {
        self.decision_at = now + self.around(self.config.decision_interval);
        self.update_shedding(now);
        match self.decide(now) {
            Decision::Move(plan) => {
                self.last_stay = None;
                self.offer(now, plan);
            }
            Decision::Stay(reason) => self.report_stay(now, reason),
        }
    }

    fn report_stay(&mut self, now: Duration, reason: StayReason) {
        let has_ended = matches!(reason, StayReason::Drained(_) | StayReason::DeadlinePassed);
        if has_ended {
            let status = self.status_of_drain(now);
            if let Some(drain) = self.drain.as_mut().filter(|drain| !drain.is_ended) {
                drain.is_ended = true;
                self.report(Event::DrainEnded(status));
            }
            return;
        }
        let kind = Some(discriminant(&reason));
        let is_notable = matches!(
            reason,
            StayReason::NoBeneficialMove { .. } | StayReason::NobodyKnown
        );
        match reason {
            StayReason::Unavailable(_) => {}
            reason if is_notable && self.last_stay != kind => {
                self.last_stay = kind;
                self.report(Event::Stays(reason));
            }
            _ => self.last_stay = kind,
        }
    }

    /// Returns the mean load of the open nodes, in percent points.
    pub(super) fn average_points(&self, now: Duration) -> Option<f64> {
        let own = self.own_demand(now).filter(|_| self.drain.is_none());
        self.known.average(now, self.config.freshness, own)
    }

    /// Follows the load of this node with the transfer policy.
    pub(super) fn update_shedding(&mut self, now: Duration) {
        let (Some(own), Some(average)) = (self.own_demand(now), self.average_points(now)) else {
            return;
        };
        let deficits = self.locations(now, average);
        let loads = LoadPosition {
            own: own.utilization().points(),
            average,
            deficit_max: deficits.fold(0.0, |most, location| location.deficit.max(most)),
        };
        let policy = self.config.policies.transfer;
        self.transfer_state.update(now, &policy, loads);
    }

    pub(super) fn decide(&self, now: Duration) -> Decision {
        let result = match &self.drain {
            Some(drain) => self.decide_drain(now, drain),
            None => self.decide_balance(now),
        };
        match result {
            Ok(_) if self.has_unseen_move => Decision::Stay(Unavailable::Busy.into()),
            Ok(plan) => Decision::Move(plan),
            Err(reason) => Decision::Stay(reason),
        }
    }

    fn decide_balance(&self, now: Duration) -> Result<PlannedMove, StayReason> {
        let own = self.availability(now, MovePurpose::Balance)?;
        let freshness = self.config.freshness;
        if self.known.fresh(now, freshness).next().is_none() {
            return Err(StayReason::NobodyKnown);
        }
        let average = self.average_points(now).ok_or(StayReason::NobodyKnown)?;
        let (own_share, average_share) = (own.utilization(), Utilization::of(average, 100.0));
        if !self.transfer_state.is_on {
            let (own, average) = (own_share, average_share);
            return Err(match self.transfer_state.high_since {
                Some(_) => StayReason::NotSustained { own, average },
                None => StayReason::Balanced { own, average },
            });
        }
        let policies = &self.config.policies;
        let excess = own_share.points() - average;
        let mut locations: Vec<Location> = self.locations(now, average).collect();
        policies
            .location
            .rank(&mut locations, excess, self.next_seq);
        let mut obstacles = Vec::new();
        let mut processes = self.movable_processes(now, MovePurpose::Balance, &mut obstacles);
        if locations.is_empty() {
            for process in &processes {
                note(&mut obstacles, process, ObstacleReason::NoReceiver);
            }
        }
        let capacity = f64::from(own.capacity);
        for (tried, location) in locations.iter().take(LOCATIONS_TRIED_MAX).enumerate() {
            let room = location.deficit * f64::from(location.demand.capacity) / 100.0;
            let amount = match policies.predicts {
                true => (excess * capacity / 100.0).min(room),
                false => excess * capacity / 100.0,
            };
            policies.selection.rank(&mut processes, amount, capacity);
            for process in processes.iter().take(PROCESSES_TRIED_MAX) {
                let result = match self.is_refused(now, process, location) {
                    true => Err(ObstacleReason::NoRoom),
                    false => self.plan_balance_move(own, average, process, location),
                };
                match result {
                    Ok(plan) => return Ok(plan),
                    Err(reason) if tried == 0 => note(&mut obstacles, process, reason),
                    Err(_) => {}
                }
            }
        }
        Err(StayReason::NoBeneficialMove {
            own: own_share,
            average: average_share,
            obstacles,
        })
    }

    /// Predicts the loads of both nodes after a move, and returns the reason against it if there is one.
    pub(super) fn plan_balance_move(
        &self,
        own: NodeDemand,
        average: f64,
        process: &ProcessLoad,
        location: &Location,
    ) -> Result<PlannedMove, ObstacleReason> {
        if process.sample.memory_kib > location.memory_free_kib {
            return Err(ObstacleReason::NoRoom);
        }
        let plan = predict(own, average, process, location, MovePurpose::Balance);
        if !self.config.policies.predicts {
            return Ok(plan);
        }
        let tolerance = self.config.policies.transfer.tolerance_points();
        let to = location.node;
        // The process may be at the high end of its load when it has moved.
        let high = process.used.mean() + process.used.deviation();
        let after_high = after_arrival(location.demand, high);
        if after_high.points() + self.config.gain_min.points() > plan.donor.before.points() {
            let after = after_high;
            return Err(ObstacleReason::NoGain { to, after });
        }
        if after_high.points() > average + tolerance {
            let after = after_high;
            return Err(ObstacleReason::WouldBeUndone { to, after });
        }
        if plan.donor.after.points() < average - tolerance {
            let after = plan.donor.after;
            return Err(ObstacleReason::LeavesTooLittle { after });
        }
        Ok(plan)
    }

    /// Chooses the next process of a drained node, and the node with the lowest load after the move.
    fn decide_drain(&self, now: Duration, drain: &Drain) -> Result<PlannedMove, StayReason> {
        if drain.is_overdue(now) {
            return Err(StayReason::DeadlinePassed);
        }
        let own = self.availability(now, MovePurpose::Drain)?;
        let mut obstacles = Vec::new();
        let mut processes = self.movable_processes(now, MovePurpose::Drain, &mut obstacles);
        if self.count_remaining(now) == 0 {
            return Err(StayReason::Drained(obstacles));
        }
        // The largest first, since the room for them shrinks.
        processes.sort_by(|a, b| b.used.mean().total_cmp(&a.used.mean()));
        let average = self.average_points(now).unwrap_or(0.0);
        let locations: Vec<Location> = self.locations(now, average).collect();
        for process in &processes {
            let rules = &process.sample.rules;
            let history = self.histories.get(process.sample.key);
            let former =
                history.and_then(|history| history.former_node(now, self.config.process_rest));
            let wanted = drain.target(rules.affinity_label);
            let plans = locations.iter().filter_map(|location| {
                let plan = predict(own, average, process, location, MovePurpose::Drain);
                let has_room = !self.is_refused(now, process, location)
                    && process.sample.memory_kib <= location.memory_free_kib
                    && plan.acceptor.after <= self.config.drain_ceiling;
                has_room.then_some(plan)
            });
            // A process returns to its former node only if no other has room.
            let best = plans.min_by_key(|plan| {
                let (is_former, is_wanted) = (Some(plan.to) == former, Some(plan.to) == wanted);
                (is_former, !is_wanted, plan.acceptor.after, plan.to)
            });
            match best {
                Some(plan) => return Ok(plan),
                None => note(&mut obstacles, process, ObstacleReason::NoRoom),
            }
        }
        Err(StayReason::NoBeneficialMove {
            own: own.utilization(),
            average: Utilization::of(average, 100.0),
            obstacles,
        })
    }

    /// Returns the nodes that could take a process, with their distance below the average.
    fn locations(&self, now: Duration, average: f64) -> impl Iterator<Item = Location> {
        let fresh = self.known.fresh(now, self.config.freshness);
        let open = fresh.filter(move |(_, known)| known.is_open && known.avoid_until <= now);
        open.map(move |(node, known)| Location {
            node,
            demand: known.demand,
            memory_free_kib: known.memory_free_kib,
            deficit: average - known.points,
        })
    }

    /// Returns true if the node declined the process of late for a reason that lasts.
    fn is_refused(&self, now: Duration, process: &ProcessLoad, location: &Location) -> bool {
        let until = self.refusals.get(&(process.sample.key, location.node));
        until.is_some_and(|until| *until > now)
    }

    /// Returns the processes that nothing at this node keeps from moving, and notes the obstacles of the others.
    fn movable_processes(
        &self,
        now: Duration,
        purpose: MovePurpose,
        obstacles: &mut Vec<Obstacle>,
    ) -> Vec<&ProcessLoad> {
        let processes = self.own.processes().iter();
        let is_movable = |process: &&ProcessLoad| match self.obstacle(now, process, purpose) {
            Some(reason) => {
                note(obstacles, process, reason);
                false
            }
            None => true,
        };
        processes.filter(is_movable).collect()
    }

    /// Returns the reason at this node for which a process does not move, if there is one.
    pub(super) fn obstacle(
        &self,
        now: Duration,
        process: &ProcessLoad,
        purpose: MovePurpose,
    ) -> Option<ObstacleReason> {
        let sample = &process.sample;
        if sample.rules.is_pinned {
            return Some(ObstacleReason::Pinned);
        }
        if let Some(failure) = &sample.blocked {
            return Some(ObstacleReason::Blocked(failure.clone()));
        }
        let is_considered = self.config.policies.predicts || purpose == MovePurpose::Drain;
        let past = self
            .histories
            .obstacle(now, sample.key, purpose, &self.config);
        if past.is_some() && is_considered {
            return past;
        }
        if purpose == MovePurpose::Drain {
            return None;
        }
        if let Some(label) = sample.rules.affinity_label {
            let mut others = self.own.processes().iter().map(|other| &other.sample);
            if others
                .any(|other| other.rules.affinity_label == Some(label) && other.key != sample.key)
            {
                return Some(ObstacleReason::WouldPart);
            }
        }
        if sample.freeze > self.config.freeze_max {
            return Some(ObstacleReason::FreezeTooLong(sample.freeze));
        }
        let capacity = f64::from(self.own.capacity());
        let share = Utilization::of(process.used.mean(), capacity);
        let is_small = share < self.config.process_min;
        (is_small && is_considered).then_some(ObstacleReason::TooSmall)
    }

    /// Returns the number of processes that a drain moves, now or later.
    fn count_remaining(&self, now: Duration) -> usize {
        let processes = self.own.processes().iter();
        processes
            .filter(|process| !self.is_stuck(now, process))
            .count()
    }

    /// Returns true if a drain leaves the process here for good.
    fn is_stuck(&self, now: Duration, process: &ProcessLoad) -> bool {
        match self.obstacle(now, process, MovePurpose::Drain) {
            None => false,
            Some(ObstacleReason::Failed(_)) => {
                !self.histories.may_leave_drained(process.sample.key)
            }
            Some(_) => true,
        }
    }

    pub(super) fn status_of_drain(&self, now: Duration) -> DrainStatus {
        let drain = self.drain.as_ref();
        let remaining = self.count_remaining(now);
        let stuck = self.own.processes().iter().filter_map(|process| {
            let reason = self.obstacle(now, process, MovePurpose::Drain)?;
            self.is_stuck(now, process).then_some(Obstacle {
                process: process.sample.key,
                reason,
            })
        });
        let per_minute = self.config.drain_moves_per_minute_max.max(1);
        let shortest = Duration::from_secs(60) / u32::try_from(per_minute).unwrap_or(u32::MAX);
        let default = self.config.move_estimate;
        let each = drain.map_or(default, |drain| drain.move_duration(default));
        let count = u32::try_from(remaining).unwrap_or(u32::MAX);
        let deadline = drain.and_then(|drain| drain.deadline);
        let is_moving = !self.is_idle() || self.moves_under_way > 0;
        DrainStatus {
            moved: drain.map_or(0, |drain| drain.moved),
            remaining,
            stuck: stuck.collect(),
            estimate: each.max(shortest).saturating_mul(count),
            until_deadline: deadline.map(|deadline| deadline.saturating_sub(now)),
            is_safe_to_reboot: self.own_demand(now).is_some()
                && self.own.processes().is_empty()
                && !is_moving,
        }
    }
}

/// Predicts the loads of both nodes after a move.
fn predict(
    own: NodeDemand,
    average: f64,
    process: &ProcessLoad,
    location: &Location,
    purpose: MovePurpose,
) -> PlannedMove {
    let used = process.used.mean();
    let left = (f64::from(own.used) - used).max(0.0);
    PlannedMove {
        process: process.sample.key,
        to: location.node,
        purpose,
        average: Utilization::of(average, 100.0),
        donor: LoadChange {
            before: own.utilization(),
            after: Utilization::of(left, f64::from(own.capacity)),
        },
        acceptor: LoadChange {
            before: location.demand.utilization(),
            after: after_arrival(location.demand, used),
        },
    }
}

/// Returns the load of a node that takes a process.
pub(super) fn after_arrival(node: NodeDemand, used: f64) -> Utilization {
    Utilization::of(f64::from(node.used) + used, f64::from(node.capacity))
}

/// Notes an obstacle, up to the limit.
fn note(obstacles: &mut Vec<Obstacle>, process: &ProcessLoad, reason: ObstacleReason) {
    if obstacles.len() < OBSTACLES_MAX {
        let process = process.sample.key;
        obstacles.push(Obstacle { process, reason });
    }
}
