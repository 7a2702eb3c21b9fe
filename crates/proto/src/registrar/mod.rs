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

mod announces;
mod asap;
mod associations;
mod claimed_addresses;
mod config;
mod dials;
pub mod distance;
mod element_entry;
mod elements;
mod enrp;
mod event;
mod handle_table;
mod host_quotas;
mod keep_alive;
mod operator_queries;
mod outbox;
mod peers;
mod permissions;
mod registration;
mod registration_cache;
mod reregistration_announcements;
mod resolution_cache;
mod resynchronisation;
mod startup;
mod subscriptions;
mod takeover;
mod timer_queue;
mod unknown_peers;

pub use crate::registration_life::LifeUnit;
pub use config::{RegistrarMachineConfig, RegistrarSettings, ResourceLimits, TakeoverRaceWinner};
pub use event::{Counters, Event, RemovalReason};
pub use peers::PeerStatus;
pub use permissions::{
    AddressPrefix, AddressPrefixError, HostClass, OperationPermissions, PermittedHosts,
};

use announces::Announcers;
use associations::Associations;
use bytes::Bytes;
use dials::OpenDials;
use element_entry::ElementEntry;
use elements::RegistrarElements;
use holdfast_handlespace::{AnnouncedOperation, Handlespace};
use holdfast_wire::rserpool::{asap as asap_wire, enrp as enrp_wire, message_subject};
use outbox::RegistrarOutbox;
use peers::PeerList;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use reregistration_announcements::PendingAnnouncements;
use startup::Startup;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use subscriptions::Subscriptions;
use takeover::OrphanedElements;
use timer_queue::{RegistrarTimer, TimerQueue};
use unknown_peers::UnknownPeers;

/// Number of an association, assigned by the daemon and unique among the associations that are up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AssociationId(pub u64);

/// Number of an attempt to connect, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DialId(pub u64);

/// Protocol of a message or an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PoolProtocol {
    /// ASAP, between registrars and elements or users (RFC 5352).
    Asap,
    /// ENRP, between registrars (RFC 5353).
    Enrp,
}

impl PoolProtocol {
    /// Returns the protocol's payload protocol identifier in SCTP.
    pub fn ppid(self) -> u32 {
        match self {
            PoolProtocol::Asap => asap_wire::PPID,
            PoolProtocol::Enrp => enrp_wire::PPID,
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
        protocol: PoolProtocol,
        message: Bytes,
    },
    /// Send the same message on several associations.
    SendMany {
        to: Arc<[AssociationId]>,
        protocol: PoolProtocol,
        message: Bytes,
    },
    /// Make an association with the endpoint at these addresses; [`Registrar::handle_association_up`] or
    /// [`Registrar::handle_dial_failed`] follows. If an association with it exists already, the former follows,
    /// with that one's number.
    Connect {
        dial: DialId,
        protocol: PoolProtocol,
        addresses: Vec<SocketAddr>,
    },
    /// Send a message to the protocol's multicast group.
    Multicast {
        protocol: PoolProtocol,
        message: Bytes,
    },
    /// Report the association's round trip from time to time, as long as [`Registrar::needs_measurement`] returns true.
    Measure(AssociationId),
    /// Abort an association at once; [`Registrar::handle_association_down`] follows.
    Abort(AssociationId),
    /// Report an event to its observers.
    Event(Event),
}

/// A registrar; see the module documentation.
///
/// Each part of its state is a type that keeps its own rules. The methods of `Registrar` connect the parts, and stand in
/// the files of their subjects: for example, `takeover.rs` has all steps of a takeover.
#[derive(Debug)]
pub struct Registrar {
    config: RegistrarMachineConfig,
    elements: RegistrarElements,
    associations: Associations,
    dials: OpenDials,
    peers: PeerList,
    orphaned_elements: OrphanedElements,
    announcers: Announcers,
    unknown_peers: UnknownPeers,
    subscriptions: Subscriptions,
    refreshes: PendingAnnouncements,
    startup: Startup,
    schedule: TimerQueue,
    outbox: RegistrarOutbox,
    random: SmallRng,
    counters: Counters,
}

impl Registrar {
    /// Returns a registrar that starts at `now`.
    pub fn new(now: Duration, config: RegistrarMachineConfig) -> Registrar {
        let mut registrar = Registrar {
            elements: RegistrarElements::new(config.id, config.seed),
            associations: Associations::new(config.seed),
            dials: OpenDials::default(),
            peers: PeerList::default(),
            orphaned_elements: OrphanedElements::default(),
            announcers: Announcers::default(),
            unknown_peers: UnknownPeers::default(),
            subscriptions: Subscriptions::default(),
            refreshes: PendingAnnouncements::default(),
            startup: Startup::default(),
            schedule: TimerQueue::default(),
            outbox: RegistrarOutbox::new(config.id),
            random: SmallRng::seed_from_u64(config.seed),
            counters: Counters::default(),
            config,
        };
        registrar.begin_startup(now);
        registrar
    }

