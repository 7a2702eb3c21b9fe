//! How far a process on its way from here is, and its two ends.

use holdfast_sys::process::donor::{StoppedTree, Tracker};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::image::{Descriptors, Frozen};
use holdfast_wire::MoveId;

use super::leftovers::Leftovers;
use super::locks;

/// How far it is.
pub(super) enum State {
    New,
    Watched(Box<Tracker>),
    /// It stands still, and some flows are to be diverted before the rest is sent.
    Waiting(Box<StoppedTree>, Box<Last>),
    Stopped(Box<StoppedTree>),
    /// It was, and runs on here, untouched: a copy of it was sent.
    Copied,
    Ended,
}

/// What is sent last of a tree that stands still.
pub(super) struct Last {
    /// What changed of its descriptors.
    pub(super) descriptors: Descriptors,
    /// The state of its threads.
    pub(super) state: Frozen,
}

impl State {
    /// It runs on here, once it has its locks again.
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

    /// The daemon ends, and the next one decides what becomes of it: nothing lets go what is held.
    pub(super) fn abandon(self) {
        if matches!(self, State::Stopped(_) | State::Waiting(..)) {
            std::mem::forget(self);
        }
    }

    /// All of it was sent, or could not be. The original of a copy goes on at once: nobody waits for what becomes of the copy.
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

    /// What nobody has accepted of it, when it runs elsewhere.
    pub(super) fn leftovers(&self) -> Option<Leftovers> {
        match self {
            State::Stopped(stopped) => Some(Leftovers::of(stopped)),
            _ => None,
        }
    }

    /// It runs elsewhere.
    pub(super) fn release(self) -> Result<(), String> {
        match self {
            State::Stopped(stopped) => unless_gone(stopped.release()),
            _ => Err("it was not stopped".to_owned()),
        }
    }
}

/// What has ended meanwhile needs nothing.
fn unless_gone(result: Result<(), Error>) -> Result<(), String> {
    match result {
        Err(Error::Gone(_)) => Ok(()),
        other => other.map_err(|error| error.to_string()),
    }
}
