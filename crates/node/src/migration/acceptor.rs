//! The acceptor's thread, which restores a process by means of a restorer process.

mod locks;
mod sockets;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Instant;

use bytes::Bytes;
use holdfast_checkpoint::acceptor::Restorer;
use holdfast_checkpoint::digest::TreeDigest;
use holdfast_checkpoint::donor::ProcessRef;
use holdfast_checkpoint::image::{
    ClockReadings, MissingPages, ProcessTreeState, TreeLayout, decode,
};
use holdfast_checkpoint::image_judge::MessageSequence;
use holdfast_checkpoint::postcopy::LazyPages;
use holdfast_checkpoint::sockets::RestoredSockets;
use holdfast_proto::migration::{CommandToken, Completion, Results, ResumeReport};
use holdfast_sys::cgroup::{ControlGroup, ControlGroups};
use holdfast_sys::priority::RealtimeGuard;
use holdfast_tcp_repair::WindowProbe;
use holdfast_wire::MoveId;
use holdfast_wire::failure::{self, Failure, OperatorFault, PeerFault, ProtocolViolation};
use rustix::event::EventfdFlags;

use self::locks::LockHandoverProgress;
use super::admission_policy::{AdmissionPolicy, not_allowed};
use super::arrived_processes::ProcessInfo;
use super::compression::decompress_message;
use super::donor_sockets;
use super::image_messages::{ImageMessage, MessageAssembler, MessageKind};
use super::move_records::{MoveRecord, RecordEntry};
use super::postcopy_receiver::PostcopyReceiver;
use super::restore_setup::{bind_adoption_socket, clock_offsets};
use super::socket_endpoints::listening_endpoints;
use super::step_timer::StepTimer;
use super::worker_events::{EventSender, WorkerEvent};
use crate::dataplane::retransmission_timeouts;
use crate::failure_conversion::{IntoFailure, system_call};

/// Command-line argument that starts `holdfastd` as a restorer.
pub const RESTORER_ARG: &str = "restorer";

/// Number of threads that restore sockets.
const RESTORE_THREADS: usize = 2;

/// Maximum number of reasons for a refusal.
const REFUSALS_MAX: usize = 64;

/// Path of this program, valid even if its file has been replaced.
const SELF_EXE: &str = "/proc/self/exe";

/// Job for the acceptor's thread of a move.
#[derive(Debug)]
pub(super) enum AcceptorJob {
    Build(CommandToken),
    /// Packets are held, so the process will soon be committed.
    Armed,
    Piece {
        kind: u8,
        more: bool,
        bytes: Bytes,
    },
    /// The donor violates the protocol.
    Refuse(Failure),
    Restore(CommandToken, RecordEntry),
    Resume(CommandToken),
    Discard(CommandToken),
}

/// A move to this node, with its running thread.
pub(super) struct AcceptorThread {
    job_sender: Sender<AcceptorJob>,
    /// Event descriptor, readable if there is a job.
    wake: Arc<OwnedFd>,
}

impl AcceptorThread {
    /// Starts the acceptor's thread of a move.
    pub(super) fn start(
        id: MoveId,
        policy: AdmissionPolicy,
        (record, adoption_socket): (MoveRecord, PathBuf),
        (info, is_clone, group, realtime): (
            ProcessInfo,
            bool,
            Option<(ControlGroups, ControlGroup)>,
            bool,
        ),
        events: EventSender,
    ) -> std::io::Result<AcceptorThread> {
        let (jobs, inbox) = mpsc::channel();
        let wake = Arc::new(wake_event()?);
        let worker = AcceptorWorker {
            id,
            policy,
            record,
            adoption_socket,
            events,
            assembler: MessageAssembler::default(),
            conversation: MessageSequence::default(),
            info,
            is_clone,
            group,
            restorer: None,
            restorer_ref: None,
            sockets: None,
            build_token: None,
            lock_handover: LockHandoverProgress::default(),
            problem: None,
            refusals: Vec::new(),
            is_judged: false,
            steps: StepTimer::begin(),
            realtime,
            fault_handler: None,
            wake: wake.clone(),
        };
        std::thread::Builder::new()
            .name("move-acceptor".to_owned())
            .spawn(move || worker.run(&inbox))?;
        Ok(AcceptorThread {
            job_sender: jobs,
            wake,
        })
    }

