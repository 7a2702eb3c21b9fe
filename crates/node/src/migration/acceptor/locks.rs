//! Exclusive file locks of a process being moved here that its donor still has.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use holdfast_checkpoint::files::{ContendedLock, LockHandoverStep};
use holdfast_proto::migration::CommandToken;
use holdfast_wire::failure::{Failure, NodeFault, PeerFault, ProgramFault, ProtocolViolation};

use super::super::image_messages::MessageKind;
use super::super::lock_handover::{
    AFTER_COMMIT, LockAnswer, LockRequest, LockRetry, step_concerns_locks,
};
use super::super::move_records::RecordEntry;
use super::super::worker_events::WorkerEvent;
use super::{AcceptorJob, AcceptorWorker};
use crate::failure_conversion::IntoFailure;

/// Maximum wait for the donor's answer: before the commit in total; after the commit until the request is repeated.
const SHARE_WAIT_MAX: Duration = Duration::from_secs(10);
const ANSWER_WAIT_MAX: Duration = Duration::from_millis(200);

/// Progress of the hand-over of locks.
#[derive(Default)]
pub(super) struct LockHandoverProgress {
    locks: Vec<ContendedLock>,
    /// Deadline for the donor's answer.
    deadline: Option<Instant>,
    /// `Restore` command that waits for the hand-over.
    pub(super) pending_restore: Option<(CommandToken, RecordEntry)>,
}

impl LockHandoverProgress {
    /// Returns true if the donor's answer is outstanding.
    pub(super) fn is_awaiting_donor(&self) -> bool {
        self.deadline.is_some()
    }

    /// Stops waiting for the donor. Returns the token of the waiting command.
    pub(super) fn give_up(&mut self) -> Option<CommandToken> {
        self.deadline = None;
        self.pending_restore.take().map(|(token, _)| token)
    }
}

impl AcceptorWorker {
    /// Returns the next job. Refuses the process if the donor does not answer about locks in time.
    pub(super) fn next_job(&mut self, inbox: &Receiver<AcceptorJob>) -> Option<AcceptorJob> {
        while let Some(deadline) = self.lock_handover.deadline {
            match inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(job) => return Some(job),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {
                    self.lock_handover.deadline = None;
                    self.refuse(PeerFault::LocksNotShared.into());
                }
            }
        }
        inbox.recv().ok()
    }

    /// Starts the hand-over of locks that are contended after the process's state was restored.
    pub(super) fn hand_over_locks(&mut self, locks: Vec<ContendedLock>) -> Result<(), Failure> {
        if locks.is_empty() {
            return Ok(());
        }
        if self.is_clone {
            let count = locks.len();
            tracing::warn!(id = %self.id, count, "a clone runs without the exclusive locks of its original");
            return self
                .restorer()?
                .renounce_locks()
                .map_err(IntoFailure::into_failure);
        }
        let step = LockHandoverStep::ShareRemainder;
        let request = LockRequest { step, locks };
        request.send(self.id, &self.events);
        self.lock_handover.locks = request.locks;
        self.lock_handover.deadline = Some(Instant::now() + SHARE_WAIT_MAX);
        Ok(())
    }

    /// Handles the donor's answer to the request to share its locks.
    pub(super) fn on_locks_shared(&mut self, message: &[u8]) -> Result<(), Failure> {
        let answer = LockAnswer::decode(message).ok_or(ProtocolViolation::LockAnswerUnreadable)?;
        if answer.step != LockHandoverStep::ShareRemainder
            || self.lock_handover.deadline.take().is_none()
        {
            return Err(ProtocolViolation::LockAnswerUnrequested.into());
        }
        if let Some(problem) = answer.problem {
            return Err(problem.from_peer());
        }
        let excluded_locks = self
            .restorer()?
            .advance_locks(LockHandoverStep::ShareRemainder)
            .map_err(IntoFailure::into_failure)?;
        if let Some(lock) = excluded_locks.first() {
            let (process, fd) = (lock.process, lock.fd);
            return Err(ProgramFault::LockTaken { process, fd }.into());
        }
        if let Some((token, entry)) = self.lock_handover.pending_restore.take() {
            self.complete_restore(token, &entry);
        }
        Ok(())
    }

    /// Completes the hand-over after the commit: the process must not run before its locks are exclusive again.
    pub(super) fn take_locks(&mut self, inbox: &Receiver<AcceptorJob>) -> Result<(), Failure> {
        let locks = std::mem::take(&mut self.lock_handover.locks);
        for step in AFTER_COMMIT {
            if step_concerns_locks(step, &locks) {
                self.take_lock_step(inbox, step)?;
            }
        }
        if !locks.is_empty() {
            self.steps.mark("locks");
        }
        Ok(())
    }

    fn take_lock_step(
        &mut self,
        inbox: &Receiver<AcceptorJob>,
        step: LockHandoverStep,
    ) -> Result<(), Failure> {
        let (id, mut retry) = (self.id, LockRetry::new());
        loop {
            let locks = Vec::new();
            LockRequest { step, locks }.send(id, &self.events);
            self.wait_for_answer(inbox, step)?;
            let restorer = self.restorer()?;
            match restorer.advance_locks(step) {
                Ok(excluded_locks) if excluded_locks.is_empty() => return Ok(()),
                Err(error) if restorer.has_ended() => return Err(error.into_failure()),
                Err(error) if !retry.tolerates(id, &error) => return Ok(()),
                Ok(_) | Err(_) => retry.wait(id),
            }
        }
    }

    /// Waits briefly for the donor's answer. If the donor is dead, its locks are released in the end.
    fn wait_for_answer(
        &mut self,
        inbox: &Receiver<AcceptorJob>,
        step: LockHandoverStep,
    ) -> Result<(), Failure> {
        let deadline = Instant::now() + ANSWER_WAIT_MAX;
        loop {
            let (kind, bytes) =
                match inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(AcceptorJob::Piece { kind, bytes, .. }) => (kind, bytes),
                    // No other message is for a committed process.
                    Ok(_) => continue,
                    Err(RecvTimeoutError::Timeout) => return Ok(()),
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(NodeFault::DaemonStopping.into());
                    }
                };
            self.events.send(WorkerEvent::ReportTaken {
                id: self.id,
                bytes: bytes.len() as u64,
                busy_us: 0,
                problem: None,
            });
            let answer = LockAnswer::decode(&bytes).filter(|_| kind == MessageKind::Locks as u8);
            if answer.is_some_and(|answer| answer.step == step) {
                return Ok(());
            }
        }
    }
}
