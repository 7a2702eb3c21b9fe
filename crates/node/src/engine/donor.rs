//! The donor's commands: giving connections of this node away.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use holdfast_api::app::{DatagramPiece, FromDaemon};
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::handoff::{
    CommandToken, Completion, FlowEpoch, FrozenFlow, Results, SendQueueInfo,
};
use holdfast_tcp_repair::TcpStaticState;
use holdfast_wire::{Flow, NodeId, Protocol};
use serde_bytes::ByteBuf;

use super::read_static::send_queue;
use super::recovery::RecoveryVerdict;
use super::state_blobs::{DynamicBlob, encode};
use super::tombstones::Tombstone;
use super::{Engine, flow_text};
use crate::app_server::SessionId;
use crate::dataplane::{FilterEntry, HeldPacket, monotonic_ns, monotonic_s};

/// Polling interval of a send queue that drains.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_micros(500);

/// Time limit for a program to return the unread datagrams of a diverted UDP flow, during which no node serves the
/// flow.
const COLLECT_TIMEOUT: Duration = Duration::from_millis(500);

/// A connection that a program gives away.
pub struct DonatedConnection {
    /// Session of the program.
    pub session: SessionId,
    /// Duplicate of the program's descriptor; none for a flow of a shared UDP socket.
    pub socket: Option<OwnedFd>,
    /// Application state for the program at the acceptor.
    pub application_state: Vec<u8>,
    /// Options of the socket, read in *prepare*.
    pub static_state: Option<TcpStaticState>,
    /// Copies of the packets received out of order since *prepare*.
    pub out_of_order: Vec<HeldPacket>,
    /// UDP: pieces of unread datagrams that the program has returned so far.
    pub unread_pieces: Vec<DatagramPiece>,
    /// UDP: datagrams that the program had not read; `None` until the program has answered.
    pub unread_datagrams: Option<Vec<ByteBuf>>,
    /// Monotonic time of the freeze.
    pub frozen_at_ns: Option<u64>,
    /// Bytes in the send queue at the freeze.
    pub send_queue_bytes: usize,
    /// True while the holder's answer to the diversion is outstanding.
    pub in_doubt: bool,
    /// True if the program was notified that it keeps the connection.
    pub is_notified: bool,
}

impl DonatedConnection {
    /// Returns a donation at its beginning.
    pub(super) fn new(session: SessionId, socket: Option<OwnedFd>, application: Vec<u8>) -> Self {
        Self {
            session,
            socket,
            application_state: application,
            static_state: None,
            out_of_order: Vec::new(),
            unread_pieces: Vec::new(),
            unread_datagrams: None,
            frozen_at_ns: None,
            send_queue_bytes: 0,
            in_doubt: false,
            is_notified: false,
        }
    }
}

/// A `Drain` command in progress.
pub struct PendingDrain {
    token: CommandToken,
    flows: Vec<Flow>,
    deadline: Duration,
}

/// A UDP `Freeze` command that waits for the program to empty its socket.
pub struct PendingCollect {
    pub(super) token: CommandToken,
    pub(super) flows: Vec<FlowEpoch>,
    /// Deadline; the freeze continues then without the missing answers.
    pub(super) deadline: Duration,
}

impl Engine {
    pub(super) fn drain_send_queues(
        &mut self,
        token: CommandToken,
        flows: Vec<Flow>,
        deadline: Duration,
    ) {
        self.pending_drains.push(PendingDrain {
            token,
            flows,
            deadline,
        });
        self.poll_drains();
    }

    /// Completes the drain commands whose queues are empty or whose deadline has passed.
    pub(super) fn poll_drains(&mut self) {
        let now = self.now();
        for drain in std::mem::take(&mut self.pending_drains) {
            let queues: Vec<SendQueueInfo> = drain
                .flows
                .iter()
                .map(|flow| self.flow_send_queue(flow))
                .collect();
            let empty = queues
                .iter()
                .all(|queue| queue.unsent == 0 && queue.unacked == 0);
            if empty || now >= drain.deadline {
                self.complete_handoff_command(Completion {
                    token: drain.token,
                    results: Results::Drained(queues),
                });
            } else {
                self.pending_drains.push(drain);
            }
        }
        self.drain_poll_at = (!self.pending_drains.is_empty()).then_some(now + DRAIN_POLL_INTERVAL);
    }