    /// Starts a thread that receives the remaining pages of a process which an earlier daemon restored.
    pub(super) fn start_postcopy_receiver(
        follower: PostcopyReceiver,
    ) -> std::io::Result<AcceptorThread> {
        let (jobs, inbox) = mpsc::channel();
        let wake = Arc::new(wake_event()?);
        let acceptor = AcceptorThread {
            job_sender: jobs,
            wake: wake.clone(),
        };
        std::thread::Builder::new()
            .name("move-acceptor".to_owned())
            .spawn(move || follower.run(&inbox, &wake))?;
        Ok(acceptor)
    }

    /// Passes a job to the thread. Returns false if the thread has ended.
    pub(super) fn send_job(&self, job: AcceptorJob) -> bool {
        let sent = self.job_sender.send(job).is_ok();
        // A write fails only if the descriptor is already readable.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        sent
    }
}

/// State of the acceptor's thread of a move.
struct AcceptorWorker {
    id: MoveId,
    policy: AdmissionPolicy,
    record: MoveRecord,
    adoption_socket: PathBuf,
    events: EventSender,
    assembler: MessageAssembler,
    /// Messages received so far.
    conversation: MessageSequence,
    info: ProcessInfo,
    /// True if the process is a copy whose original continues.
    is_clone: bool,
    /// Control group made for the process.
    group: Option<(ControlGroups, ControlGroup)>,
    restorer: Option<Restorer>,
    /// Reference to the restorer, as written in the record.
    restorer_ref: Option<ProcessRef>,
    sockets: Option<RestoredSockets>,
    /// Token of the `Build` command, until the first tree image is restored.
    build_token: Option<CommandToken>,
    /// Hand-over of locks that the donor has.
    lock_handover: LockHandoverProgress,
    /// Reason for taking no more messages from the donor.
    problem: Option<Failure>,
    /// Reasons for refusing the process, until the verdict is sent.
    refusals: Vec<Failure>,
    is_judged: bool,
    /// Durations of the steps since the freeze was announced.
    steps: StepTimer,
    /// True if the thread is to run at real-time priority once packets are held.
    realtime: bool,
    /// Receiver of the remaining pages (post-copy).
    fault_handler: Option<LazyPages>,
    wake: Arc<OwnedFd>,
}

impl AcceptorWorker {
    /// Runs until the process runs or the move is given up. If the event loop ends first, a restorer that has the
    /// complete process waits for the next daemon; any other restorer ends with its channel.
    fn run(mut self, inbox: &Receiver<AcceptorJob>) {
        // Set for this thread only, so processes that it starts do not inherit the priority.
        let mut priority_boost = None;
        while let Some(job) = self.next_job(inbox) {
            match job {
                // Raised before the freeze: later, other threads could run before this one sees the message that the
                // tree is stopped.
                AcceptorJob::Armed => {
                    priority_boost =
                        priority_boost.or_else(|| self.realtime.then(RealtimeGuard::begin)?)
                }
                AcceptorJob::Build(token) => self.build_token = Some(token),
                AcceptorJob::Piece { kind, more, bytes } => self.on_piece(kind, more, bytes),
                AcceptorJob::Restore(token, entry) if self.lock_handover.is_awaiting_donor() => {
                    self.lock_handover.pending_restore = Some((token, entry));
                }
                AcceptorJob::Restore(token, entry) => self.complete_restore(token, &entry),
                AcceptorJob::Resume(token) => {
                    let locks_result = self.take_locks(inbox);
                    let result = locks_result.and_then(|()| self.resume_process());
                    let is_running = result.is_ok();
                    let resumed_at = *result.as_ref().unwrap_or(&Instant::now());
                    let results = Results::Resumed(result.map(|_| ResumeReport {
                        steps: self.steps.list(),
                        ..ResumeReport::default()
                    }));
                    let completion = Completion { token, results };
                    self.events
                        .command_done_since(Some(self.id), completion, resumed_at);
                    if is_running {
                        drop(priority_boost);
                        return self.run_after_resume(inbox);
                    }
                }
                AcceptorJob::Refuse(why) => {
                    self.refuse(why.clone());
                    self.events.send(WorkerEvent::ReportTaken {
                        id: self.id,
                        bytes: 0,
                        busy_us: 0,
                        problem: Some(why),
                    });
                }
                AcceptorJob::Discard(token) => {
                    self.discard_partial();
                    self.complete_build(Err(PeerFault::MoveGivenUp.into()));
                    self.record.remove();
                    return self.complete(token, Results::Discarded);
                }
            }
        }
    }

