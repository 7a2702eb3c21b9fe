//! Programs and their roles: element, or user with a session.

use std::collections::HashMap;
use std::sync::Arc;

use holdfast_api::pool::{FromPool, ToPool};
use holdfast_proto::pool_user::SessionId;
use tokio::sync::OwnedSemaphorePermit;

use super::event_loop::PoolEventLoop;
use super::requests::{ByteGauge, PoolRequest, ProgramHandle};
use crate::api_conversion::parse_handle;

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

/// All programs, by number.
#[derive(Default)]
pub(super) struct PoolPrograms(HashMap<u64, PoolProgram>);

impl PoolPrograms {
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

    fn role(&self, number: u64) -> ProgramRole {
        self.0
            .get(&number)
            .map_or(ProgramRole::Closing, |program| program.role)
    }

    fn set_role(&mut self, number: u64, role: ProgramRole) {
        if let Some(program) = self.0.get_mut(&number) {
            program.role = role;
        }
    }
}

impl PoolEventLoop {
    /// Handles a request other than `Stop` and `ReloadTls`.
    pub(super) fn handle_request(&mut self, request: PoolRequest) {
        match request {
            PoolRequest::ProgramConnected(number, handle) => {
                let role = ProgramRole::New;
                self.programs.0.insert(number, PoolProgram { handle, role });
            }
            PoolRequest::ProgramMessage(number, message, room) => {
                if let Err(reason) = self.on_program_message(number, message, room) {
                    self.programs
                        .send_and_close(number, &FromPool::Error(reason));
                    self.on_program_closed(number);
                }
            }
            PoolRequest::ProgramClosed(number) => {
                self.programs.0.remove(&number);
                self.on_program_closed(number);
            }
            PoolRequest::Stream(number, event) => self.on_stream_event(number, event),
            PoolRequest::Status(reply) => send_reply(reply, Ok(self.status())),
            PoolRequest::Elements(reply) => send_reply(reply, Ok(self.own_elements())),
            PoolRequest::Resolve(handle, query, reply) => self.resolve(&handle, &query, reply),
            PoolRequest::Select(handle, reply) => self.select(&handle, reply),
            PoolRequest::Unreachable(report, reply) => {
                let answer = self.report_unreachable(&report);
                send_reply(reply, answer);
            }
            // Handled by the event loop itself.
            PoolRequest::ReloadTls(_) | PoolRequest::Stop => {}
        }
    }

    fn on_program_message(
        &mut self,
        number: u64,
        message: ToPool,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<(), String> {
        match (self.programs.role(number), message) {
            (ProgramRole::New, ToPool::Register(registration)) => {
                if self.stop_deadline.is_some() {
                    return Err("the daemon is stopping".to_owned());
                }
                self.programs.set_role(number, ProgramRole::Element);
                self.register(number, registration)
            }
            (ProgramRole::New, ToPool::Open { handle, options }) => {
                let handle = parse_handle(&handle).map_err(|error| error.to_string())?;
                let session = self.open_session(number, handle, options);
                self.programs.set_role(number, ProgramRole::User(session));
                Ok(())
            }
            (ProgramRole::Element, ToPool::Policy(policy)) => self.set_policy(number, &policy),
            (ProgramRole::Element, ToPool::Deregister) => {
                self.deregister(number);
                Ok(())
            }
            (ProgramRole::Element, ToPool::Data { session, bytes }) => {
                self.send_to_user(number, session, bytes, permit);
                Ok(())
            }
            (ProgramRole::Element, ToPool::StoreState { session, state }) => {
                self.send_state(number, session, &state);
                Ok(())
            }
            (ProgramRole::Element, ToPool::Close { session }) => {
                self.close_user(number, session);
                Ok(())
            }
            (ProgramRole::User(id), ToPool::Data { session, bytes }) => {
                self.send_to_element(id, session, bytes, permit);
                Ok(())
            }
            (ProgramRole::User(id), ToPool::Finish { connection }) => {
                self.finish_session(id, connection);
                Ok(())
            }
            (ProgramRole::User(id), ToPool::ReportFailure { connection }) => {
                self.fail_session(id, connection);
                Ok(())
            }
            (ProgramRole::Closing, _) => Ok(()),
            (ProgramRole::New, _) => Err("send Register or Open first".to_owned()),
            (ProgramRole::Element | ProgramRole::User(_), _) => {
                Err("this message is not allowed on a channel of this kind".to_owned())
            }
        }
    }

    fn on_program_closed(&mut self, number: u64) {
        self.programs.0.remove(&number);
        self.deregister(number);
        self.close_session_of(number);
    }
}

/// Sends an answer.
pub(super) fn send_reply<T>(
    reply: crate::mailbox::ReplySender<T>,
    answer: Result<T, holdfast_api::control::ErrorBody>,
) {
    // A failure means that the caller has gone.
    let _ = reply.send(answer);
}
