//! A registrar of Reliable Server Pooling: ASAP (RFC 5352) with elements and users, ENRP (RFC 5353) with its peers.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs until there are none, and wakes it at `poll_timeout`. An
//! association is reliable and ordered, as SCTP's are; that its sends may be dropped (a full buffer) is provided for.
//! Messages are bytes on both sides: each is parsed and encoded once, one encoding goes to all peers, and an
//! operation of an element or a user allocates nothing.
//!
//! What never happens, whatever is lost, late, repeated or killed: an element that answers its keep-alives and registers
//! anew is not lost for longer than it takes to register again. What always happens, once registrars reach each
//! other: their views become equal, and each element has one home.
//!
//! Whose an element is when two registrars say that it is theirs: an update is newer than what was before, so
//! its sender's. But two updates may cross, and a handle table says nothing about time: then the registrar with
//! the lower number asks the element to be its own (a keep-alive with the H flag), and announces it when that is
//! answered; the other does nothing.
//!
//! Two may so yield an element to each other, and an element may follow one that has yielded it. Hence who has yielded an element
//! remembers that: it asks the element when its home does not list it, and takes an answer to its own keep-alive with the H flag as
//! newer than what the home said. And a home whose element has ended its association asks it so with the next keep-alive.

mod access;
mod alive;
mod asap;
mod asked;
mod associations;
mod config;
mod dial;
pub mod distance;
mod enrp;
mod entry;
mod event;
mod granted;
mod hosts;
mod outbox;
mod parked;
mod peers;
mod refresh;
mod register;
mod schedule;
mod start;
mod strangers;
mod subscriptions;
mod sync;
mod table;
mod takeover;
mod view;

pub use crate::life::LifeUnit;
pub use access::{Access, Allow, Prefix, PrefixError, Who};
pub use config::{Config, Limits, Settings, TakeoverRace};
pub use event::{Counters, Event, Gone};
pub use peers::PeerStatus;

use associations::Associations;
use bytes::Bytes;
use dial::Dials;
use entry::Entry;
use holdfast_handlespace::{Coming, ElementKey, Handlespace};
use holdfast_wire::rserpool::{RegistrarId, asap as asap_wire, enrp as enrp_wire, peek};
use outbox::Outbox;
use peers::Peer;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use refresh::Refreshes;
use schedule::{Schedule, Timer};
use start::Start;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use strangers::Strangers;
use subscriptions::Subscriptions;
use takeover::Bequest;

/// An association, as the daemon numbers them: unique among those that are up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AssociationId(pub u64);

/// An attempt to connect, unique in the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DialId(pub u64);

/// Which protocol a message or an endpoint speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// RFC 5352.
    Asap,
    /// RFC 5353.
    Enrp,
}

impl Protocol {
    /// Its payload protocol identifier in SCTP.
    pub fn ppid(self) -> u32 {
        match self {
            Protocol::Asap => asap_wire::PPID,
            Protocol::Enrp => enrp_wire::PPID,
        }
    }
}

/// Something for the daemon to do. A clone of a message shares its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields that say no more than their type")]
pub enum Output {
    /// Send this on an association.
    Send {
        to: AssociationId,
        protocol: Protocol,
        message: Bytes,
    },
    /// Send the same on all of these.
    SendMany {
        to: Arc<[AssociationId]>,
        protocol: Protocol,
        message: Bytes,
    },
    /// Make an association with the endpoint that has these addresses; [`Registrar::handle_up`] or
    /// [`Registrar::handle_dial_failed`] follows. If there is one already, the former, with its number.
    Connect {
        dial: DialId,
        protocol: Protocol,
        addresses: Vec<SocketAddr>,
    },
    /// Send this to the protocol's multicast group.
    Multicast { protocol: Protocol, message: Bytes },
    /// Tell the association's round trip now and then, as long as [`Registrar::measures`] says that it matters.
    Measure(AssociationId),
    /// End an association at once; [`Registrar::handle_down`] follows.
    Abort(AssociationId),
    /// Tell whoever is interested.
    Event(Event),
}

