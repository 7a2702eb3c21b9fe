//! The freeze of a process that moves away.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use holdfast_checkpoint::donor::{PageSource, StoppedTree, TreeTracker};
use holdfast_checkpoint::error::Error;
use holdfast_checkpoint::image::{ProcessTreeState, encode};
use holdfast_proto::migration::FreezeReport;
use holdfast_sys::priority::RealtimeGuard;
use holdfast_wire::Flow;
use holdfast_wire::failure::{Failure, NodeFault, ProgramFault};
use holdfast_wire::move_frames::DonorFlowEpoch;
use tokio::sync::oneshot;

use super::super::donor_sockets::{self, DescriptorReaderThread, MovingConnections, SocketStates};
use super::super::donor_state::{DonorState, FinalState};
use super::super::image_messages::MessageKind;
use super::super::move_records::RecordEntry;
use super::super::step_timer::StepTimer;
use super::super::worker_events::{Redirect, WorkerEvent};
use super::postcopy_sender::PostcopySender;
use super::{DonorWorker, PAGES_MESSAGE_BYTES};
use crate::failure_conversion::IntoFailure;

/// Time limit for stopping a tree whose descriptors cannot be saved yet, and the pause between attempts.
const STOP_WAIT_MAX: Duration = Duration::from_millis(300);
const STOP_RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Number of attempts to read blocked descriptors of a stopped tree, and the pause between attempts. Descriptors that
/// other processes hold open for a moment are closed by then.
const READ_ATTEMPTS: usize = 3;
const READ_RETRY_PAUSE: Duration = Duration::from_micros(300);

/// Number of changed connections below which reading them in the freeze costs less than another round.
const FEW_CONNECTIONS: usize = 32;

/// Time limit for the acknowledgement of the data that the program sent last, and the polling interval.
const QUIET_WAIT_MAX: Duration = Duration::from_millis(10);
const QUIET_POLL_INTERVAL: Duration = Duration::from_millis(2);

impl DonorWorker {
    pub(super) fn freeze(
        &mut self,
        state: DonorState,
    ) -> (DonorState, Result<FreezeReport, Failure>) {
        let mut counts_before = self.sender.byte_counts();
        let realtime = self.options.realtime;
        let _priority_boost;
        let (mut stopped, final_state, newcomers) = match state {
            DonorState::Tracked(mut tracker) => {
                if let Err(why) = self.update_acceptor_before_stop(&mut tracker) {
                    return (DonorState::Tracked(tracker), Err(why));
                }
                _priority_boost = realtime.then(RealtimeGuard::begin);
                counts_before = self.sender.byte_counts();
                self.steps = StepTimer::begin();
                match self.stop_tree(*tracker) {
                    Ok(stopped) => stopped,
                    Err(StopFailure { tracker, why }) => {
                        return (
                            tracker.map_or(DonorState::Ended, DonorState::Tracked),
                            Err(why),
                        );
                    }
                }
            }
            // Flows that began late are diverted in this freeze.
            DonorState::AwaitingDivert(stopped, final_state) => {
                _priority_boost = realtime.then(RealtimeGuard::begin);
                match self.set_redirect(Redirect::All) {
                    Ok(_) => (stopped, *final_state, Vec::new()),
                    Err(why) => return (DonorState::Stopped(stopped), Err(why)),
                }
            }
            other => return (other, Err(NodeFault::NoRoundCompleted.into())),
        };
        let closed_flows = self.sockets.closed_connections(&final_state.descriptors);
        match self.undiverted_flows(&final_state, newcomers, &closed_flows) {
            Ok(late_flows) if late_flows.is_empty() => {
                let result = self.send_final_state(&mut stopped, final_state);
                let report = result.map(|()| FreezeReport {
                    steps: self.steps.list(),
                    closed_flows,
                    ..self.freeze_report(counts_before, late_flows)
                });
                DonorState::after_send(stopped, (self.id, self.options.is_clone), report)
            }
            Ok(late_flows) => {
                let waiting = DonorState::AwaitingDivert(stopped, Box::new(final_state));
                let report = FreezeReport {
                    closed_flows,
                    ..self.freeze_report(counts_before, late_flows)
                };
                (waiting, Ok(report))
            }
            Err(why) => (DonorState::Stopped(stopped), Err(why)),
        }
    }

