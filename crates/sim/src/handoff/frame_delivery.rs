//! The frames between daemons, and the bugs that alter them.

use super::HandoffBug;
use super::node::KernelFlowState;
use super::world::HandoffWorld;
use crate::node_group::{self, RebuildingWorld as _, node_id};
use holdfast_wire::{Flow, Frame};

impl HandoffWorld {
    pub(super) fn send_frame(&mut self, from: usize, to: usize, frame: Frame) {
        if let Frame::ChangeRequest { request, changes } = &frame {
            self.on_request(from, changes);
            let is_repeated = self.core.is_repeated_request(from, *request);
            if is_repeated && self.bug == Some(HandoffBug::AsksOnce) {
                return;
            }
        }
        if matches!(frame, Frame::ChangeResponse { .. }) && from != self.core.holder {
            return self.core.count("answer without lease not sent");
        }
        match self.bug {
            Some(HandoffBug::DoneReportsSuccess) => {
                self.core.transmit(from, to, &report_all_moved(frame))
            }
            _ => self.core.transmit(from, to, &frame),
        }
    }

    pub(super) fn deliver_frame(&mut self, from: usize, to: usize, frame: Frame) {
        if let Frame::FlowReport(frame) = frame {
            return self.deliver_report(from, to, frame);
        }
        let is_request = matches!(frame, Frame::ChangeRequest { .. });
        if is_request && to == self.core.holder && self.rebuilds.has_heard(to) {
            if let Some(frame) = self.defer_request(from, frame) {
                self.handle_request(from, to, frame);
            }
            return;
        }
        if self.bug == Some(HandoffBug::ClosesEarly)
            && matches!(frame, Frame::PrepareResponse { .. })
        {
            let entries = self.nodes[to].kernel.iter();
            let prepared = entries.filter(|(_, entry)| entry.state == KernelFlowState::Prepared);
            let prepared: Vec<Flow> = prepared.map(|(flow, _)| *flow).collect();
            for flow in prepared {
                self.nodes[to].close(flow, 0, node_id(from));
            }
        }
        node_group::GroupWorld::drive_machine(self, to, |machine, now| {
            machine.handle_frame(now, node_id(from), frame);
        });
    }
}

/// Returns the frame with all flows reported as moved. The donor's own epochs are unknown here; one wrongly reported
/// flow is enough.
fn report_all_moved(frame: Frame) -> Frame {
    match frame {
        Frame::Done {
            batch,
            results,
            times,
        } => {
            let best = results.iter().flatten().max().copied().unwrap_or(3);
            let results = results.into_iter().map(|result| Ok(result.unwrap_or(best)));
            let results = results.collect();
            Frame::Done {
                batch,
                results,
                times,
            }
        }
        frame => frame,
    }
}
