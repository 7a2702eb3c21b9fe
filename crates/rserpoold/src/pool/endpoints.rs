//! SCTP endpoints: the daemon's own, towards registrars and elements, and those of elements that serve sessions.
//!
//! An endpoint has a number: 0 is the daemon's own, any other is the number of the element that it belongs to.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};

use bytes::BytesMut;
use holdfast_sctp::{
    ENCAPSULATION_PORT, MessageToSend as Packet, TransportConfig as EndpointConfig,
    TransportEndpoint,
};
use holdfast_wire::rserpool::asap::{self, Message};
use tokio::sync::OwnedSemaphorePermit;

use super::links::{AssociationKey, LinkTable};
use crate::asap_over_tcp::FailedConnections;
use crate::config::pool::PoolConfig;
use crate::sctp_addresses::{reachable_addresses, source_towards};

/// Maximum number of hosts with a remembered encapsulation.
const INSIDE_UDP_HOSTS_MAX: usize = 1024;

/// All endpoints, with the messages that wait for room in their buffers.
pub(super) struct PoolEndpoints {
    /// Endpoint towards registrars and elements.
    own: Box<dyn TransportEndpoint>,
    /// Endpoints of elements whose sessions this daemon accepts, by the element's number.
    services: BTreeMap<u64, ServiceEndpoint>,
    /// Addresses of all services.
    service_addresses: HashSet<SocketAddr>,
    /// Associations with messages for which the buffer had no room.
    stalled: BTreeSet<AssociationKey>,
    /// Hosts that could not be reached, and whether the next attempt is inside UDP.
    next_inside_udp: HashMap<SocketAddr, bool>,
    /// Registrars over TCP that were not reached.
    failed_connections: FailedConnections,
}

/// Endpoint of an element's sessions.
struct ServiceEndpoint {
    endpoint: Box<dyn TransportEndpoint>,
    addresses: Vec<SocketAddr>,
}

impl PoolEndpoints {
    /// Starts with the daemon's own endpoint alone.
    pub(super) fn new(own: Box<dyn TransportEndpoint>) -> PoolEndpoints {
        PoolEndpoints {
            own,
            services: BTreeMap::new(),
            service_addresses: HashSet::new(),
            stalled: BTreeSet::new(),
            next_inside_udp: HashMap::new(),
            failed_connections: FailedConnections::default(),
        }
    }

    /// Returns the daemon's own endpoint.
    pub(super) fn own(&self) -> &dyn TransportEndpoint {
        self.own.as_ref()
    }

    /// Returns the daemon's own endpoint, for changes.
    pub(super) fn own_mut(&mut self) -> &mut dyn TransportEndpoint {
        self.own.as_mut()
    }

    /// Returns the endpoints of services, with their numbers in ascending order.
    pub(super) fn services(&self) -> impl Iterator<Item = (u64, &dyn TransportEndpoint)> {
        let services = self.services.iter();
        services.map(|(number, service)| (*number, service.endpoint.as_ref()))
    }

    /// Returns the endpoint with this number.
    pub(super) fn get(&mut self, number: u64) -> Option<&mut dyn TransportEndpoint> {
        if number == 0 {
            return Some(self.own.as_mut());
        }
        let service = self.services.get_mut(&number)?;
        Some(service.endpoint.as_mut())
    }

    /// Opens the endpoint of an element's sessions at these addresses; without any, at this host's own address.
    /// Returns the addresses of the endpoint.
    ///
    /// # Errors
    /// A text for the program's user: the address is unknown, or the endpoint cannot be opened.
    pub(super) fn open_service(
        &mut self,
        number: u64,
        config: &PoolConfig,
        addresses: &[IpAddr],
        port: u16,
    ) -> Result<Vec<SocketAddr>, String> {
        let addresses = match addresses {
            [] => vec![self.own_address(config)?],
            named => named
                .iter()
                .map(|address| self.user_address(config, *address))
                .collect::<Result<_, _>>()?,
        };
        let local = addresses.iter().map(|ip| SocketAddr::new(*ip, port));
        let config = EndpointConfig {
            raw: config.raw,
            encapsulation: self.own.encapsulation_port(),
            failure: config.failure,
            path_mtu: config.path_mtu,
            ..EndpointConfig::new(local.collect())
        };
        let open = || {
            let endpoint = holdfast_sctp::open(&config)?;
            let addresses = endpoint.local_addresses()?;
            io::Result::Ok((endpoint, addresses))
        };
        let (endpoint, addresses) =
            open().map_err(|error| format!("SCTP at {:?}: {error}", config.local))?;
        self.service_addresses.extend(&addresses);
        let service = ServiceEndpoint {
            endpoint,
            addresses: addresses.clone(),
        };
        self.services.insert(number, service);
        Ok(addresses)
    }

