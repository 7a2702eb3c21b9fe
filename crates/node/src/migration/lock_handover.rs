//! Messages about exclusive locks on files that both nodes see, and the waiting for such locks.
//!
//! The acceptor takes all locks before it reports the process as restored. If another process has an exclusive lock, it
//! asks the donor, and both perform the steps of [`LockHandoverStep`]: the first before the commit, the others after it, before
//! the process runs. At every instant the donor or the acceptor has enough of each lock to exclude all other processes.

use std::time::{Duration, Instant};

use holdfast_checkpoint::acceptor::Restorer;
use holdfast_checkpoint::donor::LockHandover;
use holdfast_checkpoint::error::Error;
use holdfast_checkpoint::files::{ContendedLock, LockHandoverStep};
use holdfast_proto::migration::{CommandToken, Completion, Results};
use holdfast_wire::MoveId;
use holdfast_wire::failure::Failure;
use serde::{Deserialize, Serialize};

use super::worker_events::{EventSender, WorkerEvent};
use crate::failure_conversion::IntoFailure;

/// Pause between attempts to take a contended lock: at first, and at most.
const RETRY_PAUSE_MIN: Duration = Duration::from_micros(500);
const RETRY_PAUSE_MAX: Duration = Duration::from_millis(100);
/// Wait for a lock after which the log has a warning, and time for which errors are treated as temporary.
const WARN_AFTER: Duration = Duration::from_secs(2);
const ERRORS_TOLERATED_FOR: Duration = Duration::from_secs(30);

/// Steps after the commit.
pub(super) const AFTER_COMMIT: [LockHandoverStep; 3] = [
    LockHandoverStep::MoveRemainder,
    LockHandoverStep::ShareFirstByte,
    LockHandoverStep::MoveFirstByte,
];

/// The acceptor's request for the next step.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LockRequest {
    pub(super) step: LockHandoverStep,
    /// Contended locks; only in the first step.
    pub(super) locks: Vec<ContendedLock>,
}

/// The donor's answer after its part of a step, with the problem if it failed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LockAnswer {
    pub(super) step: LockHandoverStep,
    pub(super) problem: Option<Failure>,
}

impl LockRequest {
    pub(super) fn send(&self, id: MoveId, events: &EventSender) {
        // Encoding plain numbers and bytes cannot fail.
        let bytes = postcard::to_stdvec(self).unwrap_or_default().into();
        events.send(WorkerEvent::RequestLocks { id, bytes });
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<LockRequest> {
        postcard::from_bytes(bytes).ok()
    }
}

impl LockAnswer {
    pub(super) fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).unwrap_or_default()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<LockAnswer> {
        postcard::from_bytes(bytes).ok()
    }
}

/// Returns true if a step concerns any of these locks.
pub(super) fn step_concerns_locks(step: LockHandoverStep, locks: &[ContendedLock]) -> bool {
    match step {
        LockHandoverStep::ShareRemainder | LockHandoverStep::MoveRemainder => !locks.is_empty(),
        LockHandoverStep::ShareFirstByte | LockHandoverStep::MoveFirstByte => {
            locks.iter().any(ContendedLock::has_two_parts)
        }
    }
}

/// Waits between attempts, and logs a warning if the waiting takes long.
pub(super) struct LockRetry {
    started_at: Instant,
    pause: Duration,
    has_warned: bool,
}

impl LockRetry {
    pub(super) fn new() -> LockRetry {
        LockRetry {
            started_at: Instant::now(),
            pause: RETRY_PAUSE_MIN,
            has_warned: false,
        }
    }

    pub(super) fn wait(&mut self, id: MoveId) {
        if self.started_at.elapsed() > WARN_AFTER && !std::mem::replace(&mut self.has_warned, true)
        {
            tracing::warn!(
                %id,
                "a process waits until another process unlocks a file; `/proc/locks` shows which"
            );
        }
        std::thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(RETRY_PAUSE_MAX);
    }

    /// Returns true while an error is still treated as temporary.
    pub(super) fn tolerates(&self, id: MoveId, error: &Error) -> bool {
        let is_tolerated = self.started_at.elapsed() < ERRORS_TOLERATED_FOR;
        match is_tolerated {
            true => tracing::debug!(%id, %error, "cannot take a lock; trying again"),
            false => tracing::error!(%id, %error, "cannot take a lock"),
        }
        is_tolerated
    }
}

/// Retries until the original has all its locks again, or has ended.
pub(super) fn retry_regain(id: MoveId, regain: impl Fn() -> Result<bool, Error>) {
    let mut retry = LockRetry::new();
    loop {
        match regain() {
            Ok(true) | Err(Error::ProcessEnded(_)) => return,
            Err(error) if !retry.tolerates(id, &error) => return,
            Ok(false) | Err(_) => retry.wait(id),
        }
    }
}

/// Resumes processes that an earlier daemon stopped, by `thaw`, once they have their locks again.
pub(super) fn regain_then_thaw(
    (id, token): (MoveId, CommandToken),
    given_locks: Vec<LockHandover>,
    thaw: impl FnOnce() -> Result<(), Failure> + Send + 'static,
    events: EventSender,
) -> std::io::Result<()> {
    let run = move || {
        retry_regain(id, || LockHandover::regain(&given_locks));
        let results = Results::Thawed(thaw());
        events.command_done(Some(id), Completion { token, results });
    };
    let builder = std::thread::Builder::new().name("regain-locks".to_owned());
    builder.spawn(run).map(drop)
}

/// Acquires the missing locks of a process that an earlier daemon restored.
pub(super) fn acquire_then_report(
    (id, token): (MoveId, CommandToken),
    mut restorer: Restorer,
    locks: Vec<ContendedLock>,
    events: EventSender,
) -> std::io::Result<()> {
    let run = move || {
        for step in AFTER_COMMIT {
            let mut retry = LockRetry::new();
            while step_concerns_locks(step, &locks) {
                let request = LockRequest {
                    step,
                    locks: Vec::new(),
                };
                request.send(id, &events);
                retry.wait(id);
                match restorer.advance_locks(step) {
                    Ok(excluded) if excluded.is_empty() => break,
                    Err(error) if restorer.has_ended() => {
                        let results = Results::Resumed(Err(error.into_failure()));
                        return events.command_done(Some(id), Completion { token, results });
                    }
                    Err(error) if !retry.tolerates(id, &error) => break,
                    Ok(_) | Err(_) => {}
                }
            }
        }
        events.send(WorkerEvent::LocksAcquired {
            id,
            token,
            restorer,
        });
    };
    let builder = std::thread::Builder::new().name("acquire-locks".to_owned());
    builder.spawn(run).map(drop)
}
