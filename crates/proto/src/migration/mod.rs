//! How processes move from node to node with all their sockets: one machine per node, with the roles of donor, acceptor and
//! peer (a node that a moving process has connections to). Who holds the steering table arbitrates, as for flows.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs until there are none and wakes it at `poll_timeout`.
//! Channels are as for the handoff. Memory does not go through the machine: it says when a round of copying is to be made
//! and when the process is to be frozen; the daemon sends.
//!
//! **The decision is one compare-and-set.** A move has a record in the steering table ([`holdfast_wire::Flow::of_move`]),
//! arbitrated by [`crate::ownership`] like a flow. The question that diverts names it first and then all flows of the process; so
//! do that which commits and that which rolls back. The holder applies a question in one step, so the first of commit and
//! rollback decides about all of them. Who is in doubt does not run the process, and asks. A commit names the process alone where
//! all its flows were diverted with one question: [`crate::ownership::Together`].
//!
//! | step | donor | acceptor | holder |
//! | --- | --- | --- | --- |
//! | check | names what cannot move; nothing is touched | | |
//! | offer | | looks at policy, files, memory; refusing costs nothing | |
//! | copy | rounds, until the predicted freeze no longer shrinks | makes the husk | |
//! | arm | peers prepare to translate | holds packets | |
//! | divert | | | process, flows: owned → transit |
//! | freeze | sends packets on, stops it, sends the rest | packets come | |
//! | transfer | | restores it | process, flows: transit → owned |
//! | | | it runs; peers switch | |
//! | release | ends the original | tells the holder to forget the move | record removed |
//!
//! What never happens, whatever is lost, late, repeated or killed: a process that runs at two nodes. What always happens,
//! once nodes and holder reach each other: it runs at one, which owns its flows, and nothing of it is left at the other.
//!
//! A copy (`clone`) goes the same way without flows; the original is stopped while it is read, and goes on at once.
//!
//! An answer to this machine's question has a number that [`Migration::is_answer`] knows from the handoff's.

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

/// How a process is to move.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Make a copy, and leave the original where it is.
    pub clone: bool,
    /// How its sockets move.
    pub sockets: SocketStrategy,
    /// The longest freeze that may be predicted; where none can be had that is short enough, it stays.
    pub max_freeze: Option<Duration>,
    /// Where `max_freeze` cannot be had, memory may follow the process instead; without a `max_freeze`, where rounds no longer shrink
    /// the freeze and memory is the most of it. Neither of a copy nor of what is to be verified.
    pub post_copy: bool,
    /// What is made of it is compared with the original before it runs.
    pub verify: bool,
    /// The acceptor only says whether it would take the process, which then stays ([`Reason::Rehearsed`]).
    pub rehearsal: bool,
}

impl Options {
    /// How many of a process's sockets are read and restored in the freeze: a copy's connections stay with the original.
    fn sockets_in_freeze(&self, sockets: u32) -> u32 {
        match self.clone {
            true => 0,
            false => sockets,
        }
    }
}

/// Move this process to that node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The process, with all its children.
    pub process: ProcessId,
    /// The acceptor.
    pub to: NodeId,
    /// How.
    pub options: Options,
}

/// Why a request is refused; nothing was touched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// To this very node.
    #[error("node {0} is this node; name another")]
    ToSelf(NodeId),
    /// To a node the configuration does not have.
    #[error("there is no node {0} in this group; `holdfast status` shows those there are")]
    UnknownNode(NodeId),
    /// Memory follows no copy, since its original goes on.
    #[error(
        "memory cannot follow a copy: its original goes on and changes it; leave post-copy out"
    )]
    CloneByPostCopy,
    /// Memory that follows is not there to be compared.
    #[error(
        "what follows by post-copy cannot be compared before it runs; leave one of the two out"
    )]
    VerifyByPostCopy,
    /// The process takes part in another move.
    #[error("the process is moving already; try again when that has ended")]
    AlreadyMoving(ProcessId),
}

