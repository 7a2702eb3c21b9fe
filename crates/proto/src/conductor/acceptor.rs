//! The acceptor's part of a negotiation. A node that accepted an offer keeps itself free until it learns the offer's end:
//! it is in doubt, as a participant of a two-phase commit is after its vote, and asks.

use super::audit::{AuditOutcome, AuditRecord, AuditRole};
use super::decision::LoadChange;
use super::event::Event;
use super::load::{PlacementRules, ProcessLoad, ProcessSample, Smoothed};
use super::planner::after_arrival;
use super::{Conductor, ConductorFrame};
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{
    DeclineReason, MovePurpose, NodeDemand, OfferEnd, OfferId, OfferedProcess, Utilization,
};

/// Number of inquiries without an answer after which the acceptor of a move that has not begun gives up. A move that did
/// begin is known to the daemon, which reports it by [`Conductor::handle_moves_under_way`].
const INQUIRIES_MAX: u32 = 10;

/// The offer that this node has accepted.
#[derive(Debug)]
pub(super) struct Incoming {
    donor: NodeId,
    id: OfferId,
    process: OfferedProcess,
    purpose: MovePurpose,
    own: LoadChange,
    accepted_at: Duration,
    /// True once the donor said that the move has begun.
    has_begun: bool,
    /// Time of the next inquiry.
    pub inquire_at: Duration,
}

impl Conductor {
    pub(super) fn on_offer(
        &mut self,
        now: Duration,
        (donor, id): (NodeId, OfferId),
        purpose: MovePurpose,
        demand: NodeDemand,
        process: &OfferedProcess,
    ) {
        let repeated = self.incoming.as_ref();
        if repeated.is_some_and(|incoming| incoming.donor == donor && incoming.id == id) {
            return self.accept(now, donor, id);
        }
        if self.own.process(process.key).is_some() {
            return self.ignore(donor, "ProcessOffer", "the offered process runs here");
        }
        let own = match self.judge_offer(now, purpose, demand, process) {
            Ok(own) => own,
            Err(reason) => {
                self.send(donor, ConductorFrame::Decline { id, reason });
                return self.report(Event::DeclinedOffer {
                    from: donor,
                    process: process.key,
                    reason,
                });
            }
        };
        self.incoming = Some(Incoming {
            donor,
            id,
            process: process.clone(),
            purpose,
            own,
            accepted_at: now,
            has_begun: false,
            inquire_at: now + self.config.inquiry_interval,
        });
        // The move counts from now, and again from its beginning: a beginning of which this node never hears counts too.
        self.rate.count(now, donor, id);
        let load = expected_load(now, process);
        self.histories.learn(now, process.key, &process.past_moves);
        self.histories.expect(now, process.key, donor, load.used);
        // The daemon saves the process's past before the acceptance goes out: a daemon that dies in between has agreed to
        // nothing, and a later one knows the rest of every process that came.
        self.settle();
        self.accept(now, donor, id);
    }

    fn accept(&mut self, now: Duration, donor: NodeId, id: OfferId) {
        if let Some(acceptor) = self.own_demand(now) {
            self.send(donor, ConductorFrame::Accept { id, acceptor });
        }
    }

    /// Returns the predicted change of this node's load if the node takes the process.
    fn judge_offer(
        &self,
        now: Duration,
        purpose: MovePurpose,
        donor: NodeDemand,
        process: &OfferedProcess,
    ) -> Result<LoadChange, DeclineReason> {
        if self.drain.is_some() {
            return Err(DeclineReason::Draining);
        }
        let own = self.availability(now, purpose)?;
        let free_kib = self.own.memory_free_kib;
        if process.memory_kib > free_kib {
            return Err(DeclineReason::NoMemory { free_kib });
        }
        if process
            .anti_affinity_label
            .is_some_and(|label| self.own.has_anti_affinity_label(label))
        {
            return Err(DeclineReason::AntiAffinity);
        }
        let used = f64::from(process.used);
        let change = LoadChange {
            before: own.utilization(),
            after: after_arrival(own, used),
        };
        let (after, limit) = match purpose {
            MovePurpose::Drain => (change.after, self.config.drain_ceiling),
            MovePurpose::Balance if !self.config.policies.predicts => return Ok(change),
            MovePurpose::Balance => {
                let high = used + f64::from(process.deviation);
                let gain = self.config.gain_min.0;
                let below_donor = donor.utilization().0.saturating_sub(gain);
                let tolerance = self.config.policies.transfer.tolerance_points();
                let average = self.average_points(now).unwrap_or(0.0);
                let near_average = Utilization::of(average + tolerance, 100.0);
                let limit = near_average.min(Utilization(below_donor));
                (after_arrival(own, high), limit)
            }
        };
        match after <= limit {
            true => Ok(change),
            false => Err(DeclineReason::TooLoaded { after, limit }),
        }
    }

