//! Migration: how processes move from node to node with all their sockets. One machine per node has the roles of donor,
//! acceptor and peer (a node to which a moving process has connections). The holder of the steering table arbitrates,
//! as for flows.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs until there are none and wakes it at `poll_timeout`.
//! Channels behave as for the handoff. Memory does not pass through the machine: the machine decides when to copy a
//! round and when to freeze the process; the daemon sends the pages.
//!
//! **The decision is one compare-and-set.** A move has a record in the steering table
//! ([`holdfast_wire::Flow::process_key`]), arbitrated by [`crate::flow_ownership`] like a flow. The divert request names that
//! record first and then all flows of the process; so do the commit and rollback requests. The holder applies a request
//! in one step, so the first of commit and rollback decides for all of them. A node in doubt does not run the process,
//! and asks. If all flows of a process were diverted in one request, its commit names the process alone: see
//! [`crate::flow_ownership::ProcessTransits`].
//!
//! | step | donor | acceptor | holder |
//! | --- | --- | --- | --- |
//! | check | names obstacles; nothing is touched | | |
//! | offer | | checks policy, files, memory; refusing costs nothing | |
//! | copy | rounds, until the predicted freeze no longer shrinks | makes the stub process | |
//! | arm | peers prepare to translate | holds packets | |
//! | divert | | | process, flows: owned → transit |
//! | freeze | forwards packets, stops the process, sends the rest | packets arrive | |
//! | transfer | | restores the process | process, flows: transit → owned |
//! | | | the process runs; peers switch | |
//! | release | ends the original | has the record of the move removed | record removed |
//!
//! The *stub process* is an empty process that the acceptor makes during the rounds. It becomes the restored process.
//!
//! The donor ends the original only when the acceptor knows of the commit, or has left the group. If the holder is lost
//! before, the new holder decides by what donor and acceptor know ([`crate::table_rebuild`]).
//!
//! Safety: a process never runs at two nodes, whatever frames are lost, late or repeated, and whatever daemons crash.
//! Liveness: once nodes and holder reach each other, the process runs at one node, which owns its flows, and nothing of
//! the process is left at the other.
//!
//! A clone takes the same steps without flows; the original is stopped while it is read, and continues at once.
//!
//! Requests of this machine to the holder have numbers that [`Migration::is_own_request`] can tell from the handoff's.

mod acceptor;
mod acceptor_commit;
mod command;
mod config;
mod copy_rounds;
mod crash_recovery;
mod donor;
mod donor_divert;
mod donor_freeze;
mod donor_rollback;
mod event;
mod freeze_cost;
mod migration_core;
mod ownership_claims;
mod peer_translation;
mod requests_to_holder;

pub use command::{
    CheckReport, Command, CommandToken, Completion, FlowEpoch, FreezeReport, ProcessId, Results,
    ResumeReport, RoundReport,
};
pub use config::MigrationMachineConfig;
pub use crash_recovery::{RecoveredMove, RecoveredMoveRole};
pub use event::{Event, MoveMeasurements, MoveOutcome, MovePhaseTimes, ProcessKeptReason};
pub use freeze_cost::{FreezeLoad, ProcessTree};
pub use holdfast_wire::failure::MigrationStep;

use self::acceptor::{InboundMove, InboundMoveStage};
use self::donor::OutboundMove;
use self::freeze_cost::FreezeCostModel;
use self::migration_core::{CommandPurpose, MigrationCore, MoveTimer};
use self::peer_translation::{PreparedTranslation, TranslateRequest};
use crate::holder_client::MIGRATION_REQUEST_BIT;
use crate::machine_output::MachineOutput;
use crate::view::{NO_NODE, View};
use holdfast_wire::failure::Failure;
use holdfast_wire::move_frames::{MoveFrame, SocketStrategy};
use holdfast_wire::{ChangeKind, Flow, Frame, MoveId, NodeId, OwnershipChange};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Options of a move.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MoveRequestOptions {
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
    /// Only ask if the acceptor would take the process; the process stays ([`ProcessKeptReason::Rehearsed`]).
    pub rehearsal: bool,
}

impl MoveRequestOptions {
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
pub struct MoveRequest {
    /// The process, including all its children.
    pub process: ProcessId,
    /// Node that takes the process.
    pub to: NodeId,
    /// Options of the move.
    pub options: MoveRequestOptions,
}

/// Reason for refusing a request; nothing was touched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MoveRequestError {
    /// The target is this node.
    #[error("node {0} is this node; name another")]
    ToSelf(NodeId),
    /// The target is not a node of the configuration.
    #[error("there is no node {0} in this group; `holdfast status` shows those there are")]
    UnknownNode(NodeId),
    /// A clone excludes post-copy, since its original runs on and changes the memory.
    #[error(
        "a clone excludes post-copy, because the original continues to change its memory; omit post-copy"
    )]
    CloneByPostCopy,
    /// Verification excludes post-copy, since the remaining pages are absent at the comparison.
    #[error(
        "verification excludes post-copy, because it compares all pages before the process resumes; omit one"
    )]
    VerifyByPostCopy,
    /// The process takes part in another move.
    #[error("the process is moving already; try again when that has ended")]
    AlreadyMoving(ProcessId),
}

