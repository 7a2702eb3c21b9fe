//! Replacements for the stack's system calls (`build.rs` renames them). The hooks open and bind the stack's real
//! sockets, and put its packets into the [`PacketSendQueue`](super::outbox::PacketSendQueue). The stack gets no threads, so all of it
//! runs inside our calls.

use super::packet_receive_buffers::SocketKind;
use super::packet_send_queue::PacketPath;
use super::stack::{STACK_STATE, StackState};
use holdfast_sys::address::RawAddress;
use libc::{c_int, c_void, msghdr, sockaddr, socklen_t, ssize_t};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;

/// A socket that the stack opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackSocket {
    pub fd: RawFd,
    pub is_v6: bool,
    pub is_udp: bool,
    pub is_bound: bool,
}

/// Returns the state behind the stack's lock. Hooks run only inside calls to the stack, which are made under the lock.
fn stack_state() -> &'static StackState {
    // SAFETY: the stack has no threads of its own, so this thread is inside a call of `stack.rs`, which holds the lock.
    unsafe { STACK_STATE.assume_locked() }
}

fn fail_with<T: From<i8>>(error: c_int) -> T {
    // SAFETY: `__errno_location` gives this thread's `errno`.
    unsafe { *libc::__errno_location() = error };
    T::from(-1)
}

#[unsafe(no_mangle)]
extern "C" fn holdfast_usrsctp_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let inner = stack_state();
    let is_raw = kind == libc::SOCK_RAW;
    if is_raw && !inner.setup.get().raw {
        return fail_with(libc::EPERM);
    }
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::socket(domain, kind | libc::SOCK_CLOEXEC, protocol) };
    let is_udp = kind == libc::SOCK_DGRAM && protocol == libc::IPPROTO_UDP;
    if fd >= 0 && (is_raw || is_udp) {
        inner.sockets.borrow_mut().push(StackSocket {
            fd,
            is_v6: domain == libc::AF_INET6,
            is_udp,
            is_bound: false,
        });
    }
    fd
}

/// Binds a socket to the stack's address; a UDP socket to the port of the setup, or, if that is 0, to a port of the
/// system's choice, the same for both families.
#[unsafe(no_mangle)]
unsafe extern "C" fn holdfast_usrsctp_bind(
    fd: c_int,
    address: *const sockaddr,
    length: socklen_t,
) -> c_int {
    let inner = stack_state();
    let mut sockets = inner.sockets.borrow_mut();
    let Some(socket) = sockets.iter_mut().find(|socket| socket.fd == fd) else {
        return fail_with(libc::EBADF);
    };
    let outcome = if socket.is_udp {
        let any = if socket.is_v6 {
            IpAddr::V6(Ipv6Addr::UNSPECIFIED)
        } else {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED)
        };
        let wanted = SocketAddr::new(any, inner.setup.get().udp_port.unwrap_or(0));
        let address = RawAddress::for_family(wanted, false);
        let (pointer, length) = address.as_raw();
        // SAFETY: pointer and length describe `address`, which outlives the call.
        unsafe { libc::bind(fd, pointer, length) }
    } else {
        // SAFETY: the stack passes an address of `length` bytes.
        unsafe { libc::bind(fd, address, length) }
    };
    socket.is_bound = outcome == 0;
    if socket.is_bound && socket.is_udp {
        inner.learn_udp_port(fd);
    }
    outcome
}

