//! The donor's part of a negotiation: one offer at a time.

use super::audit::{AuditOutcome, AuditRecord, AuditRole};
use super::config::ConductorConfig;
use super::decision::{ObstacleReason, PlannedMove};
use super::event::{Event, Output};
use super::planner::after_arrival;
use super::policy::Location;
use super::{Conductor, ConductorFrame};
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{
    DeclineReason, MovePurpose, NodeDemand, OfferEnd, OfferId, OfferedProcess,
};
use holdfast_wire::failure::Failure;

/// Number of ended offers whose end is remembered, for acceptors that ask.
const ENDED_OFFERS_MAX: usize = 16;
/// Factor by which a node, or a process at this node, rests longer if the reason to decline lasts.
const LASTING_REASON_FACTOR: u32 = 6;
/// Part of the decision interval after which a donor tries again when a node declined.
const RETRY_PART: u32 = 4;

/// The open offer of this node.
#[derive(Debug)]
pub(super) struct Outgoing {
    id: OfferId,
    plan: PlannedMove,
    stage: OutgoingStage,
    /// Time at which the process was offered.
    offered_at: Duration,
    /// Time at which the stage began.
    since: Duration,
    /// Load of the process, in thousandths of a processor.
    used: f64,
    /// Affinity label of the process.
    affinity_label: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OutgoingStage {
    /// The acceptor has not answered.
    Offered,
    /// The daemon moves the process.
    Moving,
}

impl Outgoing {
    /// Returns true if the daemon moves the process.
    pub fn is_moving(&self) -> bool {
        self.stage == OutgoingStage::Moving
    }

    /// Returns the time at which the stage ends for want of news.
    pub fn due(&self, config: &ConductorConfig) -> Duration {
        self.since
            + match self.stage {
                OutgoingStage::Offered => config.answer_timeout,
                OutgoingStage::Moving => config.move_duration_max,
            }
    }
}

impl Conductor {
    /// Offers a process to the acceptor of the plan.
    pub(super) fn offer(&mut self, now: Duration, plan: PlannedMove) {
        let (Some(own), Some(process)) = (self.own_demand(now), self.own.process(plan.process))
        else {
            return;
        };
        let id = OfferId {
            boot: self.config.boot,
            seq: self.next_seq,
        };
        self.next_seq += 1;
        // Float-to-integer conversions saturate.
        let offered = OfferedProcess {
            key: plan.process,
            used: process.used.mean().round() as u32,
            deviation: process.used.deviation().round() as u32,
            memory_kib: process.sample.memory_kib,
            anti_affinity_label: process.sample.rules.anti_affinity_label,
            past_moves: self.histories.past_moves(now, plan.process),
        };
        self.outgoing = Some(Outgoing {
            id,
            plan,
            stage: OutgoingStage::Offered,
            offered_at: now,
            since: now,
            used: process.used.mean(),
            affinity_label: process.sample.rules.affinity_label,
        });
        let frame = ConductorFrame::Offer {
            id,
            purpose: plan.purpose,
            donor: own,
            process: offered,
        };
        self.send(plan.to, frame);
    }

    /// Takes this node's open offer if it has this identity, acceptor and stage.
    fn take_outgoing(
        &mut self,
        from: NodeId,
        id: OfferId,
        stage: OutgoingStage,
    ) -> Option<Outgoing> {
        self.outgoing.take_if(|outgoing| {
            outgoing.id == id && outgoing.plan.to == from && outgoing.stage == stage
        })
    }

    pub(super) fn on_accept(
        &mut self,
        now: Duration,
        from: NodeId,
        id: OfferId,
        acceptor: NodeDemand,
    ) {
        let Some(mut outgoing) = self.take_outgoing(from, id, OutgoingStage::Offered) else {
            // An acceptance that comes late or twice is answered like an inquiry.
            return self.on_inquire(from, id);
        };
        self.known.update_demand(now, from, acceptor);
        match self.plan_by_acceptor(now, &outgoing.plan, acceptor) {
            Ok(plan) => {
                (outgoing.plan, outgoing.stage, outgoing.since) =
                    (plan, OutgoingStage::Moving, now);
                self.outgoing = Some(outgoing);
                self.rate.count(now, self.config.node, id);
                self.send(from, ConductorFrame::Begin { id });
                self.outputs.push_back(Output::BeginMove {
                    id,
                    process: plan.process,
                    to: from,
                });
            }
            Err(outcome) => {
                self.known.avoid(from, now + self.config.decline_rest);
                self.end_outgoing(now, outgoing, outcome, OfferEnd::Withdrawn);
            }
        }
    }

