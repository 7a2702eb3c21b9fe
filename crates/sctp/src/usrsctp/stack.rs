//! The process's single SCTP stack: lock, sockets, received packets, timers, and the queues of its endpoints.

use super::endpoint_queue::EndpointQueue;
use super::ffi;
use super::hooks::StackSocket;
use super::packet_receive_buffers::{
    CALLS_MAX, PACKETS_WANTED, PacketReceiveBuffers, ReceivedPacket, SocketKind, raw_address,
};
use super::packet_send_queue::PacketSendQueue;
use super::prefetch;
use super::readiness::{drain, periodic_timer_fd, signal};
use super::source_address::SourceAddresses;
use crate::{AssocId, TransportEvent};
use holdfast_sys::{address, sockopt};
use std::cell::{Cell, OnceCell, RefCell};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Interval of the stack's timers and unit of its clock, milliseconds.
const TICK_MS: u32 = 10;
/// Receive and send buffer of the stack's sockets, bytes.
const SOCKET_BUFFER: i32 = 8 << 20;
/// Number of buckets in the stack's tables: associations by peer's port, by tag (times 31).
const BUCKETS: u32 = 4096;
/// Most unsent or unacknowledged messages of an association, of any length. The library's default, 512, is less than
/// registrars send each other in a millisecond.
const CHUNKS_MAX: u32 = 2048;
/// Most packets that an association sends at once within its window, enough for a bundle; the library's default is 4.
const BURST_MAX: u32 = 32;
/// Level 2 of `sctp_blackhole`: no answer to packets of unknown associations, because on a raw socket a process also
/// receives packets of other processes.
const BLACKHOLE_LEVEL: u32 = 2;

/// Settings that the first endpoint determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackSettings {
    pub raw: bool,
    pub udp_port: Option<u16>,
}

/// State behind the lock. A borrow must end before the stack is called, because the stack may call back.
pub struct StackState {
    pub setup: Cell<StackSettings>,
    pub sockets: RefCell<Vec<StackSocket>>,
    pub outbox: RefCell<PacketSendQueue>,
    /// Queues of the endpoints, by the stack's number for each.
    pub queues: RefCell<Vec<Option<EndpointQueue>>>,
    pub sources: RefCell<SourceAddresses>,
    /// True while queued messages are not sent, because more follow.
    pub is_holding_back: Cell<bool>,
    /// Time of day, cached from the stack's first request since the lock was taken.
    pub time: Cell<Option<libc::timeval>>,
    inbox: RefCell<PacketReceiveBuffers>,
    udp_port: Cell<Option<u16>>,
    last_tick: Cell<Option<Instant>>,
    timer: OnceCell<OwnedFd>,
}

/// [`StackState`], reachable from hooks, which get no user argument.
pub struct StackCell {
    lock: Mutex<()>,
    inner: std::sync::LazyLock<SendInner>,
}

struct SendInner(StackState);
// SAFETY: all access is under `StackCell::lock`.
unsafe impl Sync for SendInner {}
// SAFETY: no part of it is bound to a thread.
unsafe impl Send for SendInner {}

pub static STACK_STATE: StackCell = StackCell {
    lock: Mutex::new(()),
    inner: std::sync::LazyLock::new(|| SendInner(StackState::new())),
};

/// Proof that the lock is held.
pub struct LockedStack {
    _guard: MutexGuard<'static, ()>,
}

impl StackCell {
    /// Returns the guarded state.
    ///
    /// # Safety
    /// The calling thread holds the lock.
    pub unsafe fn assume_locked(&self) -> &StackState {
        &self.inner.0
    }
}

impl StackState {
    fn new() -> Self {
        Self {
            setup: Cell::new(StackSettings {
                raw: false,
                udp_port: None,
            }),
            sockets: RefCell::default(),
            outbox: RefCell::default(),
            queues: RefCell::default(),
            sources: RefCell::default(),
            is_holding_back: Cell::new(false),
            time: Cell::new(None),
            inbox: RefCell::default(),
            udp_port: Cell::new(None),
            last_tick: Cell::new(None),
            timer: OnceCell::new(),
        }
    }

    /// Records the port that a UDP socket was bound to; the other family's socket gets the same port.
    pub fn learn_udp_port(&self, fd: RawFd) {
        // SAFETY: the descriptor was opened by the stack and is open.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        if let Ok(local) = address::local_address(borrowed) {
            let setup = self.setup.get();
            self.setup.set(StackSettings {
                udp_port: Some(local.port()),
                ..setup
            });
            self.udp_port.set(Some(local.port()));
        }
    }
}

