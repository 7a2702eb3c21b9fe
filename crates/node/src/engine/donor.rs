//! The donor's commands: giving connections of this node away.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use holdfast_api::app::{FromDaemon, Piece};
use holdfast_bpf::shared::FlowState;
use holdfast_proto::handoff::{Completion, FlowEpoch, FrozenFlow, Results, SendQueueInfo, Token};
use holdfast_sys::tcp_repair::{self, TcpStatic};
use holdfast_wire::{Flow, NodeId, Protocol};
use serde_bytes::ByteBuf;

use super::blob::{DynamicBlob, encode};
use super::read::send_queue;
use super::recover::Verdict;
use super::tombstones::Tombstone;
use super::{Engine, text_of};
use crate::app::SessionId;
use crate::dataplane::{Entry, HeldPacket, monotonic_ns, monotonic_s};

/// Polling interval of a send queue that drains.
const DRAIN_POLL: Duration = Duration::from_micros(500);

/// Time limit for a program to return the unread datagrams of a diverted UDP flow, during which no node serves the
/// flow.
const COLLECT_MAX: Duration = Duration::from_millis(500);

/// A connection that a program gives away.
pub struct Donation {
    /// Session of the program.
    pub session: SessionId,
    /// Duplicate of the program's descriptor; none for a flow of a shared UDP socket.
    pub socket: Option<OwnedFd>,
    /// Application state for the program at the acceptor.
    pub application: Vec<u8>,
    /// Options of the socket, read in *prepare*.
    pub fixed: Option<TcpStatic>,
    /// Copies of the packets received out of order since *prepare*.
    pub out_of_order: Vec<HeldPacket>,
    /// UDP: pieces of unread datagrams that the program has returned so far.
    pub pieces: Vec<Piece>,
    /// UDP: datagrams that the program had not read; `None` until the program has answered.
    pub unread: Option<Vec<ByteBuf>>,
    /// Monotonic time of the freeze.
    pub frozen_at_ns: Option<u64>,
    /// Bytes in the send queue at the freeze.
    pub queued: usize,
    /// True while the holder's answer to the diversion is outstanding.
    pub in_doubt: bool,
    /// True if the program was notified that it keeps the connection.
    pub told: bool,
}

impl Donation {
    /// Returns a donation at its beginning.
    pub(super) fn new(session: SessionId, socket: Option<OwnedFd>, application: Vec<u8>) -> Self {
        Self {
            session,
            socket,
            application,
            fixed: None,
            out_of_order: Vec::new(),
            pieces: Vec::new(),
            unread: None,
            frozen_at_ns: None,
            queued: 0,
            in_doubt: false,
            told: false,
        }
    }
}

/// A `Drain` command in progress.
pub struct Draining {
    token: Token,
    flows: Vec<Flow>,
    deadline: Duration,
}

/// A UDP `Freeze` command that waits for the program to empty its socket.
pub struct Collecting {
    pub(super) token: Token,
    pub(super) flows: Vec<FlowEpoch>,
    /// Deadline; the freeze continues then without the missing answers.
    pub(super) until: Duration,
}

impl Engine {
    pub(super) fn drain(&mut self, token: Token, flows: Vec<Flow>, deadline: Duration) {
        self.draining.push(Draining {
            token,
            flows,
            deadline,
        });
        self.poll_drains();
    }

    /// Completes the drain commands whose queues are empty or whose deadline has passed.
    pub(super) fn poll_drains(&mut self) {
        let now = self.now();
        for drain in std::mem::take(&mut self.draining) {
            let queues: Vec<SendQueueInfo> =
                drain.flows.iter().map(|flow| self.queue_of(flow)).collect();
            let empty = queues
                .iter()
                .all(|queue| queue.unsent == 0 && queue.unacked == 0);
            if empty || now >= drain.deadline {
                self.done(Completion {
                    token: drain.token,
                    results: Results::Drained(queues),
                });
            } else {
                self.draining.push(drain);
            }
        }
        self.drain_poll_at = (!self.draining.is_empty()).then_some(now + DRAIN_POLL);
    }

    fn queue_of(&self, flow: &Flow) -> SendQueueInfo {
        let socket = self
            .donations
            .get(flow)
            .and_then(|donation| donation.socket.as_ref());
        socket.map(send_queue).unwrap_or_default()
    }

    pub(super) fn freeze(&mut self, token: Token, acceptor: NodeId, flows: Vec<FlowEpoch>) {
        let frozen_at_ns = monotonic_ns();
        let entries: Vec<Entry> = flows
            .iter()
            .map(|of| Entry {
                flow: of.flow,
                epoch: of.epoch,
                peer: acceptor,
                hold_slot: 0,
            })
            .collect();
        if let Err(error) = self.dataplane.set_flows(&entries, FlowState::TransitOut) {
            let failed = flows.iter().map(|_| Err(error.to_string())).collect();
            return self.done(Completion {
                token,
                results: Results::Frozen(failed),
            });
        }
        for of in &flows {
            if let Some(donation) = self.donations.get_mut(&of.flow) {
                donation.frozen_at_ns = Some(frozen_at_ns);
            }
        }
        self.read_hold();
        let datagrams: Vec<Flow> = flows
            .iter()
            .map(|of| of.flow)
            .filter(|flow| flow.protocol == Protocol::Udp)
            .collect();
        if datagrams.is_empty() {
            return self.finish_freeze(token, &flows);
        }
        for flow in datagrams {
            if let Some(donation) = self.donations.get(&flow) {
                let session = donation.session;
                self.tell(
                    session,
                    &FromDaemon::Collect {
                        flows: vec![text_of(&flow)],
                    },
                    Vec::new(),
                );
            }
        }
        let until = self.now() + COLLECT_MAX;
        self.collecting.push(Collecting {
            token,
            flows,
            until,
        });
        self.poll_collecting();
    }

