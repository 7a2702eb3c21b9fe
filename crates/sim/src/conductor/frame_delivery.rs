//! Frames on their way: lost, late and repeated frames, frames of a node that lies, and forged frames of the guest.

use super::ConductorBug;
use super::plan::CrashPoint;
use super::world::{ConductorWorld, Event, GUEST};
use crate::node_group::{node_id, node_index};
use crate::time::Time;
use holdfast_proto::conductor::Conductor;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{
    ConductorFrame, DeclineReason, LoadReport, MovePurpose, NodeDemand, OfferEnd, OfferId,
    OfferedProcess, ProcessKey,
};
use std::time::Duration;

/// Time between two frames of the guest.
const GUEST_INTERVAL: Time = Time::from_micros(300_000);
/// Share of load messages that come late, in seeds in which some do.
const STALE_LOADS: f64 = 0.2;
/// Longest delay of such a message, in microseconds. The ages of its loads count from its sending.
const STALE_US_MAX: u64 = 60_000_000;

impl ConductorWorld<'_> {
    pub(super) fn send(&mut self, from: usize, to: NodeId, mut frame: ConductorFrame) {
        let to = node_index(to);
        self.distort(from, &mut frame);
        if let ConductorFrame::Inquire { .. } = frame
            && self.has_bug(ConductorBug::NeverInquires)
        {
            return;
        }
        self.nodes[from].sent += 1;
        let point = match &frame {
            ConductorFrame::Offer { id, .. } => {
                self.nodes[from].offered.insert(*id);
                Some(CrashPoint::Offered)
            }
            ConductorFrame::Accept { id, .. } => {
                self.nodes[from].accepted.insert((to, *id));
                if !self.nodes[to].offered.contains(id) {
                    let (by, of) = (from + 1, to + 1);
                    self.set_violation(format!("n{by} accepts an offer that n{of} never made"));
                }
                Some(CrashPoint::Accepted)
            }
            _ => None,
        };
        self.transmit(node_id(from), to, frame);
        if let Some(point) = point {
            self.crash_at(point, from);
        }
    }

    /// Changes a frame as a node that lies or has a deliberate bug would.
    fn distort(&mut self, from: usize, frame: &mut ConductorFrame) {
        if self.config.liar == Some(from) {
            match frame {
                ConductorFrame::Loads { reports } => {
                    // The liar claims to be idle, and everybody else to be overloaded, or the reverse.
                    let flip = self.random.chance(0.5);
                    for report in reports {
                        let is_own = report.node == node_id(from);
                        report.demand.used = if is_own == flip { 0 } else { 2_000 };
                        report.age_ms = 0;
                    }
                }
                ConductorFrame::Accept { acceptor, .. } => acceptor.used = 0,
                ConductorFrame::Offer { donor, .. } => donor.used = 5_000,
                _ => {}
            }
        }
        if self.has_bug(ConductorBug::HidesLabels)
            && let ConductorFrame::Offer { process, .. } = frame
        {
            process.anti_affinity_label = None;
        }
        if self.has_bug(ConductorBug::AcceptsEverything)
            && let ConductorFrame::Decline {
                id,
                reason: DeclineReason::Busy | DeclineReason::CalmingDown,
            } = frame
        {
            let acceptor = NodeDemand {
                used: 100,
                capacity: 1_000,
            };
            *frame = ConductorFrame::Accept { id: *id, acceptor };
        }
    }

    /// Puts a frame on its way.
    fn transmit(&mut self, from: NodeId, to: usize, frame: ConductorFrame) {
        let is_cut =
            self.nodes[to].is_isolated || from != GUEST && self.nodes[node_index(from)].is_isolated;
        let faults = self.config.faults;
        let is_lost = self.is_hostile() && self.random.chance(faults.lost);
        if is_cut || is_lost {
            return;
        }
        if self.is_hostile() && self.random.chance(faults.repeated) {
            self.schedule_delivery(from, to, frame.clone());
        }
        self.schedule_delivery(from, to, frame);
    }

    fn schedule_delivery(&mut self, from: NodeId, to: usize, frame: ConductorFrame) {
        let is_slow = self.is_faulty() && self.random.chance(self.config.faults.slow_frames);
        let mut longest = if is_slow { 200_000 } else { 600 };
        let is_loads = matches!(frame, ConductorFrame::Loads { .. });
        let may_be_stale = is_loads && self.config.stale && self.is_faulty();
        if may_be_stale && self.random.chance(STALE_LOADS) {
            longest = STALE_US_MAX;
            self.count("load message comes late");
        }
        let delay = Time::from_micros(self.random.between(100, longest));
        let frame = Box::new(frame);
        self.schedule(self.now + delay, Event::Deliver { from, to, frame });
    }

    pub(super) fn deliver(&mut self, from: NodeId, to: usize, frame: ConductorFrame) {
        let point = match &frame {
            ConductorFrame::Begin { .. } => Some(CrashPoint::BeginReceived),
            ConductorFrame::Ended {
                end: OfferEnd::Moved,
                ..
            } => Some(CrashPoint::EndedReceived),
            _ => None,
        };
        if point.is_some_and(|point| self.crash_at(point, to)) {
            return;
        }
        self.nodes[to].received += 1;
        self.drive(to, |machine: &mut Conductor, now: Duration| {
            machine.handle_frame(now, from, frame);
        });
    }

    /// Sends a forged frame to a random node: false loads, offers of processes that do not exist, and acceptances of offers
    /// that the guest guesses.
    pub(super) fn send_guest_frame(&mut self) {
        if !self.is_faulty() {
            return;
        }
        self.schedule(self.now + GUEST_INTERVAL, Event::Guest);
        let to = self.random.below(self.nodes.len());
        let from = match self.has_bug(ConductorBug::GuestPassesForMember) {
            true => node_id(self.random.below(self.nodes.len())),
            false => GUEST,
        };
        let id = OfferId {
            boot: 1,
            seq: self.random.between(1, 12),
        };
        let demand = NodeDemand {
            used: 0,
            capacity: 1_000,
        };
        let frame = match self.random.below(3) {
            0 => {
                let node = node_id(self.random.below(self.nodes.len()));
                let report = LoadReport {
                    node,
                    demand,
                    memory_free_kib: 1 << 30,
                    is_open: true,
                    age_ms: 0,
                };
                ConductorFrame::Loads {
                    reports: vec![report],
                }
            }
            1 => ConductorFrame::Accept {
                id,
                acceptor: demand,
            },
            _ => ConductorFrame::Offer {
                id: OfferId { boot: 99, ..id },
                purpose: MovePurpose::Drain,
                donor: demand,
                process: OfferedProcess {
                    key: ProcessKey(1_000_000),
                    used: 1,
                    deviation: 0,
                    memory_kib: 1,
                    anti_affinity_label: None,
                    past_moves: Vec::new(),
                },
            },
        };
        self.count("guest's frame");
        self.transmit(from, to, frame);
    }
}
