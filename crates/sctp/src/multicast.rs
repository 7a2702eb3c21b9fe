//! Announcements: datagrams to a multicast group.
//!
//! The announcer's settings give the addresses. Common defaults are 239.0.0.50:3863 for ASAP and 239.0.0.51:9901 for
//! ENRP. The sender of a datagram is not authenticated here.

use holdfast_sys::address::{self, RawAddress};
use holdfast_sys::sockopt::{self, check};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Length of the longest accepted datagram, bytes; longer ones are dropped.
const ANNOUNCE_LEN_MAX: usize = 9000;
/// Most routers that an announcement may pass (`IP_MULTICAST_TTL`); the group's scope limits it further.
const HOPS: i32 = 16;

/// A member of one multicast group.
#[derive(Debug)]
pub struct MulticastSocket {
    fd: OwnedFd,
    group: SocketAddr,
    interfaces: Vec<u32>,
    buffer: Vec<u8>,
}

/// A datagram that was sent to the multicast group.
#[derive(Debug, PartialEq, Eq)]
pub struct ReceivedAnnouncement<'a> {
    /// Sender address in the datagram's header, which may be forged.
    pub from: SocketAddr,
    /// Payload of the datagram.
    pub bytes: &'a [u8],
}

impl MulticastSocket {
    /// Joins `group` on the interfaces with these indices (`if_nametoindex(3)`); without any, on the interface that the
    /// routing table gives. Each of several members on one host gets every datagram, including its own.
    ///
    /// # Errors
    /// `InvalidInput` unless `group` is a multicast address; otherwise the kernel's error, such as no such interface or
    /// route.
    pub fn join(group: SocketAddr, interfaces: &[u32]) -> io::Result<Self> {
        if !group.ip().is_multicast() {
            let text = format!("{group} is not a multicast address");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let domain = if group.is_ipv4() {
            libc::AF_INET
        } else {
            libc::AF_INET6
        };
        let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::socket(domain, kind, 0) };
        check(fd)?;
        let member = Self {
            // SAFETY: the descriptor was just opened and belongs to nobody else.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
            group,
            interfaces: interfaces.to_vec(),
            buffer: vec![0; ANNOUNCE_LEN_MAX],
        };
        member.configure()?;
        Ok(member)
    }

    fn configure(&self) -> io::Result<()> {
        let fd = self.fd();
        sockopt::set_int(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
        match self.group.ip() {
            IpAddr::V4(_) => {
                sockopt::set_int(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, HOPS)?;
                // Datagrams for groups that only other sockets of this host joined are not delivered here.
                sockopt::set_int(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
            }
            IpAddr::V6(_) => {
                sockopt::set_int(fd, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, HOPS)?;
            }
        }
        // Binding to the group's address keeps unicast datagrams out.
        address::bind(fd, &RawAddress::for_family(self.group, false))?;
        if self.interfaces.is_empty() {
            return self.join_on(0);
        }
        self.interfaces
            .iter()
            .try_for_each(|&index| self.join_on(index))
    }

    fn join_on(&self, interface: u32) -> io::Result<()> {
        let fd = self.fd();
        match self.group.ip() {
            IpAddr::V4(group) => {
                // The request is a `struct ip_mreqn`: group, address of an interface (any), index.
                let mut request = [0; 12];
                request[..4].copy_from_slice(&group.octets());
                request[8..].copy_from_slice(&interface.to_ne_bytes());
                sockopt::set_bytes(fd, libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, &request)
            }
            IpAddr::V6(group) => {
                let mut request = group.octets().to_vec();
                request.extend(interface.to_ne_bytes());
                sockopt::set_bytes(fd, libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP, &request)
            }
        }
    }

    /// Returns the socket, which is readable when a datagram has arrived.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Sends to the group on each interface and returns the number of interfaces that accepted the datagram. An
    /// interface that is down does not affect the others.
    ///
    /// # Errors
    /// No interface accepted the datagram.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        if self.interfaces.is_empty() {
            self.send_on(0, bytes)?;
            return Ok(1);
        }
        let mut count = 0;
        let mut failure = None;
        for &interface in &self.interfaces {
            match self.send_on(interface, bytes) {
                Ok(()) => count += 1,
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if count == 0 => Err(error),
            _ => Ok(count),
        }
    }

    fn send_on(&self, interface: u32, bytes: &[u8]) -> io::Result<()> {
        if self.group.is_ipv4() {
            let mut request = [0; 12];
            request[8..].copy_from_slice(&interface.to_ne_bytes());
            let (level, name) = (libc::IPPROTO_IP, libc::IP_MULTICAST_IF);
            sockopt::set_bytes(self.fd(), level, name, &request)?;
        } else {
            let (level, name) = (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF);
            sockopt::set_int(self.fd(), level, name, interface as i32)?;
        }
        let to = RawAddress::for_family(self.group, false);
        let (address, length) = to.as_raw();
        let fd = self.fd.as_raw_fd();
        // SAFETY: bytes and address are readable for their lengths and outlive the call.
        let sent = unsafe {
            let (data, len) = (bytes.as_ptr().cast(), bytes.len());
            libc::sendto(fd, data, len, libc::MSG_NOSIGNAL, address, length)
        };
        sockopt::check_length(sent).map(drop)
    }

    /// Returns the next datagram, if there is one; never blocks.
    ///
    /// # Errors
    /// The socket's error.
    pub fn receive(&mut self) -> io::Result<Option<ReceivedAnnouncement<'_>>> {
        loop {
            let mut from = RawAddress::empty();
            let (address, length) = from.as_raw_mut();
            let fd = self.fd.as_raw_fd();
            // SAFETY: the buffer is writable for its length, and so is the address; all outlive the call.
            let outcome = unsafe {
                let (data, len) = (self.buffer.as_mut_ptr().cast(), self.buffer.len());
                libc::recvfrom(fd, data, len, libc::MSG_TRUNC, address, length)
            };
            let len = match sockopt::check_length(outcome) {
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if let (Some(from), true) = (from.to_socket_addr(), len <= self.buffer.len()) {
                let bytes = &self.buffer[..len];
                return Ok(Some(ReceivedAnnouncement { from, bytes }));
            }
        }
    }
}