    /// Closes an element's endpoint, if the element has one. The endpoint reports no more events of its associations.
    pub(super) fn close_service(&mut self, number: u64) {
        if let Some(service) = self.services.remove(&number) {
            for address in &service.addresses {
                self.service_addresses.remove(address);
            }
        }
    }

    /// Returns the address for users; replaces an unspecified one.
    ///
    /// # Errors
    /// A text for the program's user: this host's own address is unknown.
    pub(super) fn user_address(
        &self,
        config: &PoolConfig,
        address: IpAddr,
    ) -> Result<IpAddr, String> {
        if !address.is_unspecified() {
            return Ok(address);
        }
        self.own_address(config)
    }

    /// Returns this host's address that registrars see.
    fn own_address(&self, config: &PoolConfig) -> Result<IpAddr, String> {
        let own_addresses = config.listen.first().filter(|own| !own.is_unspecified());
        if let Some(own) = own_addresses {
            return Ok(*own);
        }
        if let Some(first) = config.known_registrars().first() {
            return source_towards(first.address)
                .map_err(|error| format!("no route to registrar {first}: {error}"));
        }
        let own_addresses = reachable_addresses(self.own.as_ref());
        let own_addresses =
            own_addresses.map_err(|error| format!("{error}; name the service's address"))?;
        own_addresses
            .first()
            .map(SocketAddr::ip)
            .ok_or_else(|| "this host has no address; name the service's".to_owned())
    }

    /// Returns true if one of these addresses is the daemon's own endpoint.
    pub(super) fn is_own(&self, addresses: &[SocketAddr]) -> bool {
        let own_addresses = self.own.local_addresses().unwrap_or_default();
        addresses
            .iter()
            .any(|address| own_addresses.contains(address))
    }

    /// Begins an association with the host at these addresses; an association of a session comes from a port of its
    /// own.
    ///
    /// # Errors
    /// The endpoint cannot begin the association.
    pub(super) fn connect(
        &mut self,
        config: &PoolConfig,
        addresses: &[SocketAddr],
        is_session: bool,
    ) -> io::Result<AssociationKey> {
        let udp_port = self.udp_port_for(config, addresses);
        let assoc = match is_session {
            true => self.own.connect_from_new_port(addresses, udp_port),
            false => self.own.connect(addresses, udp_port),
        }?;
        Ok(AssociationKey { endpoint: 0, assoc })
    }

    /// Begins a connection with a registrar over TCP or TLS, only if configured and only with the configured
    /// transport.
    ///
    /// # Errors
    /// No registrar is configured at this address, or the endpoint cannot begin the connection.
    pub(super) fn connect_registrar(
        &mut self,
        config: &PoolConfig,
        address: SocketAddr,
    ) -> io::Result<AssociationKey> {
        let mut registrars = config.registrars.iter();
        let registrar = registrars.find(|at| at.address == address && at.transport.is_some());
        let transport = registrar.and_then(|at| at.transport.clone());
        let transport =
            transport.ok_or_else(|| io::Error::from(io::ErrorKind::PermissionDenied))?;
        let assoc = self.own.connect_stream(address, &transport)?;
        Ok(AssociationKey { endpoint: 0, assoc })
    }

    /// Returns the UDP port for reaching a host; `None`: directly over IP.
    fn udp_port_for(&self, config: &PoolConfig, addresses: &[SocketAddr]) -> Option<u16> {
        let (is_raw, own_port) = (self.own.is_raw(), self.own.encapsulation_port());
        let is_own_service = |at: &SocketAddr| self.service_addresses.contains(at);
        if addresses.iter().any(is_own_service) {
            return own_port.filter(|_| !is_raw);
        }
        if let Some(port) = config.remote_encapsulation {
            return Some(port);
        }
        if !is_raw {
            return Some(ENCAPSULATION_PORT);
        }
        let inside_udp = self
            .next_inside_udp
            .get(addresses.first()?)
            .copied()
            .unwrap_or(false);
        (inside_udp && own_port.is_some()).then_some(ENCAPSULATION_PORT)
    }

