//! Resolutions and sessions of this host's pool users.

use std::collections::HashMap;
use std::time::Duration;

use holdfast_api::control::{
    ErrorBody, ReportAccepted, Resolution, ResolveQuery, UnreachableReport,
};
use holdfast_api::pool::{FromPool, SelectionRule, SessionEvent, SessionOptions};
use holdfast_proto::pool_element::LinkId;
use holdfast_proto::pool_user::{
    ChoiceMethod as ChosenBy, Event, PoolUser, PoolUserConfig, RequestId, ResolveError, SessionId,
};
use holdfast_wire::rserpool::{ElementId, PolicyKind, PoolElement, PoolHandle, Transport};

use super::program_roles::PoolPrograms;
use super::requests::send_reply;
use crate::api_conversion::{self, element_entry, parse_handle};
use crate::mailbox::ReplySender;

/// Maximum number of elements in a resolution.
const ITEMS_MAX: u32 = 4096;

/// A caller that waits for the machine's answer.
struct PendingResolution {
    reply: ReplySender<Resolution>,
    handle: PoolHandle,
    items: usize,
}

/// State of a user's session, and the program that has the session.
struct UserSession {
    program: u64,
    link: Option<LinkId>,
    /// Number of the session's last connection.
    connection: u64,
    /// True if the program has signalled the end of its data; if the element then ends too, the session has ended.
    is_finishing: bool,
    /// True if the element ended the connection in order.
    ended_in_order: bool,
}

/// The users of this host's programs and of the control API: one machine for all, their requests and sessions.
pub(super) struct PoolUsers {
    machine: PoolUser,
    pending: HashMap<RequestId, PendingResolution>,
    sessions: HashMap<SessionId, UserSession>,
    /// Transport addresses of sessions' links.
    transports: HashMap<LinkId, Transport>,
}

impl PoolUsers {
    /// Starts without requests and sessions.
    pub(super) fn new(config: PoolUserConfig) -> PoolUsers {
        PoolUsers {
            machine: PoolUser::new(config),
            pending: HashMap::new(),
            sessions: HashMap::new(),
            transports: HashMap::new(),
        }
    }

    /// Returns the one machine of all users.
    pub(super) fn machine(&self) -> &PoolUser {
        &self.machine
    }

    /// Returns the one machine of all users, for inputs and outputs.
    pub(super) fn machine_mut(&mut self) -> &mut PoolUser {
        &mut self.machine
    }

    /// Returns the number of sessions.
    pub(super) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Records the element that a session connects to.
    pub(super) fn set_transport(&mut self, link: LinkId, transport: Transport) {
        self.transports.insert(link, transport);
    }

    /// Removes a link that a session has given up.
    pub(super) fn remove_link(&mut self, link: LinkId) {
        self.transports.remove(&link);
    }

    /// Returns the link of this connection of a session, if it is current.
    pub(super) fn link(&self, session: SessionId, connection: u64) -> Option<LinkId> {
        let session = self.sessions.get(&session)?;
        session.link.filter(|_| session.connection == connection)
    }

    /// Returns the program of the session.
    pub(super) fn program(&self, session: SessionId) -> Option<u64> {
        Some(self.sessions.get(&session)?.program)
    }

    /// Resolves a pool handle to elements of the pool; the answer goes to `reply`.
    pub(super) fn resolve(
        &mut self,
        now: Duration,
        text: &str,
        query: &ResolveQuery,
        reply: ReplySender<Resolution>,
    ) {
        let handle = match parse_handle(text) {
            Ok(handle) => handle,
            Err(error) => return send_reply(reply, Err(error)),
        };
        let items = query.items.map(|items| items.clamp(1, ITEMS_MAX));
        let request = match query.cached {
            Some(true) => self.machine.handle_resolve(now, handle.clone()),
            _ => self
                .machine
                .handle_resolve_uncached(now, handle.clone(), items),
        };
        let items = items.map_or(usize::MAX, |items| items as usize);
        self.await_answer(request, handle, items, reply);
    }

