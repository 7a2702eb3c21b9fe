//! The associations of elements, users and registrars, and what each host uses.

use super::config::{Limits, Settings};
use super::table::Download;
use super::{AssociationId, Protocol};
use foldhash::fast::FixedState;
use holdfast_handlespace::ElementKey;
use holdfast_wire::rserpool::{RegistrarId, SctpTransport, TransportUse};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Association {
    /// Its endpoint's addresses, as an element's ASAP transport.
    pub(super) transport: SctpTransport,
    pub(super) protocol: Protocol,
    pub(super) may_register: bool,
    pub(super) may_resolve: bool,
    pub(super) may_be_registrar: bool,
    /// One way, in milliseconds, rounded.
    pub(super) distance: u32,
    /// The elements that registered over it, each with its place in its [`Entry`](super::entry::Entry).
    pub(super) elements: Vec<ElementKey>,
    /// The registrar that spoke over it.
    pub(super) peer: Option<RegistrarId>,
    pub(super) malformed: u32,
    pub(super) download: Option<Download>,
}

impl Association {
    /// The host that it counts for.
    pub(super) fn host(&self) -> IpAddr {
        let first = self.transport.addresses.first();
        first.copied().unwrap_or(Ipv4Addr::UNSPECIFIED.into())
    }

    /// Whether one of these addresses is its own.
    #[inline]
    pub(super) fn shares(&self, addresses: &[IpAddr]) -> bool {
        addresses
            .iter()
            .any(|address| self.transport.addresses.contains(address))
    }

    /// Sets what it may do.
    pub(super) fn admit(&mut self, settings: &Settings, mentors: &[Vec<SocketAddr>]) {
        let host = self.host();
        self.may_register = settings.access.register.contains(host);
        self.may_resolve = settings.access.resolve.contains(host);
        self.may_be_registrar = is_registrar(host, settings, mentors);
    }
}

/// Whether a registrar may be at this address.
pub(super) fn is_registrar(
    address: IpAddr,
    settings: &Settings,
    mentors: &[Vec<SocketAddr>],
) -> bool {
    let mentor = |mentor: &SocketAddr| mentor.ip().to_canonical() == address;
    settings.access.registrar.contains(address) || mentors.iter().flatten().any(mentor)
}

/// What one host uses.
#[derive(Debug, Default)]
struct Host {
    associations: usize,
    elements: usize,
    /// A token bucket: messages that it may still send, in millionths, as of `filled`.
    tokens: u64,
    filled: Duration,
}

const MESSAGE: u64 = 1_000_000;

/// The hashers have a seed: hosts and ports are chosen by others.
#[derive(Debug)]
pub(super) struct Associations {
    by_id: HashMap<AssociationId, Association, FixedState>,
    /// By the other side's endpoint.
    by_address: HashMap<(Protocol, SocketAddr), AssociationId, FixedState>,
    hosts: HashMap<IpAddr, Host, FixedState>,
}

impl Associations {
    pub(super) fn new(seed: u64) -> Associations {
        Associations {
            by_id: HashMap::with_hasher(FixedState::with_seed(seed)),
            by_address: HashMap::with_hasher(FixedState::with_seed(seed)),
            hosts: HashMap::with_hasher(FixedState::with_seed(seed)),
        }
    }

    /// A new association; false if its host has too many.
    pub(super) fn insert(
        &mut self,
        now: Duration,
        id: AssociationId,
        protocol: Protocol,
        addresses: &[SocketAddr],
        limits: &Limits,
    ) -> bool {
        let association = Association {
            transport: SctpTransport {
                port: addresses.first().map_or(0, SocketAddr::port),
                usage: TransportUse::DataOnly,
                addresses: addresses.iter().map(|a| a.ip().to_canonical()).collect(),
            },
            protocol,
            may_register: false,
            may_resolve: false,
            may_be_registrar: false,
            distance: 0,
            elements: Vec::new(),
            peer: None,
            malformed: 0,
            download: None,
        };
        let host = self
            .hosts
            .entry(association.host())
            .or_insert_with(|| Host {
                tokens: u64::from(limits.messages_per_second) * MESSAGE,
                filled: now,
                ..Host::default()
            });
        if host.associations >= limits.associations_per_host {
            return false;
        }
        host.associations += 1;
        for address in endpoints(&association.transport) {
            self.by_address.insert((protocol, address), id);
        }
        self.by_id.insert(id, association);
        true
    }

