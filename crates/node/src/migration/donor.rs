//! The donor's thread, which alone traces the process, from the first round until the move has ended.

mod freeze;
mod locks;
pub(super) mod postcopy_sender;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use bytes::Bytes;
use holdfast_checkpoint::donor::{PageSource, ProcessRef, TreeTracker};
use holdfast_checkpoint::image::{
    DescriptorUpdate, MissingPages, ProcessLayout, TreeLayout, encode,
};
use holdfast_proto::migration::{CommandToken, Completion, ProcessTree, Results, RoundReport};
use holdfast_wire::failure::{Failure, NodeFault, PeerFault};
use holdfast_wire::move_frames::PageRequest;
use holdfast_wire::{Flow, MoveId, NodeId};
use tokio::sync::oneshot;

use self::postcopy_sender::{LoopEnded, PostcopySender};
use super::crash_recovery;
use super::donor_sockets::{self, MoveOptions, MovingConnections};
use super::donor_state::DonorState;
use super::image_messages::{ImageSender, MessageKind, SendWindow};
use super::lingering_listeners::{DRAIN_BEFORE_RELEASE_MAX, LingeringListeners, ListenerDrain};
use super::move_records::{MoveRecord, RecordEntry};
use super::process_check;
use super::socket_endpoints::{MovableAddresses, TreeSockets};
use super::step_timer::StepTimer;
use super::worker_events::{EventSender, WorkerEvent};
use crate::failure_conversion::IntoFailure;

/// Bytes of memory in one message.
const PAGES_MESSAGE_BYTES: u64 = 1 << 20;

/// Maximum number of touch-ups (short copies of dirty pages) in a round.
const TOUCH_UPS_MAX: u32 = 16;
/// Another touch-up is worthwhile if the last one found less than this fraction of the previous one.
const WORTHWHILE_RATIO: f64 = 0.8;
/// Number of dirty bytes below which another touch-up is not worthwhile.
const FEW_DIRTY_BYTES: u64 = 128 << 10;

/// Job for the donor's thread of a move.
#[derive(Debug)]
pub(super) enum DonorJob {
    Round(CommandToken),
    /// Freeze: packets of these flows are held at the acceptor. If the flag is set, remaining pages may be sent later
    /// (post-copy).
    Freeze(CommandToken, Vec<Flow>, bool),
    Thaw(CommandToken),
    Release(CommandToken),
    /// The acceptor asks for remaining pages.
    PagesRequested(PageRequest),
    /// The acceptor has taken some of the remaining pages.
    PagesTaken,
    /// The acceptor asks for the next step of the hand-over of locks.
    Locks(Bytes),
}

/// A move from this node, with its running thread.
pub(super) struct DonorThread {
    job_sender: Sender<DonorJob>,
    window: Arc<SendWindow>,
    /// True if post-copy is in progress and the thread must be told of taken bytes.
    is_postcopy: Arc<AtomicBool>,
    pub(super) acceptor: NodeId,
}

impl DonorThread {
    /// Starts the donor's thread of a move.
    pub(super) fn start(
        id: MoveId,
        root: i32,
        to: NodeId,
        (record, addresses): (MoveRecord, MovableAddresses),
        options: MoveOptions,
        events: EventSender,
    ) -> std::io::Result<DonorThread> {
        let (jobs, inbox) = mpsc::channel();
        let (outgoing, window) = ImageSender::new(id, to, events.clone());
        let is_postcopy = Arc::new(AtomicBool::new(false));
        let worker = DonorWorker {
            id,
            root,
            to,
            sender: outgoing,
            record,
            addresses,
            sockets: TreeSockets::default(),
            options,
            connections: None,
            held_flows: BTreeSet::new(),
            events,
            steps: StepTimer::begin(),
            is_postcopy: is_postcopy.clone(),
            may_postcopy: false,
            postcopy_sender: None,
        };
        std::thread::Builder::new()
            .name("move-donor".to_owned())
            .spawn(move || worker.run(&inbox))?;
        Ok(DonorThread {
            job_sender: jobs,
            window,
            is_postcopy,
            acceptor: to,
        })
    }