    /// Handles a new association, begun by the other side or by an [`Output::Connect`]. `addresses` are the addresses
    /// of the other endpoint that the transport has confirmed; the first one identifies the host. For further addresses
    /// see [`Registrar::handle_addresses`].
    pub fn handle_association_up(
        &mut self,
        now: Duration,
        association: AssociationId,
        protocol: PoolProtocol,
        addresses: &[SocketAddr],
        dial: Option<DialId>,
    ) {
        if self.associations.get(association).is_none() {
            let limits = &self.config.settings.limits;
            let admitted = self
                .associations
                .insert(now, association, protocol, addresses, limits);
            if let Err(reason) = admitted {
                self.counters.associations_refused += 1;
                self.outbox.push(Output::Abort(association));
                self.outbox.push_event(Event::Aborted {
                    association,
                    reason,
                });
                if let Some(dial) = dial {
                    self.handle_dial_failed(now, dial);
                }
                return;
            }
            let silence_deadline = now + limits.first_message_timeout;
            self.schedule.set(
                RegistrarTimer::SilentAssociation(association),
                silence_deadline,
            );
            if let Some(new) = self.associations.get_mut(association) {
                new.set_permissions(&self.config.settings, &self.config.mentors);
            }
            if protocol == PoolProtocol::Enrp {
                self.outbox.push(Output::Measure(association));
            }
        }
        if let Some(dial) = dial {
            self.on_dial_succeeded(now, dial, association);
        }
    }

    /// Handles a certificate, with this name, from the other side of an association.
    pub fn handle_certificate_name(&mut self, association: AssociationId, name: String) {
        if let Some(known_association) = self.associations.get_mut(association) {
            known_association.certificate_name = Some(name);
            known_association.set_permissions(&self.config.settings, &self.config.mentors);
        }
    }

    /// Handles the end of an association, for any reason.
    pub fn handle_association_down(&mut self, now: Duration, association: AssociationId) {
        let Some(removed) = self.associations.remove(now, association) else {
            return;
        };
        for timer in [
            RegistrarTimer::DownloadTimeout,
            RegistrarTimer::SilentAssociation,
            RegistrarTimer::AddressConfirmation,
            RegistrarTimer::DistanceUpdate,
        ] {
            self.schedule.stop(timer(association));
        }
        for handle in &removed.pools {
            self.subscriptions.unsubscribe(association, handle);
        }
        self.on_association_lost(now, removed.elements);
        self.on_mentor_lost(now, association);
        if let Some(peer) = removed.peer {
            self.on_peer_lost(now, peer, association);
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
            self.subscriptions.unsubscribe(association, &handle);
        }
        self.schedule
            .stop(RegistrarTimer::DownloadTimeout(association));
        self.associations.abort_download(association);
        for key in keys {
            self.probe_element(now, key);
        }
        if let Some(peer) = peer {
            self.on_peer_lost(now, peer, association);
        }
    }

