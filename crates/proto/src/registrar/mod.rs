//! A registrar of Reliable Server Pooling: ASAP (RFC 5352) with elements and users, ENRP (RFC 5353) with its peers.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs until there are none, and wakes it at `poll_timeout`.
//! An association is reliable and ordered, as SCTP's are; the machine copes with a dropped send (a full buffer).
//! Messages are bytes on both sides: each is parsed and encoded once, one encoding goes to all peers, and an operation
//! of an element or a user allocates nothing.
//!
//! Safety: an element that answers its keep-alives and re-registers is never missing for longer than until its next
//! registration, whatever messages are lost, late or repeated, and whatever registrars crash. Liveness: once registrars
//! reach each other, their views become equal, and each element has one home.
//!
//! Two registrars may both claim to be an element's home. An update is newer than earlier knowledge, so its sender
//! wins. But two updates may cross, and a handle table carries no time. In these cases the registrar with the lower
//! number asks the element to follow it (a keep-alive with the H flag), and announces the element once it answers; the
//! other does nothing.
//!
//! Two registrars may each yield the same element to the other, and an element may follow a registrar that has
//! yielded it. Therefore a registrar remembers elements it has yielded: it probes any that the new home does not list,
//! and takes an answer to its own keep-alive with the H flag as newer than the home's word. A home whose element has
//! ended its association sets the H flag in the next keep-alive.

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

/// Number of an association, assigned by the daemon and unique among the associations that are up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AssociationId(pub u64);

/// Number of an attempt to connect, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DialId(pub u64);

/// Protocol of a message or an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// RFC 5352.
    Asap,
    /// RFC 5353.
    Enrp,
}

impl Protocol {
    /// Returns the protocol's payload protocol identifier in SCTP.
    pub fn ppid(self) -> u32 {
        match self {
            Protocol::Asap => asap_wire::PPID,
            Protocol::Enrp => enrp_wire::PPID,
        }
    }
}

/// An action for the daemon. A clone of a message shares its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields that say no more than their type")]
pub enum Output {
    /// Send a message on an association.
    Send {
        to: AssociationId,
        protocol: Protocol,
        message: Bytes,
    },
    /// Send the same message on several associations.
    SendMany {
        to: Arc<[AssociationId]>,
        protocol: Protocol,
        message: Bytes,
    },
    /// Make an association with the endpoint at these addresses; [`Registrar::handle_up`] or
    /// [`Registrar::handle_dial_failed`] follows. If an association with it exists already, the former follows,
    /// with that one's number.
    Connect {
        dial: DialId,
        protocol: Protocol,
        addresses: Vec<SocketAddr>,
    },
    /// Send a message to the protocol's multicast group.
    Multicast { protocol: Protocol, message: Bytes },
    /// Report the association's round trip from time to time, as long as [`Registrar::measures`] returns true.
    Measure(AssociationId),
    /// Abort an association at once; [`Registrar::handle_down`] follows.
    Abort(AssociationId),
    /// Report an event to its observers.
    Event(Event),
}

/// A registrar; see the module documentation.
#[derive(Debug)]
pub struct Registrar {
    config: Config,
    space: Handlespace<Entry>,
    associations: Associations,
    dials: Dials,
    peers: BTreeMap<RegistrarId, Peer>,
    /// Own elements that a peer claims as well, while this registrar probes them.
    contested: HashMap<ElementKey, RegistrarId>,
    /// Elements of dead registrars that still need their new home.
    bequests: BTreeMap<RegistrarId, Bequest>,
    /// Last time that each registrar was heard to announce itself to elements.
    announcers: BTreeMap<RegistrarId, Duration>,
    /// Number of elements that have a distance.
    distant: usize,
    strangers: Strangers,
    subscriptions: Subscriptions,
    refreshes: Refreshes,
    start: Start,
    mentor_failures: usize,
    mentor_dial: Option<DialId>,
    /// Number of handle tables that are being sent.
    downloads: usize,
    schedule: Schedule,
    out: Outbox,
    random: SmallRng,
    counters: Counters,
}

impl Registrar {
    /// Returns a registrar that starts at `now`.
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

    /// Handles a new association, begun by the other side or by an [`Output::Connect`]. `addresses` are the addresses
    /// of the other endpoint that the transport has confirmed; the first one identifies the host. For further addresses
    /// see [`Registrar::handle_addresses`].
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

    /// Handles a certificate, with this name, from the other side of an association.
    pub fn handle_name(&mut self, association: AssociationId, name: String) {
        if let Some(known) = self.associations.get_mut(association) {
            known.name = Some(name);
            known.admit(&self.config.settings, &self.config.mentors);
        }
    }

    /// Handles the end of an association, for any reason.
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

    /// Handles a restart of the association's other side: its user may have changed.
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

    /// Applies changed settings. A peer or element that loses a permission is treated as if it had never had it:
    /// elements are removed, and associations of registrars aborted.
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

    /// Handles all timers due at `now`.
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

    /// Number of messages ahead at which to call [`expect`](Self::expect).
    pub const AHEAD: usize = Handlespace::<Entry>::AHEAD;

    /// Announces the message that comes [`AHEAD`](Self::AHEAD) messages after the next one, if known, so that the
    /// memory it will touch is prefetched. The daemon should call this function once for each message; correctness does
    /// not depend on it.
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

    /// Returns the next output; none until the next input.
    #[inline]
    pub fn poll_output(&mut self) -> Option<Output> {
        self.out.pop()
    }

    /// Returns the time at which to call [`handle_timeout`](Self::handle_timeout).
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

    /// Notes the first well-formed message of an association.
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
