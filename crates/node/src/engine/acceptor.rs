//! The acceptor's commands: receiving connections at this node.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use holdfast_api::app::{DESCRIPTORS_MAX, FromDaemon, IncomingItem, StateItem, split};
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::handoff::{CommandToken, Completion, FlowToRestore, Results};
use holdfast_tcp_repair::{PreparedSocket, RestoredSocket, TcpStaticState};
use holdfast_wire::frame::{BatchId, FlowToPrepare};
use holdfast_wire::{Flow, NodeId};

use super::recovery::RecoveryVerdict;
use super::state_blobs::{DynamicBlob, StaticBlob, decode};
use super::{Engine, flow_text};
use crate::app_server::SessionId;
use crate::dataplane::{FilterEntry, HeldPacket};

/// Time limit for a program to take its arrivals. Shorter than the donor's limit, so that the donor learns the reason.
const PROGRAM_RECEIPT_TIMEOUT: Duration = Duration::from_millis(1500);

/// Maximum number of ids in an `Activate` or `Cancel` message; at most 10 bytes each, so that the message fits.
pub(super) const IDS_PER_MESSAGE: usize = 4096;

/// A connection that is being handed off to this node.
pub struct ArrivingConnection {
    /// Session of the program that takes the connection.
    pub session: SessionId,
    /// Id of the arrival on this node.
    pub id: u64,
    /// True if the program has received descriptor and state.
    pub is_received: bool,
    /// Progress of the socket.
    pub socket: ArrivalSocket,
    /// Options of the socket, as read by the donor.
    pub static_state: Option<TcpStaticState>,
    /// State of the socket; default until the donor has sent it.
    pub dynamic_state: DynamicBlob,
    /// Slot of the hold counters.
    pub slot: u32,
    /// Packets held for the connection so far.
    pub held_packets: Vec<HeldPacket>,
    /// True if packets are given to the stack instead of being held.
    pub released: bool,
    /// True if the congestion map has an entry for the connection.
    pub has_congestion_entry: bool,
}

/// Progress of an arriving connection's socket.
pub enum ArrivalSocket {
    /// No socket of its own: a flow of the program's shared UDP socket.
    SharedUdp,
    /// No socket yet: the commit makes it in the listener's accept queue.
    Queued,
    /// Bound, in repair mode.
    Prepared(PreparedSocket),
    /// Connected, in repair mode.
    Restored(RestoredSocket),
    /// Restored by an earlier daemon, which may already have activated it.
    Reclaimed(OwnedFd),
    /// Active.
    Active(OwnedFd),
    /// Failed and closed.
    Closed,
}

/// A `PrepareSockets` command that waits for programs to take descriptors and state.
pub struct PendingPrepare {
    token: CommandToken,
    flows: Vec<Flow>,
    results: Vec<Result<(), String>>,
    /// Deadline; arrivals not taken by then are given up.
    pub(super) deadline: Duration,
}

impl Engine {
    /// Continues a `PrepareSockets` command after the sockets are made: waits until the programs have taken them.
    pub(super) fn await_programs(
        &mut self,
        token: CommandToken,
        flows: Vec<Flow>,
        results: Vec<Result<(), String>>,
    ) {
        for (flow, result) in flows.iter().zip(&results) {
            if result.is_err() {
                self.remove_arrival(flow);
            }
        }
        let deadline = self.now() + PROGRAM_RECEIPT_TIMEOUT;
        self.pending_prepares.push(PendingPrepare {
            token,
            flows,
            results,
            deadline,
        });
        self.poll_prepares();
    }

