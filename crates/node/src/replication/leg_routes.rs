//! The part of a node with a leg: the answers of its server leave by the contact node, and the node says whether the server listens.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};

use holdfast_sys::net;
use holdfast_sys::sock_diag::{self, tcp_listeners};
use holdfast_sys::source_routes::{Gateway, route_servers};
use holdfast_wire::health_frames::ServiceEndpoint;
use holdfast_wire::replication_frames::ReplicationFrame;

/// Routing table of the answers to replicated clients; also the priority of its rules.
pub(crate) const REPLY_ROUTING_TABLE: u32 = 18_535;

/// Servers of this node that are legs.
#[derive(Debug, Default)]
pub(super) struct LegRoutes {
    /// Server of each replicated service, once its answers are routed.
    servers: BTreeMap<ServiceEndpoint, SocketAddr>,
    /// True if the host has the rules of `servers` and no others, of an earlier daemon either.
    is_known: bool,
}

impl LegRoutes {
    /// Routes the answers of these services' servers at `own` by the contact node, and no others.
    pub fn set(&mut self, services: &[ServiceEndpoint], own: IpAddr, contact: Option<IpAddr>) {
        let server = |service: &ServiceEndpoint| {
            let server = SocketAddr::new(own, service.address.port());
            (*service, server)
        };
        let wanted: BTreeMap<_, _> = services.iter().map(server).collect();
        if self.is_known && wanted == self.servers && wanted.is_empty() {
            return;
        }
        match route(&wanted.values().copied().collect(), own, contact) {
            Ok(()) => {
                self.servers = wanted;
                self.is_known = true;
            }
            Err(error) => {
                tracing::error!(%error, "cannot route the answers of a replicated server to the contact node");
                self.servers.clear();
                self.is_known = false;
            }
        }
    }

    /// Returns the servers of this node that are legs.
    pub fn servers(&self) -> BTreeSet<SocketAddr> {
        self.servers.values().copied().collect()
    }

    /// Answers the contact node's question about a leg.
    pub fn answer(&self, service: ServiceEndpoint, own: IpAddr) -> ReplicationFrame {
        let server = SocketAddr::new(own, service.address.port());
        let listens = is_listening(server).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot list the sockets of servers");
            // An error here says nothing about the server.
            true
        });
        ReplicationFrame::ServerAnswer {
            service,
            listens,
            is_routed: self.servers.contains_key(&service),
        }
    }
}

fn is_listening(server: SocketAddr) -> io::Result<bool> {
    let mut netlink = sock_diag::open()?;
    let listeners = tcp_listeners(&mut netlink)?;
    Ok(listeners.iter().any(|socket| socket.receives(server)))
}

fn route(servers: &BTreeSet<SocketAddr>, own: IpAddr, contact: Option<IpAddr>) -> io::Result<()> {
    let gateway = match contact {
        Some(address) if !servers.is_empty() => {
            let route = net::route_to(address)?;
            if route.gateway.is_some() {
                let reason = format!("the contact node {address} is behind a router");
                return Err(io::Error::new(io::ErrorKind::HostUnreachable, reason));
            }
            Gateway {
                address,
                interface: route.interface,
            }
        }
        _ => Gateway {
            address: own,
            interface: 0,
        },
    };
    route_servers(servers, gateway, REPLY_ROUTING_TABLE)
}
