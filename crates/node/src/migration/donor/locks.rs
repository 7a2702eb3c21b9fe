//! File locks of a process that moves away.

use holdfast_checkpoint::donor::StoppedTree;
use holdfast_checkpoint::files::{ContendedLock, LockHandoverStep};
use holdfast_wire::failure::Failure;

use super::super::image_messages::MessageKind;
use super::super::lock_handover::{LockAnswer, LockRequest};
use super::super::move_records::RecordEntry;
use super::DonorWorker;
use crate::failure_conversion::IntoFailure;

impl DonorWorker {
    /// Performs the donor's part of a step of the hand-over.
    pub(super) fn on_lock_request(&self, stopped: &mut StoppedTree, request: &[u8]) {
        let Some(LockRequest { step, locks }) = LockRequest::decode(request) else {
            return;
        };
        let outcome = match step {
            LockHandoverStep::ShareRemainder => self.share_locks(stopped, &locks),
            step => stopped
                .advance_handover(step)
                .map_err(IntoFailure::into_own_failure),
        };
        let problem = outcome.err();
        let answer = LockAnswer { step, problem };
        self.sender
            .send_unwindowed(MessageKind::Locks, answer.encode());
    }

    /// Shares locks with the acceptor. The record is written first, so that a process that lacks locks regains them
    /// before it resumes.
    fn share_locks(
        &self,
        stopped: &mut StoppedTree,
        locks: &[ContendedLock],
    ) -> Result<(), Failure> {
        let given_locks = stopped
            .find_locks(locks)
            .map_err(IntoFailure::into_own_failure)?;
        self.record
            .write(&RecordEntry::GivenLocks(given_locks.clone()))?;
        stopped
            .begin_handover(given_locks)
            .map_err(IntoFailure::into_own_failure)
    }
}