/// Something for the daemon to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send this frame.
    Send {
        /// To this node, never this one.
        to: NodeId,
        /// The frame.
        frame: Frame,
    },
    /// Carry this out and answer with a [`Completion`].
    Do(Command),
    /// Tell whoever is interested.
    Event(Event),
}

/// The machine. See the module's text.
#[derive(Debug)]
pub struct Migration {
    core: Core,
    donor: BTreeMap<MoveId, Given>,
    acceptor: BTreeMap<MoveId, Taken>,
    /// Moves taken that have ended.
    ended: VecDeque<MoveId>,
    tells: BTreeMap<(MoveId, NodeId), Tell>,
    prepared: BTreeMap<MoveId, Prepared>,
    model: CostModel,
}

impl Migration {
    /// A machine with nothing to do.
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

    /// Begins to move a process. Its end follows as [`Event::Outcome`].
    ///
    /// # Errors
    /// When it cannot move; nothing was touched.
    pub fn handle_request(
        &mut self,
        now: Duration,
        request: Request,
    ) -> Result<MoveId, RequestError> {
        self.requested(now, request)
    }

    /// Somebody wants a move from this node to be given up; too late once it is committed.
    pub fn handle_cancel(&mut self, now: Duration, id: MoveId) {
        self.fail(now, id, Reason::Cancelled);
    }

    /// Takes a frame that `from` sent (as the channel's certificate says): [`Frame::Move`], and answers that are this
    /// machine's.
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

    /// Whether an `Answer` or `QueryAnswer` of that number is for this machine.
    pub fn is_answer(request: u64) -> bool {
        request & asks::REQUESTS != 0
    }

    /// Takes the end of a command.
    ///
    /// # Panics
    /// When the results are another command's: the daemon is at fault, and processes would hang.
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

    /// Keeps back what would be reported to the holder of flows that are moving ([`Migration::is_moving`]): it follows as
    /// [`Event::Report`], if it still is to be reported when the move has ended. The others are given back at once.
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

    /// The channel to `peer` is gone, and with it frames on their way. Also to be told when it was replaced.
    pub fn handle_peer_lost(&mut self, now: Duration, peer: NodeId) {
        self.donor_lost(peer);
        self.acceptor_lost(now, peer);
    }

    /// There is a channel to `peer` again: what waits for it is said at once.
    pub fn handle_peer_connected(&mut self, now: Duration, peer: NodeId) {
        if peer == self.core.config.holder {
            self.ask_all_again(now);
        }
        self.tell_all_again(now, peer);
        self.say_all_done(now, peer);
    }

    /// Moves found written down when the daemon started: to be told before anything else.
    pub fn handle_recovered(&mut self, now: Duration, moves: Vec<RecoveredMove>) {
        self.recovered(now, moves);
    }

    /// Time has passed.
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

    /// The next thing to do, none when all is done.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.core.outputs.pop_front()
    }

    /// When to call `handle_timeout`, none for never. May be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.core.timers.first().map(|(due, _)| *due)
    }

    /// Whether the flow takes part in a move on this node.
    pub fn is_moving(&self, flow: &Flow) -> bool {
        self.core.moving.contains_key(flow)
    }

    /// How long a process would be frozen, as far as is known.
    pub fn predict(&self, sockets: SocketStrategy, load: Load) -> Duration {
        self.model.predict(sockets, load)
    }

    /// Whether nothing is under way: nothing moves, nothing is asked or told, no command is open, no output waits.
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

    /// A failed command is due again.
    fn command_again(&mut self, token: Token) {
        match self.core.again.remove(&token) {
            Some(Purpose::Thaw(id, attempt)) => self.command_thaw(id, attempt + 1),
            Some(Purpose::Release(id, attempt)) => self.command_release(id, attempt + 1),
            Some(Purpose::Go(id, attempt)) => self.command_go(id, attempt + 1),
            _ => {}
        }
    }
}