    fn complete(&self, token: CommandToken, results: Results) {
        self.events
            .command_done(Some(self.id), Completion { token, results });
    }

    /// Handles a piece. After a problem only its bytes are counted.
    fn on_piece(&mut self, kind: u8, more: bool, bytes: Bytes) {
        let (started_at, mut problem) = (Instant::now(), None);
        let count = bytes.len() as u64;
        if self.problem.is_none()
            && let Err(why) = self.take_piece(kind, more, bytes)
        {
            problem = Some(why.clone());
            self.refuse(why);
        }
        self.events.send(WorkerEvent::ReportTaken {
            id: self.id,
            bytes: count,
            busy_us: u64::try_from(started_at.elapsed().as_micros()).unwrap_or(u64::MAX),
            problem,
        });
    }

    /// Stops taking messages and removes the partial process at once, even if the donor continues to send.
    fn refuse(&mut self, why: Failure) {
        if self.problem.is_some() {
            return;
        }
        self.discard_partial();
        self.complete_build(Err(why.clone()));
        if let Some(token) = self.lock_handover.give_up() {
            self.complete(token, Results::Restored(Err(why.clone())));
        }
        self.problem = Some(why);
    }

    /// Ends the restorer with all its processes, and removes sockets, control group and the adoption socket.
    fn discard_partial(&mut self) {
        (self.restorer, self.sockets) = (None, None);
        if let Some((groups, group)) = &self.group {
            groups.remove(group.path());
        }
        let _ = std::fs::remove_file(&self.adoption_socket);
    }

    fn take_piece(&mut self, kind: u8, more: bool, bytes: Bytes) -> Result<(), Failure> {
        let Some((kind, message)) = self.assembler.add_piece(kind, more, bytes)? else {
            return Ok(());
        };
        let order = self.conversation.accept(kind.conversation_message());
        order.map_err(|why| ProtocolViolation::MessageOrder(why.into()))?;
        if !(self.refusals.is_empty() || is_judged_up_front(kind)) {
            return Err(self.combined_refusal());
        }
        match kind {
            MessageKind::FreezeNotice => self.steps = StepTimer::begin(),
            _ => self.steps.mark("wait"),
        }
        let result = self.handle_message(kind, message);
        match kind {
            // The donor gets all refusals together, in the verdict.
            MessageKind::Tree | MessageKind::Descriptors if !self.is_judged => {
                result.or_else(|why| self.add_refusal(why))?;
            }
            _ => result?,
        }
        self.steps.mark(kind.name());
        Ok(())
    }

    /// Adds a reason for refusing the process.
    fn add_refusal(&mut self, why: Failure) -> Result<(), Failure> {
        if self.refusals.len() >= REFUSALS_MAX {
            return Err(ProtocolViolation::VerdictNotRequested.into());
        }
        if !self.refusals.contains(&why) {
            self.refusals.push(why);
        }
        Ok(())
    }

    /// Returns the refusals as one failure, for a donor that goes on after them.
    fn combined_refusal(&self) -> Failure {
        match &self.refusals[..] {
            [refusal] => refusal.clone(),
            refusals => OperatorFault::NotAllowed(failure::join(refusals).into()).into(),
        }
    }

    /// Judges the preview of the process's state, and sends the verdict to the donor.
    fn judge_preview(&mut self, message: &[u8]) -> Result<(), Failure> {
        let preview: ProcessTreeState = decode(message).map_err(IntoFailure::into_failure)?;
        if let Err(why) = self.policy.judge().check_state(&preview) {
            self.add_refusal(not_allowed(why))?;
        } else if self.refusals.is_empty()
            && let Err(error) = self.restorer()?.check_state_preview(&preview)
        {
            self.add_refusal(error.into_failure())?;
        }
        self.is_judged = true;
        let refusals = self.refusals.clone();
        self.events.send(WorkerEvent::SendVerdict {
            id: self.id,
            refusals,
        });
        if !self.refusals.is_empty() {
            self.discard_partial();
            self.problem = Some(self.combined_refusal());
        }
        Ok(())
    }