    /// Remembers that a host did not answer: the next attempt uses the other way, directly over IP or inside UDP.
    pub(super) fn toggle_encapsulation(&mut self, links: &LinkTable, assoc_key: AssociationKey) {
        if links.is_up(assoc_key) || assoc_key.endpoint != 0 || assoc_key.assoc.is_stream() {
            return;
        }
        if let Some(first) = links.addresses(assoc_key).first().copied() {
            if self.next_inside_udp.len() >= INSIDE_UDP_HOSTS_MAX {
                self.next_inside_udp.clear();
            }
            let inside_udp = self.next_inside_udp.entry(first).or_insert(false);
            *inside_udp = !*inside_udp;
        }
    }

    /// Records that a registrar refused a connection over TCP or TLS.
    pub(super) fn record_refusal(&mut self, remote: SocketAddr, reason: &str) {
        self.failed_connections.record(remote, reason);
    }

    /// Ends an association after the data sent so far.
    pub(super) fn shutdown(&mut self, assoc_key: AssociationKey) {
        if let Some(endpoint) = self.get(assoc_key.endpoint) {
            let _ = endpoint.shutdown(assoc_key.assoc);
        }
    }

    /// Aborts an association or registrar connection at its endpoint.
    pub(super) fn abort(&mut self, assoc_key: AssociationKey) {
        if let Some(endpoint) = self.get(assoc_key.endpoint) {
            // If the association is already gone, an event reports it.
            let _ = endpoint.abort(assoc_key.assoc);
        }
    }

    /// Sends an ASAP message.
    pub(super) fn send_asap(
        &mut self,
        links: &mut LinkTable,
        assoc_key: AssociationKey,
        message: &Message,
    ) {
        let mut bytes = BytesMut::new();
        match message.encode(&mut bytes) {
            Ok(()) => {
                let packet = Packet::new(asap::PPID, bytes.freeze());
                self.send(links, assoc_key, packet, None);
            }
            Err(error) => tracing::error!(%error, name = message.name(), "cannot encode a message"),
        }
    }

    /// Sends a message, or queues it until the association's buffer has room.
    pub(super) fn send(
        &mut self,
        links: &mut LinkTable,
        assoc_key: AssociationKey,
        message: Packet,
        permit: Option<OwnedSemaphorePermit>,
    ) {
        let is_first = links
            .queued(assoc_key)
            .is_some_and(|waiting| waiting.is_empty());
        if is_first && self.try_send(assoc_key, &message) {
            return;
        }
        if let Some(waiting) = links.queued(assoc_key) {
            waiting.push_back((message, permit));
            self.stalled.insert(assoc_key);
        }
    }

    /// Returns true if the message is finished: sent, or its association is gone.
    fn try_send(&mut self, assoc_key: AssociationKey, message: &Packet) -> bool {
        let Some(endpoint) = self.get(assoc_key.endpoint) else {
            return true;
        };
        match endpoint.send(assoc_key.assoc, message) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            Err(error) => {
                tracing::debug!(%error, ?assoc_key, "cannot send");
                true
            }
        }
    }

    /// Retries messages for which the buffer had no room.
    pub(super) fn retry_stalled(&mut self, links: &mut LinkTable) {
        for assoc_key in std::mem::take(&mut self.stalled) {
            while let Some((message, permit)) = links
                .queued(assoc_key)
                .and_then(std::collections::VecDeque::pop_front)
            {
                if self.try_send(assoc_key, &message) {
                    continue;
                }
                if let Some(waiting) = links.queued(assoc_key) {
                    waiting.push_front((message, permit));
                }
                self.stalled.insert(assoc_key);
                break;
            }
        }
    }

    /// Returns true if messages wait for room in a buffer.
    pub(super) fn has_stalled(&self) -> bool {
        !self.stalled.is_empty()
    }

    /// Stops retries for an association that has ended.
    pub(super) fn forget_stalled(&mut self, assoc_key: AssociationKey) {
        self.stalled.remove(&assoc_key);
    }

    /// Hands all written messages to the network.
    ///
    /// # Errors
    /// The sockets of the transport are unusable.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.own.flush()?;
        for service in self.services.values_mut() {
            service.endpoint.flush()?;
        }
        Ok(())
    }
}
