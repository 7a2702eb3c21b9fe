//! SCTP by libusrsctp in this process.
//!
//! The library runs without threads. Its packets leave through [`outbox`] and come through [`inbox`], both in
//! batches, on sockets of our own handling ([`hooks`]); so real addresses, several of them, and both encapsulations work as
//! they do in the library, at one system call for dozens of packets. There is one stack in a process ([`stack`]), with one lock.

mod ffi;
mod hooks;
mod inbox;
mod options;
mod outbox;
mod queue;
mod stack;

use super::layout::{packed, unpacked};
use super::{AssocId, Config, Endpoint, Event, Message};
use crate::sockopt::check;
use ffi::{SndInfo, Socket};
use queue::Queue;
use stack::{Setup, Stack};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Descriptors looked at in one turn: those of the stack, and the wake-up.
const READY_MAX: usize = 8;

/// A one-to-many socket of the process's stack.
pub struct UsrsctpEndpoint {
    socket: *mut Socket,
    number: usize,
    epoll: OwnedFd,
    wake_fd: RawFd,
    encapsulation: Option<u16>,
    is_raw: bool,
}

// SAFETY: the socket is used under the stack's lock only, by whichever thread.
unsafe impl Send for UsrsctpEndpoint {}

impl UsrsctpEndpoint {
    /// Opens an endpoint, and starts the stack if it is the first.
    pub fn open(config: &Config) -> io::Result<Self> {
        let stack = Stack::lock();
        stack.start(Setup {
            raw: config.raw,
            udp_port: config.encapsulation,
        })?;
        let wake = event_fd()?;
        let epoll = epoll_of(stack.fds().into_iter().chain([wake.as_raw_fd()]))?;
        let wake_fd = wake.as_raw_fd();
        let number = add_queue(&stack, Queue::new(wake, config.message_len_max));
        let is_v6 = config.local.iter().any(SocketAddr::is_ipv6);
        let domain = if is_v6 { libc::AF_INET6 } else { libc::AF_INET };
        // SAFETY: the callback has the library's signature; its argument is a number, not a pointer.
        let socket = unsafe {
            ffi::usrsctp_socket(
                domain,
                libc::SOCK_SEQPACKET,
                libc::IPPROTO_SCTP,
                Some(queue::receive),
                None,
                0,
                number as *mut libc::c_void,
            )
        };
        let endpoint = Self {
            socket,
            number,
            epoll,
            wake_fd,
            encapsulation: stack.udp_port(),
            is_raw: stack.is_raw(),
        };
        if socket.is_null() {
            return Err(io::Error::last_os_error());
        }
        endpoint.prepare(config)?;
        drop(stack);
        Ok(endpoint)
    }

    fn prepare(&self, config: &Config) -> io::Result<()> {
        // SAFETY: the socket is open, and the lock is held by the caller.
        check(unsafe { ffi::usrsctp_set_non_blocking(self.socket, 1) })?;
        options::set(self.socket, config)?;
        self.bind(&config.local)?;
        if config.listen {
            // SAFETY: as above.
            check(unsafe { ffi::usrsctp_listen(self.socket, 1) })?;
        }
        Ok(())
    }

    fn bind(&self, local: &[SocketAddr]) -> io::Result<()> {
        let Some((first, others)) = local.split_first() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let mut address = packed(&[*first]);
        let length = address.len() as libc::socklen_t;
        // SAFETY: the address is readable for its length.
        check(unsafe { ffi::usrsctp_bind(self.socket, address.as_mut_ptr().cast(), length) })?;
        if others.is_empty() {
            return Ok(());
        }
        let port = self.addresses(false, 0)?.first().map_or(0, SocketAddr::port);
        for &other in others {
            let mut address = packed(&[SocketAddr::new(other.ip(), port)]);
            let pointer = address.as_mut_ptr().cast();
            // SAFETY: `pointer` has one packed address.
            check(unsafe {
                ffi::usrsctp_bindx(self.socket, pointer, 1, ffi::BINDX_ADD_ADDR)
            })?;
        }
        Ok(())
    }

