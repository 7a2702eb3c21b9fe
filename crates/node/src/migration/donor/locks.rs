//! File locks of a process that moves away.

use holdfast_sys::process::donor::StoppedTree;
use holdfast_sys::process::files::{LockStep, WantedLock};

use super::super::locks::{LockAnswer, LockRequest};
use super::super::pieces::Kind;
use super::super::records::Entry;
use super::{Giving, text};

impl Giving {
    /// Performs the donor's part of a step of the hand-over.
    pub(super) fn give_locks(&self, stopped: &mut StoppedTree, request: &[u8]) {
        let Some(LockRequest { step, locks }) = LockRequest::decode(request) else {
            return;
        };
        let outcome = match step {
            LockStep::Share => self.share_locks(stopped, &locks),
            step => stopped.release_locks(step).map_err(text),
        };
        let problem = outcome.err();
        let answer = LockAnswer { step, problem };
        self.outgoing.send_anyway(Kind::Locks, answer.encode());
    }

    /// Shares locks with the acceptor. The record is written first, so that a process that lacks locks regains them
    /// before it resumes.
    fn share_locks(&self, stopped: &mut StoppedTree, locks: &[WantedLock]) -> Result<(), String> {
        let given = stopped.find_locks(locks).map_err(text)?;
        self.record.write(&Entry::Locks(given.clone()))?;
        stopped.share_locks(given).map_err(text)
    }
}
