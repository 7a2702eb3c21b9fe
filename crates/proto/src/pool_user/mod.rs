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

mod choose;
mod config;
mod event;
mod pool;
mod probing;
mod resolve;
mod selection;
mod session;
#[cfg(test)]
mod tests;

pub use crate::hunt::{HuntConfig, Link, Output as LinkOutput};
pub use choose::Choose;
pub use config::{Config, OwnCard};
pub use event::{Event, ResolveError};

use crate::hunt::{Change, Hunt, Reach};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle, RegistrarId, Transport};
use pool::Pool;
use probing::Ways;
use resolve::{Pending, Waiting};
use session::Session;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// An action for the daemon.
pub type Output = LinkOutput<Event>;

/// Identifies a request, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Identifies a session, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// Purpose of a timer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// Answer to a request about a pool.
    Answer(PoolHandle),
    /// Cached data of a pool.
    Cache(PoolHandle),
    Session(SessionId),
    /// Idle link for probes.
    Way(Link),
}

/// A pool user; see the module documentation.
#[derive(Debug)]
pub struct PoolUser {
    config: Config,
    hunt: Hunt<Event>,
    /// Boxed: most users have one pool, and a node of the map has space for eleven.
    pools: BTreeMap<PoolHandle, Box<Pool>>,
    pending: BTreeMap<PoolHandle, Pending>,
    /// Reports that wait for a registrar.
    reports: BTreeSet<(PoolHandle, ElementId)>,
    sessions: BTreeMap<SessionId, Session>,
    links: BTreeMap<Link, SessionId>,
    ways: Ways,
    timers: BTreeSet<(Duration, Timer)>,
    numbers: u64,
}

impl PoolUser {
    /// Returns an idle machine.
    pub fn new(config: Config) -> PoolUser {
        PoolUser {
            hunt: Hunt::new(config.hunt.clone(), config.seed, Reach::SctpAndTcp),
            config,
            pools: BTreeMap::new(),
            pending: BTreeMap::new(),
            reports: BTreeSet::new(),
            sessions: BTreeMap::new(),
            links: BTreeMap::new(),
            ways: Ways::default(),
            timers: BTreeSet::new(),
            numbers: 0,
        }
    }

    /// Requests one element, selected by the pool's policy: [`Event::Selected`] or [`Event::Failed`] follows.
    pub fn handle_select(&mut self, now: Duration, handle: PoolHandle) -> RequestId {
        let request = RequestId(self.number());
        self.want(now, handle, Waiting::One(request));
        request
    }

    /// Requests the pool's elements: [`Event::Resolved`] or [`Event::Failed`] follows.
    pub fn handle_resolve(&mut self, now: Duration, handle: PoolHandle) -> RequestId {
        let request = RequestId(self.number());
        self.want(now, handle, Waiting::All(request));
        request
    }

    /// Requests the pool's elements from a registrar, without the cache; `items` is the most elements wanted:
    /// [`Event::Resolved`] or [`Event::Failed`] follows.
    pub fn handle_resolve_anew(
        &mut self,
        now: Duration,
        handle: PoolHandle,
        items: Option<u32>,
    ) -> RequestId {
        let request = RequestId(self.number());
        self.ask_for(now, handle, Some(Waiting::All(request)), items);
        request
    }

    /// Invalidates the cached data of a pool: the next request goes to a registrar.
    pub fn handle_purge(&mut self, handle: &PoolHandle) {
        if let Some(pool) = self.pools.get_mut(handle) {
            pool.fetched = None;
        }
    }

    /// Starts to report changes of a pool's elements ([`Event::Changed`]), as the registrar sends them, or by a request
    /// every [`Config::fresh_for`].
    pub fn handle_watch(&mut self, now: Duration, handle: PoolHandle) {
        self.pools.entry(handle.clone()).or_default().watched = true;
        self.ask(now, handle, None);
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
        if pool.is_some_and(|pool| pool.is_used(id)) {
            self.unreachable(now, handle, id);
        }
    }

    /// Handles the success of a [`LinkOutput::Connect`].
    pub fn handle_connected(&mut self, now: Duration, link: Link) {
        if let Some(&session) = self.links.get(&link) {
            return self.session_connected(session);
        }
        if self.ways.contains(link) {
            return;
        }
        let change = self.hunt.handle_connected(link);
        self.changed(now, change);
    }

    /// Handles a link that could not be made, or was lost. The daemon treats a link with an undeliverable message as
    /// lost, and closes it.
    pub fn handle_lost(&mut self, now: Duration, link: Link) {
        if let Some(&session) = self.links.get(&link) {
            return self.session_lost(now, session);
        }
        if self.ways.contains(link) {
            return self.way_lost(now, link);
        }
        let change = self.hunt.handle_lost(now, link);
        self.changed(now, change);
    }

    /// Handles an orderly close by the other side. A session continues as after a loss, but without a report to the
    /// registrar, because its element can be reached.
    pub fn handle_ended(&mut self, now: Duration, link: Link) {
        match self.links.get(&link) {
            Some(&session) => self.session_ended(now, session),
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
    pub fn handle_message(&mut self, now: Duration, link: Link, message: Message) {
        if let Some(&session) = self.links.get(&link) {
            return self.session_message(now, session, message);
        }
        if let Message::ProbeAnswer {
            handle,
            id,
            in_flight,
            latency_us,
        } = &message
        {
            return self.probe_answered(now, link, (handle, *id), (*in_flight, *latency_us));
        }
        if self.hunt.home() != Some(link) {
            return;
        }
        self.hunt.handle_heard(link);
        match message {
            Message::HandleResolutionResponse {
                updates,
                handle,
                policy,
                elements,
                causes,
            } => {
                if causes.is_empty() {
                    self.resolved(now, handle, updates.then_some(link), policy, elements);
                } else {
                    self.refused(now, handle, causes);
                }
            }
            Message::Error(causes) => self.hunt.event(Event::Reported(causes)),
            _ => {}
        }
    }

    /// Handles all timers due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        let change = self.hunt.handle_timeout(now);
        self.changed(now, change);
        while let Some((due, _)) = self.timers.first()
            && *due <= now
        {
            match self.timers.pop_first() {
                Some((_, Timer::Answer(handle))) => self.answer_due(now, handle),
                Some((_, Timer::Cache(handle))) => self.cache_due(now, handle),
                Some((_, Timer::Session(session))) => self.session_due(now, session),
                Some((_, Timer::Way(link))) => self.way_due(now, link),
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
    pub fn session_of(&self, link: Link) -> Option<SessionId> {
        self.links.get(&link).copied()
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
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

    fn changed(&mut self, now: Duration, change: Option<Change>) {
        match change {
            Some(Change::Found) => {
                self.hunt.event(Event::NewHome {
                    registrar: self.hunt.home_id(),
                });
                self.ask_all(now);
            }
            Some(Change::Lost) => {
                self.hunt.event(Event::HomeLost);
                self.none_asked();
            }
            Some(Change::NotFound) => self.hunt.event(Event::NoRegistrar),
            None => {}
        }
    }
}