    /// Completes the freeze commands whose programs have emptied their sockets or whose deadline has passed.
    pub(super) fn poll_collecting(&mut self) {
        let now = self.now();
        for collecting in std::mem::take(&mut self.collecting) {
            let ready = collecting.flows.iter().all(|of| {
                of.flow.protocol == Protocol::Tcp
                    || self
                        .donations
                        .get(&of.flow)
                        .is_none_or(|donation| donation.unread.is_some())
            });
            if ready || collecting.until <= now {
                self.finish_freeze(collecting.token, &collecting.flows);
            } else {
                self.collecting.push(collecting);
            }
        }
    }

    fn finish_freeze(&mut self, token: Token, flows: &[FlowEpoch]) {
        let results = flows.iter().map(|of| self.extract(&of.flow)).collect();
        self.done(Completion {
            token,
            results: Results::Frozen(results),
        });
    }

    fn extract(&mut self, flow: &Flow) -> Result<FrozenFlow, String> {
        let donation = self.donations.get_mut(flow).ok_or("its program is gone")?;
        let mut blob = DynamicBlob::default();
        if let (Some(socket), Some(fixed)) = (&donation.socket, &donation.fixed) {
            let state =
                tcp_repair::extract(socket.as_fd(), fixed).map_err(|error| error.to_string())?;
            let missing = |packet: &HeldPacket| {
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
                .filter(missing)
                .map(|packet| ByteBuf::from(packet.bytes))
                .collect();
            donation.queued = state.outgoing.len();
            blob.tcp = Some(state);
        }
        if flow.protocol == Protocol::Udp {
            let unread = donation.unread.take();
            blob.packets = unread.ok_or("its server program did not say what it had not read")?;
        }
        Ok(FrozenFlow {
            dynamic: encode(&blob)?,
            application: bytes::Bytes::new(),
        })
    }

    pub(super) fn resume(&mut self, token: Token, flows: &[FlowEpoch], in_doubt: bool) {
        let results = flows
            .iter()
            .map(|of| self.resume_one(of, in_doubt))
            .collect();
        self.done(Completion {
            token,
            results: Results::Resumed(results),
        });
    }

    fn resume_one(&mut self, of: &FlowEpoch, in_doubt: bool) -> Result<(), String> {
        match self.dataplane.flow(&of.flow) {
            Some((_, value)) if value.epoch > of.epoch => return Ok(()),
            // The flow was closed during the handoff, so nothing resumes.
            None | Some((FlowState::Closing | FlowState::Moved, _)) => {
                if !in_doubt {
                    self.decided(&of.flow, Verdict::Kept);
                    self.donations.remove(&of.flow);
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
        let entry = Entry {
            flow: of.flow,
            epoch: of.epoch,
            peer: NodeId(0),
            hold_slot: 0,
        };
        self.dataplane
            .set_flows(&[entry], state)
            .map_err(|error| error.to_string())?;
        self.decided(&of.flow, Verdict::Kept);
        let Some(donation) = self.donations.get_mut(&of.flow) else {
            return Ok(());
        };
        donation.in_doubt = in_doubt;
        if let (Some(socket), Some(_)) = (&donation.socket, donation.frozen_at_ns.take()) {
            let fixed = donation.fixed.as_ref().ok_or("it was never read")?;
            tcp_repair::resume(socket.as_fd(), fixed).map_err(|error| error.to_string())?;
        }
        if donation.told && !in_doubt {
            self.donations.remove(&of.flow);
        }
        Ok(())
    }

    pub(super) fn close(&mut self, token: Token, acceptor: NodeId, flows: &[FlowEpoch]) {
        let entries: Vec<Entry> = flows
            .iter()
            .map(|of| Entry {
                flow: of.flow,
                epoch: of.epoch,
                peer: acceptor,
                hold_slot: 0,
            })
            .collect();
        if let Err(error) = self.dataplane.set_flows(&entries, FlowState::Moved) {
            let failed = flows.iter().map(|_| Err(error.to_string())).collect();
            return self.done(Completion {
                token,
                results: Results::Closed(failed),
            });
        }
        let to = self.name_of(acceptor);
        let results = flows
            .iter()
            .map(|of| self.close_one(&of.flow, of.epoch, &to))
            .collect();
        self.done(Completion {
            token,
            results: Results::Closed(results),
        });
    }

    fn close_one(&mut self, flow: &Flow, epoch: u32, to: &str) -> Result<(), String> {
        let tombstone = Tombstone { flow: *flow, epoch };
        self.tombstones.add(monotonic_s(), tombstone);
        self.programs.lost(flow);
        self.taken_at_ns.remove(flow);
        let Some(donation) = self.donations.remove(flow) else {
            let to = to.to_owned();
            self.decided(flow, Verdict::Gone { to });
            return Ok(());
        };
        if let Some(frozen_at_ns) = donation.frozen_at_ns {
            self.operations
                .frozen(flow, frozen_at_ns, donation.queued as u64);
        }
        if let Some(socket) = &donation.socket {
            tcp_repair::abandon(socket.as_fd()).map_err(|error| error.to_string())?;
        }
        self.gone
            .entry((donation.session, to.to_owned()))
            .or_default()
            .push(text_of(flow));
        Ok(())
    }
}
