//! The process's one stack: its lock, its sockets, packets in, timers, and the queues of its endpoints.

use super::ahead;
use super::ffi;
use super::hooks::StackSocket;
use super::inbox::{CALLS_MAX, Inbox, Kind, PACKETS_WANTED, Packet, with_port};
use super::outbox::Outbox;
use super::queue::Queue;
use super::ready::{drain, signal, timer};
use super::source::Sources;
use crate::transport::{AssocId, Event};
use crate::{address, sockopt};
use std::cell::{Cell, OnceCell, RefCell};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// How often timers run, milliseconds: the stack's own clock counts in these.
const TICK_MS: u32 = 10;
/// Receive and send buffer of the stack's sockets, bytes.
const SOCKET_BUFFER: i32 = 8 << 20;
/// Buckets of the stack's tables: associations by peer's port, by tag (times 31).
const BUCKETS: u32 = 4096;
/// Messages that an association may have unsent or unacknowledged, whatever their length. The library's 512 are less than registrars
/// have on their way to each other in a millisecond.
const CHUNKS_MAX: u32 = 2048;
/// Packets that an association sends at once, as far as its window allows, instead of 4: a bundle's.
const BURST_MAX: u32 = 32;
/// Answer nothing to packets of associations that are not ours (level 2 of `sctp_blackhole`): on a raw socket a process sees those
/// of other processes, too.
const SILENT: u32 = 2;

/// What the first endpoint decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    pub raw: bool,
    pub udp_port: Option<u16>,
}

/// Everything behind the lock. Borrows end before the stack is called, which may call back.
pub struct Inner {
    pub setup: Cell<Setup>,
    pub sockets: RefCell<Vec<StackSocket>>,
    pub outbox: RefCell<Outbox>,
    /// By the number that the stack knows an endpoint by.
    pub queues: RefCell<Vec<Option<Queue>>>,
    pub sources: RefCell<Sources>,
    /// What is handed over is not sent: more follows.
    pub held_back: Cell<bool>,
    /// The time, once the stack has asked for it since the lock was taken.
    pub time: Cell<Option<libc::timeval>>,
    inbox: RefCell<Inbox>,
    udp_port: Cell<Option<u16>>,
    ticked: Cell<Option<Instant>>,
    timer: OnceCell<OwnedFd>,
}

/// [`Inner`], reachable from hooks, which get no argument of ours.
pub struct Locked {
    lock: Mutex<()>,
    inner: std::sync::LazyLock<SendInner>,
}

struct SendInner(Inner);
// SAFETY: all access is under `Locked::lock`.
unsafe impl Sync for SendInner {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for SendInner {}

pub static INNER: Locked = Locked {
    lock: Mutex::new(()),
    inner: std::sync::LazyLock::new(|| SendInner(Inner::new())),
};

/// The lock, held.
pub struct Stack {
    _guard: MutexGuard<'static, ()>,
}

impl Locked {
    /// What the lock guards.
    ///
    /// # Safety
    /// This thread holds the lock.
    pub unsafe fn assume_locked(&self) -> &Inner {
        &self.inner.0
    }
}

impl Inner {
    fn new() -> Self {
        Self {
            setup: Cell::new(Setup {
                raw: false,
                udp_port: None,
            }),
            sockets: RefCell::default(),
            outbox: RefCell::default(),
            queues: RefCell::default(),
            sources: RefCell::default(),
            held_back: Cell::new(false),
            time: Cell::new(None),
            inbox: RefCell::default(),
            udp_port: Cell::new(None),
            ticked: Cell::new(None),
            timer: OnceCell::new(),
        }
    }

    /// Notes the port that a UDP socket was bound to; the other family's socket gets the same.
    pub fn learn_udp_port(&self, fd: RawFd) {
        // SAFETY: the descriptor was opened by the stack and is open.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        if let Ok(local) = address::local(borrowed) {
            let setup = self.setup.get();
            self.setup.set(Setup {
                udp_port: Some(local.port()),
                ..setup
            });
            self.udp_port.set(Some(local.port()));
        }
    }
}

impl Stack {
    /// Takes the lock.
    pub fn lock() -> Self {
        let stack = Self {
            _guard: INNER.lock.lock().unwrap_or_else(PoisonError::into_inner),
        };
        stack.inner().time.set(None);
        stack
    }

    pub fn inner(&self) -> &Inner {
        // SAFETY: `self` is the lock, held.
        unsafe { INNER.assume_locked() }
    }

