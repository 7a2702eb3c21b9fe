//! Interfaces, addresses, routes and neighbours of this network namespace (`rtnetlink(7)`, `netdevice(7)`).

use crate::netlink::{Netlink, NetlinkRequest, attributes};
use crate::sockopt::check;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Attribute numbers `IFA_*`, `NDA_*` and `RTA_*` (`linux/if_addr.h`, `linux/neighbour.h`, `linux/rtnetlink.h`).
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_F_NODAD: u8 = 2;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NTF_USE: u8 = 1;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PREFSRC: u16 = 7;
/// Longest wait for the kernel to add the route of a new address.
const ROUTE_TIMEOUT: Duration = Duration::from_secs(5);
/// States in which a neighbour's link address is usable: permanent, no ARP, reachable, probe, stale, delay.
const NUD_VALID: u16 = 0x80 | 0x40 | 0x02 | 0x10 | 0x04 | 0x08;

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Name of the interface.
    pub name: String,
    /// Index of the interface.
    pub index: u32,
    /// Link address; zero for an interface without one.
    pub mac: [u8; 6],
    /// MTU, bytes.
    pub mtu: u32,
}

impl Interface {
    /// Returns the interface with this index.
    ///
    /// # Errors
    /// `ENXIO` when there is none.
    pub fn by_index(index: u32) -> io::Result<Self> {
        Self::find(&interface_name(index)?)
    }

    /// Returns the interface called `name`.
    ///
    /// # Errors
    /// `ENODEV` when there is none; otherwise errors of `ioctl(2)`.
    pub fn find(name: &str) -> io::Result<Self> {
        let index = ioctl(name, libc::SIOCGIFINDEX, |_| {})?;
        let hardware = ioctl(name, libc::SIOCGIFHWADDR, |_| {})?;
        let mtu = ioctl(name, libc::SIOCGIFMTU, |_| {})?;
        // SAFETY: each request filled the member that is read.
        let (index, hardware, mtu) = unsafe {
            (
                index.ifr_ifru.ifru_ifindex,
                hardware.ifr_ifru.ifru_hwaddr,
                mtu.ifr_ifru.ifru_mtu,
            )
        };
        let mut mac = [0; 6];
        if hardware.sa_family == libc::ARPHRD_ETHER {
            for (to, from) in mac.iter_mut().zip(hardware.sa_data) {
                *to = from as u8;
            }
        }
        Ok(Self {
            name: name.to_owned(),
            index: index as u32,
            mac,
            mtu: mtu as u32,
        })
    }
}

/// Brings an interface up.
///
/// # Errors
/// Errors of `ioctl(2)`.
pub fn set_up(name: &str) -> io::Result<()> {
    let current = ioctl(name, libc::SIOCGIFFLAGS, |_| {})?;
    // SAFETY: SIOCGIFFLAGS filled this member.
    let flags = unsafe { current.ifr_ifru.ifru_flags } | libc::IFF_UP as libc::c_short;
    ioctl(name, libc::SIOCSIFFLAGS, |request| {
        request.ifr_ifru.ifru_flags = flags;
    })
    .map(|_| ())
}

/// Sets an interface's MTU, bytes.
///
/// # Errors
/// Errors of `ioctl(2)`.
pub fn set_mtu(name: &str, mtu: i32) -> io::Result<()> {
    ioctl(name, libc::SIOCSIFMTU, |request| {
        request.ifr_ifru.ifru_mtu = mtu
    })
    .map(|_| ())
}

/// Sets the length of an interface's send queue, packets.
///
/// # Errors
/// Errors of `ioctl(2)`.
pub fn set_queue_length(name: &str, packets: i32) -> io::Result<()> {
    // SIOCSIFTXQLEN uses the union member of the metric.
    ioctl(name, libc::SIOCSIFTXQLEN, |request| {
        request.ifr_ifru.ifru_metric = packets;
    })
    .map(|_| ())
}

