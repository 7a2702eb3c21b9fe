//! A pool user's side of ASAP (RFC 5352 sections 3.3 and 3.5 to 3.9): handle resolution with a cache, reports of
//! unreachable elements, and sessions that fail over to another element.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs until there are none and wakes it at `poll_timeout`.
//!
//! A pool has at most one open request at a time, and the machine leaves a registrar that does not answer. A response
//! therefore always belongs to the last request, although messages have no numbers.
//!
//! A session is a link to an element, with a control channel beside the data if the element has one. Data passes
//! directly between the daemon and its client program. When the link is lost, the session turns to the next element at
//! once: from the business card or from the cached pool, however old. The cookie is sent with the connection, so that
//! the element has the state one and a half round trips after the loss was noticed, and the user continues after two.

mod cached_pool;
mod choice_method;
mod config;
mod event;
mod position_selector;
mod probe_links;
mod resolve;
mod session;
#[cfg(test)]
mod tests;

pub use crate::server_hunt::{LinkId, Output as LinkOutput, ServerHuntConfig};
pub use choice_method::ChoiceMethod;
pub use config::{OwnBusinessCard, PoolUserConfig};
pub use event::{Event, ResolveError};

use crate::server_hunt::{HomeChange, RegistrarTransports, ServerHunt};
use cached_pool::CachedPool;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle, RegistrarId, Transport};
use probe_links::ProbeLinks;
use resolve::{PendingResolution, ResolutionRecipient};
use session::Session;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// An action that the pool user's machine asks of the daemon.
pub type Output = LinkOutput<Event>;

/// Identifies a request, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Identifies a session, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// Purpose of a timer of the pool user's machine.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// Time limit of a registrar's answer about a pool.
    Answer(PoolHandle),
    /// Expiry of a pool's cache entry.
    Cache(PoolHandle),
    Session(SessionId),
    /// Idle link for probes.
    ProbeLink(LinkId),
}

/// A pool user; see the module documentation.
#[derive(Debug)]
pub struct PoolUser {
    config: PoolUserConfig,
    hunt: ServerHunt<Event>,
    /// Boxed: most users have one pool, and a node of the map has space for eleven.
    pools: BTreeMap<PoolHandle, Box<CachedPool>>,
    pending_resolutions: BTreeMap<PoolHandle, PendingResolution>,
    /// Reports that wait for a registrar.
    pending_reports: BTreeSet<(PoolHandle, ElementId)>,
    sessions: BTreeMap<SessionId, Session>,
    session_links: BTreeMap<LinkId, SessionId>,
    probe_links: ProbeLinks,
    timers: BTreeSet<(Duration, Timer)>,
    last_number: u64,
}

impl PoolUser {
    /// Returns an idle machine.
    pub fn new(config: PoolUserConfig) -> PoolUser {
        PoolUser {
            hunt: ServerHunt::new(
                config.hunt.clone(),
                config.seed,
                RegistrarTransports::SctpAndTcp,
            ),
            config,
            pools: BTreeMap::new(),
            pending_resolutions: BTreeMap::new(),
            pending_reports: BTreeSet::new(),
            sessions: BTreeMap::new(),
            session_links: BTreeMap::new(),
            probe_links: ProbeLinks::default(),
            timers: BTreeSet::new(),
            last_number: 0,
        }
    }

    /// Requests one element, selected by the pool's policy: [`Event::Selected`] or [`Event::RequestFailed`] follows.
    pub fn handle_select(&mut self, now: Duration, handle: PoolHandle) -> RequestId {
        let request = RequestId(self.next_number());
        self.request_pool(now, handle, ResolutionRecipient::Selection(request));
        request
    }

    /// Requests the pool's elements: [`Event::Resolved`] or [`Event::RequestFailed`] follows.
    pub fn handle_resolve(&mut self, now: Duration, handle: PoolHandle) -> RequestId {
        let request = RequestId(self.next_number());
        self.request_pool(now, handle, ResolutionRecipient::Resolution(request));
        request
    }

    /// Requests the pool's elements from a registrar, without the cache; `items` is the most elements wanted:
    /// [`Event::Resolved`] or [`Event::RequestFailed`] follows.
    pub fn handle_resolve_uncached(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        items: Option<u32>,
    ) -> RequestId {
        let request = RequestId(self.next_number());
        self.request_items(
            now,
            handle,
            Some(ResolutionRecipient::Resolution(request)),
            items,
        );
        request
    }

    /// Invalidates the cached data of a pool: the next request goes to a registrar.
    pub fn handle_purge(&mut self, handle: &PoolHandle) {
        if let Some(pool) = self.pools.get_mut(handle) {
            pool.fetched = None;
        }
    }

    /// Starts to report changes of a pool's elements ([`Event::PoolChanged`]), as the registrar sends them, or by a request
    /// every [`PoolUserConfig::cache_fresh_for`].
    pub fn handle_watch(&mut self, now: Duration, handle: PoolHandle) {
        self.pools.entry(handle.clone()).or_default().watched = true;
        self.request_resolution(now, handle, None);
    }

    /// Ends [`PoolUser::handle_watch`].
    pub fn handle_unwatch(&mut self, handle: &PoolHandle) {
        if let Some(pool) = self.pools.get_mut(handle) {
            pool.watched = false;
        }
    }

