//! Conversion of socket addresses between Rust's types and the kernel's, and the system calls that take an address.

use crate::sockopt::check;
use std::io;
use std::mem::{size_of, zeroed};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};

/// A socket address in the kernel's layout.
#[derive(Clone, Copy)]
pub struct RawAddress {
    storage: libc::sockaddr_storage,
    length: libc::socklen_t,
}

impl RawAddress {
    /// An address to be filled by the kernel.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            // SAFETY: all-zero bytes are a valid `sockaddr_storage`.
            storage: unsafe { zeroed() },
            length: size_of::<libc::sockaddr_storage>() as libc::socklen_t,
        }
    }

    /// Returns `address` in the form that a socket of family `v6 ? AF_INET6 : AF_INET` needs: an IPv4 address becomes
    /// IPv4-mapped on an IPv6 socket.
    #[must_use]
    pub fn for_family(address: SocketAddr, v6: bool) -> Self {
        match address {
            SocketAddr::V4(v4) if v6 => {
                let mapped = SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0);
                Self::from_v6(&mapped)
            }
            SocketAddr::V4(v4) => Self::from_v4(&v4),
            SocketAddr::V6(v6) => Self::from_v6(&v6),
        }
    }

    fn from_v4(address: &SocketAddrV4) -> Self {
        let mut raw = Self::empty();
        let sin = libc::sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: address.port().to_be(),
            sin_addr: libc::in_addr {
                s_addr: u32::from(*address.ip()).to_be(),
            },
            sin_zero: [0; 8],
        };
        // SAFETY: `sockaddr_storage` is at least as large and as aligned as `sockaddr_in`.
        unsafe {
            (&raw mut raw.storage)
                .cast::<libc::sockaddr_in>()
                .write(sin)
        };
        raw.length = size_of::<libc::sockaddr_in>() as libc::socklen_t;
        raw
    }

    fn from_v6(address: &SocketAddrV6) -> Self {
        let mut raw = Self::empty();
        let sin6 = libc::sockaddr_in6 {
            sin6_family: libc::AF_INET6 as libc::sa_family_t,
            sin6_port: address.port().to_be(),
            sin6_flowinfo: address.flowinfo(),
            sin6_addr: libc::in6_addr {
                s6_addr: address.ip().octets(),
            },
            sin6_scope_id: address.scope_id(),
        };
        // SAFETY: `sockaddr_storage` is at least as large and as aligned as `sockaddr_in6`.
        unsafe {
            (&raw mut raw.storage)
                .cast::<libc::sockaddr_in6>()
                .write(sin6)
        };
        raw.length = size_of::<libc::sockaddr_in6>() as libc::socklen_t;
        raw
    }

    /// Returns the address as a Rust type; `None` for a family other than IPv4 and IPv6.
    #[must_use]
    pub fn to_socket_addr(&self) -> Option<SocketAddr> {
        match i32::from(self.storage.ss_family) {
            libc::AF_INET => {
                // SAFETY: the family says that the storage holds a `sockaddr_in`.
                let sin = unsafe { (&raw const self.storage).cast::<libc::sockaddr_in>().read() };
                let ip = Ipv4Addr::from(u32::from_be(sin.sin_addr.s_addr));
                Some(SocketAddrV4::new(ip, u16::from_be(sin.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: the family says that the storage holds a `sockaddr_in6`.
                let sin6 = unsafe {
                    (&raw const self.storage)
                        .cast::<libc::sockaddr_in6>()
                        .read()
                };
                let ip = Ipv6Addr::from(sin6.sin6_addr.s6_addr);
                let port = u16::from_be(sin6.sin6_port);
                Some(SocketAddrV6::new(ip, port, sin6.sin6_flowinfo, sin6.sin6_scope_id).into())
            }
            _ => None,
        }
    }

    /// Returns the bytes of the address, as many as its family needs.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the first `length` bytes of the storage are initialised, and `length` never exceeds it.
        unsafe {
            std::slice::from_raw_parts((&raw const self.storage).cast(), self.length as usize)
        }
    }

    /// Splits the address at the start of `bytes` from the rest; `None` for another family or too few bytes.
    pub fn split_from(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let family = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?);
        let length = match i32::from(family) {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
            _ => return None,
        };
        let (address, rest) = bytes.split_at_checked(length)?;
        let mut raw = Self::empty();
        // SAFETY: `address` is readable for `length` bytes, and the storage is larger.
        unsafe {
            std::ptr::copy_nonoverlapping(
                address.as_ptr(),
                (&raw mut raw.storage).cast::<u8>(),
                length,
            );
        }
        raw.length = length as libc::socklen_t;
        Some((raw, rest))
    }

    /// Pointer and length, for calls that read the address.
    pub fn as_raw(&self) -> (*const libc::sockaddr, libc::socklen_t) {
        ((&raw const self.storage).cast(), self.length)
    }

    /// Pointer and length, for calls that write the address.
    pub fn as_raw_mut(&mut self) -> (*mut libc::sockaddr, &mut libc::socklen_t) {
        ((&raw mut self.storage).cast(), &mut self.length)
    }
}

/// Returns an IPv4-mapped IPv6 address as IPv4, so that a flow has one name for sockets of either family.
#[must_use]
pub fn canonical(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddrV4::new(v4, v6.port()).into(),
            None => address,
        },
        SocketAddr::V4(_) => address,
    }
}

/// Returns the socket's own address.
///
/// # Errors
/// Errors of `getsockname(2)`; `InvalidData` for a socket that is neither IPv4 nor IPv6.
pub fn local_address(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    let mut raw = RawAddress::empty();
    let (pointer, length) = raw.as_raw_mut();
    // SAFETY: pointer and length describe `raw.storage`, which outlives the call.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), pointer, length) })?;
    raw.to_socket_addr().ok_or_else(unsupported_family)
}

/// Returns the address of the socket's peer.
///
/// # Errors
/// Errors of `getpeername(2)` (`ENOTCONN` without a peer); `InvalidData` for another family.
pub fn remote_address(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    let mut raw = RawAddress::empty();
    let (pointer, length) = raw.as_raw_mut();
    // SAFETY: pointer and length describe `raw.storage`, which outlives the call.
    check(unsafe { libc::getpeername(fd.as_raw_fd(), pointer, length) })?;
    raw.to_socket_addr().ok_or_else(unsupported_family)
}

/// Calls `bind(2)`.
///
/// # Errors
/// Errors of the system call.
pub fn bind(fd: BorrowedFd<'_>, address: &RawAddress) -> io::Result<()> {
    let (pointer, length) = address.as_raw();
    // SAFETY: pointer and length describe an initialised address that outlives the call.
    check(unsafe { libc::bind(fd.as_raw_fd(), pointer, length) })
}

/// Calls `connect(2)`.
///
/// # Errors
/// Errors of the system call.
pub fn connect(fd: BorrowedFd<'_>, address: &RawAddress) -> io::Result<()> {
    let (pointer, length) = address.as_raw();
    // SAFETY: pointer and length describe an initialised address that outlives the call.
    check(unsafe { libc::connect(fd.as_raw_fd(), pointer, length) })
}

/// Calls `connect(2)` with no address: a UDP socket loses its peer, a TCP socket its connection.
///
/// # Errors
/// Errors of the system call.
pub fn disconnect(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut raw = RawAddress::empty();
    raw.storage.ss_family = libc::AF_UNSPEC as libc::sa_family_t;
    connect(fd, &raw)
}

fn unsupported_family() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the socket is neither IPv4 nor IPv6",
    )
}