    /// Starts a thread that sends the remaining pages of a process which an earlier daemon left stopped, and then
    /// ends that process. Its unaccepted connections follow it meanwhile.
    pub(super) fn start_postcopy_sender(
        (id, to): (MoveId, NodeId),
        pids: Vec<Option<i32>>,
        record: MoveRecord,
        token: CommandToken,
        (addresses, events): (MovableAddresses, EventSender),
    ) -> std::io::Result<DonorThread> {
        let (jobs, inbox) = mpsc::channel();
        let (mut outgoing, window) = ImageSender::new(id, to, events.clone());
        let run = move || {
            begin_recovered_drain((id, to), &record.read(), (addresses, events.clone())).finish();
            // Only the acceptor knows the missing pages.
            if let Ok(page_source) = PageSource::new(&pids, &MissingPages::default()) {
                let sender = PostcopySender::new((id, to), page_source);
                if sender.run(&mut outgoing, &inbox, &events).is_err() {
                    return;
                }
            }
            let results = Results::Released(crash_recovery::release(&record.read()));
            events.command_done(Some(id), Completion { token, results });
        };
        std::thread::Builder::new()
            .name("move-donor".to_owned())
            .spawn(run)?;
        let is_postcopy = Arc::new(AtomicBool::new(true));
        Ok(DonorThread {
            job_sender: jobs,
            window,
            is_postcopy,
            acceptor: to,
        })
    }

    /// Starts a thread that ends a process which an earlier daemon left stopped and which runs at another node, once its
    /// unaccepted connections have followed it.
    pub(super) fn start_recovered_release(
        (id, to): (MoveId, NodeId),
        record: MoveRecord,
        token: CommandToken,
        (addresses, events): (MovableAddresses, EventSender),
    ) -> std::io::Result<()> {
        let run = move || {
            let entries = record.read();
            let mut drain = begin_recovered_drain((id, to), &entries, (addresses, events.clone()));
            if crash_recovery::given_locks(&entries).is_empty() {
                drain.run(DRAIN_BEFORE_RELEASE_MAX);
            }
            let released = crash_recovery::release(&entries);
            if released.is_ok() {
                drain.finish();
            }
            let results = Results::Released(released);
            events.command_done(Some(id), Completion { token, results });
        };
        let builder = std::thread::Builder::new().name("move-donor".to_owned());
        builder.spawn(run).map(drop)
    }

    /// Passes a job to the thread. Returns false if the thread has ended.
    pub(super) fn send_job(&self, job: DonorJob) -> bool {
        if let DonorJob::Thaw(_) = job {
            self.window.close(PeerFault::MoveGivenUp.into());
        }
        self.job_sender.send(job).is_ok()
    }

    /// Records that the acceptor has taken bytes, after `busy_us` microseconds of work, or the reason why it takes no
    /// more.
    pub(super) fn on_taken(&self, (bytes, busy_us): (u64, u64), problem: Option<Failure>) {
        self.window.on_taken(bytes, Duration::from_micros(busy_us));
        if self.is_postcopy.load(Ordering::Relaxed) {
            let _ = self.job_sender.send(DonorJob::PagesTaken);
        }
        if let Some(problem) = problem {
            self.window.close(problem.from_peer());
        }
    }

    /// Records the acceptor's verdict; without refusals it takes the process.
    pub(super) fn on_judged(&self, refusals: Vec<Failure>) {
        let refusals = refusals.into_iter().map(Failure::from_peer);
        self.window.set_verdict(refusals.collect());
    }

    /// Stops sending, because the acceptor cannot be reached.
    pub(super) fn on_channel_lost(&self) {
        self.window.close(PeerFault::AcceptorChannelLost.into());
    }
}

/// Begins to hand off the unaccepted connections of processes that an earlier daemon left stopped. New clients follow the
/// processes from now on.
fn begin_recovered_drain(
    (id, to): (MoveId, NodeId),
    entries: &[RecordEntry],
    (addresses, events): (MovableAddresses, EventSender),
) -> ListenerDrain {
    let processes: Vec<ProcessRef> = crash_recovery::held_processes(entries).copied().collect();
    let listeners = LingeringListeners::of_processes(&processes);
    let (reply, done) = oneshot::channel();
    events.send(WorkerEvent::RedirectToAcceptor {
        to,
        endpoints: listeners.endpoints().to_vec(),
        reply,
    });
    // Without an answer the daemon is ending.
    let _ = done.blocking_recv();
    ListenerDrain::new(listeners, (id, to), (addresses, events))
}

/// State of the donor's thread of a move.
struct DonorWorker {
    id: MoveId,
    root: i32,
    to: NodeId,
    sender: ImageSender,
    record: MoveRecord,
    addresses: MovableAddresses,
    sockets: TreeSockets,
    /// Options of the move.
    options: MoveOptions,
    /// Followed sockets; set in the first round.
    connections: Option<MovingConnections>,
    /// Flows whose packets are held at the acceptor.
    held_flows: BTreeSet<Flow>,
    events: EventSender,
    /// Durations of the steps of the freeze.
    steps: StepTimer,
    is_postcopy: Arc<AtomicBool>,
    /// True if pages that are dirty in the freeze may be sent later (post-copy).
    may_postcopy: bool,
    /// Sender of the remaining pages.
    postcopy_sender: Option<PostcopySender>,
}

