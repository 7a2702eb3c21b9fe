//! Migration: how processes move from node to node with all their sockets. One machine per node has the roles of donor,
//! acceptor and peer (a node to which a moving process has connections). The holder of the steering table arbitrates,
//! as for flows.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs until there are none and wakes it at `poll_timeout`.
//! Channels behave as for the handoff. Memory does not pass through the machine: the machine decides when to copy a
//! round and when to freeze the process; the daemon sends the pages.
//!
//! **The decision is one compare-and-set.** A move has a record in the steering table
//! ([`holdfast_wire::Flow::of_move`]), arbitrated by [`crate::ownership`] like a flow. The divert request names that
//! record first and then all flows of the process; so do the commit and rollback requests. The holder applies a request
//! in one step, so the first of commit and rollback decides for all of them. A node in doubt does not run the process,
//! and asks. If all flows of a process were diverted in one request, its commit names the process alone: see
//! [`crate::ownership::Together`].
//!
//! | step | donor | acceptor | holder |
//! | --- | --- | --- | --- |
//! | check | names obstacles; nothing is touched | | |
//! | offer | | checks policy, files, memory; refusing costs nothing | |
//! | copy | rounds, until the predicted freeze no longer shrinks | makes the empty process | |
//! | arm | peers prepare to translate | holds packets | |
//! | divert | | | process, flows: owned → transit |
//! | freeze | forwards packets, stops the process, sends the rest | packets arrive | |
//! | transfer | | restores the process | process, flows: transit → owned |
//! | | | the process runs; peers switch | |
//! | release | ends the original | has the record of the move removed | record removed |
//!
//! The *empty process* is made at the acceptor during the rounds, and becomes the restored process.
//!
//! Safety: a process never runs at two nodes, whatever frames are lost, late or repeated, and whatever daemons crash.
//! Liveness: once nodes and holder reach each other, the process runs at one node, which owns its flows, and nothing of
//! the process is left at the other.
//!
//! A clone takes the same steps without flows; the original is stopped while it is read, and continues at once.
//!
//! Requests of this machine to the holder have numbers that [`Migration::is_answer`] can tell from the handoff's.

mod acceptor;
mod asks;
mod command;
mod config;
mod core;
mod donor;
mod event;
mod give;
mod peers;
mod predict;
mod recover;
mod rounds;
mod settle;
mod take;
mod transfer;

pub use command::{
    CheckReport, Command, Completion, FlowEpoch, FreezeReport, ProcessId, Results, RoundReport,
    Token, Went,
};
pub use config::Config;
pub use event::{Event, Outcome, Phases, Reason, Step, Summary};
pub use predict::{Load, Shape};
pub use recover::{RecoveredMove, RecoveredRole};

use self::acceptor::Taken;
use self::core::{Core, Purpose, Timer};
use self::donor::Given;
use self::peers::{Prepared, Tell};
use self::predict::CostModel;
use holdfast_wire::migration::{MoveFrame, SocketStrategy};
use holdfast_wire::{Change, Flow, Frame, MoveId, NodeId};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Options of a move.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Make a clone, and leave the original running on this node.
    pub clone: bool,
    /// Strategy for moving the sockets.
    pub sockets: SocketStrategy,
    /// Upper limit of the predicted freeze; the process stays if no prediction is within the limit.
    pub max_freeze: Option<Duration>,
    /// Allow post-copy: the remaining pages are sent after the process resumes at the acceptor. Used if the rounds
    /// cannot meet `max_freeze`; without a `max_freeze`, if rounds no longer shorten the freeze and memory takes most
    /// of it. Not for clones, and not with `verify`.
    pub post_copy: bool,
    /// Compare the restored process with the original before it runs.
    pub verify: bool,
    /// Only ask if the acceptor would take the process; the process stays ([`Reason::Rehearsed`]).
    pub rehearsal: bool,
}

impl Options {
    /// Returns how many of a process's sockets are read and restored during the freeze; none for a clone, since its
    /// original keeps the connections.
    fn sockets_in_freeze(&self, sockets: u32) -> u32 {
        match self.clone {
            true => 0,
            false => sockets,
        }
    }
}

/// A request to move a process to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The process, including all its children.
    pub process: ProcessId,
    /// The acceptor.
    pub to: NodeId,
    /// Options of the move.
    pub options: Options,
}

/// Reason for refusing a request; nothing was touched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The target is this node.
    #[error("node {0} is this node; name another")]
    ToSelf(NodeId),
    /// The target is not a node of the configuration.
    #[error("there is no node {0} in this group; `holdfast status` shows those there are")]
    UnknownNode(NodeId),
    /// A clone excludes post-copy, since its original runs on and changes the memory.
    #[error(
        "memory cannot follow a copy: its original goes on and changes it; leave post-copy out"
    )]
    CloneByPostCopy,
    /// Verification excludes post-copy, since the remaining pages are absent at the comparison.
    #[error(
        "what follows by post-copy cannot be compared before it runs; leave one of the two out"
    )]
    VerifyByPostCopy,
    /// The process takes part in another move.
    #[error("the process is moving already; try again when that has ended")]
    AlreadyMoving(ProcessId),
}