    pub(super) fn prepare_flow(
        &mut self,
        donor: NodeId,
        prepare: &FlowToPrepare,
    ) -> Result<(FilterEntry, Vec<u8>), String> {
        self.refuse_owned_flow(&prepare.flow)?;
        let epoch = prepare
            .epoch
            .checked_add(1)
            .ok_or("the flow's epoch cannot be incremented")?;
        let blob: StaticBlob = decode(&prepare.static_state)?;
        let (session, service) = self.program_or_queue_for(&prepare.flow, blob.is_unaccepted)?;
        let socket = match &blob.tcp {
            _ if blob.is_unaccepted => ArrivalSocket::Queued,
            Some(static_state)
                if static_state.local == prepare.flow.local
                    && static_state.remote == prepare.flow.remote =>
            {
                ArrivalSocket::Prepared(
                    self.preparer
                        .prepare(static_state)
                        .map_err(|error| error.to_string())?,
                )
            }
            Some(_) => return Err("the received state belongs to another flow".into()),
            None => ArrivalSocket::SharedUdp,
        };
        let slot = self
            .hold_slots
            .take()
            .ok_or("too many connections are in transit here; try again")?;
        self.dataplane.programs.hold_counters.reset(slot);
        let id = self.next_arrival;
        self.next_arrival += 1;
        let arrival = ArrivingConnection {
            session,
            id,
            is_received: blob.is_unaccepted,
            socket,
            static_state: blob.tcp,
            dynamic_state: DynamicBlob::default(),
            slot,
            held_packets: Vec::new(),
            released: false,
            has_congestion_entry: false,
        };
        if let Some(previous) = self.arrivals.insert(prepare.flow, arrival) {
            self.hold_slots.release(previous.slot);
        }
        self.arrival_ids.insert(id, (prepare.flow, service));
        Ok((
            FilterEntry {
                flow: prepare.flow,
                epoch,
                peer: donor,
                hold_slot: slot,
            },
            blob.application_state.into_vec(),
        ))
    }

    /// Refuses a flow that this node owns, since no other node may give it. A flow that the holder refused to record
    /// as this node's is accepted, since another node may own it.
    pub(super) fn refuse_owned_flow(&self, flow: &Flow) -> Result<(), String> {
        use FlowState::{Flushing, Owned, Prepared, RedirectingData, TransitOut};
        match self.dataplane.flow(flow) {
            Some((Owned | Prepared | RedirectingData | Flushing | TransitOut, _))
                if !self.unrecorded.has(flow) =>
            {
                Err("the acceptor already owns the flow".into())
            }
            _ => Ok(()),
        }
    }

    /// Sends descriptors and application state to the programs that take the flows. Returns the flows whose descriptors
    /// could not be copied, with the error.
    pub(super) fn offer_to_programs(
        &mut self,
        states: Vec<(Flow, Vec<u8>)>,
    ) -> BTreeMap<Flow, String> {
        let mut failed = BTreeMap::new();
        let mut by_session: BTreeMap<SessionId, (Vec<Flow>, Vec<StateItem>)> = BTreeMap::new();
        for (flow, application_state) in states {
            let Some(arrival) = self.arrivals.get(&flow) else {
                continue;
            };
            let (flows, items) = by_session.entry(arrival.session).or_default();
            flows.push(flow);
            items.push(StateItem {
                id: arrival.id,
                application_state,
            });
        }
        for (session, (flows, items)) in by_session {
            for flows in flows.chunks(DESCRIPTORS_MAX) {
                failed.extend(self.offer_to_program(session, flows));
            }
            let mut items = items;
            let is_offered = |item: &StateItem| {
                let arrival = self.arrival_ids.get(&item.id);
                arrival.is_none_or(|(flow, _)| !failed.contains_key(flow))
            };
            items.retain(is_offered);
            for items in split(items, usize::MAX) {
                self.send_to_program(session, &states_message(items), Vec::new());
            }
        }
        failed
    }

    fn offer_to_program(&mut self, session: SessionId, flows: &[Flow]) -> Vec<(Flow, String)> {
        let mut failed = Vec::new();
        let mut descriptors: Vec<OwnedFd> = Vec::with_capacity(flows.len());
        let mut items = Vec::with_capacity(flows.len());
        for flow in flows {
            let Some(arrival) = self.arrivals.get(flow) else {
                continue;
            };
            let service = self
                .arrival_ids
                .get(&arrival.id)
                .map_or(0, |(_, service)| *service);
            let duplicate = match &arrival.socket {
                ArrivalSocket::Prepared(socket) => match socket.as_fd().try_clone_to_owned() {
                    Ok(duplicate) => Some(duplicate),
                    Err(error) => {
                        failed.push((
                            *flow,
                            format!("cannot copy the socket's descriptor: {error}"),
                        ));
                        continue;
                    }
                },
                _ => None,
            };
            items.push(IncomingItem {
                id: arrival.id,
                service,
                flow: flow_text(flow),
                descriptor: duplicate.is_some(),
            });
            descriptors.extend(duplicate);
        }
        if !items.is_empty() {
            self.send_to_program(session, &FromDaemon::Incoming { items }, descriptors);
        }
        failed
    }