    fn flow_send_queue(&self, flow: &Flow) -> SendQueueInfo {
        let socket = self
            .donations
            .get(flow)
            .and_then(|donation| donation.socket.as_ref());
        socket.map(send_queue).unwrap_or_default()
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
            let failed = flows.iter().map(|_| Err(error.to_string())).collect();
            return self.complete_handoff_command(Completion {
                token,
                results: Results::Frozen(failed),
            });
        }
        for flow_epoch in &flows {
            if let Some(donation) = self.donations.get_mut(&flow_epoch.flow) {
                donation.frozen_at_ns = Some(frozen_at_ns);
            }
        }
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
            if let Some(donation) = self.donations.get(&flow) {
                let session = donation.session;
                self.send_to_program(
                    session,
                    &FromDaemon::Collect {
                        flows: vec![flow_text(&flow)],
                    },
                    Vec::new(),
                );
            }
        }
        let deadline = self.now() + COLLECT_TIMEOUT;
        self.pending_collects.push(PendingCollect {
            token,
            flows,
            deadline,
        });
        self.poll_collects();
    }

    /// Completes the freeze commands whose programs have emptied their sockets or whose deadline has passed.
    pub(super) fn poll_collects(&mut self) {
        let now = self.now();
        for collect in std::mem::take(&mut self.pending_collects) {
            let ready = collect.flows.iter().all(|flow_epoch| {
                flow_epoch.flow.protocol == Protocol::Tcp
                    || self
                        .donations
                        .get(&flow_epoch.flow)
                        .is_none_or(|donation| donation.unread_datagrams.is_some())
            });
            if ready || collect.deadline <= now {
                self.finish_freeze(collect.token, &collect.flows);
            } else {
                self.pending_collects.push(collect);
            }
        }
    }

    fn finish_freeze(&mut self, token: CommandToken, flows: &[FlowEpoch]) {
        let results = flows
            .iter()
            .map(|flow_epoch| self.extract_flow(&flow_epoch.flow))
            .collect();
        self.complete_handoff_command(Completion {
            token,
            results: Results::Frozen(results),
        });
    }

    fn extract_flow(&mut self, flow: &Flow) -> Result<FrozenFlow, String> {
        let donation = self
            .donations
            .get_mut(flow)
            .ok_or("the flow's server program has ended")?;
        let mut blob = DynamicBlob::default();
        if let (Some(socket), Some(static_state)) = (&donation.socket, &donation.static_state) {
            let state = holdfast_tcp_repair::extract(socket.as_fd(), static_state)
                .map_err(|error| error.to_string())?;
            let is_missing = |packet: &HeldPacket| {
                packet.segment.is_some_and(|segment| {
                    segment
                        .sequence
                        .wrapping_add(segment.length)
                        .wrapping_sub(state.rcv_nxt)
                        .cast_signed()
                        > 0
                })
            };
            let copies = std::mem::take(&mut donation.out_of_order);
            blob.packets = copies
                .into_iter()
                .filter(is_missing)
                .map(|packet| ByteBuf::from(packet.bytes))
                .collect();
            donation.send_queue_bytes = state.outgoing.len();
            blob.tcp = Some(state);
        }
        if flow.protocol == Protocol::Udp {
            let unread = donation.unread_datagrams.take();
            blob.packets =
                unread.ok_or("the server program did not return its unread datagrams")?;
        }
        Ok(FrozenFlow {
            dynamic: encode(&blob)?,
            application: bytes::Bytes::new(),
        })
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

    fn resume_flow(&mut self, flow_epoch: &FlowEpoch, in_doubt: bool) -> Result<(), String> {
        match self.dataplane.flow(&flow_epoch.flow) {
            Some((_, value)) if value.epoch > flow_epoch.epoch => return Ok(()),
            // The flow was closed during the handoff, so nothing resumes.
            None | Some((FlowState::Closing | FlowState::Moved, _)) => {
                if !in_doubt {
                    self.on_recovery_verdict(&flow_epoch.flow, RecoveryVerdict::Kept);
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
            .map_err(|error| error.to_string())?;
        self.on_recovery_verdict(&flow_epoch.flow, RecoveryVerdict::Kept);
        let Some(donation) = self.donations.get_mut(&flow_epoch.flow) else {
            return Ok(());
        };
        donation.in_doubt = in_doubt;
        if let (Some(socket), Some(_)) = (&donation.socket, donation.frozen_at_ns.take()) {
            let static_state = donation
                .static_state
                .as_ref()
                .ok_or("the flow's state was never read")?;
            holdfast_tcp_repair::resume(socket.as_fd(), static_state)
                .map_err(|error| error.to_string())?;
        }
        if donation.is_notified && !in_doubt {
            self.donations.remove(&flow_epoch.flow);
        }
        Ok(())
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
            let failed = flows.iter().map(|_| Err(error.to_string())).collect();
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

    fn close_flow(&mut self, flow: &Flow, epoch: u32, to: &str) -> Result<(), String> {
        let tombstone = Tombstone { flow: *flow, epoch };
        self.tombstones.add(monotonic_s(), tombstone);
        self.programs.clear_owner(flow);
        self.taken_at_ns.remove(flow);
        let Some(donation) = self.donations.remove(flow) else {
            let to = to.to_owned();
            self.on_recovery_verdict(flow, RecoveryVerdict::Moved { to });
            return Ok(());
        };
        if let Some(frozen_at_ns) = donation.frozen_at_ns {
            self.operations
                .on_frozen(flow, frozen_at_ns, donation.send_queue_bytes as u64);
        }
        if let Some(socket) = &donation.socket {
            holdfast_tcp_repair::abandon(socket.as_fd()).map_err(|error| error.to_string())?;
        }
        self.gone_messages
            .entry((donation.session, to.to_owned()))
            .or_default()
            .push(flow_text(flow));
        Ok(())
    }
}
