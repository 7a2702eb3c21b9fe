//! Reading of connections at the donor while they are in use: before the freeze, and without modifying them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use holdfast_bpf::observe::Observed;
use holdfast_bpf::shared::FlowState;
use holdfast_proto::handoff::{Reason, SendQueueInfo, StaticFlow};
use holdfast_sys::tcp_repair::{self, Queue, Seen};
use holdfast_wire::{Flow, NodeId, Protocol};
use serde_bytes::ByteBuf;

use super::Engine;
use super::blob::{StaticBlob, encode};
use super::queued::NOBODY;
use crate::dataplane::Entry;

impl Engine {
    /// Snapshots the sockets of these flows in one pass of the kernel iterator.
    pub(super) fn look_at(&mut self, flows: &[Flow]) -> Vec<Option<Observed>> {
        let donations = &self.donations;
        let socket = |flow| donations.get(flow)?.socket.as_ref();
        let with: Vec<(usize, BorrowedFd<'_>)> = flows
            .iter()
            .enumerate()
            .filter_map(|(index, flow)| Some((index, socket(flow)?.as_fd())))
            .collect();
        let sockets: Vec<BorrowedFd<'_>> = with.iter().map(|(_, socket)| *socket).collect();
        let mut seen = vec![None; flows.len()];
        for ((index, _), one) in with.iter().zip(self.dataplane.sockets.look(&sockets)) {
            seen[*index] = one;
        }
        seen
    }

    pub(super) fn read_one(
        &mut self,
        flow: &Flow,
        observed: Option<&Observed>,
    ) -> Result<(StaticFlow, Entry), Reason> {
        let (state, value) = self.dataplane.flow(flow).ok_or(Reason::UnknownFlow)?;
        match state {
            FlowState::Owned | FlowState::Prepared | FlowState::Flushing => {}
            FlowState::Closing => return Err(Reason::UnknownFlow),
            FlowState::Moved => return Err(Reason::OwnedElsewhere(None)),
            FlowState::Leaving | FlowState::TransitIn | FlowState::TransitOut => {
                return Err(Reason::AlreadyMoving);
            }
        }
        let donation = self.donations.get_mut(flow).ok_or(Reason::UnknownFlow)?;
        let mut queue = SendQueueInfo::default();
        if flow.protocol == Protocol::Tcp {
            let socket = donation
                .socket
                .as_ref()
                .ok_or_else(|| unmovable("the program gave no descriptor"))?;
            if let Some(ticks) = self.clock_shift {
                tcp_repair::shift_timestamp_clock(socket.as_fd(), ticks).map_err(unmovable)?;
            }
            let seen = observed.and_then(|observed| self.dataplane.sockets.seen(observed));
            let seen = seen.filter(Seen::is_enough);
            let fixed = match &seen {
                Some(seen) => self.static_reader.read_seen(socket.as_fd(), seen),
                None => self.static_reader.read(socket.as_fd()),
            };
            let fixed = fixed.map_err(unmovable)?;
            if fixed.local != flow.local || fixed.remote != flow.remote {
                return Err(unmovable("the descriptor given is another connection's"));
            }
            queue = seen.map_or_else(|| send_queue(socket), |seen| queue_info(&seen.queue));
            donation.fixed = Some(fixed);
        }
        let blob = StaticBlob {
            tcp: donation.fixed.clone(),
            application: ByteBuf::from(std::mem::take(&mut donation.application)),
            unaccepted: donation.session == NOBODY,
        };
        let static_state = encode(&blob).map_err(unmovable)?;
        donation.application = blob.application.into_vec();
        let entry = Entry {
            flow: *flow,
            epoch: value.epoch,
            peer: NodeId(0),
            hold_slot: 0,
        };
        Ok((
            StaticFlow {
                epoch: value.epoch,
                static_state,
                queue,
            },
            entry,
        ))
    }
}

fn unmovable(why: impl ToString) -> Reason {
    Reason::Unmovable(why.to_string())
}

pub(super) fn send_queue(socket: &OwnedFd) -> SendQueueInfo {
    let queue = tcp_repair::send_queue(socket.as_fd());
    queue.map_or_else(|_| SendQueueInfo::default(), |queue| queue_info(&queue))
}

fn queue_info(queue: &Queue) -> SendQueueInfo {
    SendQueueInfo {
        unsent: queue.unsent,
        unacked: queue.unacknowledged,
        unread: queue.unread,
        delivery_rate: queue.delivery_rate,
        rtt: Duration::from_micros(u64::from(queue.srtt_us)),
    }
}