    /// The peer's addresses or our own.
    fn addresses(&self, remote: bool, assoc: u32) -> io::Result<Vec<SocketAddr>> {
        /// More than the 65535 bytes of an INIT can name.
        const COUNT_MAX: usize = 4096;
        let mut list = std::ptr::null_mut();
        // SAFETY: the library allocates a list of that many packed addresses, freed below.
        unsafe {
            let count = if remote {
                ffi::usrsctp_getpaddrs(self.socket, assoc, &raw mut list)
            } else {
                ffi::usrsctp_getladdrs(self.socket, assoc, &raw mut list)
            };
            check(count)?;
            if list.is_null() {
                return Ok(Vec::new());
            }
            let count = (count as usize).min(COUNT_MAX);
            let addresses = options::read_list(list.cast(), count);
            if remote {
                ffi::usrsctp_freepaddrs(list);
            } else {
                ffi::usrsctp_freeladdrs(list);
            }
            Ok(unpacked(&addresses, count))
        }
    }

    fn send_with(&self, assoc: AssocId, flags: u16, message: &Message) -> io::Result<()> {
        let mut info = SndInfo {
            sid: message.stream,
            flags: flags | if message.unordered { ffi::UNORDERED } else { 0 },
            ppid: message.ppid.to_be(),
            context: 0,
            assoc: assoc.0,
        };
        // SAFETY: data and information outlive the call, which copies them; the lock is held by the caller.
        let sent = unsafe {
            ffi::usrsctp_sendv(
                self.socket,
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
            Some(libc::ENOENT | libc::ENOTCONN | libc::ECONNRESET | libc::EINVAL) => {
                Err(io::ErrorKind::NotConnected.into())
            }
            _ => Err(error),
        }
    }

    /// Lets the stack read what its sockets have.
    fn turn(&self, stack: &Stack) -> io::Result<()> {
        let mut ready = [libc::epoll_event { events: 0, u64: 0 }; READY_MAX];
        // SAFETY: the array is writable for its length.
        let count = unsafe {
            let max = READY_MAX as i32;
            libc::epoll_wait(self.epoll.as_raw_fd(), ready.as_mut_ptr(), max, 0)
        };
        let count = usize::try_from(count).unwrap_or(0);
        for event in &ready[..count] {
            let fd = event.u64 as RawFd;
            if fd == self.wake_fd {
                drain(fd);
            } else {
                stack.read(fd)?;
            }
        }
        stack.tick();
        Ok(())
    }

    /// Takes this endpoint's events and wakes others that got some.
    fn collect(&self, stack: &Stack, events: &mut Vec<Event>) -> Vec<AssocId> {
        let mut too_long = Vec::new();
        let mut queues = stack.inner().queues.borrow_mut();
        for (number, queue) in queues.iter_mut().enumerate() {
            let Some(queue) = queue else { continue };
            if number == self.number {
                events.append(&mut queue.events);
                too_long = std::mem::take(&mut queue.too_long);
            } else if !queue.events.is_empty() || !queue.too_long.is_empty() {
                signal(queue.wake.as_raw_fd());
            }
        }
        too_long
    }
}

impl Endpoint for UsrsctpEndpoint {
    fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn recv_batch(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        let stack = Stack::lock();
        self.turn(&stack)?;
        for assoc in self.collect(&stack, events) {
            let _ = self.send_with(assoc, ffi::SEND_ABORT, &Message::new(0, "too long".into()));
        }
        Ok(())
    }

    fn send(&mut self, assoc: AssocId, message: &Message) -> io::Result<()> {
        let _stack = Stack::lock();
        self.send_with(assoc, 0, message)
    }

    fn send_many(&mut self, assocs: &[AssocId], message: &Message) -> usize {
        let _stack = Stack::lock();
        let handed_over = |&&assoc: &&AssocId| self.send_with(assoc, 0, message).is_ok();
        assocs.iter().filter(handed_over).count()
    }

