//! Multicast memberships of a socket. The kernel shows, per interface, how many sockets joined a group
//! (`/proc/net/igmp`, `/proc/net/igmp6`), but not which ones. A query for a socket's filter of such a group succeeds
//! only if the socket has joined the group.

use super::{StepContext, UdpError};
use holdfast_sys::net::interface_index;
use holdfast_sys::sockopt::{get_bytes, set_bytes};
use libc::{IPPROTO_IP, IPPROTO_IPV6};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::BorrowedFd;

/// Options `MCAST_JOIN_GROUP`, `MCAST_BLOCK_SOURCE`, `MCAST_JOIN_SOURCE_GROUP` and `MCAST_MSFILTER` (`linux/in.h`; RFC
/// 3678 section 5).
const MCAST_JOIN_GROUP: i32 = 42;
const MCAST_BLOCK_SOURCE: i32 = 43;
const MCAST_JOIN_SOURCE_GROUP: i32 = 46;
const MCAST_MSFILTER: i32 = 48;
/// Filter mode `MCAST_INCLUDE`: datagrams only from the listed sources.
const MCAST_INCLUDE: u32 = 1;
/// Length of a `sockaddr_storage`, and its offset in `struct group_req`, bytes.
const STORAGE_LEN: usize = 128;
const GROUP_OFFSET: usize = 8;
/// Offsets of mode, number of sources, and sources in `struct group_filter`.
const MODE_OFFSET: usize = GROUP_OFFSET + STORAGE_LEN;
const COUNT_OFFSET: usize = MODE_OFFSET + 4;
const SOURCES_OFFSET: usize = COUNT_OFFSET + 4;
/// Most sources of a group that are requested; the kernel's limits are lower.
const SOURCES_MAX: usize = 128;

/// One group that a socket has joined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MulticastMembership {
    /// Address of the group.
    pub group: IpAddr,
    /// Name of the interface it was joined on (indexes differ between hosts).
    pub interface: String,
    /// Wanted source, for source-specific multicast (RFC 4607); each of several wanted sources has an entry of its own.
    /// `None`: all sources.
    pub source: Option<IpAddr>,
    /// Blocked sources, when all others are wanted.
    pub blocked: Vec<IpAddr>,
}

/// The groups that sockets of a host have joined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMulticastGroups(Vec<(u32, String, IpAddr)>);

impl HostMulticastGroups {
    /// Reads the groups of the calling thread's network namespace.
    #[must_use]
    pub fn read() -> Self {
        // The file does not exist in a kernel without the protocol.
        let file = |name: &str| {
            std::fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap_or_default()
        };
        Self::parse(&file("igmp"), &file("igmp6"))
    }

    fn parse(v4: &str, v6: &str) -> Self {
        let mut found = Vec::new();
        let mut interface = None;
        for line in v4.lines().skip(1) {
            let mut words = line.split_whitespace();
            let first = words.next().unwrap_or_default();
            if !line.starts_with('\t') {
                let index = first.parse::<u32>().ok();
                interface = index.zip(words.next().map(str::to_owned));
            } else if let (Some((index, name)), Ok(group)) =
                (&interface, u32::from_str_radix(first, 16))
            {
                let group = Ipv4Addr::from(group.to_ne_bytes());
                found.push((*index, name.clone(), group.into()));
            }
        }
        for line in v6.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if let [index, name, group, ..] = words[..]
                && let (Ok(index), Ok(group)) = (index.parse(), u128::from_str_radix(group, 16))
            {
                found.push((index, name.to_owned(), Ipv6Addr::from_bits(group).into()));
            }
        }
        Self(found)
    }
}

/// Returns the groups in `groups` that a socket has joined.
///
/// # Errors
/// The kernel's error.
pub fn memberships(
    socket: BorrowedFd<'_>,
    v6_socket: bool,
    groups: &HostMulticastGroups,
) -> Result<Vec<MulticastMembership>, UdpError> {
    let mut found = Vec::new();
    for (index, interface, group) in &groups.0 {
        if group.is_ipv6() && !v6_socket {
            continue;
        }
        let Some((include, sources)) =
            source_filter(socket, *index, *group).at_step("MCAST_MSFILTER")?
        else {
            continue;
        };
        let member = |source, blocked| MulticastMembership {
            group: *group,
            interface: interface.clone(),
            source,
            blocked,
        };
        if include {
            found.extend(sources.into_iter().map(|one| member(Some(one), Vec::new())));
        } else {
            found.push(member(None, sources));
        }
    }
    Ok(found)
}

