//! The associations of elements, users and registrars.

use super::access::{Access, Allow};
use super::asked::Asked;
use super::config::{Limits, Settings};
use super::distance::Moving;
use super::granted::Granted;
use super::hosts::Hosts;
use super::table::Download;
use super::{AssociationId, Protocol};
use bytes::Bytes;
use foldhash::fast::FixedState;
use holdfast_handlespace::ElementKey;
use holdfast_wire::rserpool::{Addresses, PoolHandle, RegistrarId, SctpTransport, TransportUse};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Association {
    /// Its endpoint's addresses, as an element's ASAP transport: those that the transport has confirmed.
    pub(super) transport: SctpTransport,
    /// Addresses that the other side says are its own too. Whoever lists another's must not pass for it.
    pub(super) claimed: Addresses,
    /// Registrations that wait for claimed addresses to be confirmed.
    pub(super) parked: Vec<Bytes>,
    /// Whose certificate the other side has shown.
    pub(super) name: Option<String>,
    /// The host that it counts for.
    pub(super) host: IpAddr,
    pub(super) protocol: Protocol,
    pub(super) may_register: bool,
    pub(super) may_resolve: bool,
    pub(super) may_be_registrar: bool,
    /// When it began.
    pub(super) begun: Duration,
    /// A message came that could be read.
    pub(super) spoke: bool,
    /// One way, in milliseconds, and what it was when elements were last moved for it: see [`distance`](mod@super::distance).
    pub(super) delay_ms: u32,
    pub(super) moved_ms: u32,
    pub(super) moving: Option<Moving>,
    /// How many of its elements have a distance.
    pub(super) distant: usize,
    /// Elements that were asked over it without being named.
    pub(super) probed: Vec<ElementKey>,
    /// The elements that registered over it, each with its place in its [`Entry`](super::entry::Entry).
    pub(super) elements: Vec<ElementKey>,
    /// The pools that it wants to hear of.
    pub(super) pools: Vec<PoolHandle>,
    /// The registrar that spoke over it.
    pub(super) peer: Option<RegistrarId>,
    pub(super) malformed: u32,
    pub(super) download: Option<Download>,
    pub(super) granted: Granted,
    pub(super) asked: Asked,
}

impl Association {
    /// Whether one of these addresses is its own.
    #[inline]
    pub(super) fn shares(&self, addresses: &[IpAddr]) -> bool {
        addresses
            .iter()
            .any(|address| self.transport.addresses.contains(address))
    }