    /// Handles a client program's failure to reach an element that this machine had selected for it. The element is not
    /// selected for a while, and the registrar is informed. The machine does the same itself for its own links.
    ///
    /// An element that was never selected is ignored: "the ASAP Endpoint MUST NOT send an ASAP_ENDPOINT_UNREACHABLE
    /// message unless the user has made a previous request to send data to the PE" (RFC 5352 section 3.5).
    pub fn handle_unreachable(&mut self, now: Duration, handle: &PoolHandle, id: ElementId) {
        let pool = self.pools.get(handle);
        if pool.is_some_and(|pool| pool.was_selected(id)) {
            self.report_unreachable(now, handle, id);
        }
    }

    /// Handles the success of a [`LinkOutput::Connect`].
    pub fn handle_connected(&mut self, now: Duration, link: LinkId) {
        if let Some(&session) = self.session_links.get(&link) {
            return self.on_session_connected(session);
        }
        if self.probe_links.contains(link) {
            return;
        }
        let change = self.hunt.handle_connected(link);
        self.on_home_change(now, change);
    }

    /// Handles a link that could not be made, or was lost. The daemon treats a link with an undeliverable message as
    /// lost, and closes it.
    pub fn handle_lost(&mut self, now: Duration, link: LinkId) {
        if let Some(&session) = self.session_links.get(&link) {
            return self.on_session_lost(now, session);
        }
        if self.probe_links.contains(link) {
            return self.on_probe_link_lost(now, link);
        }
        let change = self.hunt.handle_lost(now, link);
        self.on_home_change(now, change);
    }

    /// Handles an orderly close by the other side. A session continues as after a loss, but without a report to the
    /// registrar, because its element can be reached.
    pub fn handle_closed(&mut self, now: Duration, link: LinkId) {
        match self.session_links.get(&link) {
            Some(&session) => self.on_session_closed(now, session),
            None => self.handle_lost(now, link),
        }
    }

    /// Handles a registrar's multicast announce, with the fields of `Message::ServerAnnounce`; `source` is the
    /// datagram's source address, with ASAP's port.
    pub fn handle_announce(
        &mut self,
        now: Duration,
        registrar: RegistrarId,
        transports: Vec<Transport>,
        source: Option<Transport>,
    ) {
        self.hunt
            .handle_announce(now, registrar, transports, source);
    }

    /// Handles a message from a registrar, from a probed element, or on a session's control channel.
    pub fn handle_message(&mut self, now: Duration, link: LinkId, message: Message) {
        if let Some(&session) = self.session_links.get(&link) {
            return self.on_session_message(now, session, message);
        }
        if let Message::ProbeAnswer {
            handle,
            id,
            in_flight,
            latency_us,
        } = &message
        {
            return self.on_probe_answer(now, link, (handle, *id), (*in_flight, *latency_us));
        }
        if self.hunt.home() != Some(link) {
            return;
        }
        self.hunt.note_message(link);
        match message {
            Message::HandleResolutionResponse {
                updates,
                handle,
                policy,
                elements,
                causes,
            } => {
                if causes.is_empty() {
                    self.on_resolved(now, handle, updates.then_some(link), policy, elements);
                } else {
                    self.on_refused(now, handle, causes);
                }
            }
            Message::Error(causes) => self.hunt.push_event(Event::ErrorReported(causes)),
            _ => {}
        }
    }

    /// Handles all timers due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        let change = self.hunt.handle_timeout(now);
        self.on_home_change(now, change);
        while let Some((due, _)) = self.timers.first()
            && *due <= now
        {
            match self.timers.pop_first() {
                Some((_, Timer::Answer(handle))) => self.on_answer_timeout(now, handle),
                Some((_, Timer::Cache(handle))) => self.on_cache_timeout(now, handle),
                Some((_, Timer::Session(session))) => self.on_session_timeout(now, session),
                Some((_, Timer::ProbeLink(link))) => self.on_probe_link_due(now, link),
                None => {}
            }
        }
    }

    /// Returns the next output, none if there is none left.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.hunt.outputs.pop_front()
    }

    /// Returns the time at which to call `handle_timeout`, none for never. The time may be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let timers = self.timers.first().map(|(due, _)| *due);
        timers.into_iter().chain(self.hunt.poll_timeout()).min()
    }

    /// Returns the home registrar's number, if there is one and it has named its number.
    pub fn home(&self) -> Option<RegistrarId> {
        self.hunt.home_id()
    }

    /// Returns the session that uses the link, if any.
    pub fn session_of(&self, link: LinkId) -> Option<SessionId> {
        self.session_links.get(&link).copied()
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Moves a timer from its old time, if it was set, to its new time, if any.
    fn set_timer(&mut self, timer: Timer, from: Option<Duration>, to: Option<Duration>) {
        if let Some(from) = from {
            self.timers.remove(&(from, timer.clone()));
        }
        if let Some(to) = to {
            self.timers.insert((to, timer));
        }
    }

    fn on_home_change(&mut self, now: Duration, change: Option<HomeChange>) {
        match change {
            Some(HomeChange::Found) => {
                self.hunt.push_event(Event::NewHome {
                    registrar: self.hunt.home_id(),
                });
                self.send_all_pending(now);
            }
            Some(HomeChange::Lost) => {
                self.hunt.push_event(Event::HomeLost);
                self.mark_all_unsent();
            }
            Some(HomeChange::NotFound) => self.hunt.push_event(Event::NoRegistrar),
            None => {}
        }
    }
}
