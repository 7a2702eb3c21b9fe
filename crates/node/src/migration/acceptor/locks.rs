//! Exclusive file locks of a process being moved here that its donor still has.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use holdfast_proto::migration::Token;
use holdfast_sys::process::files::{LockStep, WantedLock};

use super::super::locks::{AFTER_COMMIT, LockAnswer, LockRequest, Patience, concerns};
use super::super::pieces::Kind;
use super::super::records::Entry;
use super::super::told::Told;
use super::{Job, Taking, text};

/// Maximum wait for the donor's answer: before the commit in total; after the commit until the request is repeated.
const SHARED_MAX: Duration = Duration::from_secs(10);
const ANSWER_MAX: Duration = Duration::from_millis(200);

/// Progress of the hand-over of locks.
#[derive(Default)]
pub(super) struct Handover {
    locks: Vec<WantedLock>,
    /// Deadline for the donor's answer.
    until: Option<Instant>,
    /// `Restore` command that waits for the hand-over.
    pub(super) restoring: Option<(Token, Entry)>,
}

impl Handover {
    /// Returns true if the donor's answer is outstanding.
    pub(super) fn is_awaited(&self) -> bool {
        self.until.is_some()
    }

    /// Stops waiting for the donor. Returns the token of the waiting command.
    pub(super) fn give_up(&mut self) -> Option<Token> {
        self.until = None;
        self.restoring.take().map(|(token, _)| token)
    }
}

impl Taking {
    /// Returns the next job. Refuses the process if the donor does not answer about locks in time.
    pub(super) fn next_job(&mut self, inbox: &Receiver<Job>) -> Option<Job> {
        while let Some(until) = self.handover.until {
            match inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(job) => return Some(job),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {
                    self.handover.until = None;
                    self.refuse("the donor did not share its locks in time".to_owned());
                }
            }
        }
        inbox.recv().ok()
    }

    /// Starts the hand-over of locks that are contended after the process's state was restored.
    pub(super) fn contended(&mut self, locks: Vec<WantedLock>) -> Result<(), String> {
        if locks.is_empty() {
            return Ok(());
        }
        if self.copies {
            let count = locks.len();
            tracing::warn!(id = %self.id, count, "a copy goes without exclusive locks that its original has");
            return self.there()?.renounce_locks().map_err(text);
        }
        let step = LockStep::Share;
        let request = LockRequest { step, locks };
        request.tell(self.id, &self.teller);
        self.handover.locks = request.locks;
        self.handover.until = Some(Instant::now() + SHARED_MAX);
        Ok(())
    }

    /// Handles the donor's answer to the request to share its locks.
    pub(super) fn shared(&mut self, message: &[u8]) -> Result<(), String> {
        let answer = LockAnswer::decode(message).ok_or("an answer about locks does not parse")?;
        if answer.step != LockStep::Share || self.handover.until.take().is_none() {
            return Err("the donor answers about locks without having been asked".to_owned());
        }
        if let Some(problem) = answer.problem {
            return Err(problem);
        }
        let excluded = self.there()?.advance_locks(LockStep::Share).map_err(text)?;
        if let Some(lock) = excluded.first() {
            let (process, fd) = (lock.process, lock.fd);
            return Err(format!(
                "somebody else took a lock on the file of descriptor {fd} of process {process} meanwhile; try again"
            ));
        }
        if let Some((token, entry)) = self.handover.restoring.take() {
            self.restored(token, &entry);
        }
        Ok(())
    }

    /// Completes the hand-over after the commit: the process must not run before its locks are exclusive again.
    pub(super) fn take_locks(&mut self, inbox: &Receiver<Job>) -> Result<(), String> {
        let locks = std::mem::take(&mut self.handover.locks);
        for step in AFTER_COMMIT {
            if concerns(step, &locks) {
                self.take_step(inbox, step)?;
            }
        }
        if !locks.is_empty() {
            self.steps.done("locks");
        }
        Ok(())
    }

    fn take_step(&mut self, inbox: &Receiver<Job>, step: LockStep) -> Result<(), String> {
        let (id, mut patience) = (self.id, Patience::new());
        loop {
            let locks = Vec::new();
            LockRequest { step, locks }.tell(id, &self.teller);
            self.wait_for_answer(inbox, step)?;
            let restorer = self.there()?;
            match restorer.advance_locks(step) {
                Ok(excluded) if excluded.is_empty() => return Ok(()),
                Err(error) if restorer.has_ended() => return Err(text(error)),
                Err(error) if !patience.bears(id, &error) => return Ok(()),
                Ok(_) | Err(_) => patience.wait(id),
            }
        }
    }

    /// Waits briefly for the donor's answer. If the donor is dead, its locks are released in the end.
    fn wait_for_answer(&mut self, inbox: &Receiver<Job>, step: LockStep) -> Result<(), String> {
        let until = Instant::now() + ANSWER_MAX;
        loop {
            let (kind, bytes) =
                match inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(Job::Piece { kind, bytes, .. }) => (kind, bytes),
                    // No other message is for a committed process.
                    Ok(_) => continue,
                    Err(RecvTimeoutError::Timeout) => return Ok(()),
                    Err(RecvTimeoutError::Disconnected) => return Err("the daemon ends".to_owned()),
                };
            self.teller.tell(Told::Took {
                id: self.id,
                bytes: bytes.len() as u64,
                busy_us: 0,
                problem: None,
            });
            let answer = LockAnswer::decode(&bytes).filter(|_| kind == Kind::Locks as u8);
            if answer.is_some_and(|answer| answer.step == step) {
                return Ok(());
            }
        }
    }
}