/// An action for the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send a frame.
    Send {
        /// The receiver, never this node.
        to: NodeId,
        /// The frame.
        frame: Frame,
    },
    /// Carry out a command and answer with a [`Completion`].
    Do(Command),
    /// Report an event to its observers.
    Event(Event),
}

/// The migration machine of a node; see the module documentation.
#[derive(Debug)]
pub struct Migration {
    core: Core,
    donor: BTreeMap<MoveId, Given>,
    acceptor: BTreeMap<MoveId, Taken>,
    /// Ended moves to this node.
    ended: VecDeque<MoveId>,
    tells: BTreeMap<(MoveId, NodeId), Tell>,
    prepared: BTreeMap<MoveId, Prepared>,
    model: CostModel,
}

impl Migration {
    /// Returns an idle machine.
    pub fn new(config: Config) -> Migration {
        Migration {
            core: Core::new(config),
            donor: BTreeMap::new(),
            acceptor: BTreeMap::new(),
            ended: VecDeque::new(),
            tells: BTreeMap::new(),
            prepared: BTreeMap::new(),
            model: CostModel::new(),
        }
    }

    /// Begins to move a process. The end of the move follows as [`Event::Outcome`].
    ///
    /// # Errors
    /// If the process cannot move; nothing was touched.
    pub fn handle_request(
        &mut self,
        now: Duration,
        request: Request,
    ) -> Result<MoveId, RequestError> {
        self.requested(now, request)
    }

    /// Cancels a move from this node. Has no effect once the move is committed.
    pub fn handle_cancel(&mut self, now: Duration, id: MoveId) {
        self.fail(now, id, Reason::Cancelled);
    }

    /// Handles a frame from the node `from` (as named by the channel's certificate): [`Frame::Move`], and the holder's
    /// answers to this machine.
    pub fn handle_frame(&mut self, now: Duration, from: NodeId, frame: Frame) {
        match frame {
            Frame::Move { id, frame } => self.frame_arrived(now, from, id, frame),
            Frame::Answer { request, results } => self.answered(now, from, request, results),
            Frame::QueryAnswer { request, records } => {
                self.looked_up(now, from, request, records);
            }
            other => (self.core).ignored(from, other.name(), "it is another machine's"),
        }
    }

    /// Returns true if an `Answer` or `QueryAnswer` with this number belongs to this machine.
    pub fn is_answer(request: u64) -> bool {
        request & asks::REQUESTS != 0
    }

    /// Handles the completion of a command.
    ///
    /// # Panics
    /// If the results belong to another kind of command: the daemon is at fault, and processes would hang.
    pub fn handle_done(&mut self, now: Duration, completion: Completion) {
        let Completion { token, results } = completion;
        match self.core.commands.remove(&token) {
            Some(purpose) => self.completed(now, purpose, results),
            None => {
                let node = self.core.config.node;
                (self.core).ignored(node, "completion", "no command has its token");
            }
        }
    }

    /// Defers changes to report to the holder for flows that are moving ([`Migration::is_moving`]). A deferred change
    /// follows as [`Event::Report`] after the move, if it still applies then. Changes of other flows are returned at
    /// once by the same event.
    pub fn handle_changes(&mut self, changes: Vec<Change>) {
        let mut others = Vec::new();
        for change in changes {
            match self.core.moving.get_mut(&change.flow) {
                Some(moving) => moving.deferred.push(change),
                None => others.push(change),
            }
        }
        if !others.is_empty() {
            let changes = others;
            self.core.event(Event::Report { changes });
        }
    }

    /// Handles the loss of the channel to `peer`, and of frames on their way. The daemon also calls this function when
    /// a channel was replaced.
    pub fn handle_peer_lost(&mut self, now: Duration, peer: NodeId) {
        self.donor_lost(peer);
        self.acceptor_lost(now, peer);
    }

    /// Handles a new channel to `peer`: frames that wait for an answer from it are repeated at once.
    pub fn handle_peer_connected(&mut self, now: Duration, peer: NodeId) {
        if peer == self.core.config.holder {
            self.ask_all_again(now);
        }
        self.tell_all_again(now, peer);
        self.say_all_done(now, peer);
    }

    /// Takes over moves that the daemon found in its saved state at its start; must be called before any other handler.
    pub fn handle_recovered(&mut self, now: Duration, moves: Vec<RecoveredMove>) {
        self.recovered(now, moves);
    }