    /// Handles a program's `Received`: the program has descriptor and state of these arrivals.
    pub(super) fn on_program_received(&mut self, ids: &[u64]) {
        for id in ids {
            if let Some((flow, _)) = self.arrival_ids.get(id)
                && let Some(arrival) = self.arrivals.get_mut(flow)
                && arrival.id == *id
            {
                arrival.is_received = true;
            }
        }
        self.poll_prepares();
    }

    /// Handles a program's `Refused`: the program does not take these arrivals.
    pub(super) fn on_program_refused(&mut self, ids: &[u64], reason: &str) {
        for id in ids {
            let Some((flow, _)) = self.arrival_ids.get(id) else {
                continue;
            };
            for prepare in &mut self.pending_prepares {
                for (prepared_flow, result) in prepare.flows.iter().zip(&mut prepare.results) {
                    if prepared_flow == flow && result.is_ok() {
                        *result = Err(format!("the acceptor's server program refused: {reason}"));
                    }
                }
            }
        }
        self.poll_prepares();
    }

    /// Completes the prepare commands for which every program has answered, has ended, or is late.
    pub(super) fn poll_prepares(&mut self) {
        let now = self.now();
        let mut overdue = Vec::new();
        for mut prepare in std::mem::take(&mut self.pending_prepares) {
            let mut waiting = false;
            for (flow, result) in prepare.flows.iter().zip(&mut prepare.results) {
                if result.is_err() {
                    continue;
                }
                match self.arrivals.get(flow) {
                    Some(arrival) if self.program_has_ended(arrival.session) => {
                        *result = Err("the acceptor's server program has ended".into());
                    }
                    Some(arrival) if !arrival.is_received && prepare.deadline <= now => {
                        overdue.push((arrival.session, arrival.id));
                        *result = Err(format!(
                            "the acceptor's server program did not take the flow within {} ms",
                            PROGRAM_RECEIPT_TIMEOUT.as_millis()
                        ));
                    }
                    Some(arrival) if !arrival.is_received => waiting = true,
                    Some(_) => {}
                    None => *result = Err("the handoff was given up meanwhile".into()),
                }
            }
            if waiting {
                self.pending_prepares.push(prepare);
                continue;
            }
            for (flow, result) in prepare.flows.iter().zip(&prepare.results) {
                if result.is_err() {
                    self.remove_arrival(flow);
                }
            }
            let results = Results::PreparedSockets(prepare.results);
            self.complete_handoff_command(Completion {
                token: prepare.token,
                results,
            });
        }
        for (session, id) in overdue {
            let cancel = FromDaemon::Cancel {
                ids: vec![id],
                reason: "the flow was not taken in time".into(),
            };
            self.send_to_program(session, &cancel, Vec::new());
        }
    }

    pub(super) fn restore_flows(
        &mut self,
        token: CommandToken,
        batch: BatchId,
        flows: &[FlowToRestore],
    ) {
        let results = flows
            .iter()
            .map(|restore| self.restore_flow(restore))
            .collect();
        self.journal.record_dynamic(batch, flows);
        self.complete_handoff_command(Completion {
            token,
            results: Results::Restored(results),
        });
    }