/// Adds an address without duplicate address detection, because several hosts may share the address on purpose. An
/// address that exists already is no error. Packets to the address are delivered when this function returns: the kernel
/// adds the route of an IPv6 address from a work queue, a moment after the address, and the function waits for the
/// route.
///
/// # Errors
/// Errors of the netlink request; `TimedOut` when the route does not appear within 5 s (an interface that is down).
pub fn add_address(interface: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
    let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    change_address(libc::RTM_NEWADDR, flags, interface, address, prefix)?;
    let start = Instant::now();
    while !is_local(address)? {
        if start.elapsed() > ROUTE_TIMEOUT {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("{address} was added, but packets to it are not delivered"),
            ));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Returns true if this host delivers packets for `address` to itself.
///
/// # Errors
/// Errors of the netlink request.
pub fn is_local(address: IpAddr) -> io::Result<bool> {
    let mut local = false;
    match query_route(address, |body| {
        local = body.get(7) == Some(&libc::RTN_LOCAL)
    }) {
        Err(error) if error.kind() == io::ErrorKind::NetworkUnreachable => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::HostUnreachable => Ok(false),
        outcome => outcome.map(|()| local),
    }
}

/// Returns the addresses of an interface with the lengths of their prefixes, bits.
///
/// # Errors
/// Errors of the netlink request.
pub fn addresses(interface: u32) -> io::Result<Vec<(IpAddr, u8)>> {
    let mut found = Vec::new();
    let message = NetlinkRequest::new(libc::RTM_GETADDR, 0, &[0; 8]);
    let flags = libc::NLM_F_DUMP;
    Netlink::new(libc::NETLINK_ROUTE)?.request(message, flags, |_, body| {
        let (Some(fixed), Some(rest)) = (body.get(..8), body.get(8..)) else {
            return;
        };
        if fixed[4..8] != interface.to_ne_bytes() {
            return;
        }
        let value = |wanted| attributes(rest).find(|(kind, _)| *kind == wanted);
        // IPv4 has both: IFA_ADDRESS is the remote end of a point-to-point link.
        let address = value(IFA_LOCAL).or_else(|| value(IFA_ADDRESS));
        let address = address.and_then(|(_, bytes)| parse_address(bytes));
        found.extend(address.map(|address| (address, fixed[1])));
    })?;
    Ok(found)
}

/// Removes an address. An address that does not exist is no error.
///
/// # Errors
/// Errors of the netlink request.
pub fn remove_address(interface: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
    match change_address(libc::RTM_DELADDR, 0, interface, address, prefix) {
        Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => Ok(()),
        outcome => outcome,
    }
}

fn change_address(
    kind: u16,
    flags: i32,
    interface: u32,
    address: IpAddr,
    prefix: u8,
) -> io::Result<()> {
    let mut fixed = [0u8; 8];
    fixed[0] = family(address);
    fixed[1] = prefix;
    fixed[2] = if address.is_ipv6() { IFA_F_NODAD } else { 0 };
    fixed[4..].copy_from_slice(&interface.to_ne_bytes());
    let bytes = octets(address);
    let message = NetlinkRequest::new(kind, flags, &fixed)
        .attribute(IFA_LOCAL, &bytes)
        .attribute(IFA_ADDRESS, &bytes);
    Netlink::new(libc::NETLINK_ROUTE)?.change(message)
}

/// The route of packets to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Index of the outgoing interface.
    pub interface: u32,
    /// Router, unless the address is on the link.
    pub gateway: Option<IpAddr>,
    /// Source address that the kernel would choose.
    pub source: Option<IpAddr>,
}

/// Returns the route that the kernel takes to `address`.
///
/// # Errors
/// `ENETUNREACH` and others when there is none.
pub fn route_to(address: IpAddr) -> io::Result<Route> {
    let mut route = None;
    query_route(address, |body| {
        let mut found = Route {
            interface: 0,
            gateway: None,
            source: None,
        };
        for (kind, value) in attributes(body.get(12..).unwrap_or(&[])) {
            match kind {
                RTA_OIF => found.interface = value.try_into().map_or(0, u32::from_ne_bytes),
                RTA_GATEWAY => found.gateway = parse_address(value),
                RTA_PREFSRC => found.source = parse_address(value),
                _ => {}
            }
        }
        route = Some(found);
    })?;
    route.ok_or_else(|| io::Error::from_raw_os_error(libc::ENETUNREACH))
}

/// Requests the route to `address`; `on_answer` gets the `struct rtmsg` and its attributes.
fn query_route(address: IpAddr, mut on_answer: impl FnMut(&[u8])) -> io::Result<()> {
    let mut fixed = [0u8; 12];
    fixed[0] = family(address);
    fixed[1] = if address.is_ipv4() { 32 } else { 128 };
    let message =
        NetlinkRequest::new(libc::RTM_GETROUTE, 0, &fixed).attribute(RTA_DST, &octets(address));
    Netlink::new(libc::NETLINK_ROUTE)?.request(message, 0, |_, body| on_answer(body))
}

