//! The donor's commands: giving connections of this node away.

use std::os::fd::AsFd;
use std::time::Duration;

use holdfast_api::app::FromDaemon;
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::handoff::{CommandToken, Completion, FlowEpoch, Results};
use holdfast_wire::failure::Failure;
use holdfast_wire::{Flow, NodeId, Protocol};

use super::recovered_flows::RecoveryVerdict;
use super::{Engine, flow_text};
use crate::dataplane::{FilterEntry, monotonic_ns};
use crate::failure_conversion::IntoFailure;

impl Engine {
    pub(super) fn drain_send_queues(
        &mut self,
        token: CommandToken,
        flows: Vec<Flow>,
        deadline: Duration,
    ) {
        self.donations.add_drain(token, flows, deadline);
        self.poll_drains();
    }

    /// Completes the drain commands whose queues are empty or whose deadline has passed.
    pub(super) fn poll_drains(&mut self) {
        let now = self.now();
        for completion in self.donations.poll_drains(now) {
            self.complete_handoff_command(completion);
        }
    }

    pub(super) fn freeze_flows(
        &mut self,
        token: CommandToken,
        acceptor: NodeId,
        flows: Vec<FlowEpoch>,
    ) {
        let frozen_at_ns = monotonic_ns();
        let entries: Vec<FilterEntry> = flows
            .iter()
            .map(|flow_epoch| FilterEntry {
                flow: flow_epoch.flow,
                epoch: flow_epoch.epoch,
                peer: acceptor,
                hold_slot: 0,
            })
            .collect();
        if let Err(error) = self.dataplane.set_flows(&entries, FlowState::TransitOut) {
            let failure = error.into_failure();
            let failed = flows.iter().map(|_| Err(failure.clone())).collect();
            return self.complete_handoff_command(Completion {
                token,
                results: Results::Frozen(failed),
            });
        }
        self.donations.set_frozen(&flows, frozen_at_ns);
        self.read_hold();
        let datagrams: Vec<Flow> = flows
            .iter()
            .map(|flow_epoch| flow_epoch.flow)
            .filter(|flow| flow.protocol == Protocol::Udp)
            .collect();
        if datagrams.is_empty() {
            return self.finish_freeze(token, &flows);
        }
        for flow in datagrams {
            if let Some(session) = self.donations.session_of(&flow) {
                let message = FromDaemon::Collect {
                    flows: vec![flow_text(&flow)],
                };
                self.program_messages.send(session, &message, Vec::new());
            }
        }
        let now = self.now();
        self.donations.add_collect(now, token, flows);
        self.poll_collects();
    }

    /// Completes the freeze commands whose programs have emptied their sockets or whose deadline has passed.
    pub(super) fn poll_collects(&mut self) {
        let now = self.now();
        for collect in self.donations.take_ready_collects(now) {
            self.finish_freeze(collect.token, &collect.flows);
        }
    }

    fn finish_freeze(&mut self, token: CommandToken, flows: &[FlowEpoch]) {
        let results = flows
            .iter()
            .map(|flow_epoch| self.donations.extract(&flow_epoch.flow))
            .collect();
        self.complete_handoff_command(Completion {
            token,
            results: Results::Frozen(results),
        });
    }

    pub(super) fn resume_flows(
        &mut self,
        token: CommandToken,
        flows: &[FlowEpoch],
        in_doubt: bool,
    ) {
        let results = flows
            .iter()
            .map(|flow_epoch| self.resume_flow(flow_epoch, in_doubt))
            .collect();
        self.complete_handoff_command(Completion {
            token,
            results: Results::Resumed(results),
        });
    }

    fn resume_flow(&mut self, flow_epoch: &FlowEpoch, in_doubt: bool) -> Result<(), Failure> {
        match self.dataplane.flow(&flow_epoch.flow) {
            Some((_, value)) if value.epoch > flow_epoch.epoch => return Ok(()),
            // The flow was closed during the handoff, so nothing resumes.
            None | Some((FlowState::Closing | FlowState::Moved, _)) => {
                if !in_doubt {
                    self.set_recovery_verdict(&flow_epoch.flow, RecoveryVerdict::Kept);
                    self.donations.remove(&flow_epoch.flow);
                }
                return Ok(());
            }
            Some(_) => {}
        }
        let state = if in_doubt {
            FlowState::Prepared
        } else {
            FlowState::Owned
        };
        // The filters are set first, because packets that the resumed socket sends must pass.
        let entry = FilterEntry {
            flow: flow_epoch.flow,
            epoch: flow_epoch.epoch,
            peer: NodeId(0),
            hold_slot: 0,
        };
        self.dataplane
            .set_flows(&[entry], state)
            .map_err(IntoFailure::into_own_failure)?;
        self.set_recovery_verdict(&flow_epoch.flow, RecoveryVerdict::Kept);
        self.donations.resume(&flow_epoch.flow, in_doubt)
    }

    pub(super) fn close_flows(
        &mut self,
        token: CommandToken,
        acceptor: NodeId,
        flows: &[FlowEpoch],
    ) {
        let entries: Vec<FilterEntry> = flows
            .iter()
            .map(|flow_epoch| FilterEntry {
                flow: flow_epoch.flow,
                epoch: flow_epoch.epoch,
                peer: acceptor,
                hold_slot: 0,
            })
            .collect();
        if let Err(error) = self.dataplane.set_flows(&entries, FlowState::Moved) {
            let failure = error.into_failure();
            let failed = flows.iter().map(|_| Err(failure.clone())).collect();
            return self.complete_handoff_command(Completion {
                token,
                results: Results::Closed(failed),
            });
        }
        let acceptor_name = self.node_name(acceptor);
        let results = flows
            .iter()
            .map(|flow_epoch| self.close_flow(&flow_epoch.flow, flow_epoch.epoch, &acceptor_name))
            .collect();
        self.complete_handoff_command(Completion {
            token,
            results: Results::Closed(results),
        });
    }

    fn close_flow(&mut self, flow: &Flow, epoch: u32, to: &str) -> Result<(), Failure> {
        self.flow_history.add_tombstone(*flow, epoch);
        self.programs.clear_owner(flow);
        self.flow_history.on_end(flow);
        let Some(donation) = self.donations.remove(flow) else {
            let to = to.to_owned();
            self.set_recovery_verdict(flow, RecoveryVerdict::Moved { to });
            return Ok(());
        };
        if let Some(frozen_at_ns) = donation.frozen_at_ns {
            self.operations
                .on_frozen(flow, frozen_at_ns, donation.send_queue_bytes as u64);
        }
        if let Some(socket) = &donation.socket {
            holdfast_tcp_repair::abandon(socket.as_fd()).map_err(IntoFailure::into_own_failure)?;
        }
        self.program_messages.add_moved(donation.session, flow, to);
        Ok(())
    }
}