/// An action that the migration machine asks of the daemon.
pub type Output = MachineOutput<Command, Event>;

/// The migration machine of a node; see the module documentation.
#[derive(Debug)]
pub struct Migration {
    core: MigrationCore,
    outbound_moves: BTreeMap<MoveId, OutboundMove>,
    inbound_moves: BTreeMap<MoveId, InboundMove>,
    /// Ended moves to this node.
    ended_moves: VecDeque<MoveId>,
    translate_requests: BTreeMap<(MoveId, NodeId), TranslateRequest>,
    prepared_translations: BTreeMap<MoveId, PreparedTranslation>,
    model: FreezeCostModel,
}

impl Migration {
    /// Returns an idle machine in a group with this view.
    pub fn new(config: MigrationMachineConfig, view: View) -> Migration {
        Migration {
            core: MigrationCore::new(config, view),
            outbound_moves: BTreeMap::new(),
            inbound_moves: BTreeMap::new(),
            ended_moves: VecDeque::new(),
            translate_requests: BTreeMap::new(),
            prepared_translations: BTreeMap::new(),
            model: FreezeCostModel::new(),
        }
    }

    /// Begins to move a process. The end of the move follows as [`Event::Outcome`].
    ///
    /// # Errors
    /// If the process cannot move; nothing was touched.
    pub fn handle_request(
        &mut self,
        now: Duration,
        request: MoveRequest,
    ) -> Result<MoveId, MoveRequestError> {
        self.start_request(now, request)
    }

    /// Cancels a move from this node. Has no effect once the move is committed.
    pub fn handle_cancel(&mut self, now: Duration, id: MoveId) {
        self.fail_move(now, id, ProcessKeptReason::Cancelled);
    }

    /// Handles a frame from the node `from` (as named by the channel's certificate): [`Frame::Move`], and the holder's
    /// answers to this machine.
    pub fn handle_frame(&mut self, now: Duration, from: NodeId, frame: Frame) {
        match frame {
            Frame::Move { id, frame } => self.on_move_frame(now, from, id, frame),
            Frame::ChangeResponse { request, results } => {
                self.on_holder_answer(now, from, request, results)
            }
            Frame::QueryResponse { request, records } => {
                self.on_looked_up(now, from, request, records);
            }
            other => (self.core.outputs).report_ignored(
                from,
                other.name(),
                "the frame belongs to another state machine",
            ),
        }
    }

    /// Returns true if an `ChangeResponse` or `QueryResponse` with this number belongs to this machine.
    pub fn is_own_request(request: u64) -> bool {
        request & MIGRATION_REQUEST_BIT != 0
    }

    /// Handles the completion of a command.
    ///
    /// # Panics
    /// If the results belong to another kind of command: the daemon is at fault, and processes would hang.
    pub fn handle_completion(&mut self, now: Duration, completion: Completion) {
        let Completion { token, results } = completion;
        match self.core.open_commands.remove(&token) {
            Some(purpose) => self.on_completed(now, purpose, results),
            None => {
                let node = self.core.config.node;
                (self.core.outputs).report_ignored(
                    node,
                    "completion",
                    "no open command has this token",
                );
            }
        }
    }

    /// Defers changes to report to the holder for flows that are moving ([`Migration::is_moving`]), and notes the ends of
    /// flows that came with a process ([`Migration::has_arrived`]). A deferred change
    /// follows as [`Event::ReportChanges`] after the move, if it still applies then. Changes of other flows are returned at
    /// once by the same event.
    pub fn handle_changes(&mut self, changes: Vec<OwnershipChange>) {
        let mut not_moving = Vec::new();
        for change in changes {
            match self.core.moving_flows.get_mut(&change.flow) {
                Some(moving) => moving.deferred.push(change),
                None => {
                    if change.kind == ChangeKind::Remove {
                        self.note_gone_flow(change.flow);
                    }
                    not_moving.push(change);
                }
            }
        }
        if !not_moving.is_empty() {
            let changes = not_moving;
            self.core
                .outputs
                .push_event(Event::ReportChanges { changes });
        }
    }

