//! The associations of elements, users and registrars.

use super::config::{RegistrarSettings, ResourceLimits};
use super::distance::DistanceUpdate;
use super::handle_table::TableDownload;
use super::host_quotas::HostQuotas;
use super::permissions::{OperationPermissions, PermittedHosts};
use super::registration_cache::RegistrationCache;
use super::resolution_cache::ResolutionCache;
use super::{AssociationId, PoolProtocol};
use bytes::Bytes;
use foldhash::fast::FixedState;
use holdfast_handlespace::ElementKey;
use holdfast_wire::rserpool::{Addresses, PoolHandle, RegistrarId, SctpTransport, TransportUse};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Association {
    /// Addresses of its endpoint, as an element's ASAP transport: the ones confirmed by the transport.
    pub(super) transport: SctpTransport,
    /// Addresses that the other side claims as well. A host that lists an address of another must not pass for it.
    pub(super) claimed_addresses: Addresses,
    /// Registrations that wait for claimed addresses to be confirmed.
    pub(super) pending_registrations: Vec<Bytes>,
    /// Name in the certificate of the other side.
    pub(super) certificate_name: Option<String>,
    /// Host to which the association counts.
    pub(super) host: IpAddr,
    pub(super) protocol: PoolProtocol,
    pub(super) may_register: bool,
    pub(super) may_resolve: bool,
    pub(super) may_be_registrar: bool,
    /// Time at which the association came up.
    pub(super) up_since: Duration,
    /// True once a well-formed message arrived.
    pub(super) has_spoken: bool,
    /// One-way delay in milliseconds, and its value when elements were last moved because of it: see
    /// [`distance`](mod@super::distance).
    pub(super) delay_ms: u32,
    pub(super) applied_delay_ms: u32,
    pub(super) distance_update: Option<DistanceUpdate>,
    /// Number of elements registered over this association that have a distance.
    pub(super) distant_elements: usize,
    /// Elements that were probed over it without being named.
    pub(super) probed: Vec<ElementKey>,
    /// Elements registered over this association; each element's
    /// [`ElementEntry`](super::element_entry::ElementEntry) has its index here.
    pub(super) elements: Vec<ElementKey>,
    /// The pools that it subscribes to.
    pub(super) pools: Vec<PoolHandle>,
    /// The registrar at the other side.
    pub(super) peer: Option<RegistrarId>,
    pub(super) malformed_count: u32,
    /// The handle table that is being sent to the other side.
    download: Option<TableDownload>,
    pub(super) registration_cache: RegistrationCache,
    pub(super) resolution_cache: ResolutionCache,
}

impl Association {
    /// Returns true if one of these addresses is the association's.
    #[inline]
    pub(super) fn has_any_address(&self, addresses: &[IpAddr]) -> bool {
        addresses
            .iter()
            .any(|address| self.transport.addresses.contains(address))
    }

    /// Sets the association's permissions. Each of its addresses identifies the host, since it can be reached at all of
    /// them, and so does its certificate.
    pub(super) fn set_permissions(
        &mut self,
        settings: &RegistrarSettings,
        mentors: &[Vec<SocketAddr>],
    ) {
        self.registration_cache.invalidate();
        self.resolution_cache.clear();
        let addresses = &self.transport.addresses;
        let permits_any =
            |may: &dyn Fn(IpAddr) -> bool| addresses.iter().any(|address| may(*address));
        let permits_named = |who: &PermittedHosts| {
            self.certificate_name
                .as_deref()
                .is_some_and(|name| who.permits_name(name))
        };
        let OperationPermissions {
            register, resolve, ..
        } = &settings.access;
        self.may_register =
            permits_any(&|address| register.permits_address(address)) || permits_named(register);
        self.may_resolve =
            permits_any(&|address| resolve.permits_address(address)) || permits_named(resolve);
        self.may_be_registrar =
            permits_any(&|address| is_registrar_permitted(address, settings, mentors));
    }
}

/// Returns true if a registrar is permitted at this address.
pub(super) fn is_registrar_permitted(
    address: IpAddr,
    settings: &RegistrarSettings,
    mentors: &[Vec<SocketAddr>],
) -> bool {
    let mentor = |mentor: &SocketAddr| mentor.ip().to_canonical() == address;
    settings.access.registrar.permits_address(address) || mentors.iter().flatten().any(mentor)
}

/// All associations. The hashers are seeded, because other hosts choose addresses and ports.
#[derive(Debug)]
pub(super) struct Associations {
    by_id: HashMap<AssociationId, Association, FixedState>,
    /// Associations by the other side's endpoint.
    by_address: HashMap<(PoolProtocol, SocketAddr), AssociationId, FixedState>,
    pub(super) hosts: HostQuotas,
    /// Number of handle tables that are being sent.
    downloads: usize,
}

