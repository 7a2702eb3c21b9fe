//! One socket of the stack. All calls are made under the stack's lock.

use super::endpoint_queue::{self, ulp_info};
use super::ffi::{self, SndInfo};
use super::options;
use super::stack::LockedStack;
use crate::socket_api_layout::{pack_addresses, unpack_addresses};
use crate::{MessageToSend, TransportConfig};
use holdfast_sys::sockopt::check;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// One of an association's two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AssocEnd {
    Local,
    Remote,
}

/// A one-to-many socket; closed by [`close`](Socket::close).
pub struct Socket(*mut ffi::Socket);

// SAFETY: all threads use the socket only under the stack's lock.
unsafe impl Send for Socket {}

impl Socket {
    /// Opens a socket that delivers its events to the endpoint's `queue` under the number `port`.
    pub fn open(
        stack: &LockedStack,
        config: &TransportConfig,
        port: u32,
        queue: u32,
    ) -> io::Result<Self> {
        let is_v6 = config.local.iter().any(SocketAddr::is_ipv6);
        let domain = if is_v6 { libc::AF_INET6 } else { libc::AF_INET };
        // SAFETY: the callback has the library's signature; its argument holds numbers, not a pointer.
        let socket = unsafe {
            ffi::usrsctp_socket(
                domain,
                libc::SOCK_SEQPACKET,
                libc::IPPROTO_SCTP,
                Some(endpoint_queue::on_received),
                None,
                0,
                ulp_info(port, queue),
            )
        };
        if socket.is_null() {
            return Err(io::Error::last_os_error());
        }
        let socket = Self(socket);
        match socket.configure(config) {
            Ok(()) => Ok(socket),
            Err(error) => {
                socket.close(stack);
                Err(error)
            }
        }
    }

    fn configure(&self, config: &TransportConfig) -> io::Result<()> {
        // SAFETY: the socket is open.
        check(unsafe { ffi::usrsctp_set_non_blocking(self.0, 1) })?;
        options::set_all(self.0, config)?;
        self.bind(&config.local)?;
        if config.listen {
            // SAFETY: the socket is open.
            check(unsafe { ffi::usrsctp_listen(self.0, 1) })?;
        }
        Ok(())
    }

    fn bind(&self, local: &[SocketAddr]) -> io::Result<()> {
        let Some((first, others)) = local.split_first() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let mut address = pack_addresses(&[*first]);
        let length = address.len() as libc::socklen_t;
        // SAFETY: the address is readable for its length.
        check(unsafe { ffi::usrsctp_bind(self.0, address.as_mut_ptr().cast(), length) })?;
        if others.is_empty() {
            return Ok(());
        }
        let addresses = self.addresses(AssocEnd::Local, 0)?;
        let port = addresses.first().map_or(0, SocketAddr::port);
        for &other in others {
            let mut address = pack_addresses(&[SocketAddr::new(other.ip(), port)]);
            let pointer = address.as_mut_ptr().cast();
            // SAFETY: `pointer` has one packed address.
            check(unsafe { ffi::usrsctp_bindx(self.0, pointer, 1, ffi::BINDX_ADD_ADDR) })?;
        }
        Ok(())
    }

    /// Starts an association and returns the stack's number of it.
    pub fn connect(&self, remote: &[SocketAddr], encapsulation: Option<u16>) -> io::Result<u32> {
        options::set_encapsulation(self.0, encapsulation)?;
        let addresses = pack_addresses(remote);
        let mut assoc = 0;
        // SAFETY: the list has that many packed addresses.
        let outcome = check(unsafe {
            let pointer = addresses.as_ptr().cast();
            ffi::usrsctp_connectx(self.0, pointer, remote.len() as i32, &raw mut assoc)
        });
        match outcome {
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) if error.raw_os_error() == Some(libc::EALREADY) => {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            other => other?,
        }
        Ok(assoc)
    }

    /// Passes a message to the stack; `flags` as in `struct sctp_sndinfo`.
    pub fn send(&self, assoc: u32, flags: u16, message: &MessageToSend) -> io::Result<()> {
        let unordered = if message.unordered { ffi::UNORDERED } else { 0 };
        let mut info = SndInfo {
            sid: message.stream,
            flags: flags | unordered,
            ppid: message.ppid.to_be(),
            context: 0,
            assoc,
        };
        // SAFETY: data and information outlive the call, which copies them.
        let sent = unsafe {
            ffi::usrsctp_sendv(
                self.0,
                message.data.as_ptr().cast(),
                message.data.len(),
                std::ptr::null_mut(),
                0,
                (&raw mut info).cast(),
                size_of::<SndInfo>() as libc::socklen_t,
                ffi::SENDV_SNDINFO,
                0,
            )
        };
        if sent >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTCONN | libc::ECONNRESET) => {
                Err(io::ErrorKind::NotConnected.into())
            }
            Some(libc::ENOBUFS | libc::ENOMEM) => Err(io::ErrorKind::WouldBlock.into()),
            _ => Err(error),
        }
    }

    /// Passes messages that are to share packets: nothing is sent before the last message or `unsent_max` bytes.
    /// Returns the number of messages that fit.
    pub fn send_bundle(
        &self,
        stack: &LockedStack,
        assoc: u32,
        messages: &[MessageToSend],
        unsent_max: usize,
    ) -> usize {
        let last = messages.len().saturating_sub(1);
        let mut unsent = 0;
        let is_full = |(index, message): (usize, &MessageToSend)| {
            unsent += message.data.len();
            let more_follows = index < last && unsent < unsent_max;
            if !more_follows {
                unsent = 0;
            }
            stack.hold_back(more_follows);
            let sent = self.send(assoc, 0, message);
            sent.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        };
        let first_refused = messages.iter().enumerate().position(is_full);
        stack.hold_back(false);
        first_refused.unwrap_or(messages.len())
    }

    pub fn round_trip(&self, assoc: u32) -> io::Result<Duration> {
        options::round_trip(self.0, assoc)
    }

    pub fn measure(&self, assoc: u32) {
        options::measure(self.0, assoc);
    }

    /// Returns true if the peer has answered at this address.
    pub fn is_confirmed(&self, assoc: u32, address: SocketAddr) -> bool {
        options::is_confirmed(self.0, assoc, address)
    }

    /// Returns the addresses of one end; `assoc` 0 means the socket's bound addresses.
    pub fn addresses(&self, end: AssocEnd, assoc: u32) -> io::Result<Vec<SocketAddr>> {
        let (get, free) = match end {
            AssocEnd::Local => (
                ffi::usrsctp_getladdrs as options::GetList,
                ffi::usrsctp_freeladdrs as options::FreeList,
            ),
            AssocEnd::Remote => (
                ffi::usrsctp_getpaddrs as options::GetList,
                ffi::usrsctp_freepaddrs as options::FreeList,
            ),
        };
        let mut list = std::ptr::null_mut();
        // SAFETY: the library allocates a list of `count` packed addresses, which is copied and then freed.
        unsafe {
            let count = get(self.0, assoc, &raw mut list);
            check(count)?;
            if list.is_null() {
                return Ok(Vec::new());
            }
            let bytes = options::read_list(list.cast(), count as usize);
            free(list);
            Ok(unpack_addresses(&bytes, count as usize))
        }
    }

    pub fn close(self, _stack: &LockedStack) {
        // SAFETY: the socket is open, and not used after.
        unsafe { ffi::usrsctp_close(self.0) };
    }
}
