//! Programs and their roles: element, or user with a session.

use std::collections::HashMap;
use std::sync::Arc;

use holdfast_api::pool::FromPool;
use holdfast_proto::pool_user::SessionId;

use super::requests::{ByteGauge, ProgramHandle};

/// Role of a program's channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProgramRole {
    /// The program has not chosen a role yet.
    New,
    /// An element with the program's number.
    Element,
    /// A session of a user.
    User(SessionId),
    /// The channel is closing.
    Closing,
}

struct PoolProgram {
    handle: ProgramHandle,
    role: ProgramRole,
}

/// All programs with a channel to the pool daemon, by number.
#[derive(Default)]
pub(super) struct PoolPrograms(HashMap<u64, PoolProgram>);

impl PoolPrograms {
    /// Adds a program that has opened a channel.
    pub(super) fn add(&mut self, number: u64, handle: ProgramHandle) {
        let role = ProgramRole::New;
        self.0.insert(number, PoolProgram { handle, role });
    }

    /// Removes a program, which closes its channel.
    pub(super) fn remove(&mut self, number: u64) {
        self.0.remove(&number);
    }

    /// Sends a message to a program, if it exists. A program that does not read is dropped.
    pub(super) fn send(&mut self, number: u64, message: &FromPool) {
        if let Some(program) = self.0.get(&number)
            && !program.handle.send(message)
        {
            // Its channel ends, which is reported like any end.
            self.0.remove(&number);
        }
    }

    /// Returns the number of bytes queued for a program.
    pub(super) fn queued(&self, number: u64) -> usize {
        let program = self.0.get(&number);
        program.map_or(0, |program| program.handle.queued())
    }

    /// Returns the gauge of a program's queued bytes, for waiting; `None` if the program is gone.
    pub(super) fn gauge(&self, number: u64) -> Option<Arc<ByteGauge>> {
        Some(self.0.get(&number)?.handle.gauge())
    }

    /// Sends a last message to a program and closes its channel.
    pub(super) fn send_and_close(&mut self, number: u64, message: &FromPool) {
        if let Some(program) = self.0.remove(&number) {
            program.handle.send(message);
        }
    }

    /// Returns a program's role; `Closing` if the program is gone.
    pub(super) fn role(&self, number: u64) -> ProgramRole {
        self.0
            .get(&number)
            .map_or(ProgramRole::Closing, |program| program.role)
    }

    /// Records the role that a program has chosen.
    pub(super) fn set_role(&mut self, number: u64, role: ProgramRole) {
        if let Some(program) = self.0.get_mut(&number) {
            program.role = role;
        }
    }
}