    /// Predicts the move again with the load that the acceptor has told itself.
    fn plan_by_acceptor(
        &self,
        now: Duration,
        plan: &PlannedMove,
        acceptor: NodeDemand,
    ) -> Result<PlannedMove, AuditOutcome> {
        let process = self.own.process(plan.process);
        let own = self.own_demand(now);
        let (Some(process), Some(own)) = (process, own) else {
            return Err(AuditOutcome::ProcessGone);
        };
        if self.obstacle(now, process, plan.purpose).is_some() || self.has_unseen_move {
            return Err(AuditOutcome::ProcessGone);
        }
        let average = self.average_points(now).unwrap_or(plan.average.points());
        let location = Location {
            node: plan.to,
            demand: acceptor,
            memory_free_kib: u64::MAX,
            deficit: average - acceptor.utilization().points(),
        };
        match plan.purpose {
            MovePurpose::Balance => self
                .plan_balance_move(own, average, process, &location)
                .map_err(AuditOutcome::NotBeneficial),
            MovePurpose::Drain => {
                let mut plan = *plan;
                plan.acceptor.before = acceptor.utilization();
                plan.acceptor.after = after_arrival(acceptor, process.used.mean());
                match plan.acceptor.after <= self.config.drain_ceiling {
                    true => Ok(plan),
                    false => Err(AuditOutcome::NotBeneficial(ObstacleReason::NoRoom)),
                }
            }
        }
    }

    pub(super) fn on_decline(
        &mut self,
        now: Duration,
        from: NodeId,
        id: OfferId,
        reason: DeclineReason,
    ) {
        let Some(outgoing) = self.take_outgoing(from, id, OutgoingStage::Offered) else {
            return self.ignore(from, "OfferDecline", "this node has no such open offer");
        };
        let process = outgoing.plan.process;
        let lasting = self.config.decline_rest * LASTING_REASON_FACTOR;
        let rest = match reason {
            // The node may take other processes at once.
            DeclineReason::NoMemory { .. } | DeclineReason::AntiAffinity => {
                self.refusals.insert((process, from), now + lasting);
                Duration::ZERO
            }
            DeclineReason::BalancingOff | DeclineReason::Draining | DeclineReason::LoadUnknown => {
                lasting
            }
            DeclineReason::Busy
            | DeclineReason::Starting
            | DeclineReason::CalmingDown
            | DeclineReason::RateLimit
            | DeclineReason::TooLoaded { .. } => self.config.decline_rest,
        };
        self.known.avoid(from, now + rest);
        let retry = self.around(self.config.decision_interval / RETRY_PART);
        self.decision_at = self.decision_at.min(now + retry);
        self.report(Event::Declined {
            by: from,
            process,
            reason,
        });
        self.audit_donor(now, &outgoing, AuditOutcome::Declined(reason), None);
    }

    /// Takes the end of a move that [`Output::BeginMove`] requested: the process runs at the acceptor, or here for this
    /// reason. A move that could not begin ends at once.
    pub fn handle_move_ended(&mut self, now: Duration, id: OfferId, result: Result<(), Failure>) {
        let is_moving =
            |outgoing: &mut Outgoing| outgoing.id == id && outgoing.stage == OutgoingStage::Moving;
        let Some(outgoing) = self.outgoing.take_if(is_moving) else {
            return;
        };
        let plan = outgoing.plan;
        match result {
            Ok(()) => {
                self.own.remove(plan.process);
                // A float-to-integer conversion saturates.
                self.known.add_used(plan.to, outgoing.used.round() as u32);
                if let Some(drain) = &mut self.drain {
                    let took = now.saturating_sub(outgoing.offered_at);
                    drain.count(took, outgoing.affinity_label, plan.to);
                    self.decision_at = now;
                }
                self.end_outgoing(now, outgoing, AuditOutcome::Moved, OfferEnd::Moved);
            }
            Err(failure) => {
                self.histories.fail(now, plan.process, failure.clone());
                self.known.avoid(plan.to, now + self.config.decline_rest);
                let outcome = AuditOutcome::Failed(failure);
                self.end_outgoing(now, outgoing, outcome, OfferEnd::Kept);
            }
        }
        self.settle();
    }