    /// Starts the stack as `setup` says, or, where it runs already, does nothing.
    pub fn start(&self, setup: Setup) -> io::Result<()> {
        let inner = self.inner();
        if inner.timer.get().is_some() {
            return Ok(());
        }
        inner.setup.set(setup);
        let timer = timer(TICK_MS)?;
        // SAFETY: called once, under the lock, with no packets without IP; hooks are ready.
        unsafe {
            ffi::usrsctp_tunable_set_sctp_pcbtblsize(BUCKETS);
            ffi::usrsctp_tunable_set_sctp_hashtblsize(BUCKETS);
            let port = setup.udp_port.map_or(0, |port| port.max(1));
            ffi::usrsctp_init_nothreads(port, None, None);
            // A checksum left out on loopback would be wrong in a capture, and for a kernel's stack.
            ffi::usrsctp_sysctl_set_sctp_no_csum_on_loopback(0);
            ffi::usrsctp_sysctl_set_sctp_blackhole(SILENT);
            ffi::usrsctp_sysctl_set_sctp_max_chunks_on_queue(CHUNKS_MAX);
            ffi::usrsctp_sysctl_set_sctp_max_burst_default(BURST_MAX);
            ffi::usrsctp_sysctl_set_sctp_auto_asconf(0);
            ffi::usrsctp_sysctl_set_sctp_asconf_enable(0);
            // The encapsulation hides the bits of the outer header.
            ffi::usrsctp_sysctl_set_sctp_ecn_enable(0);
            ffi::recv_thread_init();
        }
        inner.sockets.borrow_mut().retain(|socket| socket.is_bound);
        for socket in inner.sockets.borrow().iter() {
            prepare(socket);
        }
        if let Some(port) = inner.udp_port.get() {
            // SAFETY: no pointers are passed.
            unsafe { ffi::usrsctp_sysctl_set_sctp_udp_tunneling_port(u32::from(port)) };
        }
        inner.ticked.set(Some(Instant::now()));
        let _ = inner.timer.set(timer);
        self.check(setup)
    }