    fn handle_message(&mut self, kind: MessageKind, message: ImageMessage) -> Result<(), Failure> {
        if kind == MessageKind::Pages {
            return self
                .restorer()?
                .write_pages_message(&message.0)
                .map_err(IntoFailure::into_failure);
        }
        let message = &message.into_bytes();
        match kind {
            MessageKind::Tree => {
                let tree: TreeLayout = decode(message).map_err(IntoFailure::into_failure)?;
                let verdict = self.policy.judge().check_tree(&tree);
                verdict.map_err(not_allowed)?;
                if !self.refusals.is_empty() {
                    return Ok(());
                }
                self.start_restorer(tree.clocks)?
                    .update_tree(&tree)
                    .map_err(IntoFailure::into_failure)?;
                self.complete_build(Ok(()));
            }
            MessageKind::Pages | MessageKind::CompressedPages => {
                let pages = decompress_message(message)?;
                self.restorer()?
                    .write_pages_message(&[pages])
                    .map_err(IntoFailure::into_failure)?;
            }
            MessageKind::Descriptors | MessageKind::LastDescriptors => {
                self.restore_descriptors(kind, message)?
            }
            MessageKind::Snapshots | MessageKind::Sockets | MessageKind::LastSockets => {
                self.restore_socket_states(kind, donor_sockets::decode(message)?)?;
            }
            MessageKind::FreezeNotice => {
                if self.realtime {
                    self.restorer()?
                        .raise_priority()
                        .map_err(IntoFailure::into_failure)?;
                }
                // The process still runs at the donor.
                if let Some(sockets) = &mut self.sockets {
                    let exited = sockets.leave_repair(1);
                    exited.map_err(IntoFailure::into_failure)?;
                }
            }
            MessageKind::Frozen => {
                let frozen: ProcessTreeState =
                    decode(message).map_err(IntoFailure::into_failure)?;
                let verdict = self.policy.judge().check_state(&frozen);
                verdict.map_err(not_allowed)?;
                let contended = self
                    .restorer()?
                    .restore_state(&frozen)
                    .map_err(IntoFailure::into_failure)?;
                self.hand_over_locks(contended)?;
            }
            MessageKind::StatePreview => self.judge_preview(message)?,
            MessageKind::Locks => self.on_locks_shared(message)?,
            MessageKind::MissingPages => {
                let missing: MissingPages = decode(message).map_err(IntoFailure::into_failure)?;
                self.restorer()?
                    .announce_missing(&missing)
                    .map_err(IntoFailure::into_failure)?;
            }
            MessageKind::PostcopyPages | MessageKind::PostcopyFailed => {
                return Err(ProtocolViolation::EarlyPostCopyPages.into());
            }
            MessageKind::Digest => {
                let original: TreeDigest = decode(message).map_err(IntoFailure::into_failure)?;
                self.restorer()?
                    .compare_digest(&original)
                    .map_err(IntoFailure::into_failure)?;
            }
        }
        Ok(())
    }

    /// Completes the `Build` command with the result of the first tree image.
    fn complete_build(&mut self, result: Result<(), Failure>) {
        if let Some(token) = self.build_token.take() {
            self.complete(token, Results::Built(result));
        }
    }

    fn restorer(&mut self) -> Result<&mut Restorer, Failure> {
        let restorer = self.restorer.as_mut();
        restorer.ok_or_else(|| ProtocolViolation::MemoryBeforeTree.into())
    }

    /// Returns the restorer; starts it for the first tree image.
    fn start_restorer(&mut self, clocks: ClockReadings) -> Result<&mut Restorer, Failure> {
        if self.restorer.is_none() {
            let listener = bind_adoption_socket(&self.adoption_socket)
                .map_err(|error| system_call(self.adoption_socket.display().to_string(), &error))?;
            let offsets = clock_offsets(clocks);
            let program = Path::new(SELF_EXE);
            let restorer = Restorer::start_adoptable(program, &[RESTORER_ARG], offsets, &listener);
            let mut restorer = restorer.map_err(IntoFailure::into_failure)?;
            restorer
                .set_rights(self.policy.rights())
                .map_err(IntoFailure::into_failure)?;
            let restorer_ref = ProcessRef::of(restorer.pid()).map_err(IntoFailure::into_failure)?;
            self.record.write(&RecordEntry::Restorer(restorer_ref))?;
            self.restorer_ref = Some(restorer_ref);
            // The restored processes inherit the group from the restorer.
            if let Some((groups, group)) = &self.group {
                let created = groups.create(group, restorer.pid());
                created.map_err(|why| OperatorFault::ControlGroup(why.into()))?;
            }
            self.restorer = Some(restorer);
        }
        self.restorer()
    }

