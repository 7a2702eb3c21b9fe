//! Routes and rules (`ip-rule(8)`) by which the answers of TCP servers leave by a gateway, wherever their clients are.

use crate::netlink::{Netlink, NetlinkRequest, attributes};
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};

/// Attributes of `linux/fib_rules.h`.
const FRA_SRC: u16 = 2;
const FRA_PRIORITY: u16 = 6;
const FRA_TABLE: u16 = 15;
const FRA_IP_PROTO: u16 = 22;
const FRA_SPORT_RANGE: u16 = 23;
/// `FR_ACT_TO_TBL`.
const ACTION_TO_TABLE: u8 = 1;
/// Attributes of `linux/rtnetlink.h`.
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_TABLE: u16 = 15;

/// A gateway and the interface that leads to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Address of the gateway, of the servers' family.
    pub address: IpAddr,
    /// Index of the interface.
    pub interface: u32,
}

/// Routes the packets of these servers, and of no others, by a gateway. `table` is both the number of a routing table that nothing
/// else uses and the priority of the rules that lead to it. With no servers, rules and routes are removed.
///
/// # Errors
/// Errors of the netlink request.
pub fn route_servers(
    servers: &BTreeSet<SocketAddr>,
    gateway: Gateway,
    table: u32,
) -> io::Result<()> {
    let mut netlink = Netlink::new(libc::NETLINK_ROUTE)?;
    if !servers.is_empty() {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        netlink.change(route_request(libc::RTM_NEWROUTE, flags, gateway, table))?;
    }
    let known = routed_servers(table)?;
    for server in known.difference(servers) {
        netlink.change(rule_request(libc::RTM_DELRULE, 0, *server, table))?;
    }
    for server in servers.difference(&known) {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        netlink.change(rule_request(libc::RTM_NEWRULE, flags, *server, table))?;
    }
    Ok(())
}

/// Removes the rules of [`route_servers`] with this table. The routes in the table stay: nothing leads to them.
///
/// # Errors
/// Errors of the netlink request.
pub fn remove_routed_servers(table: u32) -> io::Result<()> {
    let mut netlink = Netlink::new(libc::NETLINK_ROUTE)?;
    for server in routed_servers(table)? {
        netlink.change(rule_request(libc::RTM_DELRULE, 0, server, table))?;
    }
    Ok(())
}

/// Returns the servers with a rule of [`route_servers`] in this network namespace.
///
/// # Errors
/// Errors of the netlink request.
pub fn routed_servers(table: u32) -> io::Result<BTreeSet<SocketAddr>> {
    let mut found = BTreeSet::new();
    let message = NetlinkRequest::new(libc::RTM_GETRULE, 0, &[0; 12]);
    Netlink::new(libc::NETLINK_ROUTE)?.request(message, libc::NLM_F_DUMP, |_, body| {
        let all = || attributes(body.get(12..).unwrap_or(&[]));
        let value = |kind| {
            all()
                .find(|(found, _)| *found == kind)
                .map(|(_, value)| value)
        };
        if value(FRA_TABLE) == Some(&table.to_ne_bytes()) {
            let address = value(FRA_SRC).and_then(address_from_bytes);
            let port = value(FRA_SPORT_RANGE).and_then(|range| range.first_chunk().copied());
            let server = address.zip(port);
            found.extend(server.map(|(ip, port)| SocketAddr::new(ip, u16::from_ne_bytes(port))));
        }
    })?;
    Ok(found)
}

fn address_from_bytes(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
    }
}

fn address_bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn family_of(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

/// Builds a request about the rule of one server.
fn rule_request(kind: u16, flags: i32, server: SocketAddr, table: u32) -> NetlinkRequest {
    let source = address_bytes(server.ip());
    // `struct fib_rule_hdr`.
    let mut head = [0; 12];
    head[0] = family_of(server.ip());
    head[2] = (source.len() * 8) as u8;
    head[7] = ACTION_TO_TABLE;
    // `struct fib_rule_port_range`.
    let port = server.port().to_ne_bytes();
    NetlinkRequest::new(kind, flags, &head)
        .attribute(FRA_PRIORITY, &table.to_ne_bytes())
        .attribute(FRA_TABLE, &table.to_ne_bytes())
        .attribute(FRA_SRC, &source)
        .attribute(FRA_IP_PROTO, &[libc::IPPROTO_TCP as u8])
        .attribute(FRA_SPORT_RANGE, &[port, port].concat())
}

/// Builds a request about the default route by the gateway.
fn route_request(kind: u16, flags: i32, gateway: Gateway, table: u32) -> NetlinkRequest {
    // `struct rtmsg`.
    let mut head = [0; 12];
    head[0] = family_of(gateway.address);
    head[5] = libc::RTPROT_STATIC;
    head[6] = libc::RT_SCOPE_UNIVERSE;
    head[7] = libc::RTN_UNICAST;
    NetlinkRequest::new(kind, flags, &head)
        .attribute(RTA_GATEWAY, &address_bytes(gateway.address))
        .attribute(RTA_OIF, &gateway.interface.to_ne_bytes())
        .attribute(RTA_TABLE, &table.to_ne_bytes())
}