    fn check(&self, setup: Setup) -> io::Result<()> {
        let sockets = self.inner().sockets.borrow();
        if setup.udp_port.is_some() && !sockets.iter().any(|socket| socket.is_udp) {
            let port = setup.udp_port.unwrap_or(0);
            let text = format!("UDP port {port} of encapsulated SCTP is in use");
            return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
        }
        if sockets.is_empty() {
            let text = "no SCTP in the kernel, no raw socket allowed, and no UDP port given";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        Ok(())
    }

    pub fn udp_port(&self) -> Option<u16> {
        self.inner().udp_port.get()
    }

    pub fn is_raw(&self) -> bool {
        self.inner().sockets.borrow().iter().any(|s| !s.is_udp)
    }

    /// The descriptors that have something to read when there is work.
    pub fn fds(&self) -> Vec<RawFd> {
        let inner = self.inner();
        let sockets = inner.sockets.borrow();
        let timer = inner.timer.get().map(AsRawFd::as_raw_fd);
        sockets.iter().map(|s| s.fd).chain(timer).collect()
    }

    /// Reads what came on one of [`fds`](Self::fds), and lets the stack handle it.
    pub fn read(&self, fd: RawFd) -> io::Result<()> {
        let inner = self.inner();
        if inner.timer.get().is_some_and(|t| t.as_raw_fd() == fd) {
            drain(fd);
            return Ok(());
        }
        let socket = inner.sockets.borrow().iter().find(|s| s.fd == fd).copied();
        let Some(socket) = socket else { return Ok(()) };
        let kind = match (socket.is_udp, socket.is_v6) {
            (true, _) => Kind::Udp,
            (false, true) => Kind::Raw6,
            (false, false) => Kind::Raw4,
        };
        let mut inbox = inner.inbox.borrow_mut();
        let mut packets = 0;
        // All that is there, unless that is much: who pauses between two calls shall not pause with work left.
        for _ in 0..CALLS_MAX {
            let is_all = match inbox.fill(fd) {
                Ok(is_all) => is_all,
                Err(error) if is_passing(&error) => return Ok(()),
                Err(error) => return Err(error),
            };
            let came = inbox.packets(kind);
            packets += came.len();
            // SAFETY: the stack runs, and the lock is held.
            unsafe { ahead::take_each(&came, take_in) };
            if is_all || packets >= PACKETS_WANTED {
                break;
            }
        }
        Ok(())
    }

    /// Runs the timers that are due.
    pub fn tick(&self) {
        let inner = self.inner();
        let now = Instant::now();
        let Some(ticked) = inner.ticked.get() else {
            return;
        };
        let elapsed = now.duration_since(ticked).as_millis();
        let ticks = u32::try_from(elapsed).unwrap_or(u32::MAX) / TICK_MS;
        if ticks > 0 {
            inner.sources.borrow_mut().tell_time(now);
            let elapsed = ticks * TICK_MS;
            inner.ticked.set(Some(
                ticked + std::time::Duration::from_millis(elapsed.into()),
            ));
            // SAFETY: the stack runs, and the lock is held.
            unsafe { ffi::usrsctp_handle_timers(elapsed) };
        }
    }

    /// Puts a queue into the first free place; returns its number.
    pub fn add_queue(&self, queue: Queue) -> u32 {
        let mut queues = self.inner().queues.borrow_mut();
        let number = queues.iter().position(Option::is_none);
        let number = number.unwrap_or_else(|| {
            queues.push(None);
            queues.len() - 1
        });
        queues[number] = Some(queue);
        number as u32
    }

    pub fn remove_queue(&self, number: u32) {
        if let Some(queue) = self.inner().queues.borrow_mut().get_mut(number as usize) {
            *queue = None;
        }
    }

    /// Takes one queue's events, wakes endpoints that got some meanwhile, and returns associations whose messages are too long.
    pub fn collect(&self, own: u32, events: &mut Vec<Event>) -> Vec<AssocId> {
        let mut too_long = Vec::new();
        let mut queues = self.inner().queues.borrow_mut();
        for (number, queue) in queues.iter_mut().enumerate() {
            let Some(queue) = queue else { continue };
            let assembly = &mut queue.assembly;
            if number == own as usize {
                events.append(&mut assembly.events);
                too_long = std::mem::take(&mut assembly.too_long);
            } else if !assembly.events.is_empty() || !assembly.too_long.is_empty() {
                signal(queue.wake.as_raw_fd());
            }
        }
        too_long
    }

    /// Whether messages handed over from now on are only queued.
    pub fn hold_back(&self, held_back: bool) {
        self.inner().held_back.set(held_back);
    }

    pub fn flush(&self) {
        self.inner().outbox.borrow_mut().flush();
    }
}

/// Errors of a receive call that are of a moment or of one peer.
fn is_passing(error: &io::Error) -> bool {
    let code = error.raw_os_error().unwrap_or(0);
    [
        libc::EAGAIN,
        libc::EINTR,
        libc::ECONNREFUSED,
        libc::EHOSTUNREACH,
        libc::ENETUNREACH,
        libc::ENOBUFS,
        libc::ENOMEM,
    ]
    .contains(&code)
}

/// Larger buffers than the stack asks for, and offload. Both are wishes: an unprivileged process gets what the system allows.
fn prepare(socket: &StackSocket) {
    // SAFETY: the stack keeps its sockets open.
    let fd = unsafe { BorrowedFd::borrow_raw(socket.fd) };
    for (forced, plain) in [
        (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF),
        (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF),
    ] {
        if sockopt::set_int(fd, libc::SOL_SOCKET, forced, SOCKET_BUFFER).is_err() {
            let _ = sockopt::set_int(fd, libc::SOL_SOCKET, plain, SOCKET_BUFFER);
        }
    }
    if socket.is_udp {
        let _ = sockopt::set_int(fd, libc::SOL_UDP, libc::UDP_GRO, 1);
    }
}

/// Gives a packet to the stack, as `usrsctp_conninput` does, but with IP addresses.
fn take_in(packet: &Packet<'_>) {
    /// The SCTP common header, and that with a chunk header.
    const HEADER_LEN: usize = 12;
    const LEAST_LEN: usize = HEADER_LEN + 4;
    /// `MCLBYTES`: what one buffer of the stack holds.
    const CLUSTER_LEN: usize = 2048;
    let bytes = packet.bytes;
    let is_unicast = |ip: std::net::IpAddr| match ip {
        std::net::IpAddr::V4(ip) => {
            !ip.is_multicast() && !ip.is_broadcast() && !ip.is_unspecified()
        }
        std::net::IpAddr::V6(ip) => !ip.is_multicast() && !ip.is_unspecified(),
    };
    if bytes.len() < LEAST_LEN || !is_unicast(packet.destination) || !is_unicast(packet.source) {
        return;
    }
    let port = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let mut source = with_port(packet.source, port(0));
    let mut destination = with_port(packet.destination, port(2));
    let first_len = bytes.len().min(CLUSTER_LEN);
    // SAFETY: an mbuf for `first_len` bytes in one buffer is asked for and filled; the rest, if any, is appended by the
    // stack. The header is in the first buffer, which is longer. The stack takes what it keeps out of `mbuf`. The lock is held, as
    // packets are read under it.
    unsafe {
        let mut mbuf =
            ffi::sctp_get_mbuf_for_msg(first_len as u32, 0, ffi::M_NOWAIT, 1, ffi::MT_DATA);
        if mbuf.is_null() {
            return;
        }
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), (*mbuf).data, first_len);
        (*mbuf).len = first_len as i32;
        if let Some(rest) = bytes.get(first_len..).filter(|rest| !rest.is_empty()) {
            let (at, len) = (first_len as i32, rest.len() as i32);
            ffi::m_copyback(mbuf, at, len, rest.as_ptr().cast_mut().cast());
        }
        let header = (*mbuf).data;
        ffi::sctp_common_input_processing(
            &raw mut mbuf,
            0,
            HEADER_LEN as i32,
            bytes.len() as i32,
            source.as_raw_mut().0,
            destination.as_raw_mut().0,
            header,
            header.add(HEADER_LEN),
            1,
            packet.ecn,
            0,
            packet.encapsulation.unwrap_or(0).to_be(),
        );
        if !mbuf.is_null() {
            ffi::m_freem(mbuf);
        }
    }
}

#[cfg(test)]
mod tests;