/// Returns the sources of a group that a socket wants (true) or blocks (false); `None` if the socket has not joined it.
fn source_filter(
    socket: BorrowedFd<'_>,
    interface: u32,
    group: IpAddr,
) -> std::io::Result<Option<(bool, Vec<IpAddr>)>> {
    let mut raw = vec![0u8; SOURCES_OFFSET + SOURCES_MAX * STORAGE_LEN];
    raw[..4].copy_from_slice(&interface.to_ne_bytes());
    write_address(&mut raw[GROUP_OFFSET..], group);
    raw[COUNT_OFFSET..SOURCES_OFFSET].copy_from_slice(&(SOURCES_MAX as u32).to_ne_bytes());
    match get_bytes(socket, option_level(group), MCAST_MSFILTER, &mut raw) {
        Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => return Ok(None),
        other => drop(other?),
    }
    let word = |at: usize| u32::from_ne_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
    let sources = raw[SOURCES_OFFSET..]
        .chunks(STORAGE_LEN)
        .take(word(COUNT_OFFSET) as usize);
    let sources = sources.map(|raw| read_address(raw, group)).collect();
    Ok(Some((word(MODE_OFFSET) == MCAST_INCLUDE, sources)))
}

fn option_level(group: IpAddr) -> i32 {
    if group.is_ipv4() {
        IPPROTO_IP
    } else {
        IPPROTO_IPV6
    }
}

/// Joins a socket to a multicast group at an interface, restricted to a source if there is one.
///
/// # Errors
/// [`UdpError::DeviceAbsent`] without such an interface; otherwise the kernel's error.
pub fn join(socket: BorrowedFd<'_>, membership: &MulticastMembership) -> Result<(), UdpError> {
    let index = interface_index(&membership.interface)
        .map_err(|_| UdpError::DeviceAbsent(membership.interface.clone()))?;
    let level = option_level(membership.group);
    // The request is a `struct group_source_req`, which begins with a `struct group_req`.
    let mut raw = [0u8; GROUP_OFFSET + 2 * STORAGE_LEN];
    raw[..4].copy_from_slice(&index.to_ne_bytes());
    write_address(&mut raw[GROUP_OFFSET..], membership.group);
    let with_source = |name: i32, source: IpAddr| {
        let mut raw = raw;
        write_address(&mut raw[GROUP_OFFSET + STORAGE_LEN..], source);
        set_bytes(socket, level, name, &raw)
    };
    if let Some(source) = membership.source {
        return with_source(MCAST_JOIN_SOURCE_GROUP, source).at_step("MCAST_JOIN_SOURCE_GROUP");
    }
    let request = &raw[..GROUP_OFFSET + STORAGE_LEN];
    set_bytes(socket, level, MCAST_JOIN_GROUP, request).at_step("MCAST_JOIN_GROUP")?;
    for source in &membership.blocked {
        with_source(MCAST_BLOCK_SOURCE, *source).at_step("MCAST_BLOCK_SOURCE")?;
    }
    Ok(())
}

/// Reads the address in a `sockaddr_storage` of the same family as `family_of`.
fn read_address(raw: &[u8], family_of: IpAddr) -> IpAddr {
    match family_of {
        IpAddr::V4(_) => {
            let mut octets = [0; 4];
            octets.copy_from_slice(&raw[4..8]);
            octets.into()
        }
        IpAddr::V6(_) => {
            let mut octets = [0; 16];
            octets.copy_from_slice(&raw[8..24]);
            octets.into()
        }
    }
}

/// Writes a `sockaddr_storage` with port 0.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_igmp_files_are_parsed() {
        let v4 = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
            1\tlo        :     1      V3\n\
            \t\t\t\t010000E0     1 0:00000000\t\t0\n\
            12\teth0      :     2      V3\n\
            \t\t\t\t070707EF     1 0:00000000\t\t0\n";
        let v6 = "12   eth0            ff150000000000000000000000000077     1 00000004 0\n";
        let group = |index: u32, name: &str, address: &str| {
            (index, name.to_owned(), address.parse().expect("an address"))
        };
        let expected = [
            group(1, "lo", "224.0.0.1"),
            group(12, "eth0", "239.7.7.7"),
            group(12, "eth0", "ff15::77"),
        ];
        assert_eq!(HostMulticastGroups::parse(v4, v6).0, expected);
        assert_eq!(
            HostMulticastGroups::parse("", "some words"),
            HostMulticastGroups::default()
        );
    }
}
