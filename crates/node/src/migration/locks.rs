//! Messages about exclusive locks on files that both nodes see, and the waiting for such locks.
//!
//! The acceptor takes all locks before it reports the process as restored. If another process has an exclusive lock, it
//! asks the donor, and both perform the steps of [`LockStep`]: the first before the commit, the others after it, before
//! the process runs. At every instant the donor or the acceptor has enough of each lock to exclude all other processes.

use std::time::{Duration, Instant};

use holdfast_proto::migration::{Completion, Results, Token};
use holdfast_sys::process::acceptor::Restorer;
use holdfast_sys::process::donor::GivenLock;
use holdfast_sys::process::error::Error;
use holdfast_sys::process::files::{LockStep, WantedLock};
use holdfast_wire::MoveId;
use serde::{Deserialize, Serialize};

use super::told::{Teller, Told};

/// Pause between attempts to take a contended lock: at first, and at most.
const AGAIN_MIN: Duration = Duration::from_micros(500);
const AGAIN_MAX: Duration = Duration::from_millis(100);
/// Wait for a lock after which the log has a warning, and time for which errors are treated as temporary.
const WARN: Duration = Duration::from_secs(2);
const ERRORS_MAX: Duration = Duration::from_secs(30);

/// Steps after the commit.
pub(super) const AFTER_COMMIT: [LockStep; 3] = [LockStep::Rest, LockStep::First, LockStep::Last];

/// The acceptor's request for the next step.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LockRequest {
    pub(super) step: LockStep,
    /// Contended locks; only in the first step.
    pub(super) locks: Vec<WantedLock>,
}

/// The donor's answer after its part of a step, with the problem if it failed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LockAnswer {
    pub(super) step: LockStep,
    pub(super) problem: Option<String>,
}

impl LockRequest {
    pub(super) fn tell(&self, id: MoveId, teller: &Teller) {
        // Encoding plain numbers and bytes cannot fail.
        let bytes = postcard::to_stdvec(self).unwrap_or_default().into();
        teller.tell(Told::Locks { id, bytes });
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
pub(super) fn concerns(step: LockStep, locks: &[WantedLock]) -> bool {
    match step {
        LockStep::Share | LockStep::Rest => !locks.is_empty(),
        LockStep::First | LockStep::Last => locks.iter().any(WantedLock::has_two_parts),
    }
}

/// Waits between attempts, and logs a warning if the waiting takes long.
pub(super) struct Patience {
    began: Instant,
    pause: Duration,
    warned: bool,
}

impl Patience {
    pub(super) fn new() -> Patience {
        Patience {
            began: Instant::now(),
            pause: AGAIN_MIN,
            warned: false,
        }
    }

    pub(super) fn wait(&mut self, id: MoveId) {
        if self.began.elapsed() > WARN && !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(
                %id,
                "a process stands still until nobody else has a lock on a file which it has an exclusive lock on; `/proc/locks` shows who"
            );
        }
        std::thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(AGAIN_MAX);
    }

    /// Returns true while an error is still treated as temporary.
    pub(super) fn bears(&self, id: MoveId, error: &Error) -> bool {
        let bears = self.began.elapsed() < ERRORS_MAX;
        match bears {
            true => tracing::debug!(%id, %error, "a lock could not be taken; trying again"),
            false => tracing::error!(%id, %error, "a lock could not be taken"),
        }
        bears
    }
}

/// Retries until the original has all its locks again, or has ended.
pub(super) fn regain(id: MoveId, regain: impl Fn() -> Result<bool, Error>) {
    let mut patience = Patience::new();
    loop {
        match regain() {
            Ok(true) | Err(Error::Gone(_)) => return,
            Err(error) if !patience.bears(id, &error) => return,
            Ok(false) | Err(_) => patience.wait(id),
        }
    }
}

/// Resumes processes that an earlier daemon stopped, by `thaw`, once they have their locks again.
pub(super) fn resume(
    (id, token): (MoveId, Token),
    given: Vec<GivenLock>,
    thaw: impl FnOnce() -> Result<(), String> + Send + 'static,
    teller: Teller,
) -> std::io::Result<()> {
    let run = move || {
        regain(id, || GivenLock::regain(&given));
        let results = Results::Thawed(thaw());
        teller.done(Some(id), Completion { token, results });
    };
    let builder = std::thread::Builder::new().name("give".to_owned());
    builder.spawn(run).map(drop)
}

/// Acquires the missing locks of a process that an earlier daemon restored.
pub(super) fn complete(
    (id, token): (MoveId, Token),
    mut restorer: Restorer,
    locks: Vec<WantedLock>,
    teller: Teller,
) -> std::io::Result<()> {
    let run = move || {
        for step in AFTER_COMMIT {
            let mut patience = Patience::new();
            while concerns(step, &locks) {
                let request = LockRequest {
                    step,
                    locks: Vec::new(),
                };
                request.tell(id, &teller);
                patience.wait(id);
                match restorer.advance_locks(step) {
                    Ok(excluded) if excluded.is_empty() => break,
                    Err(error) if restorer.has_ended() => {
                        let results = Results::Gone(Err(error.to_string()));
                        return teller.done(Some(id), Completion { token, results });
                    }
                    Err(error) if !patience.bears(id, &error) => break,
                    Ok(_) | Err(_) => {}
                }
            }
        }
        teller.tell(Told::Locked {
            id,
            token,
            restorer,
        });
    };
    let builder = std::thread::Builder::new().name("take".to_owned());
    builder.spawn(run).map(drop)
}