    /// Handles the loss of the channel to `peer`, and of frames on their way. The daemon also calls this function when
    /// a channel was replaced.
    pub fn handle_peer_lost(&mut self, now: Duration, peer: NodeId) {
        self.on_donor_lost(peer);
        self.on_acceptor_lost(now, peer);
    }

    /// Handles a new view of the group; an older one is ignored. Requests that the holder has not answered go to the new
    /// holder at once.
    pub fn handle_view(&mut self, now: Duration, view: View) {
        if !view.is_newer_than(&self.core.view) {
            return;
        }
        let holder = view.contact_node;
        self.core.view = view;
        if holder != self.core.holder_client.holder() {
            self.redirect_requests_to_holder(now, holder);
        }
    }

    /// Handles the removal of this node from the group: there is no holder and no other node until a newer view comes.
    /// Requests to the holder wait for that view.
    pub fn handle_removal(&mut self, now: Duration) {
        self.core.view = self.core.view.without_nodes();
        self.redirect_requests_to_holder(now, NO_NODE);
    }

    /// Handles a new channel to `peer`: frames that wait for an answer from it are repeated at once.
    pub fn handle_peer_connected(&mut self, now: Duration, peer: NodeId) {
        if peer == self.core.holder_client.holder() {
            self.repeat_all_requests_to_holder(now);
        }
        self.repeat_translate_requests(now, peer);
        self.resend_done(now, peer);
    }

    /// Takes over moves that the daemon found in its saved state at its start; must be called before any other handler.
    pub fn handle_recovered(&mut self, now: Duration, moves: Vec<RecoveredMove>) {
        self.on_recovered(now, moves);
    }