    /// Sets what it may do. Any of its addresses says who it is, since it is reached at all of them, and so does its certificate.
    pub(super) fn admit(&mut self, settings: &Settings, mentors: &[Vec<SocketAddr>]) {
        self.granted.forget();
        self.asked.forget();
        let own = &self.transport.addresses;
        let any = |may: &dyn Fn(IpAddr) -> bool| own.iter().any(|address| may(*address));
        let named = |who: &Allow| self.name.as_deref().is_some_and(|name| who.names(name));
        let Access {
            register, resolve, ..
        } = &settings.access;
        self.may_register = any(&|address| register.contains(address)) || named(register);
        self.may_resolve = any(&|address| resolve.contains(address)) || named(resolve);
        self.may_be_registrar = any(&|address| is_registrar(address, settings, mentors));
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

/// The hashers have a seed: hosts and ports are chosen by others.
#[derive(Debug)]
pub(super) struct Associations {
    by_id: HashMap<AssociationId, Association, FixedState>,
    /// By the other side's endpoint.
    by_address: HashMap<(Protocol, SocketAddr), AssociationId, FixedState>,
    pub(super) hosts: Hosts,
}

impl Associations {
    pub(super) fn new(seed: u64) -> Associations {
        Associations {
            by_id: HashMap::with_hasher(FixedState::with_seed(seed)),
            by_address: HashMap::with_hasher(FixedState::with_seed(seed)),
            hosts: Hosts::new(seed),
        }
    }

    /// A new association; an error if there are too many.
    pub(super) fn insert(
        &mut self,
        now: Duration,
        id: AssociationId,
        protocol: Protocol,
        addresses: &[SocketAddr],
        limits: &Limits,
    ) -> Result<(), &'static str> {
        let transport = SctpTransport {
            port: addresses.first().map_or(0, SocketAddr::port),
            usage: TransportUse::DataOnly,
            addresses: canonical(addresses),
        };
        let first = transport.addresses.first().copied();
        let host = limits.host_of(first.unwrap_or(Ipv4Addr::UNSPECIFIED.into()));
        if self.by_id.len() >= limits.associations {
            return Err("there are too many associations");
        }
        if !self.hosts.join(now, host, limits) {
            return Err("its host has too many associations");
        }
        for address in endpoints(&transport) {
            self.by_address.insert((protocol, address), id);
        }
        let association = Association {
            transport,
            claimed: Addresses::new(),
            parked: Vec::new(),
            name: None,
            host,
            protocol,
            may_register: false,
            may_resolve: false,
            may_be_registrar: false,
            begun: now,
            spoke: false,
            delay_ms: 0,
            moved_ms: 0,
            moving: None,
            distant: 0,
            probed: Vec::new(),
            elements: Vec::new(),
            pools: Vec::new(),
            peer: None,
            malformed: 0,
            download: None,
            granted: Granted::default(),
            asked: Asked::default(),
        };
        self.by_id.insert(id, association);
        Ok(())
    }

    /// An association has these addresses, and says that it has those.
    pub(super) fn readdress(
        &mut self,
        id: AssociationId,
        confirmed: &[SocketAddr],
        claimed: &[SocketAddr],
    ) {
        let Some(association) = self.by_id.get_mut(&id) else {
            return;
        };
        for address in endpoints(&association.transport) {
            let endpoint = (association.protocol, address);
            if self.by_address.get(&endpoint) == Some(&id) {
                self.by_address.remove(&endpoint);
            }
        }
        association.transport.addresses = canonical(confirmed);
        association.claimed = canonical(claimed);
        for address in endpoints(&association.transport) {
            self.by_address.insert((association.protocol, address), id);
        }
    }

    pub(super) fn remove(&mut self, now: Duration, id: AssociationId) -> Option<Association> {
        let association = self.by_id.remove(&id)?;
        for address in endpoints(&association.transport) {
            let endpoint = (association.protocol, address);
            if self.by_address.get(&endpoint) == Some(&id) {
                self.by_address.remove(&endpoint);
            }
        }
        self.hosts.leave(now, association.host);
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

    pub(super) fn each_mut(&mut self) -> impl Iterator<Item = (&AssociationId, &mut Association)> {
        self.by_id.iter_mut()
    }

    /// The associations of registrars that have not said who they are, in the order of their numbers.
    pub(super) fn unknown_registrars(&self) -> Vec<AssociationId> {
        let unknown = self.by_id.iter().filter(|(_, association)| {
            association.protocol == Protocol::Enrp
                && association.may_be_registrar
                && association.peer.is_none()
        });
        let mut unknown: Vec<_> = unknown.map(|(id, _)| *id).collect();
        unknown.sort_unstable();
        unknown
    }

    /// The association with the endpoint that has one of these addresses.
    pub(super) fn find(&self, protocol: Protocol, at: &[SocketAddr]) -> Option<AssociationId> {
        let association = |at: &SocketAddr| {
            let at = SocketAddr::new(at.ip().to_canonical(), at.port());
            self.by_address.get(&(protocol, at)).copied()
        };
        at.iter().find_map(association)
    }

    /// An element belongs to an association; returns its place in the list.
    pub(super) fn link(
        &mut self,
        id: AssociationId,
        key: ElementKey,
        is_distant: bool,
    ) -> Option<usize> {
        let association = self.by_id.get_mut(&id)?;
        association.distant += usize::from(is_distant);
        association.elements.push(key);
        let place = association.elements.len() - 1;
        Some(place)
    }

    /// An element no longer does; returns the element that has its place, if another has.
    pub(super) fn unlink(
        &mut self,
        id: AssociationId,
        place: usize,
        is_distant: bool,
    ) -> Option<ElementKey> {
        let association = self.by_id.get_mut(&id)?;
        association.distant -= usize::from(is_distant);
        association.elements.swap_remove(place);
        association.elements.get(place).copied()
    }
}

fn canonical(addresses: &[SocketAddr]) -> Addresses {
    let each = addresses.iter();
    each.map(|address| address.ip().to_canonical()).collect()
}

/// The addresses with their port.
pub(super) fn endpoints(transport: &SctpTransport) -> impl Iterator<Item = SocketAddr> {
    let addresses = transport.addresses.iter();
    addresses.map(|address| SocketAddr::new(*address, transport.port))
}