    /// Selects an element of the pool with this handle; the answer goes to `reply`.
    pub(super) fn select(&mut self, now: Duration, text: &str, reply: ReplySender<Resolution>) {
        let handle = match parse_handle(text) {
            Ok(handle) => handle,
            Err(error) => return send_reply(reply, Err(error)),
        };
        let request = self.machine.handle_select(now, handle.clone());
        self.await_answer(request, handle, 1, reply);
    }

    fn await_answer(
        &mut self,
        request: RequestId,
        handle: PoolHandle,
        items: usize,
        reply: ReplySender<Resolution>,
    ) {
        let pending = PendingResolution {
            reply,
            handle,
            items,
        };
        self.pending.insert(request, pending);
    }

    /// Handles a report of an unreachable element.
    pub(super) fn report_unreachable(
        &mut self,
        now: Duration,
        report: &UnreachableReport,
    ) -> Result<ReportAccepted, ErrorBody> {
        let handle = parse_handle(&report.handle)?;
        let id = u32::from_str_radix(&report.id, 16).map_err(|_| ErrorBody {
            error: format!("`{}` is not an element's id", report.id),
            what_to_do: "write its eight hexadecimal digits, as `holdfast pool resolve` shows them"
                .to_owned(),
        })?;
        let id = ElementId(id);
        self.machine.handle_unreachable(now, &handle, id);
        Ok(ReportAccepted { id: id.to_string() })
    }

    /// Opens a session for a program.
    pub(super) fn open(
        &mut self,
        now: Duration,
        program: u64,
        handle: PoolHandle,
        options: SessionOptions,
    ) -> SessionId {
        if options.ask_registrar {
            self.machine.handle_purge(&handle);
        }
        let choose = match options.rule {
            SelectionRule::Registrar => ChosenBy::Registrar,
            SelectionRule::PowerOfTwoChoices => ChosenBy::Latency,
            SelectionRule::Prequal => ChosenBy::Probes,
        };
        let id = self
            .machine
            .handle_open_with_method(now, handle, None, choose);
        let session = UserSession {
            program,
            link: None,
            connection: 0,
            is_finishing: false,
            ended_in_order: false,
        };
        self.sessions.insert(id, session);
        id
    }

    /// Ends the session of a program that is gone.
    pub(super) fn close_session_of(&mut self, now: Duration, program: u64) {
        let is_of_program = |(_, session): &(&SessionId, &UserSession)| session.program == program;
        let session = self.sessions.iter().find(is_of_program).map(|(id, _)| *id);
        if let Some(id) = session {
            self.end_session(now, id);
        }
    }

    fn end_session(&mut self, now: Duration, id: SessionId) {
        self.sessions.remove(&id);
        self.machine.handle_close(now, id);
    }