impl DonorWorker {
    /// Runs until the move or the event loop has ended. If the loop ends first, the kernel resumes a stopped tree when
    /// its tracer exits, unless the tree is held.
    fn run(mut self, inbox: &Receiver<DonorJob>) {
        let mut state = DonorState::New;
        while let Ok(job) = inbox.recv() {
            let mut effective_at = None;
            let (next_state, token, results) = match job {
                DonorJob::Round(token) => {
                    let (next_state, result) = self.copy_round(state);
                    (next_state, token, Results::Copied(result))
                }
                DonorJob::Freeze(token, flows, may_follow) => {
                    self.held_flows.extend(flows);
                    self.may_postcopy = may_follow;
                    let (next_state, result) = self.freeze(state);
                    effective_at = Some(self.steps.started_at());
                    (next_state, token, Results::Frozen(result))
                }
                DonorJob::Thaw(token) => (
                    DonorState::Ended,
                    token,
                    Results::Thawed(state.thaw(self.id)),
                ),
                DonorJob::Release(token) => {
                    let Ok(released) = self.release(state, inbox) else {
                        return;
                    };
                    (DonorState::Ended, token, Results::Released(released))
                }
                // The process may already run at the acceptor before this node knows of the commit.
                DonorJob::PagesRequested(request) => {
                    if let Some(serving) = &mut self.postcopy_sender {
                        serving.handle_early_request(request, &mut self.sender);
                    }
                    continue;
                }
                DonorJob::PagesTaken => continue,
                DonorJob::Locks(bytes) => {
                    if let DonorState::Stopped(stopped) = &mut state {
                        self.on_lock_request(stopped, &bytes);
                    }
                    continue;
                }
            };
            state = next_state;
            let completion = Completion { token, results };
            let effective_at = effective_at.unwrap_or_else(Instant::now);
            self.events
                .command_done_since(Some(self.id), completion, effective_at);
            if let DonorState::Ended = state {
                return;
            }
        }
        state.abandon();
    }

    /// Ends the process here, once all its memory is at the acceptor.
    fn release(
        &mut self,
        state: DonorState,
        inbox: &Receiver<DonorJob>,
    ) -> Result<Result<(), Failure>, LoopEnded> {
        let mut drain = state
            .lingering_listeners()
            .map(|listeners| self.begin_drain(listeners));
        if let Some(serving) = self.postcopy_sender.take() {
            // Waiting clients are handed off first, since sending the remaining pages takes longer.
            drain.take().into_iter().for_each(ListenerDrain::finish);
            if let Err(interrupted) = serving.run(&mut self.sender, inbox, &self.events) {
                state.abandon();
                return Err(interrupted);
            }
        }
        // The acceptor may wait for locks of the process.
        if let Some(drain) = &mut drain
            && crash_recovery::given_locks(&self.record.read()).is_empty()
        {
            drain.run(DRAIN_BEFORE_RELEASE_MAX);
        }
        let released = state.release();
        if released.is_ok() {
            drain.into_iter().for_each(ListenerDrain::finish);
        }
        Ok(released)
    }

    /// Begins to hand unaccepted connections off after the process.
    fn begin_drain(&self, listeners: LingeringListeners) -> ListenerDrain {
        let context = (self.addresses.clone(), self.events.clone());
        ListenerDrain::new(listeners, (self.id, self.to), context)
    }

    fn copy_round(&mut self, state: DonorState) -> (DonorState, Result<RoundReport, Failure>) {
        let tracker = match state {
            DonorState::New => TreeTracker::start_with_priority(self.root, self.options.realtime)
                .map(Box::new)
                .map_err(IntoFailure::into_own_failure),
            DonorState::Tracked(tracker) => Ok(tracker),
            other => return (other, Err(NodeFault::ProcessAlreadyStopped.into())),
        };
        let mut tracker = match tracker {
            Ok(tracker) => tracker,
            Err(why) => return (DonorState::New, Err(why)),
        };
        let result = self.copy_and_report(&mut tracker);
        (DonorState::Tracked(tracker), result)
    }