/// Returns the link address of `address` on the link of `interface` if the kernel knows it; sends no solicitation.
///
/// # Errors
/// Errors of the netlink request.
pub fn neighbour(interface: u32, address: IpAddr) -> io::Result<Option<[u8; 6]>> {
    let fixed = neighbour_message(interface, address, 0);
    let message =
        NetlinkRequest::new(libc::RTM_GETNEIGH, 0, &fixed).attribute(NDA_DST, &octets(address));
    let mut mac = None;
    let outcome = Netlink::new(libc::NETLINK_ROUTE)?.request(message, 0, |_, body| {
        let state = body
            .get(8..10)
            .map_or(0, |raw| u16::from_ne_bytes([raw[0], raw[1]]));
        if state & NUD_VALID != 0 {
            mac = attributes(body.get(12..).unwrap_or(&[]))
                .find(|(kind, _)| *kind == NDA_LLADDR)
                .and_then(|(_, value)| value.try_into().ok());
        }
    });
    match outcome {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        other => other.map(|()| mac),
    }
}

/// Returns the link address of `address` on the link of `interface`. If the kernel does not know it, has the kernel
/// send ARP or ND solicitations and blocks for at most `timeout`.
///
/// # Errors
/// `TimedOut` when nobody answered; otherwise errors of the netlink request.
pub fn resolve_neighbour(
    interface: u32,
    address: IpAddr,
    timeout: Duration,
) -> io::Result<[u8; 6]> {
    let start = Instant::now();
    loop {
        if let Some(mac) = neighbour(interface, address)? {
            return Ok(mac);
        }
        if start.elapsed() >= timeout {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no link-layer address found for {address}"),
            ));
        }
        let fixed = neighbour_message(interface, address, NTF_USE);
        let message = NetlinkRequest::new(libc::RTM_NEWNEIGH, libc::NLM_F_CREATE, &fixed)
            .attribute(NDA_DST, &octets(address));
        Netlink::new(libc::NETLINK_ROUTE)?.change(message)?;
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Builds a `struct ndmsg`.
fn neighbour_message(interface: u32, address: IpAddr, flags: u8) -> [u8; 12] {
    let mut fixed = [0u8; 12];
    fixed[0] = family(address);
    fixed[4..8].copy_from_slice(&interface.to_ne_bytes());
    fixed[10] = flags;
    fixed
}

fn family(address: IpAddr) -> u8 {
    let family = if address.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    family as u8
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn parse_address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(v4.into());
    }
    <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from)
}

/// Makes an `ifreq` for `name`.
pub fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: all-zero bytes are a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() || name.is_empty() || name.contains('\0') {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("'{name}' is not a valid interface name"),
        ));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// Makes one interface request, with the argument that `fill` sets.
fn ioctl(
    name: &str,
    number: libc::c_ulong,
    fill: impl FnOnce(&mut libc::ifreq),
) -> io::Result<libc::ifreq> {
    let mut request = request(name)?;
    fill(&mut request);
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    check(fd)?;
    // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: interface requests read and write one `ifreq`, which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), number, &raw mut request) })?;
    Ok(request)
}

/// Returns the index of the interface called `name`.
///
/// # Errors
/// `ENODEV` when there is none.
pub fn interface_index(name: &str) -> io::Result<u32> {
    let answer = ioctl(name, libc::SIOCGIFINDEX, |_| {})?;
    // SAFETY: SIOCGIFINDEX filled this member.
    Ok(unsafe { answer.ifr_ifru.ifru_ifindex } as u32)
}

/// Returns the name of the interface with `index`.
///
/// # Errors
/// `ENXIO` when there is none.
pub fn interface_name(index: u32) -> io::Result<String> {
    let mut raw = [0u8; libc::IFNAMSIZ];
    // SAFETY: `raw` has the IF_NAMESIZE bytes that the call may write.
    let found = unsafe { libc::if_indextoname(index, raw.as_mut_ptr().cast()) };
    if found.is_null() {
        return Err(io::Error::last_os_error());
    }
    Ok(name_from_bytes(&raw))
}

/// Returns a name up to its terminating zero.
pub fn name_from_bytes(raw: &[u8]) -> String {
    let text = raw.split(|byte| *byte == 0).next().unwrap_or(&[]);
    String::from_utf8_lossy(text).into_owned()
}
