//! The frames between daemons, and the bugs that alter them.

use super::Bug;
use super::holder::is_commit;
use super::world::World;
use crate::group::{World as _, id};
use holdfast_wire::migration::MoveFrame;
use holdfast_wire::{Change, ChangeKind, Frame, MoveId};

impl World {
    pub(super) fn send_frame(&mut self, from: usize, to: usize, frame: Frame) {
        match &frame {
            Frame::Ask { request, changes } => {
                let again = self.core.asks_again(from, *request);
                self.asks(from, changes);
                if again && self.bug == Some(Bug::AsksOnce) {
                    return;
                }
            }
            Frame::Move { id, frame } if self.bent((from, to), *id, frame) => return,
            _ => {}
        }
        match self.bug {
            Some(Bug::DoneLies) => self.core.transmit(from, to, &lied(frame)),
            _ => self.core.transmit(from, to, &frame),
        }
    }

    /// Handles a request to the holder: applies the bugs that do not wait for the answer.
    fn asks(&mut self, node: usize, changes: &[Change]) {
        let process = changes.iter().find_map(|change| {
            let deciding = is_commit(change.kind) || change.kind == ChangeKind::Rollback;
            Some((change.flow.move_id().filter(|_| deciding)?, change.kind))
        });
        match (self.bug, process) {
            (Some(Bug::GoesBeforeCommitted), Some((id, kind))) if is_commit(kind) => {
                self.start(node, id, &[]);
            }
            (Some(Bug::ThawsUnasked), Some((id, ChangeKind::Rollback))) => self.thaw(node, id),
            _ => {}
        }
    }

    /// Applies bugs to a frame of a move; returns true if the frame is not sent.
    fn bent(&mut self, (from, to): (usize, usize), id: MoveId, frame: &MoveFrame) -> bool {
        match frame {
            MoveFrame::Final { .. } if self.bug == Some(Bug::ReleasesEarly) => {
                self.release(from, id);
                false
            }
            MoveFrame::Translate { step, .. } if self.bug == Some(Bug::TellsOnce) => {
                self.tells_again((from, to), id, *step)
            }
            _ => false,
        }
    }

    pub(super) fn deliver_frame(&mut self, from: usize, to: usize, frame: Frame) {
        match frame {
            Frame::Ask { .. } | Frame::Query { .. } if to != self.core.holder => {
                let what = format!("node {} is asked and is not the holder", id(to));
                self.core.violated(what);
            }
            Frame::Ask { request, changes } => {
                let results = self.arbitrate(id(from), &changes);
                self.send(to, from, Frame::Answer { request, results });
            }
            Frame::Query { request, flows } => {
                let steering = &self.core.steering;
                let records = flows.iter().map(|flow| steering.get(flow).copied());
                let records = records.collect();
                self.send(to, from, Frame::QueryAnswer { request, records });
            }
            frame => self.input(to, |machine, now| {
                machine.handle_frame(now, id(from), frame);
            }),
        }
    }
}

/// Returns the frame; a frame with a move's final result reports success.
fn lied(frame: Frame) -> Frame {
    match frame {
        Frame::Move {
            id,
            frame:
                MoveFrame::Done {
                    times,
                    ran_us,
                    steps,
                    ..
                },
        } => {
            let result = Ok(3);
            let frame = MoveFrame::Done {
                result,
                times,
                ran_us,
                steps,
            };
            Frame::Move { id, frame }
        }
        frame => frame,
    }
}