    /// Handles all timers due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        while let Some(&(due, timer)) = self.core.timers.first() {
            if due > now {
                break;
            }
            self.core.timers.pop_first();
            match timer {
                Timer::Given(id) => self.given_timed_out(now, id),
                Timer::Divert(id) => self.divert_again(id),
                Timer::Taken(id) => self.taken_timed_out(now, id),
                Timer::Ask(request) => self.ask_again(now, request),
                Timer::Again(token) => self.command_again(token),
                Timer::Tell(id, peer) => self.tell_again(now, id, peer),
                Timer::Doubt(id) => self.doubt(now, id),
            }
        }
    }

    /// Returns the next output, none if there is none left.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.core.outputs.pop_front()
    }

    /// Returns the time at which to call `handle_timeout`, none for never. The time may be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.core.timers.first().map(|(due, _)| *due)
    }

    /// Returns true if the flow takes part in a move on this node.
    pub fn is_moving(&self, flow: &Flow) -> bool {
        self.core.moving.contains_key(flow)
    }

    /// Returns the predicted freeze of a process.
    pub fn predict(&self, sockets: SocketStrategy, load: Load) -> Duration {
        self.model.predict(sockets, load)
    }

    /// Returns true if no process moves, no request, translation or command is open, and no output waits.
    pub fn is_idle(&self) -> bool {
        let core = &self.core;
        core.outputs.is_empty()
            && core.moving.is_empty()
            && core.commands.is_empty()
            && core.questions.is_empty()
            && core.timers.is_empty()
            && self.donor.is_empty()
            && self.acceptor.is_empty()
            && self.tells.is_empty()
            && self.prepared.is_empty()
    }

    fn frame_arrived(&mut self, now: Duration, from: NodeId, id: MoveId, frame: MoveFrame) {
        let name = frame.name();
        match frame {
            MoveFrame::Offer(offer) => self.offer_arrived(now, from, id, offer),
            MoveFrame::Arm { part, flows } => self.arm_asked(from, id, part, flows),
            MoveFrame::Final {
                flows,
                peers,
                forwarded,
                bytes,
            } => self.final_arrived(now, from, id, flows, (peers, forwarded, bytes)),
            MoveFrame::Released => self.released_there(now, from, id),
            MoveFrame::Abort { reason } => self.abort_arrived(from, id, &reason),
            MoveFrame::Translate {
                hops,
                step,
                to,
                connections,
            } => self.translate_asked(now, from, id, (hops, step, to), connections),
            MoveFrame::Translated { step, result } => {
                self.translated(now, from, id, step, result);
            }
            MoveFrame::Done {
                result,
                times,
                ran_us,
                steps,
            } if id.donor == self.core.config.node => {
                let ran_at = now.saturating_sub(Duration::from_micros(ran_us.into()));
                self.done(now, from, id, result, (times, ran_at, steps));
            }
            MoveFrame::Piece { .. }
            | MoveFrame::Took { .. }
            | MoveFrame::Wanted(_)
            | MoveFrame::Judged { .. }
            | MoveFrame::Locks { .. } => {
                (self.core).ignored(from, name, "it is the daemon's");
            }
            _ if self.donor.get(&id).is_none_or(|given| given.to != from) => {
                (self.core).ignored(from, name, "the move is not known, or not the sender's");
            }
            MoveFrame::Offered { refusals } => self.offered(now, from, id, refusals),
            MoveFrame::Ready(result) => self.ready(now, id, result),
            MoveFrame::Armed { part, result } => self.armed(now, from, id, part, result),
            MoveFrame::Done { .. } => {}
        }
    }

    fn completed(&mut self, now: Duration, purpose: Purpose, results: Results) {
        match (purpose, results) {
            (Purpose::Check(id), Results::Checked(result)) => self.checked(now, id, result),
            (Purpose::Round(id), Results::Copied(result)) => self.round_ended(now, id, result),
            (Purpose::Note(id), Results::Noted(result)) => self.noted(now, id, result),
            (Purpose::Freeze(id), Results::Frozen(result)) => self.frozen(now, id, result),
            (Purpose::Thaw(id, attempt), Results::Thawed(result)) => {
                self.thawed(now, id, attempt, result);
            }
            (Purpose::Release(id, attempt), Results::Released(result)) => {
                self.released(now, id, attempt, result);
            }
            (Purpose::Examine(id), Results::Examined(result)) => self.examined(now, id, result),
            (Purpose::Build(id), Results::Built(result)) => self.built(now, id, result),
            (Purpose::Arm(id, part), Results::Armed(result)) => self.hold_armed(id, part, result),
            (Purpose::Restore(id), Results::Restored(result)) => self.restored(now, id, result),
            (Purpose::Go(id, attempt), Results::Gone(result)) => {
                self.went(now, id, attempt, result);
            }
            (Purpose::Discard(_), Results::Discarded)
            | (Purpose::Forget(_), Results::Forgotten) => {}
            (Purpose::Translate(id, asker, step), Results::Translated(result)) => {
                self.translation_done(now, id, (asker, step), result);
            }
            (Purpose::Holder(request), Results::Arbitrated(results)) => {
                self.answered(now, self.core.config.node, request, results);
            }
            (Purpose::Holder(request), Results::LookedUp(records)) => {
                self.looked_up(now, self.core.config.node, request, records);
            }
            (purpose, results) => panic!("{results:?} does not answer the command for {purpose:?}"),
        }
    }

    /// Repeats a failed command.
    fn command_again(&mut self, token: Token) {
        match self.core.again.remove(&token) {
            Some(Purpose::Thaw(id, attempt)) => self.command_thaw(id, attempt + 1),
            Some(Purpose::Release(id, attempt)) => self.command_release(id, attempt + 1),
            Some(Purpose::Go(id, attempt)) => self.command_go(id, attempt + 1),
            _ => {}
        }
    }
}