impl LockedStack {
    /// Takes the lock of the process's usrsctp stack.
    pub fn lock() -> Self {
        let stack = Self {
            _guard: STACK_STATE
                .lock
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        };
        stack.state().time.set(None);
        stack
    }

    pub fn state(&self) -> &StackState {
        // SAFETY: `self` is the lock, held.
        unsafe { STACK_STATE.assume_locked() }
    }

    /// Starts the stack with `setup`, or does nothing if it is running.
    pub fn start(&self, setup: StackSettings) -> io::Result<()> {
        let inner = self.state();
        if inner.timer.get().is_some() {
            return Ok(());
        }
        inner.setup.set(setup);
        let timer = periodic_timer_fd(TICK_MS)?;
        // SAFETY: called once, under the lock, with no packets without IP; hooks are ready.
        unsafe {
            ffi::usrsctp_tunable_set_sctp_pcbtblsize(BUCKETS);
            ffi::usrsctp_tunable_set_sctp_hashtblsize(BUCKETS);
            let port = setup.udp_port.map_or(0, |port| port.max(1));
            ffi::usrsctp_init_nothreads(port, None, None);
            // A missing checksum on loopback would look wrong in a capture and to a kernel's stack.
            ffi::usrsctp_sysctl_set_sctp_no_csum_on_loopback(0);
            ffi::usrsctp_sysctl_set_sctp_blackhole(BLACKHOLE_LEVEL);
            ffi::usrsctp_sysctl_set_sctp_max_chunks_on_queue(CHUNKS_MAX);
            ffi::usrsctp_sysctl_set_sctp_max_burst_default(BURST_MAX);
            ffi::usrsctp_sysctl_set_sctp_auto_asconf(0);
            ffi::usrsctp_sysctl_set_sctp_asconf_enable(0);
            // The encapsulation hides the ECN bits of the outer header.
            ffi::usrsctp_sysctl_set_sctp_ecn_enable(0);
            ffi::recv_thread_init();
        }
        inner.sockets.borrow_mut().retain(|socket| socket.is_bound);
        for socket in inner.sockets.borrow().iter() {
            enlarge_buffers(socket);
        }
        if let Some(port) = inner.udp_port.get() {
            // SAFETY: no pointers are passed.
            unsafe { ffi::usrsctp_sysctl_set_sctp_udp_tunneling_port(u32::from(port)) };
        }
        inner.last_tick.set(Some(Instant::now()));
        let _ = inner.timer.set(timer);
        self.check_sockets(setup)
    }