/// The machine. See the module's text.
#[derive(Debug)]
pub struct Registrar {
    config: Config,
    space: Handlespace<Entry>,
    associations: Associations,
    dials: Dials,
    peers: BTreeMap<RegistrarId, Peer>,
    /// Own elements that a peer also says are its own, while they are asked.
    contested: HashMap<ElementKey, RegistrarId>,
    /// Of registrars that are no more.
    bequests: BTreeMap<RegistrarId, Bequest>,
    /// When each registrar was last heard to announce itself to elements.
    announcers: BTreeMap<RegistrarId, Duration>,
    /// Elements that have a distance.
    distant: usize,
    strangers: Strangers,
    subscriptions: Subscriptions,
    refreshes: Refreshes,
    start: Start,
    mentor_failures: usize,
    mentor_dial: Option<DialId>,
    /// Handle tables that are being sent.
    downloads: usize,
    schedule: Schedule,
    out: Outbox,
    random: SmallRng,
    counters: Counters,
}

impl Registrar {
    /// A registrar that begins at `now`.
    pub fn new(now: Duration, config: Config) -> Registrar {
        let mut registrar = Registrar {
            space: Handlespace::new(config.seed),
            associations: Associations::new(config.seed),
            dials: Dials::default(),
            peers: BTreeMap::new(),
            contested: HashMap::new(),
            bequests: BTreeMap::new(),
            announcers: BTreeMap::new(),
            distant: 0,
            strangers: Strangers::default(),
            subscriptions: Subscriptions::default(),
            refreshes: Refreshes::default(),
            start: Start::default(),
            mentor_failures: 0,
            mentor_dial: None,
            downloads: 0,
            schedule: Schedule::default(),
            out: Outbox::new(config.id),
            random: SmallRng::seed_from_u64(config.seed),
            counters: Counters::default(),
            config,
        };
        registrar.begin(now);
        registrar
    }

    /// An association is there: begun by the other side, or by an [`Output::Connect`]. `addresses` are those of the other
    /// endpoint that the transport has confirmed, the first being the one that the host is known by; for further ones see
    /// [`Registrar::handle_addresses`].
    pub fn handle_up(
        &mut self,
        now: Duration,
        association: AssociationId,
        protocol: Protocol,
        addresses: &[SocketAddr],
        dial: Option<DialId>,
    ) {
        if self.associations.get(association).is_none() {
            let limits = &self.config.settings.limits;
            let admitted = self
                .associations
                .insert(now, association, protocol, addresses, limits);
            if let Err(why) = admitted {
                self.counters.associations_refused += 1;
                self.out.push(Output::Abort(association));
                self.out.event(Event::Aborted { association, why });
                if let Some(dial) = dial {
                    self.handle_dial_failed(now, dial);
                }
                return;
            }
            let silent = now + limits.first_message;
            self.schedule.set(Timer::Silent(association), silent);
            if let Some(new) = self.associations.get_mut(association) {
                new.admit(&self.config.settings, &self.config.mentors);
            }
            if protocol == Protocol::Enrp {
                self.out.push(Output::Measure(association));
            }
        }
        if let Some(dial) = dial {
            self.dialled(now, dial, association);
        }
    }

    /// The other side of an association has shown a certificate with this name.
    pub fn handle_name(&mut self, association: AssociationId, name: String) {
        if let Some(known) = self.associations.get_mut(association) {
            known.name = Some(name);
            known.admit(&self.config.settings, &self.config.mentors);
        }
    }

    /// An association is gone, for whatever reason.
    pub fn handle_down(&mut self, now: Duration, association: AssociationId) {
        let Some(gone) = self.associations.remove(now, association) else {
            return;
        };
        for timer in [Timer::Download, Timer::Silent, Timer::Claimed, Timer::Way] {
            self.schedule.stop(timer(association));
        }
        for handle in &gone.pools {
            self.subscriptions.end(association, handle);
        }
        if gone.download.is_some() {
            self.downloads -= 1;
        }
        self.association_lost(now, gone.elements);
        self.mentor_lost(now, association);
        if let Some(peer) = gone.peer {
            self.peer_lost(now, peer, association);
        }
    }

