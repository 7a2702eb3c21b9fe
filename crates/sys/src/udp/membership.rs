//! Multicast memberships. The kernel shows, per interface, how many sockets joined a group (`/proc/net/igmp`,
//! `/proc/net/igmp6`), but not which; so a program that moves a socket says what it joined.

use super::{At, UdpError};
use crate::net::interface_index;
use crate::sockopt::set_bytes;
use libc::{IPPROTO_IP, IPPROTO_IPV6};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

/// `MCAST_JOIN_GROUP` and `MCAST_JOIN_SOURCE_GROUP` (`linux/in.h`; RFC 3678 section 5).
const MCAST_JOIN_GROUP: i32 = 42;
const MCAST_JOIN_SOURCE_GROUP: i32 = 46;
/// Bytes of a `sockaddr_storage`, and where it starts in `struct group_req`.
const STORAGE: usize = 128;
const GROUP_AT: usize = 8;

/// One group a socket has joined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// The group.
    pub group: IpAddr,
    /// Name of the interface it was joined on (indexes differ between hosts).
    pub interface: String,
    /// The only source wanted, for source-specific multicast (RFC 4607).
    pub source: Option<IpAddr>,
}

/// Joins a group.
///
/// # Errors
/// [`UdpError::DeviceAbsent`] without such an interface; else the kernel's refusal.
pub fn join(socket: BorrowedFd<'_>, membership: &Membership) -> Result<(), UdpError> {
    let index = interface_index(&membership.interface)
        .map_err(|_| UdpError::DeviceAbsent(membership.interface.clone()))?;
    let level = if membership.group.is_ipv4() {
        IPPROTO_IP
    } else {
        IPPROTO_IPV6
    };
    // `struct group_source_req`; `struct group_req` is its beginning.
    let mut raw = [0u8; GROUP_AT + 2 * STORAGE];
    raw[..4].copy_from_slice(&index.to_ne_bytes());
    write_address(&mut raw[GROUP_AT..], membership.group);
    match membership.source {
        None => {
            let request = &raw[..GROUP_AT + STORAGE];
            set_bytes(socket, level, MCAST_JOIN_GROUP, request).at("MCAST_JOIN_GROUP")
        }
        Some(source) => {
            write_address(&mut raw[GROUP_AT + STORAGE..], source);
            set_bytes(socket, level, MCAST_JOIN_SOURCE_GROUP, &raw).at("MCAST_JOIN_SOURCE_GROUP")
        }
    }
}

/// A `sockaddr_storage` with port 0.
fn write_address(raw: &mut [u8], address: IpAddr) {
    let mut write = |family: i32, at: usize, octets: &[u8]| {
        raw[..2].copy_from_slice(&(family as u16).to_ne_bytes());
        raw[at..at + octets.len()].copy_from_slice(octets);
    };
    match address {
        IpAddr::V4(v4) => write(libc::AF_INET, 4, &v4.octets()),
        IpAddr::V6(v6) => write(libc::AF_INET6, 8, &v6.octets()),
    }
}