    fn check_sockets(&self, setup: StackSettings) -> io::Result<()> {
        let sockets = self.state().sockets.borrow();
        if setup.udp_port.is_some() && !sockets.iter().any(|socket| socket.is_udp) {
            let port = setup.udp_port.unwrap_or(0);
            let text = format!("UDP port {port} for encapsulated SCTP is in use");
            return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
        }
        if sockets.is_empty() {
            let text = "no SCTP available: the kernel has none, raw sockets are not permitted, and no UDP port is configured";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        Ok(())
    }

    pub fn udp_port(&self) -> Option<u16> {
        self.state().udp_port.get()
    }

    pub fn is_raw(&self) -> bool {
        self.state().sockets.borrow().iter().any(|s| !s.is_udp)
    }

    /// Returns the descriptors that are readable when the stack has work to do.
    pub fn fds(&self) -> Vec<RawFd> {
        let inner = self.state();
        let sockets = inner.sockets.borrow();
        let timer = inner.timer.get().map(AsRawFd::as_raw_fd);
        sockets.iter().map(|s| s.fd).chain(timer).collect()
    }

    /// Reads the packets that arrived on one of [`fds`](Self::fds), and lets the stack process them.
    pub fn read(&self, fd: RawFd) -> io::Result<()> {
        let inner = self.state();
        if inner.timer.get().is_some_and(|t| t.as_raw_fd() == fd) {
            drain(fd);
            return Ok(());
        }
        let socket = inner.sockets.borrow().iter().find(|s| s.fd == fd).copied();
        let Some(socket) = socket else { return Ok(()) };
        let kind = match (socket.is_udp, socket.is_v6) {
            (true, _) => SocketKind::Udp,
            (false, true) => SocketKind::Raw6,
            (false, false) => SocketKind::Raw4,
        };
        let mut inbox = inner.inbox.borrow_mut();
        let mut packets = 0;
        // All packets are read, up to a limit: a caller that pauses between two calls must not leave work behind.
        for _ in 0..CALLS_MAX {
            let is_drained = match inbox.fill(fd) {
                Ok(is_drained) => is_drained,
                Err(error) if is_temporary(&error) => return Ok(()),
                Err(error) => return Err(error),
            };
            let received = inbox.packets(kind);
            packets += received.len();
            // SAFETY: the stack runs, and the lock is held.
            unsafe { prefetch::for_each_prefetched(&received, process_packet) };
            if is_drained || packets >= PACKETS_WANTED {
                break;
            }
        }
        Ok(())
    }

    /// Runs the due timers.
    pub fn tick(&self) {
        let inner = self.state();
        let now = Instant::now();
        let Some(ticked) = inner.last_tick.get() else {
            return;
        };
        let elapsed = now.duration_since(ticked).as_millis();
        let ticks = u32::try_from(elapsed).unwrap_or(u32::MAX) / TICK_MS;
        if ticks > 0 {
            inner.sources.borrow_mut().set_now(now);
            let elapsed = ticks * TICK_MS;
            inner.last_tick.set(Some(
                ticked + std::time::Duration::from_millis(elapsed.into()),
            ));
            // SAFETY: the stack runs, and the lock is held.
            unsafe { ffi::usrsctp_handle_timers(elapsed) };
        }
    }

    /// Puts a queue into the first free slot and returns its number.
    pub fn add_queue(&self, queue: EndpointQueue) -> u32 {
        let mut queues = self.state().queues.borrow_mut();
        let number = queues.iter().position(Option::is_none);
        let number = number.unwrap_or_else(|| {
            queues.push(None);
            queues.len() - 1
        });
        queues[number] = Some(queue);
        number as u32
    }

    pub fn remove_queue(&self, number: u32) {
        if let Some(queue) = self.state().queues.borrow_mut().get_mut(number as usize) {
            *queue = None;
        }
    }

    /// Appends the events of queue `own_queue`, wakes other endpoints with new events, and returns the associations with
    /// messages over the limit.
    pub fn collect_events(&self, own_queue: u32, events: &mut Vec<TransportEvent>) -> Vec<AssocId> {
        let mut oversized = Vec::new();
        let mut queues = self.state().queues.borrow_mut();
        for (number, queue) in queues.iter_mut().enumerate() {
            let Some(queue) = queue else { continue };
            let assembly = &mut queue.assembler;
            if number == own_queue as usize {
                events.append(&mut assembly.events);
                oversized = std::mem::take(&mut assembly.oversized);
            } else if !assembly.events.is_empty() || !assembly.oversized.is_empty() {
                signal(queue.wake.as_raw_fd());
            }
        }
        oversized
    }

    /// Sets whether messages are only queued from then on.
    pub fn hold_back(&self, held_back: bool) {
        self.state().is_holding_back.set(held_back);
    }

    pub fn flush(&self) {
        self.state().outbox.borrow_mut().flush();
    }
}

/// Returns true for errors of a receive call that are temporary or concern one peer.
fn is_temporary(error: &io::Error) -> bool {
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

/// Requests larger buffers than the stack does, and receive offload. Failure is ignored: an unprivileged process gets
/// only the sizes that the system allows.
fn enlarge_buffers(socket: &StackSocket) {
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

/// Passes a packet to the stack, like `usrsctp_conninput`, but with IP addresses.
fn process_packet(packet: &ReceivedPacket<'_>) {
    /// Length of the SCTP common header, without and with a chunk header.
    const HEADER_LEN: usize = 12;
    const LEAST_LEN: usize = HEADER_LEN + 4;
    /// `MCLBYTES`: capacity of one buffer of the stack.
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
    let mut source = raw_address(packet.source, port(0));
    let mut destination = raw_address(packet.destination, port(2));
    let first_len = bytes.len().min(CLUSTER_LEN);
    // SAFETY: an mbuf for `first_len` bytes in one buffer is requested and filled; the stack appends the rest, if any.
    // The header is in the first buffer, which is longer. The stack takes the parts it keeps out of `mbuf`. The lock is
    // held, because packets are read under it.
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
