//! The acceptor's commands: receiving connections at this node.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use holdfast_api::app::{DESCRIPTORS_MAX, FromDaemon, IncomingItem, StateItem, split};
use holdfast_bpf::shared::FlowState;
use holdfast_proto::handoff::{Completion, RestoreFlow, Results, Token};
use holdfast_sys::tcp_repair::{self, PreparedSocket, RestoredSocket, TcpStatic};
use holdfast_wire::frame::{BatchId, PrepareFlow};
use holdfast_wire::{Flow, NodeId};

use super::blob::{DynamicBlob, StaticBlob, decode};
use super::recover::Verdict;
use super::{Engine, text_of};
use crate::app::SessionId;
use crate::dataplane::{Entry, HeldPacket};

/// Time limit for a program to take its arrivals. Shorter than the donor's limit, so that the donor learns the reason.
const TAKE_MAX: Duration = Duration::from_millis(1500);

/// Maximum number of ids in a `Go` or `Cancel` message; at most 10 bytes each, so that the message fits.
pub(super) const IDS_MAX: usize = 4096;

/// A connection that is being handed off to this node.
pub struct Arrival {
    /// Session of the program that takes the connection.
    pub session: SessionId,
    /// Id of the arrival on this node.
    pub id: u64,
    /// True if the program has received descriptor and state.
    pub received: bool,
    /// Progress of the socket.
    pub socket: Socket,
    /// Options of the socket, as read by the donor.
    pub fixed: Option<TcpStatic>,
    /// State of the socket; default until the donor has sent it.
    pub state: DynamicBlob,
    /// Slot of the hold counters.
    pub slot: u32,
    /// Packets held for the connection so far.
    pub held: Vec<HeldPacket>,
    /// True if packets are given to the stack instead of being held.
    pub released: bool,
    /// True if the congestion map has an entry for the connection.
    pub congestion: bool,
}

/// Progress of an arriving connection's socket.
pub enum Socket {
    /// No socket of its own: a flow of the program's shared UDP socket.
    Shared,
    /// No socket yet: the commit makes it in the listener's accept queue.
    Queued,
    /// Bound, in repair mode.
    Prepared(PreparedSocket),
    /// Connected, in repair mode.
    Restored(RestoredSocket),
    /// Restored by an earlier daemon, which may already have activated it.
    Reclaimed(OwnedFd),
    /// Active.
    Live(OwnedFd),
    /// Failed and closed.
    Gone,
}

/// A `PrepareSockets` command that waits for programs to take descriptors and state.
pub struct Preparing {
    token: Token,
    flows: Vec<Flow>,
    results: Vec<Result<(), String>>,
    /// Deadline; arrivals not taken by then are given up.
    pub(super) until: Duration,
}

impl Engine {
    /// Continues a `PrepareSockets` command after the sockets are made: waits until the programs have taken them.
    pub(super) fn await_programs(
        &mut self,
        token: Token,
        flows: Vec<Flow>,
        results: Vec<Result<(), String>>,
    ) {
        for (flow, result) in flows.iter().zip(&results) {
            if result.is_err() {
                self.undo(flow);
            }
        }
        let until = self.now() + TAKE_MAX;
        self.preparing.push(Preparing {
            token,
            flows,
            results,
            until,
        });
        self.poll_preparing();
    }

    pub(super) fn prepare_one(
        &mut self,
        donor: NodeId,
        of: &PrepareFlow,
    ) -> Result<(Entry, Vec<u8>), String> {
        self.refuse_own(&of.flow)?;
        let epoch = of.epoch.checked_add(1).ok_or("its epoch is the last")?;
        let blob: StaticBlob = decode(&of.static_state)?;
        let (session, service) = self.taker(&of.flow, blob.unaccepted)?;
        let socket = match &blob.tcp {
            _ if blob.unaccepted => Socket::Queued,
            Some(fixed) if fixed.local == of.flow.local && fixed.remote == of.flow.remote => {
                Socket::Prepared(
                    self.preparer
                        .prepare(fixed)
                        .map_err(|error| error.to_string())?,
                )
            }
            Some(_) => return Err("its state is another flow's".into()),
            None => Socket::Shared,
        };
        let slot = self
            .slots
            .take()
            .ok_or("too many connections are in transit here; try again")?;
        self.dataplane.programs.holds.reset(slot);
        let id = self.next_arrival;
        self.next_arrival += 1;
        let arrival = Arrival {
            session,
            id,
            received: blob.unaccepted,
            socket,
            fixed: blob.tcp,
            state: DynamicBlob::default(),
            slot,
            held: Vec::new(),
            released: false,
            congestion: false,
        };
        if let Some(older) = self.arrivals.insert(of.flow, arrival) {
            self.slots.give_back(older.slot);
        }
        self.arrival_ids.insert(id, (of.flow, service));
        Ok((
            Entry {
                flow: of.flow,
                epoch,
                peer: donor,
                hold_slot: slot,
            },
            blob.application.into_vec(),
        ))
    }