    /// Returns the process's flows that are not diverted yet: connections among the changed descriptors, and new
    /// datagram flows of its sockets since the last round.
    fn undiverted_flows(
        &mut self,
        final_state: &FinalState,
        newcomers: Vec<Flow>,
        closed_flows: &[Flow],
    ) -> Result<Vec<DonorFlowEpoch>, Failure> {
        self.addresses.check_descriptors(&final_state.descriptors)?;
        if self.sockets.update(&final_state.descriptors) {
            self.report_sockets();
        }
        if !self.options.is_clone {
            self.sockets.check_loopback_ends()?;
        }
        let mut undiverted = self.addresses.connections(&final_state.descriptors);
        if let Some(flow) = undiverted.iter().find(|flow| closed_flows.contains(flow)) {
            return Err(ProgramFault::PortReused(*flow).into());
        }
        undiverted.extend(
            newcomers
                .into_iter()
                .filter(|flow| self.sockets.receives_flow(flow)),
        );
        undiverted.retain(|flow| !self.held_flows.contains(flow));
        if undiverted.is_empty() {
            return Ok(Vec::new());
        }
        let (reply, answer) = oneshot::channel();
        self.events.send(WorkerEvent::OwnedFlows {
            flows: undiverted,
            reply,
        });
        answer
            .blocking_recv()
            .map_err(|_| NodeFault::DaemonStopping.into())
    }

    /// Sends memory, even if the descriptors cannot be saved; the acceptor takes it as another round. Returns the state
    /// of the tree, which is sent last.
    fn send_memory(&mut self, stopped: &mut StoppedTree) -> Result<ProcessTreeState, Failure> {
        self.send_tree(stopped.tree())?;
        self.steps.mark("tree");
        if self.may_postcopy {
            return self.send_memory_for_postcopy(stopped);
        }
        while let Some(pages) = stopped
            .read_pages(PAGES_MESSAGE_BYTES)
            .map_err(IntoFailure::into_own_failure)?
        {
            self.sender.send_pages(pages)?;
        }
        self.steps.mark("memory");
        let state = stopped
            .read_state()
            .map_err(IntoFailure::into_own_failure)?;
        self.steps.mark("state");
        Ok(state)
    }

    /// Sends memory with post-copy: some pages, and a list of the remaining ones. Returns the state of the tree.
    fn send_memory_for_postcopy(
        &mut self,
        stopped: &mut StoppedTree,
    ) -> Result<ProcessTreeState, Failure> {
        self.postcopy_sender = None;
        let state = stopped
            .read_state()
            .map_err(IntoFailure::into_own_failure)?;
        let missing = stopped.defer_to_postcopy(&state);
        self.steps.mark("state");
        while let Some(pages) = stopped
            .read_pages(PAGES_MESSAGE_BYTES)
            .map_err(IntoFailure::into_own_failure)?
        {
            self.sender.send_pages(pages)?;
        }
        self.steps.mark("memory");
        if !missing.is_empty() {
            self.sender.send(
                MessageKind::MissingPages,
                encode(&missing).map_err(IntoFailure::into_own_failure)?,
            )?;
            let page_source = PageSource::new(&stopped.process_ids(), &missing)
                .map_err(IntoFailure::into_own_failure)?;
            self.postcopy_sender = Some(PostcopySender::new((self.id, self.to), page_source));
            self.is_postcopy.store(true, Ordering::Relaxed);
        }
        self.steps.mark("missing");
        Ok(state)
    }

    /// Sends all remaining messages. The tree is stopped for good before its connections enter repair mode, and before
    /// the message that lets the acceptor run the process.
    fn send_final_state(
        &mut self,
        stopped: &mut StoppedTree,
        final_state: FinalState,
    ) -> Result<(), Failure> {
        let descriptors =
            encode(&final_state.descriptors).map_err(IntoFailure::into_own_failure)?;
        self.sender
            .send(MessageKind::LastDescriptors, descriptors)?;
        // The original of a copy continues in any case, so it is not held.
        if !self.options.is_clone {
            // Written before holding, so that a held process is never forgotten.
            if self.postcopy_sender.is_some() {
                self.record
                    .write(&RecordEntry::PostcopyPids(stopped.process_ids()))?;
            }
            self.record.write(&RecordEntry::HeldProcesses(
                stopped
                    .processes_to_hold()
                    .map_err(IntoFailure::into_own_failure)?,
            ))?;
            stopped
                .keep_stopped_without_tracer()
                .map_err(IntoFailure::into_own_failure)?;
        }
        self.steps.mark("hold");
        let connections = self.connections.as_mut();
        connections
            .ok_or(NodeFault::NoRoundCompleted)?
            .send_states(stopped, self.held_flows.iter(), &mut self.sender)?;
        self.steps.mark("sockets");
        let state = encode(&final_state.state).map_err(IntoFailure::into_own_failure)?;
        self.sender.send(MessageKind::Frozen, state)?;
        if self.options.verify {
            let digest = stopped
                .digest(&final_state.state)
                .map_err(IntoFailure::into_own_failure)?;
            self.sender.send(
                MessageKind::Digest,
                encode(&digest).map_err(IntoFailure::into_own_failure)?,
            )?;
            self.steps.mark("checksums");
        }
        tracing::debug!(id = %self.id, steps = %self.steps, "the process is frozen");
        Ok(())
    }