impl Associations {
    pub(super) fn new(seed: u64) -> Associations {
        Associations {
            by_id: HashMap::with_hasher(FixedState::with_seed(seed)),
            by_address: HashMap::with_hasher(FixedState::with_seed(seed)),
            hosts: HostQuotas::new(seed),
            downloads: 0,
        }
    }

    /// Adds an association; fails if there are too many.
    pub(super) fn insert(
        &mut self,
        now: Duration,
        id: AssociationId,
        protocol: PoolProtocol,
        addresses: &[SocketAddr],
        limits: &ResourceLimits,
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
        if !self.hosts.add_association(now, host, limits) {
            return Err("its host has too many associations");
        }
        for address in endpoints(&transport) {
            self.by_address.insert((protocol, address), id);
        }
        let association = Association {
            transport,
            claimed_addresses: Addresses::new(),
            pending_registrations: Vec::new(),
            certificate_name: None,
            host,
            protocol,
            may_register: false,
            may_resolve: false,
            may_be_registrar: false,
            up_since: now,
            has_spoken: false,
            delay_ms: 0,
            applied_delay_ms: 0,
            distance_update: None,
            distant_elements: 0,
            probed: Vec::new(),
            elements: Vec::new(),
            pools: Vec::new(),
            peer: None,
            malformed_count: 0,
            download: None,
            registration_cache: RegistrationCache::default(),
            resolution_cache: ResolutionCache::default(),
        };
        self.by_id.insert(id, association);
        Ok(())
    }

    /// Replaces the confirmed and the claimed addresses of an association.
    pub(super) fn set_addresses(
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
        association.claimed_addresses = canonical(claimed);
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
        self.hosts.remove_association(now, association.host);
        self.downloads -= usize::from(association.download.is_some());
        Some(association)
    }

    /// Returns the number of handle tables that are being sent.
    pub(super) fn downloads(&self) -> usize {
        self.downloads
    }

    /// Keeps the rest of a handle table that is being sent on an association without another one.
    pub(super) fn set_download(&mut self, id: AssociationId, unfinished: TableDownload) {
        if let Some(association) = self.by_id.get_mut(&id) {
            association.download = Some(unfinished);
            self.downloads += 1;
        }
    }

    /// Removes and returns the rest of a handle table that is being sent.
    pub(super) fn take_download(&mut self, id: AssociationId) -> Option<TableDownload> {
        let unfinished = self.by_id.get_mut(&id)?.download.take()?;
        self.downloads -= 1;
        Some(unfinished)
    }

    #[inline]
    pub(super) fn get(&self, id: AssociationId) -> Option<&Association> {
        self.by_id.get(&id)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: AssociationId) -> Option<&mut Association> {
        self.by_id.get_mut(&id)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&AssociationId, &mut Association)> {
        self.by_id.iter_mut()
    }

    /// Returns the associations of registrars that have not identified themselves, in the order of their numbers.
    pub(super) fn unknown_registrars(&self) -> Vec<AssociationId> {
        let unknown = self.by_id.iter().filter(|(_, association)| {
            association.protocol == PoolProtocol::Enrp
                && association.may_be_registrar
                && association.peer.is_none()
        });
        let mut unknown: Vec<_> = unknown.map(|(id, _)| *id).collect();
        unknown.sort_unstable();
        unknown
    }

    /// Returns the association with the endpoint that has one of these addresses.
    pub(super) fn find(&self, protocol: PoolProtocol, at: &[SocketAddr]) -> Option<AssociationId> {
        let association = |at: &SocketAddr| {
            let at = SocketAddr::new(at.ip().to_canonical(), at.port());
            self.by_address.get(&(protocol, at)).copied()
        };
        at.iter().find_map(association)
    }

    /// Adds an element to an association; returns its index in the list.
    pub(super) fn link_element(
        &mut self,
        id: AssociationId,
        key: ElementKey,
        is_distant: bool,
    ) -> Option<usize> {
        let association = self.by_id.get_mut(&id)?;
        association.distant_elements += usize::from(is_distant);
        association.elements.push(key);
        let index = association.elements.len() - 1;
        Some(index)
    }

    /// Removes an element from an association; returns the element that has moved to its index, if any.
    pub(super) fn unlink_element(
        &mut self,
        id: AssociationId,
        index: usize,
        is_distant: bool,
    ) -> Option<ElementKey> {
        let association = self.by_id.get_mut(&id)?;
        association.distant_elements -= usize::from(is_distant);
        association.elements.swap_remove(index);
        association.elements.get(index).copied()
    }
}

fn canonical(addresses: &[SocketAddr]) -> Addresses {
    let each = addresses.iter();
    each.map(|address| address.ip().to_canonical()).collect()
}

/// Returns the addresses with their port.
pub(super) fn endpoints(transport: &SctpTransport) -> impl Iterator<Item = SocketAddr> {
    let addresses = transport.addresses.iter();
    addresses.map(|address| SocketAddr::new(*address, transport.port))
}
