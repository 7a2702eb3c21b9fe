//! The frames between daemons, and the bugs that alter them.

use super::MigrationBug;
use super::holder::is_commit;
use super::world::MigrationWorld;
use crate::node_group::{GroupWorld as _, RebuildingWorld as _, node_id};
use holdfast_wire::move_frames::MoveFrame;
use holdfast_wire::{ChangeKind, Frame, MoveId, OwnershipChange};

impl MigrationWorld {
    pub(super) fn send_frame(&mut self, from: usize, to: usize, frame: Frame) {
        match &frame {
            Frame::ChangeRequest { request, changes } => {
                let is_repeated = self.core.is_repeated_request(from, *request);
                self.on_request(from, changes);
                if is_repeated && self.bug == Some(MigrationBug::AsksOnce) {
                    return;
                }
            }
            Frame::Move { id, frame } if self.apply_bug((from, to), *id, frame) => return,
            _ => {}
        }
        match self.bug {
            Some(MigrationBug::DoneReportsSuccess) => {
                self.core.transmit(from, to, &report_success(frame))
            }
            _ => self.core.transmit(from, to, &frame),
        }
    }

    /// Handles a request to the holder: applies the bugs that do not wait for the answer.
    fn on_request(&mut self, node: usize, changes: &[OwnershipChange]) {
        let process = changes.iter().find_map(|change| {
            let deciding = is_commit(change.kind) || change.kind == ChangeKind::Rollback;
            Some((change.flow.move_id().filter(|_| deciding)?, change.kind))
        });
        match (self.bug, process) {
            (Some(MigrationBug::ResumesBeforeCommitted), Some((id, kind))) if is_commit(kind) => {
                self.start_process(node, id, &[]);
            }
            (Some(MigrationBug::ThawsBeforeAnswer), Some((id, ChangeKind::Rollback))) => {
                self.thaw(node, id)
            }
            _ => {}
        }
    }

    /// Applies bugs to a frame of a move; returns true if the frame is not sent.
    fn apply_bug(&mut self, (from, to): (usize, usize), id: MoveId, frame: &MoveFrame) -> bool {
        match frame {
            MoveFrame::Final { .. } if self.bug == Some(MigrationBug::ReleasesEarly) => {
                self.release(from, id);
                false
            }
            MoveFrame::Translate { step, .. } if self.bug == Some(MigrationBug::TranslatesOnce) => {
                self.is_repeated_translation((from, to), id, *step)
            }
            _ => false,
        }
    }

    pub(super) fn deliver_frame(&mut self, from: usize, to: usize, frame: Frame) {
        match frame {
            Frame::FlowReport(frame) => self.deliver_report(from, to, frame),
            Frame::ChangeRequest { .. } | Frame::Query { .. } => {
                if to != self.core.holder || !self.rebuilds.has_heard(to) {
                    return self.core.count("request to no holder");
                }
                if let Some(frame) = self.defer_request(from, frame) {
                    self.handle_request(from, to, frame);
                }
            }
            frame => self.drive_machine(to, |machine, now| {
                machine.handle_frame(now, node_id(from), frame);
            }),
        }
    }
}

/// Returns the frame; a frame with a move's final result reports success.
fn report_success(frame: Frame) -> Frame {
    match frame {
        Frame::Move {
            id,
            frame:
                MoveFrame::Done {
                    times,
                    since_resume_us: ran_us,
                    steps,
                    ..
                },
        } => {
            let result = Ok(3);
            let frame = MoveFrame::Done {
                result,
                times,
                since_resume_us: ran_us,
                steps,
            };
            Frame::Move { id, frame }
        }
        frame => frame,
    }
}
