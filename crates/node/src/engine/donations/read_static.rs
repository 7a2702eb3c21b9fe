//! Reading of connections at the donor while they are in use: before the freeze, and without modifying them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use holdfast_bpf::shared_with_c::FlowState;
use holdfast_bpf::socket_snapshots::SocketSnapshot;
use holdfast_proto::handoff::{FlowKeptReason, SendQueueInfo, StaticFlow};
use holdfast_tcp_repair::{QueueLevels, TcpStaticSnapshot};
use holdfast_wire::failure::{Failure, ProgramFault};
use holdfast_wire::{Flow, NodeId, Protocol};
use serde_bytes::ByteBuf;

use super::super::program_messages::NO_SESSION;
use super::super::state_blobs::{StaticBlob, encode};
use super::Donations;
use crate::dataplane::{Dataplane, FilterEntry, SocketObserver};
use crate::failure_conversion::IntoFailure;

impl Donations {
    /// Forgets the socket options of earlier flows; the first flow of a command reads them again.
    pub fn forget_options(&mut self) {
        self.static_reader.forget_options();
    }

    /// Snapshots the sockets of these flows in one pass of the kernel iterator.
    pub fn snapshot_sockets(
        &self,
        observer: &mut SocketObserver,
        flows: &[Flow],
    ) -> Vec<Option<SocketSnapshot>> {
        let socket = |flow| self.connections.get(flow)?.socket.as_ref();
        let indexed_sockets: Vec<(usize, BorrowedFd<'_>)> = flows
            .iter()
            .enumerate()
            .filter_map(|(index, flow)| Some((index, socket(flow)?.as_fd())))
            .collect();
        let sockets: Vec<BorrowedFd<'_>> =
            indexed_sockets.iter().map(|(_, socket)| *socket).collect();
        let mut snapshots = vec![None; flows.len()];
        for ((index, _), snapshot) in indexed_sockets.iter().zip(observer.snapshot(&sockets)) {
            snapshots[*index] = snapshot;
        }
        snapshots
    }

    /// Reads a flow's state while its connection is in use, from a snapshot if that suffices. Returns also the entry
    /// with which the filters copy the flow's out-of-order segments.
    ///
    /// # Errors
    /// The reason why the flow stays here.
    pub fn read_flow(
        &mut self,
        dataplane: &Dataplane,
        flow: &Flow,
        observed: Option<&SocketSnapshot>,
    ) -> Result<(StaticFlow, FilterEntry), FlowKeptReason> {
        let (state, value) = dataplane.flow(flow).ok_or(FlowKeptReason::UnknownFlow)?;
        check_owned(state)?;
        let donation = self
            .connections
            .get_mut(flow)
            .ok_or(FlowKeptReason::UnknownFlow)?;
        let mut queue = SendQueueInfo::default();
        if flow.protocol == Protocol::Tcp {
            let socket = donation
                .socket
                .as_ref()
                .ok_or_else(|| unmovable(ProgramFault::NoDescriptorSent))?;
            if let Some(ticks) = self.clock_shift {
                holdfast_tcp_repair::shift_timestamp_clock(socket.as_fd(), ticks)
                    .map_err(|error| unmovable(error.into_own_failure()))?;
            }
            let snapshot =
                observed.and_then(|observed| dataplane.sockets.to_static_snapshot(observed));
            let snapshot = snapshot.filter(TcpStaticSnapshot::is_sufficient);
            let static_state = match &snapshot {
                Some(snapshot) => self.static_reader.read_snapshot(socket.as_fd(), snapshot),
                None => self.static_reader.read(socket.as_fd()),
            };
            let static_state = static_state.map_err(|error| unmovable(error.into_own_failure()))?;
            if static_state.local != flow.local || static_state.remote != flow.remote {
                return Err(unmovable(ProgramFault::DescriptorOfOtherFlow));
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

/// Checks that this node owns a flow that does not move.
fn check_owned(state: FlowState) -> Result<(), FlowKeptReason> {
    match state {
        FlowState::Owned | FlowState::Prepared | FlowState::Flushing => Ok(()),
        FlowState::Closing => Err(FlowKeptReason::UnknownFlow),
        FlowState::Moved => Err(FlowKeptReason::OwnedElsewhere(None)),
        FlowState::RedirectingData | FlowState::TransitIn | FlowState::TransitOut => {
            Err(FlowKeptReason::AlreadyMoving)
        }
    }
}

fn unmovable(why: impl Into<Failure>) -> FlowKeptReason {
    FlowKeptReason::Unmovable(why.into())
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