    fn copy_and_report(&mut self, tracker: &mut TreeTracker) -> Result<RoundReport, Failure> {
        let (started_at, counts_before) = (Instant::now(), self.sender.byte_counts());
        let is_first = self.connections.is_none();
        let mut connections = match self.connections.take() {
            Some(connections) => connections,
            None => MovingConnections::new(self.options),
        };
        let mut round = tracker
            .next_round()
            .map_err(IntoFailure::into_own_failure)?;
        self.send_tree(&round.tree)?;
        let mut first_descriptors = None;
        if is_first {
            first_descriptors = Some(self.send_descriptors(tracker, &mut connections)?);
            self.sender.send(
                MessageKind::StatePreview,
                encode(
                    &tracker
                        .preview_state()
                        .map_err(IntoFailure::into_own_failure)?,
                )
                .map_err(IntoFailure::into_own_failure)?,
            )?;
            let refusals = self.sender.wait_for_verdict()?;
            if self.options.rehearsal || !refusals.is_empty() {
                return Ok(RoundReport {
                    refusals,
                    ..RoundReport::default()
                });
            }
        }
        while let Some(pages) = tracker
            .read_pages(&mut round, PAGES_MESSAGE_BYTES)
            .map_err(IntoFailure::into_own_failure)?
        {
            self.sender.send_pages(pages)?;
        }
        process_check::refuse_hidden_state(self.root)?;
        let descriptors = match first_descriptors {
            Some(found) => found,
            None => self.send_descriptors(tracker, &mut connections)?,
        };
        let states = connections.snapshot_round(tracker, &descriptors);
        if let Some(states) = states.map_err(IntoFailure::into_failure)? {
            self.sender
                .send(MessageKind::Snapshots, donor_sockets::encode(&states)?)?;
        }
        connections.prepare_listing(tracker);
        self.connections = Some(connections);
        self.sender.wait_until_taken()?;
        self.report_sockets();
        let (dirty, dirtied_in) = self.recopy_dirty_pages(tracker, started_at)?;
        let duration = started_at.elapsed();
        Ok(RoundReport {
            sent_bytes: self.sender.sent_bytes - counts_before.0,
            saved_bytes: self.sender.saved_bytes - counts_before.1,
            dirty_bytes: dirty,
            dirty_interval: dirtied_in,
            duration,
            tree: freeze_counts(&round.tree, tracker),
            sockets: u32::try_from(self.sockets.list().len()).unwrap_or(u32::MAX),
            ..RoundReport::default()
        })
    }

    /// Sends the changed descriptors, or in the first round all of them.
    fn send_descriptors(
        &mut self,
        tracker: &mut TreeTracker,
        connections: &mut MovingConnections,
    ) -> Result<DescriptorUpdate, Failure> {
        connections.before_options_read();
        let descriptors = connections.descriptors_at_acceptor(
            tracker
                .read_descriptors()
                .map_err(IntoFailure::into_own_failure)?,
        );
        self.addresses.check_descriptors(&descriptors)?;
        self.sockets.update(&descriptors);
        self.sender.send(
            MessageKind::Descriptors,
            encode(&descriptors).map_err(IntoFailure::into_own_failure)?,
        )?;
        Ok(descriptors)
    }

    /// Copies pages dirtied since the round `started_at`, and repeats this as long as each pass finds less: passes get
    /// shorter, whereas a whole round stays long. Returns an estimate of the bytes dirtied since the last pass, and the
    /// time since then.
    fn recopy_dirty_pages(
        &mut self,
        tracker: &mut TreeTracker,
        round_started_at: Instant,
    ) -> Result<(u64, Duration), Failure> {
        let (mut previous_at, mut previous_bytes) = (round_started_at, u64::MAX);
        for _ in 0..TOUCH_UPS_MAX {
            let pass_at = Instant::now();
            let mut round = tracker.scan_delivered_pages();
            let changed = round.remaining_bytes();
            while let Some(pages) = tracker
                .read_pages(&mut round, PAGES_MESSAGE_BYTES)
                .map_err(IntoFailure::into_own_failure)?
            {
                self.sender.send_pages(pages)?;
            }
            self.sender.wait_until_taken()?;
            let rate = changed as f64 / (pass_at - previous_at).as_secs_f64().max(1e-6);
            let is_less = (changed as f64) < previous_bytes as f64 * WORTHWHILE_RATIO;
            (previous_at, previous_bytes) = (pass_at, changed);
            let elapsed = pass_at.elapsed();
            if !is_less || changed < FEW_DIRTY_BYTES {
                return Ok(((rate * elapsed.as_secs_f64()) as u64, elapsed));
            }
        }
        Ok((previous_bytes, previous_at.elapsed()))
    }

    fn send_tree(&mut self, tree: &TreeLayout) -> Result<(), Failure> {
        self.sender.send(
            MessageKind::Tree,
            encode(tree).map_err(IntoFailure::into_own_failure)?,
        )
    }
}

/// Returns the counts that determine the duration of a freeze.
fn freeze_counts(tree: &TreeLayout, tracker: &TreeTracker) -> ProcessTree {
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let sum =
        |length_of: fn(&ProcessLayout) -> usize| count(tree.processes.iter().map(length_of).sum());
    ProcessTree {
        processes: count(tree.processes.len()),
        threads: sum(|process| process.threads.len()),
        mappings: sum(|process| process.mappings.len()),
        shared_bytes: tracker.shared_bytes(),
    }
}