    /// Records that a session's program has ended its data.
    pub(super) fn mark_finishing(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.is_finishing = true;
        }
    }

    /// Handles a program's complaint about its element, which makes the session fail over.
    pub(super) fn fail(&mut self, now: Duration, id: SessionId, connection: u64) {
        if self.link(id, connection).is_none() {
            return;
        }
        self.machine.handle_malfunction(now, id);
    }

    /// Handles the end of a link of the machine. An orderly end of a finished session ends the session too.
    pub(super) fn on_link_ended(
        &mut self,
        now: Duration,
        link: LinkId,
        in_order: bool,
        programs: &mut PoolPrograms,
    ) {
        self.remove_link(link);
        let id = self.machine.session_of(link);
        let session = id.and_then(|id| Some((id, self.sessions.get_mut(&id)?)));
        let Some((id, session)) = session.filter(|_| in_order) else {
            return self.machine.handle_lost(now, link);
        };
        if !session.is_finishing || session.link != Some(link) {
            session.ended_in_order = session.link == Some(link);
            return self.machine.handle_closed(now, link);
        }
        let last = FromPool::Session(SessionEvent::Finished);
        programs.send_and_close(session.program, &last);
        self.end_session(now, id);
    }

    /// Handles an event of the machine.
    pub(super) fn on_event(&mut self, event: Event, programs: &mut PoolPrograms) {
        match event {
            Event::Selected { request, element } => {
                let policy = element.policy.kind();
                self.on_resolved(request, policy, vec![element]);
            }
            Event::Resolved {
                request,
                policy,
                elements,
            } => self.on_resolved(request, policy, elements),
            Event::RequestFailed { request, error } => {
                if let Some(pending) = self.pending.remove(&request) {
                    send_reply(
                        pending.reply,
                        Err(resolve_error_body(&pending.handle, &error)),
                    );
                }
            }
            Event::SessionUp {
                session,
                link,
                element,
                resumed,
            } => {
                let connected = self.on_session_up(session, link, element, resumed);
                if let Some(connected) = connected {
                    self.send_to_program(session, connected, programs);
                }
            }
            Event::SessionBroken {
                session, element, ..
            } => {
                let Some(session_entry) = self.sessions.get_mut(&session) else {
                    return;
                };
                session_entry.link = None;
                session_entry.is_finishing = false;
                let broken = SessionEvent::ElementLost {
                    element: element.to_string(),
                    closed_in_order: std::mem::take(&mut session_entry.ended_in_order),
                };
                self.send_to_program(session, broken, programs);
            }
            Event::SessionFailed { session, error } => {
                if let Some(session_entry) = self.sessions.remove(&session) {
                    let reason = error.to_string();
                    let last = FromPool::Session(SessionEvent::Failed { reason });
                    programs.send_and_close(session_entry.program, &last);
                }
            }
            Event::NewHome { registrar } => {
                tracing::info!(?registrar, "found a registrar for pool users")
            }
            Event::HomeLost => tracing::warn!("lost the registrar for pool users"),
            Event::NoRegistrar => tracing::debug!("no registrar for pool users"),
            Event::ErrorReported(causes) => tracing::warn!(?causes, "a registrar reports errors"),
            // No caller watches pools here.
            Event::PoolChanged { .. } => {}
        }
    }

    /// Records a session's new connection. Returns the event for its program.
    fn on_session_up(
        &mut self,
        session: SessionId,
        link: LinkId,
        element: ElementId,
        resumed: bool,
    ) -> Option<SessionEvent> {
        let session_entry = self.sessions.get_mut(&session)?;
        session_entry.link = Some(link);
        session_entry.connection += 1;
        let connection = session_entry.connection;
        let transport = self
            .transports
            .get(&link)
            .map(api_conversion::transport_entry);
        let (transport, addresses) = transport.unwrap_or_default();
        Some(SessionEvent::Up {
            connection,
            element: element.to_string(),
            transport: transport.to_owned(),
            addresses,
            resumed,
        })
    }

    /// Sends an event to a session's program.
    pub(super) fn send_to_program(
        &self,
        session: SessionId,
        event: SessionEvent,
        programs: &mut PoolPrograms,
    ) {
        if let Some(program) = self.program(session) {
            programs.send(program, &FromPool::Session(event));
        }
    }

    fn on_resolved(&mut self, request: RequestId, policy: PolicyKind, elements: Vec<PoolElement>) {
        let Some(asked) = self.pending.remove(&request) else {
            return;
        };
        let entries = elements.iter().take(asked.items).map(element_entry);
        let answer = Resolution {
            handle: asked.handle.to_string(),
            policy: policy.to_string(),
            elements: entries.collect(),
        };
        send_reply(asked.reply, Ok(answer));
    }
}

fn resolve_error_body(handle: &PoolHandle, error: &ResolveError) -> ErrorBody {
    let what_to_do = match error {
        ResolveError::UnknownPool => "register an element: `holdfast pool register --help`",
        ResolveError::NoElement => "look at the elements: `holdfast pool show`",
        ResolveError::NoRegistrar => {
            "start one with `holdfast registrar`, or name one with --registrar ADDRESS"
        }
        ResolveError::Unanswered => {
            "try again; if that fails, see whether `holdfast pool peers` on the registrar's host answers, and \
             read the registrar's log: restart the registrar, or name another with --registrar ADDRESS"
        }
        ResolveError::Refused(_) => "check [access] in the registrar's configuration",
    };
    let error = match error {
        ResolveError::UnknownPool => format!("there is no pool `{handle}`"),
        ResolveError::NoRegistrar => "no registrar was reached".to_owned(),
        other => other.to_string(),
    };
    ErrorBody {
        error,
        what_to_do: what_to_do.to_owned(),
    }
}
