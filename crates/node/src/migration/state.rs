//! State of a process that moves away, with its two possible ends: resumed here, or ended after the move.

use holdfast_sys::process::donor::{StoppedTree, Tracker};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::image::{Descriptors, Frozen};
use holdfast_wire::MoveId;

use super::leftovers::Leftovers;
use super::locks;

/// State of the departing process.
pub(super) enum State {
    New,
    Watched(Box<Tracker>),
    /// Stopped, while some flows must be diverted before the rest is sent.
    Waiting(Box<StoppedTree>, Box<Last>),
    Stopped(Box<StoppedTree>),
    /// Cloned: a copy was sent, and the original runs on unchanged.
    Copied,
    Ended,
}

/// State that is sent last from a stopped tree.
pub(super) struct Last {
    /// Changed descriptors.
    pub(super) descriptors: Descriptors,
    /// State of its threads.
    pub(super) state: Frozen,
}

impl State {
    /// Resumes the process here, after it has its locks again.
    pub(super) fn thaw(self, id: MoveId) -> Result<(), String> {
        if let State::Stopped(stopped) = &self {
            locks::regain(id, || stopped.regain_locks());
        }
        unless_gone(match self {
            State::New | State::Copied | State::Ended => Ok(()),
            State::Watched(tracker) => tracker.stop(),
            State::Stopped(stopped) | State::Waiting(stopped, _) => stopped.roll_back(),
        })
    }

    /// Leaves the process as it is, because the daemon ends and the next one decides: a held tree stays held.
    pub(super) fn abandon(self) {
        if matches!(self, State::Stopped(_) | State::Waiting(..)) {
            std::mem::forget(self);
        }
    }

    /// Ends the sending, with or without success. The original of a copy resumes at once, since it does not depend on
    /// the copy.
    pub(super) fn sent<T>(
        stopped: Box<StoppedTree>,
        (id, copy): (MoveId, bool),
        result: Result<T, String>,
    ) -> (State, Result<T, String>) {
        let stopped = State::Stopped(stopped);
        if !copy {
            return (stopped, result);
        }
        let goes_on = stopped.thaw(id);
        (State::Copied, result.and_then(|of| goes_on.map(|()| of)))
    }

    /// Returns the listeners with unaccepted connections of a process that runs elsewhere.
    pub(super) fn leftovers(&self) -> Option<Leftovers> {
        match self {
            State::Stopped(stopped) => Some(Leftovers::of(stopped)),
            _ => None,
        }
    }

    /// Ends the process, because it runs elsewhere.
    pub(super) fn release(self) -> Result<(), String> {
        match self {
            State::Stopped(stopped) => unless_gone(stopped.release()),
            _ => Err("it was not stopped".to_owned()),
        }
    }
}

/// Treats a process that has already ended as success.
fn unless_gone(result: Result<(), Error>) -> Result<(), String> {
    match result {
        Err(Error::Gone(_)) => Ok(()),
        other => other.map_err(|error| error.to_string()),
    }
}
