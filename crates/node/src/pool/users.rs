//! Resolutions and sessions of this host's pool users.

use std::collections::HashMap;

use holdfast_api::control::{ErrorBody, Reported, Resolution, ResolveQuery, UnreachableReport};
use holdfast_api::pool::{Choose, FromPool, SessionEvent, SessionOptions};
use holdfast_proto::pool_element::Link;
use holdfast_proto::pool_user::{Choose as ChosenBy, Event, RequestId, ResolveError, SessionId};
use holdfast_wire::rserpool::{ElementId, PolicyKind, PoolElement, PoolHandle, Transport};

use super::event_loop::Daemon;
use super::links::Owner;
use super::roles::send;
use crate::entries::{self, element_entry, handle_of};
use crate::mailbox::Reply;

/// Maximum number of elements in a resolution.
const ITEMS_MAX: u32 = 4096;

/// A caller that waits for the machine's answer.
struct Asked {
    reply: Reply<Resolution>,
    handle: PoolHandle,
    items: usize,
}

/// A session's program and state.
struct Session {
    program: u64,
    link: Option<Link>,
    /// Number of the last connection.
    connection: u64,
    /// True if the program has signalled the end of its data; if the element then ends too, the session has ended.
    finishing: bool,
    /// True if the element ended the connection in order.
    in_order: bool,
}

/// Requests and sessions of the users.
#[derive(Default)]
pub(super) struct Users {
    asked: HashMap<RequestId, Asked>,
    sessions: HashMap<SessionId, Session>,
    /// Transport addresses of sessions' links.
    places: HashMap<Link, Transport>,
}

impl Users {
    /// Returns the number of sessions.
    pub(super) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Records the element that a session connects to.
    pub(super) fn seeks(&mut self, link: Link, at: Transport) {
        self.places.insert(link, at);
    }

    /// Removes a link that a session has given up.
    pub(super) fn left(&mut self, link: Link) {
        self.places.remove(&link);
    }

    /// Returns the link of this connection of a session, if it is current.
    pub(super) fn link(&self, session: SessionId, connection: u64) -> Option<Link> {
        let session = self.sessions.get(&session)?;
        session.link.filter(|_| session.connection == connection)
    }

    /// Returns the program of the session.
    pub(super) fn program(&self, session: SessionId) -> Option<u64> {
        Some(self.sessions.get(&session)?.program)
    }
}

impl Daemon {
    /// Resolves a handle.
    pub(super) fn resolve(&mut self, text: &str, query: &ResolveQuery, reply: Reply<Resolution>) {
        let handle = match handle_of(text) {
            Ok(handle) => handle,
            Err(error) => return send(reply, Err(error)),
        };
        let now = self.now();
        let items = query.items.map(|items| items.clamp(1, ITEMS_MAX));
        let request = match query.cached {
            Some(true) => self.user.handle_resolve(now, handle.clone()),
            _ => self.user.handle_resolve_anew(now, handle.clone(), items),
        };
        let items = items.map_or(usize::MAX, |items| items as usize);
        self.ask(request, handle, items, reply);
    }

    /// Selects an element.
    pub(super) fn select(&mut self, text: &str, reply: Reply<Resolution>) {
        let handle = match handle_of(text) {
            Ok(handle) => handle,
            Err(error) => return send(reply, Err(error)),
        };
        let request = self.user.handle_select(self.now(), handle.clone());
        self.ask(request, handle, 1, reply);
    }

    fn ask(
        &mut self,
        request: RequestId,
        handle: PoolHandle,
        items: usize,
        reply: Reply<Resolution>,
    ) {
        let asked = Asked {
            reply,
            handle,
            items,
        };
        self.users.asked.insert(request, asked);
        self.carry_out(Owner::User);
    }

    /// Handles a report of an unreachable element.
    pub(super) fn unreachable(
        &mut self,
        report: &UnreachableReport,
    ) -> Result<Reported, ErrorBody> {
        let handle = handle_of(&report.handle)?;
        let id = u32::from_str_radix(&report.id, 16).map_err(|_| ErrorBody {
            error: format!("`{}` is no element's number", report.id),
            what_to_do: "write its eight hexadecimal digits, as `holdfast pool resolve` shows them"
                .to_owned(),
        })?;
        let id = ElementId(id);
        let now = self.now();
        self.user.handle_unreachable(now, &handle, id);
        self.carry_out(Owner::User);
        Ok(Reported { id: id.to_string() })
    }

    /// Opens a session for a program.
    pub(super) fn open_session(
        &mut self,
        program: u64,
        handle: PoolHandle,
        options: SessionOptions,
    ) -> SessionId {
        let now = self.now();
        if options.anew {
            self.user.handle_purge(&handle);
        }
        let choose = match options.choose {
            Choose::Registrar => ChosenBy::Registrar,
            Choose::P2c => ChosenBy::Latency,
            Choose::Prequal => ChosenBy::Probes,
        };
        let id = self.user.handle_open_choosing(now, handle, None, choose);
        let session = Session {
            program,
            link: None,
            connection: 0,
            finishing: false,
            in_order: false,
        };
        self.users.sessions.insert(id, session);
        self.carry_out(Owner::User);
        id
    }

    /// Ends the session of a program that is gone.
    pub(super) fn close_session_of(&mut self, program: u64) {
        let own = |(_, session): &(&SessionId, &Session)| session.program == program;
        let found = self.users.sessions.iter().find(own).map(|(id, _)| *id);
        if let Some(id) = found {
            self.end_session(id);
        }
    }

