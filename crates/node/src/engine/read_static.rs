//! Reading of connections at the donor while they are in use: before the freeze, and without modifying them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use holdfast_bpf::shared_with_c::FlowState;
use holdfast_bpf::socket_snapshots::SocketSnapshot;
use holdfast_proto::handoff::{FlowKeptReason, SendQueueInfo, StaticFlow};
use holdfast_tcp_repair::{QueueLevels, TcpSnapshot};
use holdfast_wire::{Flow, NodeId, Protocol};
use serde_bytes::ByteBuf;

use super::Engine;
use super::accept_queue::NO_SESSION;
use super::state_blobs::{StaticBlob, encode};
use crate::dataplane::FilterEntry;

impl Engine {
    /// Snapshots the sockets of these flows in one pass of the kernel iterator.
    pub(super) fn snapshot_sockets(&mut self, flows: &[Flow]) -> Vec<Option<SocketSnapshot>> {
        let donations = &self.donations;
        let socket = |flow| donations.get(flow)?.socket.as_ref();
        let indexed_sockets: Vec<(usize, BorrowedFd<'_>)> = flows
            .iter()
            .enumerate()
            .filter_map(|(index, flow)| Some((index, socket(flow)?.as_fd())))
            .collect();
        let sockets: Vec<BorrowedFd<'_>> =
            indexed_sockets.iter().map(|(_, socket)| *socket).collect();
        let mut snapshots = vec![None; flows.len()];
        for ((index, _), snapshot) in indexed_sockets
            .iter()
            .zip(self.dataplane.sockets.snapshot(&sockets))
        {
            snapshots[*index] = snapshot;
        }
        snapshots
    }

    pub(super) fn read_flow(
        &mut self,
        flow: &Flow,
        observed: Option<&SocketSnapshot>,
    ) -> Result<(StaticFlow, FilterEntry), FlowKeptReason> {
        let (state, value) = self
            .dataplane
            .flow(flow)
            .ok_or(FlowKeptReason::UnknownFlow)?;
        match state {
            FlowState::Owned | FlowState::Prepared | FlowState::Flushing => {}
            FlowState::Closing => return Err(FlowKeptReason::UnknownFlow),
            FlowState::Moved => return Err(FlowKeptReason::OwnedElsewhere(None)),
            FlowState::RedirectingData | FlowState::TransitIn | FlowState::TransitOut => {
                return Err(FlowKeptReason::AlreadyMoving);
            }
        }
        let donation = self
            .donations
            .get_mut(flow)
            .ok_or(FlowKeptReason::UnknownFlow)?;
        let mut queue = SendQueueInfo::default();
        if flow.protocol == Protocol::Tcp {
            let socket = donation
                .socket
                .as_ref()
                .ok_or_else(|| unmovable("the server program sent no descriptor"))?;
            if let Some(ticks) = self.clock_shift {
                holdfast_tcp_repair::shift_timestamp_clock(socket.as_fd(), ticks)
                    .map_err(unmovable)?;
            }
            let snapshot =
                observed.and_then(|observed| self.dataplane.sockets.to_tcp_snapshot(observed));
            let snapshot = snapshot.filter(TcpSnapshot::is_sufficient);
            let static_state = match &snapshot {
                Some(snapshot) => self.static_reader.read_snapshot(socket.as_fd(), snapshot),
                None => self.static_reader.read(socket.as_fd()),
            };
            let static_state = static_state.map_err(unmovable)?;
            if static_state.local != flow.local || static_state.remote != flow.remote {
                return Err(unmovable("the descriptor belongs to another connection"));
            }
            queue = snapshot.map_or_else(
                || send_queue(socket),
                |snapshot| queue_info(&snapshot.queue),
            );
            donation.static_state = Some(static_state);
        }
        let blob = StaticBlob {
            tcp: donation.static_state.clone(),
            application_state: ByteBuf::from(std::mem::take(&mut donation.application_state)),
            is_unaccepted: donation.session == NO_SESSION,
        };
        let static_state = encode(&blob).map_err(unmovable)?;
        donation.application_state = blob.application_state.into_vec();
        let entry = FilterEntry {
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

fn unmovable(why: impl ToString) -> FlowKeptReason {
    FlowKeptReason::Unmovable(why.to_string())
}

pub(super) fn send_queue(socket: &OwnedFd) -> SendQueueInfo {
    let queue = holdfast_tcp_repair::queue_levels(socket.as_fd());
    queue.map_or_else(|_| SendQueueInfo::default(), |queue| queue_info(&queue))
}

fn queue_info(queue: &QueueLevels) -> SendQueueInfo {
    SendQueueInfo {
        unsent: queue.unsent,
        unacked: queue.unacknowledged,
        unread: queue.unread,
        delivery_rate: queue.delivery_rate,
        rtt: Duration::from_micros(u64::from(queue.srtt_us)),
    }
}