    /// Ends an offer and tells the acceptor.
    fn end_outgoing(
        &mut self,
        now: Duration,
        outgoing: Outgoing,
        outcome: AuditOutcome,
        end: OfferEnd,
    ) {
        let (to, id) = (outgoing.plan.to, outgoing.id);
        if self.ended_offers.len() >= ENDED_OFFERS_MAX {
            self.ended_offers.pop_front();
        }
        self.ended_offers.push_back((to, id, end));
        if self.view.contains(to) {
            self.send(to, ConductorFrame::Ended { id, end });
        }
        let has_begun = outgoing.stage == OutgoingStage::Moving;
        let observe_at = has_begun.then_some(now + self.config.calm_down);
        self.audit_donor(now, &outgoing, outcome, observe_at);
    }

    fn audit_donor(
        &mut self,
        now: Duration,
        outgoing: &Outgoing,
        outcome: AuditOutcome,
        observe_at: Option<Duration>,
    ) {
        let record = AuditRecord {
            at: outgoing.offered_at,
            ended_at: now,
            id: outgoing.id,
            role: AuditRole::Donor(outgoing.plan),
            outcome,
            observed: None,
        };
        self.audit.push(record.clone(), observe_at);
        self.report(Event::Audited(Box::new(record)));
    }

    pub(super) fn on_inquire(&mut self, from: NodeId, id: OfferId) {
        let open = self.outgoing.as_ref();
        match open.filter(|open| open.id == id && open.plan.to == from) {
            Some(open) if open.is_moving() => {
                self.send(from, ConductorFrame::Begin { id });
            }
            // The acceptance is still on its way.
            Some(_) => {}
            None => self.answer_inquiry(from, id),
        }
    }

    /// Tells an acceptor the end of an offer that is not open.
    fn answer_inquiry(&mut self, from: NodeId, id: OfferId) {
        let known = |(to, ended, _): &&(NodeId, OfferId, OfferEnd)| *to == from && *ended == id;
        let end = match self.ended_offers.iter().find(known) {
            Some((_, _, end)) => *end,
            None if id.boot == self.config.boot => OfferEnd::Withdrawn,
            // The move of the former daemon may still be under way.
            None if self.moves_under_way > 0 => return,
            None => OfferEnd::Unknown,
        };
        self.send(from, ConductorFrame::Ended { id, end });
    }

    pub(super) fn on_donor_timeout(&mut self, now: Duration) {
        let config = &self.config;
        let is_due = |outgoing: &mut Outgoing| outgoing.due(config) <= now;
        let Some(outgoing) = self.outgoing.take_if(is_due) else {
            return;
        };
        let to = outgoing.plan.to;
        self.known.avoid(to, now + self.config.decline_rest);
        match outgoing.stage {
            OutgoingStage::Offered => {
                let outcome = AuditOutcome::Unanswered;
                self.end_outgoing(now, outgoing, outcome, OfferEnd::Withdrawn);
            }
            OutgoingStage::Moving => {
                self.end_outgoing(now, outgoing, AuditOutcome::NoNews, OfferEnd::Unknown);
            }
        }
    }

    /// Withdraws the open offer of this purpose, unless the move has begun.
    pub(super) fn withdraw_offer(&mut self, now: Duration, purpose: MovePurpose) {
        let is_open = |outgoing: &mut Outgoing| {
            outgoing.plan.purpose == purpose && outgoing.stage == OutgoingStage::Offered
        };
        if let Some(outgoing) = self.outgoing.take_if(is_open) {
            let outcome = AuditOutcome::SwitchedOff;
            self.end_outgoing(now, outgoing, outcome, OfferEnd::Withdrawn);
        }
    }

    /// Ends an offer to a node that is no longer in the group. A move that has begun ends by the daemon's word.
    pub(super) fn end_offer_to_former_member(&mut self, now: Duration) {
        let view = &self.view;
        let is_to_former = |outgoing: &mut Outgoing| {
            outgoing.stage == OutgoingStage::Offered && !view.contains(outgoing.plan.to)
        };
        if let Some(outgoing) = self.outgoing.take_if(is_to_former) {
            let outcome = AuditOutcome::AcceptorLeft;
            self.end_outgoing(now, outgoing, outcome, OfferEnd::Withdrawn);
        }
    }
}
