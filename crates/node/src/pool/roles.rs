//! Programs and their roles: element, or user with a session.

use std::collections::HashMap;
use std::sync::Arc;

use holdfast_api::pool::{FromPool, ToPool};
use holdfast_proto::pool_user::SessionId;
use tokio::sync::OwnedSemaphorePermit;

use super::event_loop::Daemon;
use super::requests::{Gauge, ProgramHandle, Request};
use crate::entries::handle_of;

/// Role of a program's channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The program has not chosen a role yet.
    New,
    /// An element with the program's number.
    Element,
    /// A session of a user.
    User(SessionId),
    /// The channel is closing.
    Over,
}

struct Program {
    handle: ProgramHandle,
    role: Role,
}

/// All programs, by number.
#[derive(Default)]
pub(super) struct Programs(HashMap<u64, Program>);

impl Programs {
    /// Sends a message to a program, if it exists. A program that does not read is dropped.
    pub(super) fn tell(&mut self, number: u64, message: &FromPool) {
        if let Some(program) = self.0.get(&number)
            && !program.handle.tell(message)
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
    pub(super) fn gauge(&self, number: u64) -> Option<Arc<Gauge>> {
        Some(self.0.get(&number)?.handle.gauge())
    }

    /// Sends a last message to a program and closes its channel.
    pub(super) fn tell_and_end(&mut self, number: u64, message: &FromPool) {
        if let Some(program) = self.0.remove(&number) {
            program.handle.tell(message);
        }
    }

    fn role(&self, number: u64) -> Role {
        self.0
            .get(&number)
            .map_or(Role::Over, |program| program.role)
    }

    fn set_role(&mut self, number: u64, role: Role) {
        if let Some(program) = self.0.get_mut(&number) {
            program.role = role;
        }
    }
}

impl Daemon {
    /// Handles a request other than `Stop` and `Secure`.
    pub(super) fn answer(&mut self, request: Request) {
        match request {
            Request::Came(number, handle) => {
                let role = Role::New;
                self.programs.0.insert(number, Program { handle, role });
            }
            Request::Said(number, message, room) => {
                if let Err(why) = self.said(number, message, room) {
                    self.programs.tell_and_end(number, &FromPool::Error(why));
                    self.program_gone(number);
                }
            }
            Request::Gone(number) => {
                self.programs.0.remove(&number);
                self.program_gone(number);
            }
            Request::Stream(number, event) => self.stream_said(number, event),
            Request::Status(reply) => send(reply, Ok(self.status())),
            Request::Elements(reply) => send(reply, Ok(self.own_elements())),
            Request::Resolve(handle, query, reply) => self.resolve(&handle, &query, reply),
            Request::Select(handle, reply) => self.select(&handle, reply),
            Request::Unreachable(report, reply) => {
                let answer = self.unreachable(&report);
                send(reply, answer);
            }
            // Handled by the event loop itself.
            Request::Secure(_) | Request::Stop => {}
        }
    }

    fn said(
        &mut self,
        number: u64,
        message: ToPool,
        room: Option<OwnedSemaphorePermit>,
    ) -> Result<(), String> {
        match (self.programs.role(number), message) {
            (Role::New, ToPool::Register(registration)) => {
                if self.ends_at.is_some() {
                    return Err("the daemon is stopping".to_owned());
                }
                self.programs.set_role(number, Role::Element);
                self.register(number, registration)
            }
            (Role::New, ToPool::Open { handle, options }) => {
                let handle = handle_of(&handle).map_err(|error| error.to_string())?;
                let session = self.open_session(number, handle, options);
                self.programs.set_role(number, Role::User(session));
                Ok(())
            }
            (Role::Element, ToPool::Policy(policy)) => self.set_policy(number, &policy),
            (Role::Element, ToPool::Deregister) => {
                self.deregister(number);
                Ok(())
            }
            (Role::Element, ToPool::Data { session, bytes }) => {
                self.send_to_user(number, session, bytes, room);
                Ok(())
            }
            (Role::Element, ToPool::Keep { session, state }) => {
                self.give_state(number, session, &state);
                Ok(())
            }
            (Role::Element, ToPool::Close { session }) => {
                self.close_user(number, session);
                Ok(())
            }
            (Role::User(id), ToPool::Data { session, bytes }) => {
                self.send_to_element(id, session, bytes, room);
                Ok(())
            }
            (Role::User(id), ToPool::Finish { connection }) => {
                self.finish(id, connection);
                Ok(())
            }
            (Role::User(id), ToPool::Fail { connection }) => {
                self.fail_session(id, connection);
                Ok(())
            }
            (Role::Over, _) => Ok(()),
            (Role::New, _) => Err("say Register or Open first".to_owned()),
            (Role::Element | Role::User(_), _) => {
                Err("that is not said on a channel of this kind".to_owned())
            }
        }
    }

    fn program_gone(&mut self, number: u64) {
        self.programs.0.remove(&number);
        self.deregister(number);
        self.close_session_of(number);
    }
}

/// Sends an answer.
pub(super) fn send<T>(
    reply: crate::mailbox::Reply<T>,
    answer: Result<T, holdfast_api::control::ErrorBody>,
) {
    // A failure means that the caller has gone.
    let _ = reply.send(answer);
}