    fn flush(&mut self) -> io::Result<()> {
        Stack::lock().flush();
        Ok(())
    }

    fn connect(
        &mut self,
        remote: &[SocketAddr],
        encapsulation: Option<u16>,
    ) -> io::Result<AssocId> {
        let _stack = Stack::lock();
        options::set_encapsulation(self.socket, encapsulation)?;
        let addresses = packed(remote);
        let mut assoc = 0;
        // SAFETY: the list has that many packed addresses.
        let outcome = check(unsafe {
            let pointer = addresses.as_ptr().cast();
            ffi::usrsctp_connectx(self.socket, pointer, remote.len() as i32, &raw mut assoc)
        });
        match outcome {
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) if error.raw_os_error() == Some(libc::EALREADY) => {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            other => other?,
        }
        Ok(AssocId(assoc))
    }

    fn round_trip(&self, assoc: AssocId) -> io::Result<Option<Duration>> {
        let _stack = Stack::lock();
        options::round_trip(self.socket, assoc)
    }

    fn remote_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        let _stack = Stack::lock();
        self.addresses(true, assoc.0)
    }

    fn local_addresses(&self) -> io::Result<Vec<SocketAddr>> {
        let _stack = Stack::lock();
        self.addresses(false, 0)
    }

    fn encapsulation_port(&self) -> Option<u16> {
        self.encapsulation
    }

    fn is_raw(&self) -> bool {
        self.is_raw
    }

    fn shutdown(&mut self, assoc: AssocId) -> io::Result<()> {
        let _stack = Stack::lock();
        self.send_with(assoc, ffi::SEND_EOF, &Message::new(0, "".into()))
    }

    fn abort(&mut self, assoc: AssocId) -> io::Result<()> {
        let _stack = Stack::lock();
        self.send_with(assoc, ffi::SEND_ABORT, &Message::new(0, "".into()))
    }
}

impl Drop for UsrsctpEndpoint {
    fn drop(&mut self) {
        let stack = Stack::lock();
        if !self.socket.is_null() {
            // SAFETY: the socket is open, and not used after.
            unsafe { ffi::usrsctp_close(self.socket) };
        }
        stack.flush();
        if let Some(queue) = stack.inner().queues.borrow_mut().get_mut(self.number) {
            *queue = None;
        }
    }
}

/// Puts a queue into the first free place.
fn add_queue(stack: &Stack, queue: Queue) -> usize {
    let mut queues = stack.inner().queues.borrow_mut();
    let number = queues.iter().position(Option::is_none);
    let number = number.unwrap_or_else(|| {
        queues.push(None);
        queues.len() - 1
    });
    queues[number] = Some(queue);
    number
}

fn event_fd() -> io::Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
    check(fd)?;
    // SAFETY: the descriptor was just opened and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// An epoll instance that watches all of `fds` for something to read.
fn epoll_of(fds: impl Iterator<Item = RawFd>) -> io::Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    check(epoll)?;
    // SAFETY: the descriptor was just opened and belongs to nobody else.
    let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
    for fd in fds {
        let mut interest = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: fd as u64,
        };
        // SAFETY: the event outlives the call.
        check(unsafe {
            libc::epoll_ctl(
                epoll.as_raw_fd(),
                libc::EPOLL_CTL_ADD,
                fd,
                &raw mut interest,
            )
        })?;
    }
    Ok(epoll)
}

fn signal(event_fd: RawFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the buffer is readable for its length. A full counter is signal enough.
    unsafe { libc::write(event_fd, one.as_ptr().cast(), one.len()) };
}

fn drain(event_fd: RawFd) {
    let mut count = [0u8; 8];
    // SAFETY: the buffer is writable for its length.
    unsafe { libc::read(event_fd, count.as_mut_ptr().cast(), count.len()) };
}
