//! A pool user's side of ASAP (RFC 5352 sections 3.3 and 3.5 to 3.9): resolution of handles with a cache, reports of
//! elements that were not reached, and sessions that go on at another element.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs until there are none and wakes it at `poll_timeout`.
//!
//! A pool has at most one question open at a time, and a registrar that does not answer is left: so an answer always is to
//! the question last asked, though messages have no numbers.
//!
//! A session is a link to an element with a control channel beside the data, if the element has one. Data goes straight
//! between the daemon and whoever uses it. When the link is lost, the session takes the next element: at once, from the
//! business card or what is known of the pool, however old. The cookie goes out with the connection, so that the element
//! has the state a round trip and a half after the loss was seen, and the user goes on after two.

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

/// Something for the daemon to do.
pub type Output = LinkOutput<Event>;

/// Names a request, unique in the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Names a session, unique in the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// What a timer is for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// A question about a pool.
    Answer(PoolHandle),
    /// What is known of a pool.
    Cache(PoolHandle),
    Session(SessionId),
    /// A link that probes go by.
    Way(Link),
}

/// The machine. See the module's text.
#[derive(Debug)]
pub struct PoolUser {
    config: Config,
    hunt: Hunt<Event>,
    /// Boxed: most users have one, and a node of the map has room for eleven.
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
    /// A machine with nothing to do.
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

    /// Asks for one element, chosen by the pool's policy: [`Event::Selected`] or [`Event::Failed`] follows.
    pub fn handle_select(&mut self, now: Duration, handle: PoolHandle) -> RequestId {
        let request = RequestId(self.number());
        self.want(now, handle, Waiting::One(request));
        request
    }

    /// Asks for the pool's elements: [`Event::Resolved`] or [`Event::Failed`] follows.
    pub fn handle_resolve(&mut self, now: Duration, handle: PoolHandle) -> RequestId {
        let request = RequestId(self.number());
        self.want(now, handle, Waiting::All(request));
        request
    }

    /// Asks a registrar for the pool's elements whatever is known here, for so many at most where `items` says:
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

    /// Forgets what is known of a pool: the next request is asked of a registrar.
    pub fn handle_purge(&mut self, handle: &PoolHandle) {
        if let Some(pool) = self.pools.get_mut(handle) {
            pool.fetched = None;
        }
    }

    /// Tells of a pool's elements from now on ([`Event::Changed`]): as the registrar tells, or by asking every
    /// [`Config::fresh_for`].
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

    /// Somebody did not reach an element that this machine had sent them to. It is not chosen for a while, and the registrar
    /// is told. For links of this machine that is done without being asked.
    ///
    /// An element that nobody was sent to is ignored: "the ASAP Endpoint MUST NOT send an ASAP_ENDPOINT_UNREACHABLE message
    /// unless the user has made a previous request to send data to the PE" (RFC 5352 section 3.5).
    pub fn handle_unreachable(&mut self, now: Duration, handle: &PoolHandle, id: ElementId) {
        let pool = self.pools.get(handle);
        if pool.is_some_and(|pool| pool.is_used(id)) {
            self.unreachable(now, handle, id);
        }
    }

    /// A link of this machine is made.
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

    /// A link could not be made, or was lost. One on which a message could not be delivered counts as lost; the daemon closes it.
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

    /// The other side has ended a link in order. A session goes on as after a loss; but its element can be reached, so no registrar is
    /// told otherwise.
    pub fn handle_ended(&mut self, now: Duration, link: Link) {
        match self.links.get(&link) {
            Some(&session) => self.session_ended(now, session),
            None => self.handle_lost(now, link),
        }
    }

    /// A registrar's announce by multicast, as `Message::ServerAnnounce` has it; `source` is where it came from, with
    /// ASAP's port.
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

    /// A message from a registrar, from an element that was probed, or on a session's control channel.
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

    /// Time has passed.
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

    /// The next thing to do, none when all is done.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.hunt.outputs.pop_front()
    }

    /// When to call `handle_timeout`, none for never. May be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let timers = self.timers.first().map(|(due, _)| *due);
        timers.into_iter().chain(self.hunt.poll_timeout()).min()
    }

    /// Who the home registrar is, if there is one and it has said so.
    pub fn home(&self) -> Option<RegistrarId> {
        self.hunt.home_id()
    }

    /// The session whose element the link leads to, if it is a session's.
    pub fn session_of(&self, link: Link) -> Option<SessionId> {
        self.links.get(&link).copied()
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Moves a timer from where it was, if it was set, to where it is to be, if anywhere.
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
