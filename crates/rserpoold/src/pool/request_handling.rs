//! Requests of programs and of the control API, carried out by the machines.

use holdfast_api::control::PolicyDetail;
use holdfast_api::pool::{FromPool, RegistrationRequest, ToPool};
use holdfast_proto::pool_user::SessionId;
use tokio::sync::OwnedSemaphorePermit;

use super::event_loop::PoolEventLoop;
use super::hosted_elements::HostedElement;
use super::links::LinkOwner;
use super::policy_conversion;
use super::program_roles::ProgramRole;
use super::requests::{PoolRequest, send_reply};
use crate::api_conversion::parse_handle;

impl PoolEventLoop {
    /// Handles a request other than `Stop` and `ReloadTls`.
    pub(super) fn handle_request(&mut self, request: PoolRequest) {
        match request {
            PoolRequest::ProgramConnected(number, handle) => {
                self.programs.add(number, handle);
            }
            PoolRequest::ProgramMessage(number, message, room) => {
                if let Err(reason) = self.on_program_message(number, message, room) {
                    self.programs
                        .send_and_close(number, &FromPool::Error(reason));
                    self.on_program_closed(number);
                }
            }
            PoolRequest::ProgramClosed(number) => {
                self.programs.remove(number);
                self.on_program_closed(number);
            }
            PoolRequest::Stream(number, event) => self.on_stream_event(number, event),
            PoolRequest::Status(reply) => send_reply(reply, Ok(self.status())),
            PoolRequest::Elements(reply) => send_reply(reply, Ok(self.own_elements())),
            PoolRequest::Resolve(handle, query, reply) => {
                self.users.resolve(self.now(), &handle, &query, reply);
                self.execute_outputs(LinkOwner::User);
            }
            PoolRequest::Select(handle, reply) => {
                self.users.select(self.now(), &handle, reply);
                self.execute_outputs(LinkOwner::User);
            }
            PoolRequest::Unreachable(report, reply) => {
                let answer = self.users.report_unreachable(self.now(), &report);
                self.execute_outputs(LinkOwner::User);
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
                let session = self.users.open(self.now(), number, handle, options);
                self.execute_outputs(LinkOwner::User);
                self.programs.set_role(number, ProgramRole::User(session));
                Ok(())
            }
            (ProgramRole::Element, ToPool::Policy(policy)) => self.set_policy(number, &policy),
            (ProgramRole::Element, ToPool::Deregister) => {
                self.deregister(number);
                Ok(())
            }
            (ProgramRole::Element, ToPool::Data { receiver, bytes }) => {
                self.send_to_user(number, receiver, bytes, permit);
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
            (ProgramRole::User(id), ToPool::Data { receiver, bytes }) => {
                self.send_to_element(id, receiver, bytes, permit);
                Ok(())
            }
            (ProgramRole::User(id), ToPool::Finish { connection }) => {
                self.finish_session(id, connection);
                Ok(())
            }
            (ProgramRole::User(id), ToPool::ReportFailure { connection }) => {
                self.users.fail(self.now(), id, connection);
                self.execute_outputs(LinkOwner::User);
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
        self.programs.remove(number);
        self.deregister(number);
        self.users.close_session_of(self.now(), number);
        self.execute_outputs(LinkOwner::User);
    }

    /// Registers a program as an element.
    pub(super) fn register(
        &mut self,
        number: u64,
        registration: RegistrationRequest,
    ) -> Result<(), String> {
        let element = HostedElement::new(number, registration, &self.config, &mut self.endpoints)?;
        self.elements.insert(number, element);
        let now = self.now();
        self.elements
            .with_machine(number, |machine| machine.handle_register(now));
        self.execute_outputs(LinkOwner::Element(number));
        Ok(())
    }

    /// Updates an element's policy information.
    fn set_policy(&mut self, number: u64, detail: &PolicyDetail) -> Result<(), String> {
        let policy = policy_conversion::policy_from_detail(detail)?;
        let now = self.now();
        let Some(element) = self.elements.get_mut(number) else {
            return Ok(());
        };
        let updated = element.machine.handle_policy(now, policy);
        self.execute_outputs(LinkOwner::Element(number));
        updated.map_err(|error| error.to_string())
    }

    /// Takes an element out of its pool; its users' sessions end at once.
    pub(super) fn deregister(&mut self, number: u64) {
        let now = self.now();
        let Some(element) = self.elements.get_mut(number) else {
            return;
        };
        element.machine.handle_deregister(now);
        for link in element.user_links() {
            self.end_user(number, link);
        }
        self.execute_outputs(LinkOwner::Element(number));
    }

    /// Handles a program's end of data.
    fn finish_session(&mut self, id: SessionId, connection: u64) {
        let link = self.users.link(id, connection);
        if link.is_some_and(|link| self.finish_stream(link)) {
            self.users.mark_finishing(id);
        }
    }
}