    fn restore_flow(&mut self, restore: &FlowToRestore) -> Result<(), String> {
        let session = self
            .arrivals
            .get(&restore.flow)
            .map(|arrival| arrival.session);
        if self.program_has_ended(session.ok_or("the flow was never prepared")?) {
            return Err("the acceptor's server program has ended".into());
        }
        let arrival = self.arrivals.get_mut(&restore.flow);
        let arrival = arrival.ok_or("the flow was never prepared")?;
        arrival.dynamic_state = decode(&restore.dynamic)?;
        match std::mem::replace(&mut arrival.socket, ArrivalSocket::Closed) {
            ArrivalSocket::Prepared(prepared) => {
                let static_state = arrival
                    .static_state
                    .as_ref()
                    .ok_or("the flow's socket options are missing")?;
                let state = arrival
                    .dynamic_state
                    .tcp
                    .as_ref()
                    .ok_or("the flow's TCP state is missing")?;
                let socket = holdfast_tcp_repair::restore(prepared, static_state, state)
                    .map_err(|error| error.to_string())?;
                let states = (static_state, state);
                let congestion = &self.congestion;
                arrival.has_congestion_entry =
                    congestion.restore(&self.dataplane, &restore.flow, socket.as_fd(), states);
                arrival.socket = ArrivalSocket::Restored(socket);
            }
            ArrivalSocket::SharedUdp => arrival.socket = ArrivalSocket::SharedUdp,
            ArrivalSocket::Queued => {
                let static_state = arrival
                    .static_state
                    .as_ref()
                    .ok_or("the flow's socket options are missing")?;
                let state = arrival
                    .dynamic_state
                    .tcp
                    .as_ref()
                    .ok_or("the flow's TCP state is missing")?;
                holdfast_tcp_repair::unaccepted_connection(static_state, state)
                    .map_err(|error| error.to_string())?;
                arrival.socket = ArrivalSocket::Queued;
            }
            ArrivalSocket::Restored(_)
            | ArrivalSocket::Reclaimed(_)
            | ArrivalSocket::Active(_)
            | ArrivalSocket::Closed => {
                return Err("the flow was already restored".into());
            }
        }
        Ok(())
    }

    pub(super) fn discard_arrivals(&mut self, token: CommandToken, flows: &[Flow]) {
        let reason = "the handoff was given up";
        for (session, ids) in self.ids_by_session(flows.iter().copied()) {
            for ids in ids.chunks(IDS_PER_MESSAGE) {
                let cancel = FromDaemon::Cancel {
                    ids: ids.to_vec(),
                    reason: reason.into(),
                };
                self.send_to_program(session, &cancel, Vec::new());
            }
        }
        for flow in flows {
            self.remove_arrival(flow);
            self.on_recovery_verdict(flow, RecoveryVerdict::Cancelled);
        }
        self.complete_handoff_command(Completion {
            token,
            results: Results::Discarded,
        });
    }
}

impl Engine {
    /// Removes all state of an arrival.
    fn remove_arrival(&mut self, flow: &Flow) {
        if let Some(arrival) = self.arrivals.remove(flow) {
            self.arrival_ids.remove(&arrival.id);
            self.hold_slots.release(arrival.slot);
            if arrival.has_congestion_entry {
                self.congestion.forget(&self.dataplane, flow);
            }
            close_silently(&arrival.socket);
        }
        self.journal.remove(flow);
        // Only an entry in transit to this node is removed: the flow may have become owned or a tombstone in another
        // way.
        if matches!(self.dataplane.flow(flow), Some((FlowState::TransitIn, _)))
            && let Err(error) = self.dataplane.remove_flow(flow)
        {
            tracing::warn!(%flow, %error, "cannot remove a flow that did not arrive from the flow table");
        }
    }
}

/// Returns a `State` message for a single item, else a `States` message.
fn states_message(mut items: Vec<StateItem>) -> FromDaemon {
    match items.pop() {
        Some(StateItem {
            id,
            application_state,
        }) if items.is_empty() => FromDaemon::State {
            id,
            application_state,
            unread: Vec::new(),
            last: true,
        },
        single => {
            items.extend(single);
            FromDaemon::States { items }
        }
    }
}

/// Closes a socket of a failed arrival silently, even if the program has a duplicate.
pub(super) fn close_silently(socket: &ArrivalSocket) {
    let descriptor: Option<BorrowedFd<'_>> = match socket {
        ArrivalSocket::Prepared(socket) => Some(socket.as_fd()),
        ArrivalSocket::Restored(socket) => Some(socket.as_fd()),
        ArrivalSocket::Active(socket) | ArrivalSocket::Reclaimed(socket) => Some(socket.as_fd()),
        ArrivalSocket::SharedUdp | ArrivalSocket::Queued | ArrivalSocket::Closed => None,
    };
    if let Some(Err(error)) = descriptor.map(holdfast_tcp_repair::abandon) {
        tracing::warn!(%error, "cannot close a discarded socket");
    }
}
