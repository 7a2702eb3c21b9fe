//! State of a process that moves away, with its two possible ends: resumed here, or ended after the move.

use holdfast_checkpoint::donor::{StoppedTree, TreeTracker};
use holdfast_checkpoint::error::Error;
use holdfast_checkpoint::image::{DescriptorUpdate, ProcessTreeState};
use holdfast_wire::MoveId;
use holdfast_wire::failure::{Failure, NodeFault};

use super::lingering_listeners::LingeringListeners;
use super::lock_handover;
use crate::failure_conversion::IntoFailure;

/// State of the departing process at its donor.
pub(super) enum DonorState {
    New,
    Tracked(Box<TreeTracker>),
    /// Stopped, while some flows must be diverted before the rest is sent.
    AwaitingDivert(Box<StoppedTree>, Box<FinalState>),
    Stopped(Box<StoppedTree>),
    /// Cloned: a copy was sent, and the original runs on unchanged.
    Cloned,
    Ended,
}

/// State that is sent last from a stopped tree.
pub(super) struct FinalState {
    /// Descriptors that have changed since they were sent.
    pub(super) descriptors: DescriptorUpdate,
    /// State of the tree's threads.
    pub(super) state: ProcessTreeState,
}

impl DonorState {
    /// Resumes the process here, after it has its locks again.
    pub(super) fn thaw(self, id: MoveId) -> Result<(), Failure> {
        if let DonorState::Stopped(stopped) = &self {
            lock_handover::retry_regain(id, || stopped.regain_locks());
        }
        ignore_gone(match self {
            DonorState::New | DonorState::Cloned | DonorState::Ended => Ok(()),
            DonorState::Tracked(tracker) => tracker.stop_tracking(),
            DonorState::Stopped(stopped) | DonorState::AwaitingDivert(stopped, _) => {
                stopped.roll_back()
            }
        })
    }

    /// Leaves the process as it is, because the daemon ends and the next one decides: a held tree stays held.
    pub(super) fn abandon(self) {
        if matches!(
            self,
            DonorState::Stopped(_) | DonorState::AwaitingDivert(..)
        ) {
            std::mem::forget(self);
        }
    }

    /// Ends the sending, with or without success. The original of a copy resumes at once, since it does not depend on
    /// the copy.
    pub(super) fn after_send<T>(
        stopped: Box<StoppedTree>,
        (id, is_clone): (MoveId, bool),
        result: Result<T, Failure>,
    ) -> (DonorState, Result<T, Failure>) {
        let stopped = DonorState::Stopped(stopped);
        if !is_clone {
            return (stopped, result);
        }
        let thawed = stopped.thaw(id);
        (
            DonorState::Cloned,
            result.and_then(|value| thawed.map(|()| value)),
        )
    }

    /// Returns the listeners with unaccepted connections of a process that runs elsewhere.
    pub(super) fn lingering_listeners(&self) -> Option<LingeringListeners> {
        match self {
            DonorState::Stopped(stopped) => Some(LingeringListeners::of_tree(stopped)),
            _ => None,
        }
    }

    /// Ends the process, because it runs elsewhere.
    pub(super) fn release(self) -> Result<(), Failure> {
        match self {
            DonorState::Stopped(stopped) => ignore_gone(stopped.release()),
            _ => Err(NodeFault::ProcessNotStopped.into()),
        }
    }
}

/// Treats a process that has already ended as success.
fn ignore_gone(result: Result<(), Error>) -> Result<(), Failure> {
    match result {
        Err(Error::ProcessEnded(_)) => Ok(()),
        other => other.map_err(IntoFailure::into_own_failure),
    }
}