    fn end_session(&mut self, id: SessionId) {
        self.users.sessions.remove(&id);
        let now = self.now();
        self.user.handle_close(now, id);
        self.carry_out(Owner::User);
    }

    /// Handles a program's end of data.
    pub(super) fn finish(&mut self, id: SessionId, connection: u64) {
        let link = self.users.link(id, connection);
        let finishing = link.is_some_and(|link| self.finish_stream(link));
        if let Some(session) = self.users.sessions.get_mut(&id) {
            session.finishing |= finishing;
        }
    }

    /// Handles a program's complaint about its element, which makes the session fail over.
    pub(super) fn fail_session(&mut self, id: SessionId, connection: u64) {
        if self.users.link(id, connection).is_none() {
            return;
        }
        let now = self.now();
        self.user.handle_failed(now, id);
        self.carry_out(Owner::User);
    }

    /// Handles the end of a link of the user's machine. An orderly end of a finished session ends the session too.
    pub(super) fn user_lost(&mut self, link: Link, in_order: bool) {
        self.users.left(link);
        let now = self.now();
        let id = self.user.session_of(link);
        let session = id.and_then(|id| Some((id, self.users.sessions.get_mut(&id)?)));
        let Some((id, session)) = session.filter(|_| in_order) else {
            return self.user.handle_lost(now, link);
        };
        if !session.finishing || session.link != Some(link) {
            session.in_order = session.link == Some(link);
            return self.user.handle_ended(now, link);
        }
        let last = FromPool::Session(SessionEvent::Finished);
        self.programs.tell_and_end(session.program, &last);
        self.end_session(id);
    }

    /// Handles an event of the user's machine.
    pub(super) fn user_event(&mut self, event: Event) {
        match event {
            Event::Selected { request, element } => {
                let policy = element.policy.kind();
                self.resolved(request, policy, vec![element]);
            }
            Event::Resolved {
                request,
                policy,
                elements,
            } => self.resolved(request, policy, elements),
            Event::Failed { request, error } => {
                if let Some(asked) = self.users.asked.remove(&request) {
                    send(asked.reply, Err(unresolved(&asked.handle, &error)));
                }
            }
            Event::SessionUp {
                session,
                link,
                element,
                resumed,
            } => self.session_up(session, link, element, resumed),
            Event::SessionBroken {
                session, element, ..
            } => {
                let Some(own) = self.users.sessions.get_mut(&session) else {
                    return;
                };
                own.link = None;
                own.finishing = false;
                let broken = SessionEvent::Broken {
                    element: element.to_string(),
                    in_order: std::mem::take(&mut own.in_order),
                };
                self.tell_user(session, broken);
            }
            Event::SessionFailed { session, error } => {
                if let Some(own) = self.users.sessions.remove(&session) {
                    let reason = error.to_string();
                    let last = FromPool::Session(SessionEvent::Failed { reason });
                    self.programs.tell_and_end(own.program, &last);
                }
            }
            Event::NewHome { registrar } => tracing::info!(?registrar, "users ask a registrar"),
            Event::HomeLost => tracing::warn!("the users' registrar is lost"),
            Event::NoRegistrar => tracing::debug!("no registrar for users"),
            Event::Reported(causes) => tracing::warn!(?causes, "a registrar reports errors"),
            // No caller watches pools here.
            Event::Changed { .. } => {}
        }
    }

    fn session_up(&mut self, session: SessionId, link: Link, element: ElementId, resumed: bool) {
        let Some(own) = self.users.sessions.get_mut(&session) else {
            return;
        };
        own.link = Some(link);
        own.connection += 1;
        let connection = own.connection;
        let at = self.users.places.get(&link).map(entries::transport);
        let (transport, addresses) = at.unwrap_or_default();
        let event = SessionEvent::Up {
            connection,
            element: element.to_string(),
            transport: transport.to_owned(),
            addresses,
            resumed,
        };
        self.tell_user(session, event);
    }

    /// Sends an event to a session's program.
    pub(super) fn tell_user(&mut self, session: SessionId, event: SessionEvent) {
        if let Some(program) = self.users.program(session) {
            self.programs.tell(program, &FromPool::Session(event));
        }
    }

    fn resolved(&mut self, request: RequestId, policy: PolicyKind, elements: Vec<PoolElement>) {
        let Some(asked) = self.users.asked.remove(&request) else {
            return;
        };
        let entries = elements.iter().take(asked.items).map(element_entry);
        let answer = Resolution {
            handle: asked.handle.to_string(),
            policy: policy.to_string(),
            elements: entries.collect(),
        };
        send(asked.reply, Ok(answer));
    }
}

fn unresolved(handle: &PoolHandle, error: &ResolveError) -> ErrorBody {
    let what_to_do = match error {
        ResolveError::UnknownPool => "register an element: `holdfast pool register --help`",
        ResolveError::NoElement => "look at the elements: `holdfast pool show`",
        ResolveError::NoRegistrar => {
            "start one with `holdfast registrar`, or say where one is with --registrar ADDRESS"
        }
        ResolveError::Unanswered => {
            "ask again; if it stays so, `holdfast pool peers` on the registrar's host shows whether that still answers, and its log \
             why not: start it again, or name another with --registrar ADDRESS"
        }
        ResolveError::Refused(_) => "look at [access] in the registrar's configuration",
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