    /// Handles all timers due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        while let Some(&(due, timer)) = self.core.timers.first() {
            if due > now {
                break;
            }
            self.core.timers.pop_first();
            match timer {
                MoveTimer::OutboundMove(id) => self.on_outbound_timeout(now, id),
                MoveTimer::RepeatDivert(id) => self.repeat_divert(id),
                MoveTimer::InboundMove(id) => self.on_inbound_timeout(now, id),
                MoveTimer::HolderRequest(request) => self.repeat_request_to_holder(now, request),
                MoveTimer::RetryCommand(token) => self.retry_command(token),
                MoveTimer::TranslateRequest(id, peer) => {
                    self.repeat_translate_request(now, id, peer)
                }
                MoveTimer::OutcomeQuery(id) => self.query_outcome(now, id),
            }
        }
    }

    /// Returns the next output, none if there is none left.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.core.outputs.pop()
    }

    /// Returns the time at which to call `handle_timeout`, none for never. The time may be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.core.timers.first().map(|(due, _)| *due)
    }

    /// Returns true if the flow takes part in a move on this node.
    pub fn is_moving(&self, flow: &Flow) -> bool {
        self.core.moving_flows.contains_key(flow)
    }

    /// Returns true if the flow came here with a process whose move has not ended: [`Migration::handle_changes`] must hear
    /// of the flow's end.
    pub fn has_arrived(&self, flow: &Flow) -> bool {
        let inbound_moves = self.inbound_moves.values();
        let mut running =
            inbound_moves.filter(|inbound| inbound.stage == InboundMoveStage::Running);
        running.any(|inbound| inbound.held_flows.contains(flow))
    }

    /// Returns the predicted freeze of a process.
    pub fn predict(&self, sockets: SocketStrategy, load: FreezeLoad) -> Duration {
        self.model.predict(sockets, load)
    }

    /// Returns the number of moves from and to this node that have not ended, rehearsals included.
    pub fn moves_under_way(&self) -> usize {
        self.outbound_moves.len() + self.inbound_moves.len()
    }

    /// Returns true if no process moves, no request, translation or command is open, and no output waits.
    pub fn is_idle(&self) -> bool {
        let core = &self.core;
        core.outputs.is_empty()
            && core.moving_flows.is_empty()
            && core.open_commands.is_empty()
            && core.holder_client.is_idle()
            && core.timers.is_empty()
            && self.outbound_moves.is_empty()
            && self.inbound_moves.is_empty()
            && self.translate_requests.is_empty()
            && self.prepared_translations.is_empty()
    }

    fn on_move_frame(&mut self, now: Duration, from: NodeId, id: MoveId, frame: MoveFrame) {
        let name = frame.name();
        match frame {
            MoveFrame::Offer(offer) => self.on_offer(now, from, id, offer),
            MoveFrame::Arm { part, flows } => self.on_arm(from, id, part, flows),
            MoveFrame::Final {
                flows,
                peers,
                forwarded,
                bytes,
            } => self.on_final(now, from, id, flows, (peers, forwarded, bytes)),
            MoveFrame::Released => self.on_donor_released(now, from, id),
            MoveFrame::Abort { reason } => self.on_abort(from, id, reason.from_peer()),
            MoveFrame::Translate {
                hops,
                step,
                to,
                connections,
            } => self.on_translate(now, from, id, (hops, step, to), connections),
            MoveFrame::TranslateResponse { step, result } => {
                self.on_translated(now, from, id, step, result.map_err(Failure::from_peer));
            }
            MoveFrame::Done {
                result,
                times,
                since_resume_us: ran_us,
                steps,
            } if id.donor == self.core.config.node => {
                let ran_at = now.saturating_sub(Duration::from_micros(ran_us.into()));
                let result = result.map_err(Failure::from_peer);
                self.on_done(now, from, id, result, (times, ran_at, steps));
            }
            MoveFrame::Piece { .. }
            | MoveFrame::PiecesProcessed { .. }
            | MoveFrame::PageRequest(_)
            | MoveFrame::CheckResult { .. }
            | MoveFrame::LockHandover { .. } => {
                (self.core.outputs).report_ignored(
                    from,
                    name,
                    "the daemon handles this frame itself",
                );
            }
            _ if self
                .outbound_moves
                .get(&id)
                .is_none_or(|outbound| outbound.to != from) =>
            {
                (self.core.outputs).report_ignored(
                    from,
                    name,
                    "the move is unknown, or the sender is not its acceptor",
                );
            }
            MoveFrame::OfferResponse { refusals } => {
                let refusals = refusals.into_iter().map(Failure::from_peer).collect();
                self.on_offered(now, from, id, refusals);
            }
            MoveFrame::Ready(result) => {
                self.on_ready(now, id, result.map_err(Failure::from_peer));
            }
            MoveFrame::ArmResponse { part, result } => {
                self.on_armed(now, from, id, part, result.map_err(Failure::from_peer));
            }
            MoveFrame::Done { .. } => {}
        }
    }

    fn on_completed(&mut self, now: Duration, purpose: CommandPurpose, results: Results) {
        match (purpose, results) {
            (CommandPurpose::Check(id), Results::Checked(result)) => {
                self.on_checked(now, id, result)
            }
            (CommandPurpose::CopyRound(id), Results::Copied(result)) => {
                self.on_round_ended(now, id, result)
            }
            (CommandPurpose::SaveFlows(id), Results::FlowsSaved(result)) => {
                self.on_flows_saved(now, id, result)
            }
            (CommandPurpose::Freeze(id), Results::Frozen(result)) => {
                self.on_frozen(now, id, result)
            }
            (CommandPurpose::Thaw(id, attempt), Results::Thawed(result)) => {
                self.on_thawed(now, id, attempt, result);
            }
            (CommandPurpose::Release(id, attempt), Results::Released(result)) => {
                self.on_released(now, id, attempt, result);
            }
            (CommandPurpose::Examine(id), Results::Examined(result)) => {
                self.on_examined(now, id, result)
            }
            (CommandPurpose::Build(id), Results::Built(result)) => self.on_built(now, id, result),
            (CommandPurpose::Arm(id, part), Results::Armed(result)) => {
                self.on_hold_armed(id, part, result)
            }
            (CommandPurpose::Restore(id), Results::Restored(result)) => {
                self.on_restored(now, id, result)
            }
            (CommandPurpose::Resume(id, attempt), Results::Resumed(result)) => {
                self.on_resumed(now, id, attempt, result);
            }
            (CommandPurpose::Discard(_), Results::Discarded)
            | (CommandPurpose::Forget(_), Results::Forgotten) => {}
            (CommandPurpose::Translate(id, asker, step), Results::Translated(result)) => {
                self.on_translation_done(now, id, (asker, step), result);
            }
            (CommandPurpose::HolderRequest(request), Results::Arbitrated(results)) => {
                self.on_holder_answer(now, self.core.config.node, request, results);
            }
            (CommandPurpose::HolderRequest(request), Results::LookedUp(records)) => {
                self.on_looked_up(now, self.core.config.node, request, records);
            }
            (purpose, results) => panic!("{results:?} does not answer the command for {purpose:?}"),
        }
    }

    /// Repeats a failed command.
    fn retry_command(&mut self, token: CommandToken) {
        match self.core.failed_commands.remove(&token) {
            Some(CommandPurpose::Thaw(id, attempt)) => self.command_thaw(id, attempt + 1),
            Some(CommandPurpose::Release(id, attempt)) => self.command_release(id, attempt + 1),
            Some(CommandPurpose::Resume(id, attempt)) => self.command_resume(id, attempt + 1),
            _ => {}
        }
    }
}