    /// Completes the `Restore` command.
    fn complete_restore(&mut self, token: CommandToken, entry: &RecordEntry) {
        let result = self.restore(entry);
        self.complete(token, Results::Restored(result));
        self.apply_deferred_options();
    }

    /// Checks that the process is complete, and writes the record. The donor's messages all precede this job.
    fn restore(&mut self, entry: &RecordEntry) -> Result<(), Failure> {
        if let Some(problem) = &self.problem {
            return Err(problem.clone());
        }
        if !self.conversation.is_complete() {
            return Err(ProtocolViolation::ImageIncomplete.into());
        }
        let unfinished = self.sockets.as_ref().map(RestoredSockets::unfinished);
        if let Some(unfinished) = unfinished.filter(|some| !some.is_empty()) {
            self.record
                .write(&RecordEntry::UnfinishedConnections(unfinished))?;
        }
        self.steps.mark("wait");
        self.record.write(entry)?;
        self.steps.mark("record");
        Ok(())
    }

    /// Sets the deferred options of connections while the holder decides about the commit.
    fn apply_deferred_options(&mut self) {
        if let Some(sockets) = &mut self.sockets {
            sockets.finish_active_options();
            let request_restore =
                |(socket, longest_ms)| retransmission_timeouts::record(socket, longest_ms);
            let ordered = sockets.capped_timeouts().all(request_restore);
            if !ordered {
                sockets.raise_timeouts();
            }
        }
    }

    /// Resumes the process. Returns the time from which it runs.
    fn resume_process(&mut self) -> Result<Instant, Failure> {
        self.steps.mark("commit");
        if let Some(sockets) = &mut self.sockets {
            let activated = sockets.activate(WindowProbe::Never, RESTORE_THREADS);
            activated.map_err(IntoFailure::into_failure)?;
        }
        self.steps.mark("activate");
        // Closed before the process runs, because a descriptor that stays open here would keep a socket open that the
        // process closes.
        let listeners = listening_endpoints(self.sockets.as_ref());
        self.sockets
            .take()
            .into_iter()
            .for_each(RestoredSockets::close);
        self.steps.mark("close");
        self.fault_handler = self
            .restorer()?
            .open_lazy_pages()
            .map_err(IntoFailure::into_failure)?;
        if self.fault_handler.is_some() {
            self.events
                .send(WorkerEvent::PostcopyStarted { id: self.id });
        }
        for lock in self
            .restorer()?
            .resume()
            .map_err(IntoFailure::into_failure)?
        {
            tracing::warn!(id = %self.id, lock, "another process on this node has a lock of an arrived process");
        }
        let resumed_at = Instant::now();
        self.steps.mark("resume");
        let _ = std::fs::remove_file(&self.adoption_socket);
        self.record.write(&RecordEntry::Running)?;
        self.steps.mark("record");
        tracing::debug!(id = %self.id, steps = %self.steps, "the process runs");
        if let (Some(restorer), Some(restorer_ref)) = (self.restorer.take(), self.restorer_ref) {
            self.events.send(WorkerEvent::ProcessRuns {
                id: self.id,
                restorer,
                restorer_ref,
                info: std::mem::take(&mut self.info),
                listeners,
            });
        }
        Ok(resumed_at)
    }
}

impl AcceptorWorker {
    /// Continues after the process runs: restores timeouts and receives the remaining pages.
    fn run_after_resume(mut self, inbox: &Receiver<AcceptorJob>) {
        let restore_timeouts = || {
            std::thread::sleep(retransmission_timeouts::CAP_DURATION);
            retransmission_timeouts::restore_recorded();
        };
        let Some(following) = self.fault_handler.take() else {
            return restore_timeouts();
        };
        std::thread::spawn(restore_timeouts);
        PostcopyReceiver::new(self.id, following, self.events).run(inbox, &self.wake);
    }
}

/// Returns true if a message is part of the image that is judged as a whole before any memory is sent.
fn is_judged_up_front(kind: MessageKind) -> bool {
    matches!(
        kind,
        MessageKind::Tree | MessageKind::Descriptors | MessageKind::StatePreview
    )
}

/// Returns an event descriptor.
fn wake_event() -> std::io::Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(rustix::event::eventfd(0, flags)?)
}