    /// Refuses a flow that this node owns, since no other node may give it. A flow that the holder refused to record
    /// as this node's is accepted, since another node may own it.
    pub(super) fn refuse_own(&self, flow: &Flow) -> Result<(), String> {
        use FlowState::{Flushing, Leaving, Owned, Prepared, TransitOut};
        match self.dataplane.flow(flow) {
            Some((Owned | Prepared | Leaving | Flushing | TransitOut, _))
                if !self.unrecorded.has(flow) =>
            {
                Err("the acceptor owns it".into())
            }
            _ => Ok(()),
        }
    }

    /// Sends descriptors and application state to the programs that take the flows. Returns the flows whose descriptors
    /// could not be copied, with the error.
    pub(super) fn offer(&mut self, states: Vec<(Flow, Vec<u8>)>) -> BTreeMap<Flow, String> {
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
                failed.extend(self.offer_some(session, flows));
            }
            let mut items = items;
            let is_offered = |item: &StateItem| {
                let arrival = self.arrival_ids.get(&item.id);
                arrival.is_none_or(|(flow, _)| !failed.contains_key(flow))
            };
            items.retain(is_offered);
            for items in split(items, usize::MAX) {
                self.tell(session, &states_message(items), Vec::new());
            }
        }
        failed
    }

    fn offer_some(&mut self, session: SessionId, flows: &[Flow]) -> Vec<(Flow, String)> {
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
                Socket::Prepared(socket) => match socket.as_fd().try_clone_to_owned() {
                    Ok(duplicate) => Some(duplicate),
                    Err(error) => {
                        failed.push((*flow, format!("its descriptor cannot be copied: {error}")));
                        continue;
                    }
                },
                _ => None,
            };
            items.push(IncomingItem {
                id: arrival.id,
                service,
                flow: text_of(flow),
                descriptor: duplicate.is_some(),
            });
            descriptors.extend(duplicate);
        }
        if !items.is_empty() {
            self.tell(session, &FromDaemon::Incoming { items }, descriptors);
        }
        failed
    }

    /// Handles a program's `Received`: the program has descriptor and state of these arrivals.
    pub(super) fn received(&mut self, ids: &[u64]) {
        for id in ids {
            if let Some((flow, _)) = self.arrival_ids.get(id)
                && let Some(arrival) = self.arrivals.get_mut(flow)
                && arrival.id == *id
            {
                arrival.received = true;
            }
        }
        self.poll_preparing();
    }

    /// Handles a program's `Refused`: the program does not take these arrivals.
    pub(super) fn refused(&mut self, ids: &[u64], reason: &str) {
        for id in ids {
            let Some((flow, _)) = self.arrival_ids.get(id) else {
                continue;
            };
            for preparing in &mut self.preparing {
                for (of, result) in preparing.flows.iter().zip(&mut preparing.results) {
                    if of == flow && result.is_ok() {
                        *result = Err(format!("its server program refused: {reason}"));
                    }
                }
            }
        }
        self.poll_preparing();
    }

    /// Completes the prepare commands for which every program has answered, has ended, or is late.
    pub(super) fn poll_preparing(&mut self) {
        let now = self.now();
        let mut late = Vec::new();
        for mut preparing in std::mem::take(&mut self.preparing) {
            let mut waiting = false;
            for (flow, result) in preparing.flows.iter().zip(&mut preparing.results) {
                if result.is_err() {
                    continue;
                }
                match self.arrivals.get(flow) {
                    Some(arrival) if self.has_ended(arrival.session) => {
                        *result = Err("the server program that was to take it has ended".into());
                    }
                    Some(arrival) if !arrival.received && preparing.until <= now => {
                        late.push((arrival.session, arrival.id));
                        *result = Err(format!(
                            "its server program did not take it within {} ms",
                            TAKE_MAX.as_millis()
                        ));
                    }
                    Some(arrival) if !arrival.received => waiting = true,
                    Some(_) => {}
                    None => *result = Err("it was given up meanwhile".into()),
                }
            }
            if waiting {
                self.preparing.push(preparing);
                continue;
            }
            for (flow, result) in preparing.flows.iter().zip(&preparing.results) {
                if result.is_err() {
                    self.undo(flow);
                }
            }
            let results = Results::PreparedSockets(preparing.results);
            self.done(Completion {
                token: preparing.token,
                results,
            });
        }
        for (session, id) in late {
            let cancel = FromDaemon::Cancel {
                ids: vec![id],
                reason: "it was not taken in time".into(),
            };
            self.tell(session, &cancel, Vec::new());
        }
    }

    pub(super) fn restore(&mut self, token: Token, batch: BatchId, flows: &[RestoreFlow]) {
        let results = flows.iter().map(|of| self.restore_one(of)).collect();
        self.journal.restored(batch, flows);
        self.done(Completion {
            token,
            results: Results::Restored(results),
        });
    }

    fn restore_one(&mut self, of: &RestoreFlow) -> Result<(), String> {
        let session = self.arrivals.get(&of.flow).map(|arrival| arrival.session);
        if self.has_ended(session.ok_or("it was never prepared")?) {
            return Err("the server program that was to take it has ended".into());
        }
        let arrival = self.arrivals.get_mut(&of.flow);
        let arrival = arrival.ok_or("it was never prepared")?;
        arrival.state = decode(&of.dynamic)?;
        match std::mem::replace(&mut arrival.socket, Socket::Gone) {
            Socket::Prepared(prepared) => {
                let fixed = arrival.fixed.as_ref().ok_or("it has no options")?;
                let state = arrival.state.tcp.as_ref().ok_or("it has no state")?;
                let socket = tcp_repair::restore(prepared, fixed, state)
                    .map_err(|error| error.to_string())?;
                let with = (fixed, state);
                let give = &self.congestion;
                arrival.congestion = give.give(&self.dataplane, &of.flow, socket.as_fd(), with);
                arrival.socket = Socket::Restored(socket);
            }
            Socket::Shared => arrival.socket = Socket::Shared,
            Socket::Queued => {
                let fixed = arrival.fixed.as_ref().ok_or("it has no options")?;
                let state = arrival.state.tcp.as_ref().ok_or("it has no state")?;
                tcp_repair::queued(fixed, state).map_err(|error| error.to_string())?;
                arrival.socket = Socket::Queued;
            }
            Socket::Restored(_) | Socket::Reclaimed(_) | Socket::Live(_) | Socket::Gone => {
                return Err("it was restored before".into());
            }
        }
        Ok(())
    }

    pub(super) fn discard(&mut self, token: Token, flows: &[Flow]) {
        let reason = "the handoff was given up";
        for (session, ids) in self.ids_by_session(flows.iter().copied()) {
            for ids in ids.chunks(IDS_MAX) {
                let cancel = FromDaemon::Cancel {
                    ids: ids.to_vec(),
                    reason: reason.into(),
                };
                self.tell(session, &cancel, Vec::new());
            }
        }
        for flow in flows {
            self.undo(flow);
            self.decided(flow, Verdict::Cancelled);
        }
        self.done(Completion {
            token,
            results: Results::Discarded,
        });
    }
}