    /// Returns the accepted offer if it has this donor and identity.
    fn incoming_of(&mut self, donor: NodeId, id: OfferId) -> Option<&mut Incoming> {
        let incoming = self.incoming.as_mut();
        incoming.filter(|incoming| incoming.donor == donor && incoming.id == id)
    }

    pub(super) fn on_begin(&mut self, now: Duration, from: NodeId, id: OfferId) {
        let Some(incoming) = self.incoming_of(from, id) else {
            return self.ignore(from, "OfferBegin", "this node has not accepted the offer");
        };
        // The answer to an inquiry is no second beginning.
        if !std::mem::replace(&mut incoming.has_begun, true) {
            self.rate.count(now, from, id);
        }
    }

    pub(super) fn on_ended(&mut self, now: Duration, from: NodeId, id: OfferId, end: OfferEnd) {
        let is_it = |incoming: &mut Incoming| incoming.donor == from && incoming.id == id;
        let Some(incoming) = self.incoming.take_if(is_it) else {
            return self.ignore(from, "OfferEnded", "this node has not accepted the offer");
        };
        match end {
            OfferEnd::Moved => {
                if !incoming.has_begun {
                    self.rate.count(now, from, id);
                }
                self.own.add(expected_load(now, &incoming.process));
            }
            OfferEnd::Kept => self.histories.forget(incoming.process.key),
            OfferEnd::Withdrawn if !incoming.has_begun => {
                self.rate.uncount(from, id);
                self.histories.forget(incoming.process.key);
            }
            // The move may have begun.
            OfferEnd::Withdrawn | OfferEnd::Unknown => self.rate.count(now, from, id),
        }
        self.end_incoming(now, &incoming, AuditOutcome::ReportedByDonor(end));
    }

    fn end_incoming(&mut self, now: Duration, incoming: &Incoming, outcome: AuditOutcome) {
        let has_moved = outcome == AuditOutcome::ReportedByDonor(OfferEnd::Moved);
        let record = AuditRecord {
            at: incoming.accepted_at,
            ended_at: now,
            id: incoming.id,
            role: AuditRole::Acceptor {
                process: incoming.process.key,
                from: incoming.donor,
                purpose: incoming.purpose,
                own: incoming.own,
            },
            outcome,
            observed: None,
        };
        let observe_at = has_moved.then_some(now + self.config.calm_down);
        self.audit.push(record.clone(), observe_at);
        self.report(Event::Audited(Box::new(record)));
    }

    /// Asks the donor about an accepted offer, or gives up.
    pub(super) fn on_acceptor_timeout(&mut self, now: Duration) {
        let interval = self.config.inquiry_interval;
        let longest = interval * INQUIRIES_MAX;
        let move_duration_max = self.config.move_duration_max;
        let is_over = |incoming: &mut Incoming| {
            let limit = match incoming.has_begun {
                true => move_duration_max,
                false => longest,
            };
            incoming.inquire_at <= now && now.saturating_sub(incoming.accepted_at) >= limit
        };
        if let Some(incoming) = self.incoming.take_if(is_over) {
            self.rate.count(now, incoming.donor, incoming.id);
            return self.end_incoming(now, &incoming, AuditOutcome::NoNews);
        }
        let Some(incoming) = self
            .incoming
            .as_mut()
            .filter(|incoming| incoming.inquire_at <= now)
        else {
            return;
        };
        incoming.inquire_at = now + interval;
        let (donor, id) = (incoming.donor, incoming.id);
        self.send(donor, ConductorFrame::Inquire { id });
    }

    /// Ends the accepted offer of a node that is no longer in the group.
    pub(super) fn end_offer_of_former_member(&mut self, now: Duration) {
        let view = &self.view;
        let is_of_former = |incoming: &mut Incoming| !view.contains(incoming.donor);
        if let Some(incoming) = self.incoming.take_if(is_of_former) {
            self.rate.count(now, incoming.donor, incoming.id);
            self.end_incoming(now, &incoming, AuditOutcome::DonorLeft);
        }
    }
}

/// Returns the load of an offered process as this node's first sample will show it.
fn expected_load(now: Duration, process: &OfferedProcess) -> ProcessLoad {
    ProcessLoad {
        used: Smoothed::new(now, process.used.into(), process.deviation.into()),
        sample: ProcessSample {
            key: process.key,
            used: process.used,
            memory_kib: process.memory_kib,
            clients: 0,
            freeze: Duration::ZERO,
            rules: PlacementRules {
                anti_affinity_label: process.anti_affinity_label,
                ..PlacementRules::default()
            },
            blocked: None,
        },
    }
}