/// Puts a packet into the outbox.
#[unsafe(no_mangle)]
unsafe extern "C" fn holdfast_usrsctp_sendmsg(
    fd: c_int,
    message: *const msghdr,
    _flags: c_int,
) -> ssize_t {
    let inner = stack_state();
    // SAFETY: the stack passes a valid message with an address and `msg_iovlen` vectors.
    let (message, vectors) = unsafe {
        let message = &*message;
        (
            message,
            std::slice::from_raw_parts(message.msg_iov, message.msg_iovlen),
        )
    };
    let socket = inner
        .sockets
        .borrow()
        .iter()
        .find(|socket| socket.fd == fd)
        .copied();
    // SAFETY: the address is readable for `msg_namelen` bytes.
    let name = unsafe {
        std::slice::from_raw_parts(message.msg_name.cast::<u8>(), message.msg_namelen as usize)
    };
    let to = RawAddress::split_from(name).and_then(|(address, _)| address.to_socket_addr());
    let (Some(socket), Some(to), Some(first)) = (socket, to, vectors.first()) else {
        return fail_with(libc::EINVAL);
    };
    // SAFETY: the message is a packet of the stack to one of its sockets.
    let chosen = unsafe { chosen_source(socket, first, to.is_ipv4()) };
    let source = inner.sources.borrow_mut().choose(to.ip(), chosen);
    // SAFETY: each vector is readable for its length.
    let pieces = vectors
        .iter()
        .map(|v| unsafe { std::slice::from_raw_parts(v.iov_base.cast::<u8>(), v.iov_len) });
    let length: usize = vectors.iter().map(|v| v.iov_len).sum();
    let route = PacketPath {
        fd,
        to,
        source,
        kind: match (socket.is_udp, socket.is_v6) {
            (true, _) => SocketKind::Udp,
            (false, true) => SocketKind::Raw6,
            (false, false) => SocketKind::Raw4,
        },
    };
    inner.outbox.borrow_mut().push(route, pieces);
    length as ssize_t
}

/// Returns the source address that the stack chose, from the IP header that it wrote. The stack writes IP and UDP
/// headers in front of a packet to a UDP socket, and then skips them (`m_adj` in `sctp_userspace_ip_output`); a packet
/// to the IPv4 raw socket begins with the IP header.
///
/// # Safety
/// `first` is the first piece of such a packet.
unsafe fn chosen_source(socket: StackSocket, first: &libc::iovec, is_v4: bool) -> Option<IpAddr> {
    const UDP_LEN: usize = 8;
    let ip_len = if is_v4 { 20 } else { 40 };
    let skipped_len = match (socket.is_udp, socket.is_v6) {
        (true, _) => ip_len + UDP_LEN,
        (false, true) => ip_len,
        (false, false) => 0,
    };
    let packet = first.iov_base.cast::<u8>();
    // SAFETY: the header begins that many bytes before, in the same buffer.
    let header = unsafe { std::slice::from_raw_parts(packet.sub(skipped_len), ip_len) };
    let source: IpAddr = if is_v4 {
        Ipv4Addr::from(<[u8; 4]>::try_from(&header[12..16]).ok()?).into()
    } else {
        Ipv6Addr::from(<[u8; 16]>::try_from(&header[8..24]).ok()?).into()
    };
    (!source.is_unspecified()).then_some(source)
}

/// Returns the time of day, read once per call to the stack, because reading it each time took a twentieth of all time.
#[unsafe(no_mangle)]
unsafe extern "C" fn holdfast_usrsctp_gettimeofday(
    time: *mut libc::timeval,
    _zone: *mut c_void,
) -> c_int {
    let cached = &stack_state().time;
    let now = cached.get().unwrap_or_else(|| {
        let mut now = libc::timeval {
            tv_sec: 0,
            tv_usec: 0,
        };
        // SAFETY: the structure is writable, and no zone is asked for.
        unsafe { libc::gettimeofday(&raw mut now, std::ptr::null_mut()) };
        cached.set(Some(now));
        now
    });
    // SAFETY: the stack passes a pointer to a `timeval`.
    unsafe { time.write(now) };
    0
}

/// Controls sending: the stack tries the lock of an association with a new message, and leaves sending to others if it
/// fails to get the lock.
#[unsafe(no_mangle)]
extern "C" fn holdfast_usrsctp_pthread_mutex_trylock(_lock: *mut c_void) -> c_int {
    match stack_state().is_holding_back.get() {
        true => libc::EBUSY,
        false => 0,
    }
}

/// Starts no threads: timers and packets are handled in our calls, and the third thread's work, address changes, is
/// disabled.
#[unsafe(no_mangle)]
extern "C" fn holdfast_usrsctp_pthread_create(
    _thread: *mut c_void,
    _attributes: *const c_void,
    _start: *const c_void,
    _argument: *mut c_void,
) -> c_int {
    0
}
