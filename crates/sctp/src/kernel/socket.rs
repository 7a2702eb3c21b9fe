//! One-to-many socket of the kernel's SCTP.

use super::abi;
use crate::TransportConfig;
use crate::socket_api_layout::{pack_addresses, u32_at, unpack_addresses};
use holdfast_sys::address;
use holdfast_sys::sockopt::{self, check};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// A non-blocking SCTP socket of the kernel.
pub struct KernelSocket(OwnedFd);

impl AsFd for KernelSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl KernelSocket {
    /// Makes a socket without address; fails if the kernel has no SCTP.
    pub fn new(is_v6: bool) -> io::Result<Self> {
        let domain = if is_v6 { libc::AF_INET6 } else { libc::AF_INET };
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::socket(domain, kind, libc::IPPROTO_SCTP) };
        check(fd)?;
        // SAFETY: the descriptor was just opened and belongs to nobody else.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub fn open(config: &TransportConfig) -> io::Result<Self> {
        let socket = Self::new(config.local.iter().any(SocketAddr::is_ipv6))?;
        for (forced, plain, bytes) in [
            (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, config.send_buffer),
            (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, config.receive_buffer),
        ] {
            let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
            if sockopt::set_int(socket.as_fd(), libc::SOL_SOCKET, forced, bytes).is_err() {
                sockopt::set_int(socket.as_fd(), libc::SOL_SOCKET, plain, bytes)?;
            }
        }
        let receive_buffer = sockopt::get_int(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF)?;
        for (name, value) in abi::options(config, receive_buffer.unsigned_abs()) {
            socket.set_option(name, &value)?;
        }
        socket.bind(&config.local)?;
        if config.listen {
            // SAFETY: no pointers are passed.
            check(unsafe { libc::listen(socket.0.as_raw_fd(), libc::SOMAXCONN) })?;
        }
        Ok(socket)
    }

    fn set_option(&self, name: i32, value: &[u8]) -> io::Result<()> {
        sockopt::set_bytes(self.as_fd(), libc::IPPROTO_SCTP, name, value)
    }

    fn bind(&self, local: &[SocketAddr]) -> io::Result<()> {
        let Some(first) = abi::first_address(local) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        address::bind(self.as_fd(), &first)?;
        if local.len() > 1 {
            let port = address::local_address(self.as_fd())?.port();
            self.set_option(
                abi::BINDX_ADD,
                &pack_addresses(&abi::with_port(&local[1..], port)),
            )?;
        }
        Ok(())
    }

    /// Starts an association and returns the kernel's number of it.
    pub fn connect(&self, remote: &[SocketAddr], encapsulation: Option<u16>) -> io::Result<u32> {
        match self.set_option(
            abi::REMOTE_UDP_ENCAPS_PORT,
            &abi::encapsulation_option(encapsulation),
        ) {
            // A kernel before 5.11 has no encapsulation to switch off.
            Err(error) if encapsulation.is_none() && is_unknown_option(&error) => {}
            outcome => outcome?,
        }
        let addresses = pack_addresses(remote);
        // The request is a `struct sctp_getaddrs_old`: association, length of the list, list.
        let mut request = [0u8; 16];
        request[4..8].copy_from_slice(&(addresses.len() as u32).to_ne_bytes());
        request[8..].copy_from_slice(&(addresses.as_ptr() as u64).to_ne_bytes());
        let outcome = self.get_option(abi::CONNECTX3, &mut request);
        match outcome {
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) if error.raw_os_error() == Some(libc::EISCONN) => {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        Ok(u32_at(&request, 0).unwrap_or(0))
    }

    fn get_option(&self, name: i32, value: &mut [u8]) -> io::Result<usize> {
        sockopt::get_bytes(self.as_fd(), libc::IPPROTO_SCTP, name, value)
    }

    pub fn round_trip(&self, assoc: u32) -> io::Result<Duration> {
        let mut status = [0; abi::STATUS_LEN];
        status[..4].copy_from_slice(&assoc.to_ne_bytes());
        self.get_option(abi::STATUS, &mut status)?;
        Ok(abi::smoothed_round_trip(&status, tick()?).unwrap_or_default())
    }

    /// Returns true if the peer has answered at an address; false also for an address that is not the peer's.
    pub fn is_confirmed(&self, assoc: u32, address: SocketAddr) -> bool {
        let mut info = abi::path_info(assoc, address);
        let outcome = self.get_option(abi::GET_PEER_ADDR_INFO, &mut info);
        outcome.is_ok() && abi::path_state(&info) != Some(abi::UNCONFIRMED)
    }

    /// Returns addresses by `GET_PEER_ADDRS` or `GET_LOCAL_ADDRS`; the latter with association 0 returns the socket's
    /// bound addresses.
    pub fn addresses(&self, name: i32, assoc: u32) -> io::Result<Vec<SocketAddr>> {
        let mut list = [0; abi::ADDRESS_LIST_LEN];
        list[..4].copy_from_slice(&assoc.to_ne_bytes());
        // The returned length covers the addresses alone; their count gives the same information.
        self.get_option(name, &mut list)?;
        let count = u32_at(&list, 4).unwrap_or(0) as usize;
        Ok(unpack_addresses(&list[8..], count))
    }
}

/// Returns the length of the kernel's tick: the resolution of its coarse clock, which each tick advances.
fn tick() -> io::Result<Duration> {
    let mut tick = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the structure is writable and outlives the call.
    check(unsafe { libc::clock_getres(libc::CLOCK_MONOTONIC_COARSE, &raw mut tick) })?;
    Ok(Duration::from_nanos(tick.tv_nsec.unsigned_abs()))
}

fn is_unknown_option(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOPROTOOPT)
}