    /// The other side of an association began anew: who it was may be gone.
    pub fn handle_restarted(&mut self, now: Duration, association: AssociationId) {
        let Some(restarted) = self.associations.get_mut(association) else {
            return;
        };
        let keys = restarted.elements.clone();
        let peer = restarted.peer.take();
        for handle in std::mem::take(&mut restarted.pools) {
            self.subscriptions.end(association, &handle);
        }
        self.schedule.stop(Timer::Download(association));
        self.end_download(association);
        for key in keys {
            self.ask(now, key);
        }
        if let Some(peer) = peer {
            self.peer_lost(now, peer, association);
        }
    }

    /// An operator changes the settings. Whoever may no longer do something is treated as if it had never been allowed: its
    /// elements leave, its associations as a registrar end.
    pub fn handle_settings(&mut self, now: Duration, settings: Settings) {
        self.config.settings = settings;
        let (mut elements, mut registrars) = (Vec::new(), Vec::new());
        for (id, association) in self.associations.each_mut() {
            association.admit(&self.config.settings, &self.config.mentors);
            if !association.may_register {
                elements.extend_from_slice(&association.elements);
            }
            if association.protocol == Protocol::Enrp && !association.may_be_registrar {
                registrars.push(*id);
            }
        }
        for key in elements {
            self.withdraw(key, Gone::Forbidden);
        }
        for association in registrars {
            self.abort(association, "no longer an allowed registrar");
        }
        if self.is_ready() {
            self.schedule.set(Timer::Heartbeat, now);
            self.start_announcing(now);
        }
    }

    /// Time has come to `poll_timeout`, or later.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.element_timers(now);
        self.tell_changes(now);
        while let Some(timer) = self.schedule.pop(now) {
            match timer {
                Timer::Heartbeat => self.heartbeat(now),
                Timer::Announce => self.announce(now),
                Timer::Refresh => self.refresh_some(now),
                Timer::Start => self.start_timeout(now),
                Timer::Peer(id) => self.peer_timeout(now, id),
                Timer::Dial(id) => self.dial_peer(id),
                Timer::Sync(id) => self.sync_timeout(id),
                Timer::Sweep(id) => self.sweep_some(now, id),
                Timer::Way(association) => self.move_some(now, association),
                Timer::Bequest(id) => self.bequeath_some(now, id),
                Timer::Download(association) => self.end_download(association),
                Timer::Silent(association) => self.abort(association, "it says nothing"),
                Timer::Claimed(association) => self.claims_end(now, association),
            }
        }
    }

    /// How many messages ahead one is best announced.
    pub const AHEAD: usize = Handlespace::<Entry>::AHEAD;

    /// Announces the message that comes [`AHEAD`](Self::AHEAD) messages after the next one, if it is known: what it will touch is fetched from
    /// memory meanwhile. To be called once for each message, and nothing depends on it.
    #[inline]
    pub fn expect(&mut self, coming: Option<(Protocol, &[u8])>) {
        let subject = coming.and_then(|(protocol, message)| match protocol {
            Protocol::Asap => peek::asap(message),
            Protocol::Enrp => peek::enrp(message),
        });
        let items = self.config.settings.resolution_items;
        self.space.expect(subject.map(|about| match about.id {
            Some(id) if about.leaves => Coming::Deregistration(about.handle, id),
            Some(id) => Coming::Registration(about.handle, id),
            None => Coming::Resolution(about.handle, items),
        }));
    }

    /// The next thing to do; none: nothing until the next input.
    #[inline]
    pub fn poll_output(&mut self) -> Option<Output> {
        self.out.pop()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<Duration> {
        let times = [
            self.schedule.next(),
            self.space.next_timer(),
            self.subscriptions.next(),
        ];
        times.into_iter().flatten().min()
    }

    pub(self) fn ignored(
        &mut self,
        from: Option<AssociationId>,
        protocol: Protocol,
        why: &'static str,
    ) {
        self.out.event(Event::Ignored {
            from,
            protocol,
            why,
        });
    }

    /// A message came that could be read.
    pub(self) fn spoke(&mut self, association: AssociationId) {
        if let Some(known) = self.associations.get_mut(association)
            && !known.spoke
        {
            known.spoke = true;
            self.schedule.stop(Timer::Silent(association));
        }
    }

    fn abort(&mut self, association: AssociationId, why: &'static str) {
        self.counters.aborted += 1;
        self.out.push(Output::Abort(association));
        self.out.event(Event::Aborted { association, why });
    }
}