    /// Applies changed settings. A peer or element that loses a permission is treated as if it had never had it:
    /// elements are removed, and associations of registrars aborted.
    pub fn handle_settings(&mut self, now: Duration, settings: RegistrarSettings) {
        self.config.settings = settings;
        let (mut elements, mut registrars) = (Vec::new(), Vec::new());
        for (id, association) in self.associations.iter_mut() {
            association.set_permissions(&self.config.settings, &self.config.mentors);
            if !association.may_register {
                elements.extend_from_slice(&association.elements);
            }
            if association.protocol == PoolProtocol::Enrp && !association.may_be_registrar {
                registrars.push(*id);
            }
        }
        for key in elements {
            self.remove_and_announce(key, RemovalReason::Forbidden);
        }
        for association in registrars {
            self.abort(association, "no longer an allowed registrar");
        }
        if self.is_ready() {
            self.schedule.set(RegistrarTimer::Heartbeat, now);
            self.start_announcing(now);
        }
    }

    /// Handles all timers due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.handle_element_timers(now);
        self.send_updates(now);
        while let Some(timer) = self.schedule.pop(now) {
            match timer {
                RegistrarTimer::Heartbeat => self.send_heartbeat(now),
                RegistrarTimer::Announce => self.send_announce(now),
                RegistrarTimer::Refresh => self.announce_due_reregistrations(now),
                RegistrarTimer::StartupStep => self.on_startup_timeout(now),
                RegistrarTimer::PeerState(id) => self.on_peer_timeout(now, id),
                RegistrarTimer::DialPeer(id) => self.dial_peer(id),
                RegistrarTimer::SyncTimeout(id) => self.on_sync_timeout(id),
                RegistrarTimer::Sweep(id) => self.sweep_stale_elements(now, id),
                RegistrarTimer::DistanceUpdate(association) => {
                    self.update_some_distances(now, association)
                }
                RegistrarTimer::HomeTransfer(id) => self.transfer_some_homes(now, id),
                RegistrarTimer::DownloadTimeout(association) => {
                    self.associations.abort_download(association)
                }
                RegistrarTimer::SilentAssociation(association) => {
                    self.abort(association, "silent for too long")
                }
                RegistrarTimer::AddressConfirmation(association) => {
                    self.end_confirmation_wait(now, association)
                }
            }
        }
    }

    /// Number of messages ahead at which to call [`expect`](Self::announce_message).
    pub const PREFETCH_DISTANCE: usize = Handlespace::<ElementEntry>::ANNOUNCE_DISTANCE;

    /// Announces the message that comes [`PREFETCH_DISTANCE`](Self::PREFETCH_DISTANCE) messages after the next one, if
    /// known, so that the memory it will touch is prefetched. The daemon should call this function once for each
    /// message; correctness does not depend on it.
    #[inline]
    pub fn announce_message(&mut self, upcoming: Option<(PoolProtocol, &[u8])>) {
        let subject = upcoming.and_then(|(protocol, message)| match protocol {
            PoolProtocol::Asap => message_subject::asap_subject(message),
            PoolProtocol::Enrp => message_subject::enrp_subject(message),
        });
        let items = self.config.settings.resolution_items;
        self.elements
            .announce_operation(subject.map(|about| match about.id {
                Some(id) if about.is_removal => {
                    AnnouncedOperation::Deregistration(about.handle, id)
                }
                Some(id) => AnnouncedOperation::Registration(about.handle, id),
                None => AnnouncedOperation::Resolution(about.handle, items),
            }));
    }

    /// Returns the next output; none until the next input.
    #[inline]
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outbox.pop()
    }

    /// Returns the time at which to call [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<Duration> {
        let times = [
            self.schedule.next(),
            self.elements.space().next_timer(),
            self.subscriptions.next_update(),
        ];
        times.into_iter().flatten().min()
    }

    /// Notes the first well-formed message of an association.
    pub(self) fn on_first_message(&mut self, association: AssociationId) {
        if let Some(known_association) = self.associations.get_mut(association)
            && !known_association.has_spoken
        {
            known_association.has_spoken = true;
            self.schedule
                .stop(RegistrarTimer::SilentAssociation(association));
        }
    }

    fn abort(&mut self, association: AssociationId, reason: &'static str) {
        self.counters.associations_aborted += 1;
        self.outbox.push(Output::Abort(association));
        self.outbox.push_event(Event::Aborted {
            association,
            reason,
        });
    }
}