impl Engine {
    /// Removes all state of an arrival.
    fn undo(&mut self, flow: &Flow) {
        if let Some(arrival) = self.arrivals.remove(flow) {
            self.arrival_ids.remove(&arrival.id);
            self.slots.give_back(arrival.slot);
            if arrival.congestion {
                self.congestion.forget(&self.dataplane, flow);
            }
            silence(&arrival.socket);
        }
        self.journal.ended(flow);
        // Only an entry in transit to this node is removed: the flow may have become owned or a tombstone in another
        // way.
        if matches!(self.dataplane.flow(flow), Some((FlowState::TransitIn, _)))
            && let Err(error) = self.dataplane.forget(flow)
        {
            tracing::warn!(%flow, %error, "a flow that is not coming stays in the table");
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
        last => {
            items.extend(last);
            FromDaemon::States { items }
        }
    }
}

/// Closes a socket of a failed arrival silently, even if the program has a duplicate.
pub(super) fn silence(socket: &Socket) {
    let descriptor: Option<BorrowedFd<'_>> = match socket {
        Socket::Prepared(socket) => Some(socket.as_fd()),
        Socket::Restored(socket) => Some(socket.as_fd()),
        Socket::Live(socket) | Socket::Reclaimed(socket) => Some(socket.as_fd()),
        Socket::Shared | Socket::Queued | Socket::Gone => None,
    };
    if let Some(Err(error)) = descriptor.map(tcp_repair::abandon) {
        tracing::warn!(%error, "a socket that is not to live could not be ended");
    }
}