    pub(super) fn remove(&mut self, id: AssociationId) -> Option<Association> {
        let association = self.by_id.remove(&id)?;
        for address in endpoints(&association.transport) {
            let endpoint = (association.protocol, address);
            if self.by_address.get(&endpoint) == Some(&id) {
                self.by_address.remove(&endpoint);
            }
        }
        let host = association.host();
        if let Some(used) = self.hosts.get_mut(&host) {
            used.associations -= 1;
            used.elements = used.elements.saturating_sub(association.elements.len());
            if used.associations == 0 {
                self.hosts.remove(&host);
            }
        }
        Some(association)
    }

    #[inline]
    pub(super) fn get(&self, id: AssociationId) -> Option<&Association> {
        self.by_id.get(&id)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: AssociationId) -> Option<&mut Association> {
        self.by_id.get_mut(&id)
    }

    pub(super) fn each_mut(&mut self) -> impl Iterator<Item = &mut Association> {
        self.by_id.values_mut()
    }

    /// The association with the endpoint that has one of these addresses.
    pub(super) fn find(&self, protocol: Protocol, at: &[SocketAddr]) -> Option<AssociationId> {
        let association = |at: &SocketAddr| {
            let at = SocketAddr::new(at.ip().to_canonical(), at.port());
            self.by_address.get(&(protocol, at)).copied()
        };
        at.iter().find_map(association)
    }

    /// Counts a message; false if its host sends too many.
    #[inline]
    pub(super) fn admits_message(&mut self, now: Duration, host: IpAddr, limits: &Limits) -> bool {
        let Some(host) = self.hosts.get_mut(&host) else {
            return false;
        };
        let rate = u64::from(limits.messages_per_second);
        let passed = now.saturating_sub(host.filled).min(Duration::from_secs(1));
        host.filled = now;
        // Microseconds times messages a second are millionths of a message.
        let filled = host.tokens + passed.as_micros() as u64 * rate;
        host.tokens = filled.min(rate * MESSAGE);
        let admitted = host.tokens >= MESSAGE;
        if admitted {
            host.tokens -= MESSAGE;
        }
        admitted
    }

    /// Whether the host of an association may have one element more.
    pub(super) fn admits_element(&self, host: IpAddr, limits: &Limits) -> bool {
        let host = self.hosts.get(&host);
        host.is_some_and(|host| host.elements < limits.elements_per_host)
    }

    /// An element belongs to an association; returns its place in the list.
    pub(super) fn link(&mut self, id: AssociationId, key: ElementKey) -> Option<usize> {
        let association = self.by_id.get_mut(&id)?;
        association.elements.push(key);
        let place = association.elements.len() - 1;
        if let Some(host) = self.hosts.get_mut(&association.host()) {
            host.elements += 1;
        }
        Some(place)
    }

    /// An element no longer does; returns the element that has its place, if another has.
    pub(super) fn unlink(&mut self, id: AssociationId, place: usize) -> Option<ElementKey> {
        let association = self.by_id.get_mut(&id)?;
        association.elements.swap_remove(place);
        if let Some(host) = self.hosts.get_mut(&association.host()) {
            host.elements -= 1;
        }
        association.elements.get(place).copied()
    }
}

/// The addresses with their port.
pub(super) fn endpoints(transport: &SctpTransport) -> impl Iterator<Item = SocketAddr> {
    let addresses = transport.addresses.iter();
    addresses.map(|address| SocketAddr::new(*address, transport.port))
}