    /// Brings the acceptor up to date while the process still runs, repeatedly as long as far fewer connections change
    /// each time. Then diverts new data, so that all received data is answered and acknowledged when the process is
    /// stopped. Without post-copy, finally copies the pages dirtied meanwhile.
    fn update_acceptor_before_stop(&mut self, tracker: &mut TreeTracker) -> Result<(), Failure> {
        let mut previous = usize::MAX;
        while let Some(states) = self
            .connections
            .as_mut()
            .and_then(MovingConnections::changed_states)
        {
            let changed = states.states.len();
            self.send_snapshots(&states)?;
            if changed < FEW_CONNECTIONS || changed > previous / 2 {
                break;
            }
            previous = changed;
        }
        let connections = self.connections.as_ref();
        if !connections.is_some_and(MovingConnections::has_tracked) {
            return self.sender.send(MessageKind::FreezeNotice, Vec::new());
        }
        self.set_redirect(Redirect::Data)?;
        self.wait_for_quiet();
        if let Some(states) = self
            .connections
            .as_mut()
            .and_then(MovingConnections::unsent_states)
        {
            self.send_snapshots(&states)?;
        }
        // Waits until the acceptor's connections have left repair mode.
        self.sender.send(MessageKind::FreezeNotice, Vec::new())?;
        self.sender.wait_until_taken()?;
        if self.may_postcopy {
            return Ok(());
        }
        self.recopy_dirty_pages(tracker, Instant::now()).map(drop)
    }

    fn send_snapshots(&mut self, states: &SocketStates) -> Result<(), Failure> {
        tracing::debug!(id = %self.id, changed = states.states.len(), "sending changed socket snapshots");
        self.sender
            .send(MessageKind::Snapshots, donor_sockets::encode(states)?)?;
        self.sender.wait_until_taken()
    }

    /// Waits until no connection needs extraction or their number stops falling: some programs acknowledge with their
    /// next data.
    fn wait_for_quiet(&mut self) {
        let (started_at, mut previous) = (Instant::now(), usize::MAX);
        while let Some(unseen) = self
            .connections
            .as_mut()
            .and_then(MovingConnections::count_unseen)
        {
            if unseen == 0 || unseen >= previous || started_at.elapsed() >= QUIET_WAIT_MAX {
                tracing::debug!(id = %self.id, unseen, "connections are quiet");
                return;
            }
            previous = unseen;
            std::thread::sleep(QUIET_POLL_INTERVAL);
        }
    }

    /// Returns a report of the bytes sent and saved since the counts in `counts_before`.
    fn freeze_report(&self, counts_before: (u64, u64), late: Vec<DonorFlowEpoch>) -> FreezeReport {
        let (sent, saved) = self.sender.byte_counts();
        FreezeReport {
            sent_bytes: sent - counts_before.0,
            saved_bytes: saved - counts_before.1,
            post_copy_bytes: self
                .postcopy_sender
                .as_ref()
                .map_or(0, PostcopySender::total_bytes),
            late_flows: late,
            ..FreezeReport::default()
        }
    }
}

impl DonorWorker {
    /// Stops the tree at a time when its descriptors can be saved. Some cannot for moments, for example while unread
    /// data is queued that only the program can read. Data sent until the stop has left; later packets are held at the
    /// acceptor. Sends memory, and returns the other state with the datagram flows that began here since the last
    /// round.
    fn stop_tree(&mut self, mut tracker: TreeTracker) -> Result<StoppedTreeRead, StopFailure> {
        let reader =
            (self.connections.as_ref()).ok_or_else(|| Failure::from(NodeFault::NoRoundCompleted));
        let reader = match reader.and_then(MovingConnections::start_reader) {
            Ok(reader) => reader,
            Err(why) => {
                let tracker = Some(Box::new(tracker));
                return Err(StopFailure { tracker, why });
            }
        };
        let started_at = Instant::now();
        loop {
            let mut stopped = match tracker.freeze() {
                Ok(stopped) => Box::new(stopped),
                Err(unfrozen) => {
                    return Err(StopFailure {
                        tracker: Some(Box::new(unfrozen.tracker)),
                        why: unfrozen.error.into_own_failure(),
                    });
                }
            };
            self.steps.mark("halt");
            let result = self.read_stopped(&mut stopped, &reader);
            let (is_temporary, why) = match result {
                Ok((final_state, newcomers)) => return Ok((stopped, final_state, newcomers)),
                Err(failed) => failed,
            };
            // Set before the process resumes, because packets that it then sends must pass.
            let redirected = self.set_redirect(Redirect::Data);
            tracker = stopped.thaw().map_err(|error| StopFailure {
                tracker: None,
                why: error.into_own_failure(),
            })?;
            if !is_temporary || redirected.is_err() || started_at.elapsed() > STOP_WAIT_MAX {
                let tracker = Some(Box::new(tracker));
                return Err(StopFailure { tracker, why });
            }
            std::thread::sleep(STOP_RETRY_PAUSE);
            // The process has run, so the freeze begins anew.
            self.steps = StepTimer::begin();
        }
    }

    /// Sends memory of a stopped tree, has its packets diverted, and reads the remaining state, with the descriptors in
    /// parallel. An error says whether it may be temporary.
    fn read_stopped(
        &mut self,
        stopped: &mut StoppedTree,
        reader: &DescriptorReaderThread,
    ) -> Result<(FinalState, Vec<Flow>), (bool, Failure)> {
        let permanent = |why: Failure| (false, why);
        let mut connections = (self.connections.take())
            .ok_or_else(|| permanent(NodeFault::NoRoundCompleted.into()))?;
        let result = self.read_stopped_with(stopped, &mut connections, reader);
        self.connections = Some(connections);
        result
    }

    fn read_stopped_with(
        &mut self,
        stopped: &mut StoppedTree,
        connections: &mut MovingConnections,
        reader: &DescriptorReaderThread,
    ) -> Result<(FinalState, Vec<Flow>), (bool, Failure)> {
        let permanent = |why: Failure| (false, why);
        let failed = |error: Error| {
            let is_permanent = matches!(error, Error::ProcessEnded(_) | Error::StopTimeout(_));
            (!is_permanent, error.into_own_failure())
        };
        reader.start_reading(stopped.descriptor_reader().map_err(failed)?);
        // The event loop diverts the packets during the copy.
        let pending_redirect = self.request_redirect(Redirect::All);
        let state = self.send_memory(stopped);
        let redirected = wait_for_redirect(pending_redirect);
        self.steps.mark("divert");
        connections.snapshot_stopped(stopped);
        self.steps.mark("inspect");
        let mut descriptors_read = reader.wait();
        for _ in 1..READ_ATTEMPTS {
            if !matches!(descriptors_read, Err(Error::Blocked(_))) {
                break;
            }
            std::thread::sleep(READ_RETRY_PAUSE);
            reader.start_reading(stopped.descriptor_reader().map_err(failed)?);
            descriptors_read = reader.wait();
        }
        let (state, newcomers) = state
            .and_then(|state| Ok((state, redirected?)))
            .map_err(permanent)?;
        let descriptors = descriptors_read
            .and_then(|described| connections.stopped_descriptors(stopped, described));
        let descriptors = descriptors.map_err(failed)?;
        if !self.options.is_clone {
            let unaccepted = stopped.listeners_with_unaccepted().map_err(failed)?;
            let handoff_check = self.addresses.check_handoff_of(&unaccepted);
            handoff_check.map_err(|why| (true, why))?;
        }
        self.steps.mark("descriptors");
        Ok((FinalState { descriptors, state }, newcomers))
    }

    /// Has the event loop set the forwarding rule for the process's packets, and waits until it is set. Returns the
    /// datagram flows that began here since the last round.
    fn set_redirect(&self, redirect: Redirect) -> Result<Vec<Flow>, Failure> {
        wait_for_redirect(self.request_redirect(redirect))
    }

    /// Asks the event loop to set the forwarding rule, without waiting; [`answer`] waits.
    fn request_redirect(&self, redirect: Redirect) -> PendingRedirect {
        let (reply, answer) = oneshot::channel();
        let id = self.id;
        self.events.send(WorkerEvent::SetRedirect {
            id,
            redirect,
            reply,
        });
        answer
    }

    pub(super) fn report_sockets(&self) {
        let (id, sockets) = (self.id, self.sockets.list());
        self.events.send(WorkerEvent::SocketsFound { id, sockets });
    }
}

/// Waits until the event loop has set the forwarding rule.
fn wait_for_redirect(pending: PendingRedirect) -> Result<Vec<Flow>, Failure> {
    let answer = pending.blocking_recv();
    answer.unwrap_or_else(|_| Err(NodeFault::DaemonStopping.into()))
}

type PendingRedirect = oneshot::Receiver<Result<Vec<Flow>, Failure>>;

/// A stopped tree; see [`DonorWorker::stop_tree`].
type StoppedTreeRead = (Box<StoppedTree>, FinalState, Vec<Flow>);

/// Failure to stop a tree.
struct StopFailure {
    /// Tracker of the running tree; `None` if it is no longer tracked.
    tracker: Option<Box<TreeTracker>>,
    why: Failure,
}
