//! The stack's socket calls, answered here (`build.rs` renames them). Its sockets are real ones, opened and bound by these; what it
//! sends goes to the [`Outbox`](super::outbox::Outbox); it gets no threads, so all of it runs inside calls of ours.

use super::inbox::Kind;
use super::outbox::Route;
use super::stack::{INNER, Inner};
use crate::address::RawAddress;
use libc::{c_int, c_void, msghdr, sockaddr, socklen_t, ssize_t};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;

/// A socket the stack opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackSocket {
    pub fd: RawFd,
    pub is_v6: bool,
    pub is_udp: bool,
    pub is_bound: bool,
}

/// What is behind the stack. Hooks run only inside its calls, and those are made under the stack's lock.
fn inner() -> &'static Inner {
    // SAFETY: the stack has no threads of its own, so this thread is inside a call of `stack.rs`, which holds the lock.
    unsafe { INNER.assume_locked() }
}

fn fail<T: From<i8>>(error: c_int) -> T {
    // SAFETY: `__errno_location` gives this thread's `errno`.
    unsafe { *libc::__errno_location() = error };
    T::from(-1)
}

#[unsafe(no_mangle)]
extern "C" fn holdfast_usrsctp_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let inner = inner();
    let is_raw = kind == libc::SOCK_RAW;
    if is_raw && !inner.setup.get().raw {
        return fail(libc::EPERM);
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

/// Binds to the address the stack wants; a UDP socket to the port of the setup, or, where that is 0, one of the system's choice, the
/// same for both families.
#[unsafe(no_mangle)]
unsafe extern "C" fn holdfast_usrsctp_bind(
    fd: c_int,
    address: *const sockaddr,
    length: socklen_t,
) -> c_int {
    let inner = inner();
    let mut sockets = inner.sockets.borrow_mut();
    let Some(socket) = sockets.iter_mut().find(|socket| socket.fd == fd) else {
        return fail(libc::EBADF);
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
    let inner = inner();
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
        return fail(libc::EINVAL);
    };
    // SAFETY: this is a packet of the stack to one of its sockets.
    let chosen = unsafe { chosen_source(socket, first, to.is_ipv4()) };
    let source = inner.sources.borrow_mut().best(to.ip(), chosen);
    // SAFETY: each vector is readable for its length.
    let pieces = vectors
        .iter()
        .map(|v| unsafe { std::slice::from_raw_parts(v.iov_base.cast::<u8>(), v.iov_len) });
    let length: usize = vectors.iter().map(|v| v.iov_len).sum();
    let route = Route {
        fd,
        to,
        source,
        kind: match (socket.is_udp, socket.is_v6) {
            (true, _) => Kind::Udp,
            (false, true) => Kind::Raw6,
            (false, false) => Kind::Raw4,
        },
    };
    inner.outbox.borrow_mut().push(route, pieces);
    length as ssize_t
}

/// The source address that the stack chose, from the IP header it wrote. Before a packet to a UDP socket there are IP and UDP headers,
/// which it then steps over (`m_adj` in `sctp_userspace_ip_output`); one to the IPv4 raw socket begins with it.
///
/// # Safety
/// `first` is the first piece of such a packet.
unsafe fn chosen_source(socket: StackSocket, first: &libc::iovec, is_v4: bool) -> Option<IpAddr> {
    const UDP_LEN: usize = 8;
    let ip_len = if is_v4 { 20 } else { 40 };
    let stepped_over = match (socket.is_udp, socket.is_v6) {
        (true, _) => ip_len + UDP_LEN,
        (false, true) => ip_len,
        (false, false) => 0,
    };
    let packet = first.iov_base.cast::<u8>();
    // SAFETY: the header begins that many bytes before, in the same buffer.
    let header = unsafe { std::slice::from_raw_parts(packet.sub(stepped_over), ip_len) };
    let source: IpAddr = if is_v4 {
        Ipv4Addr::from(<[u8; 4]>::try_from(&header[12..16]).ok()?).into()
    } else {
        Ipv6Addr::from(<[u8; 16]>::try_from(&header[8..24]).ok()?).into()
    };
    (!source.is_unspecified()).then_some(source)
}

/// What time it is: one time in each call of ours, since asking for it was a twentieth of all time.
#[unsafe(no_mangle)]
unsafe extern "C" fn holdfast_usrsctp_gettimeofday(
    time: *mut libc::timeval,
    _zone: *mut c_void,
) -> c_int {
    let asked = &inner().time;
    let now = asked.get().unwrap_or_else(|| {
        let mut now = libc::timeval {
            tv_sec: 0,
            tv_usec: 0,
        };
        // SAFETY: the structure is writable, and no zone is asked for.
        unsafe { libc::gettimeofday(&raw mut now, std::ptr::null_mut()) };
        asked.set(Some(now));
        now
    });
    // SAFETY: the stack passes a place for it.
    unsafe { time.write(now) };
    0
}

/// The stack tries the lock of an association where it has taken a message and could send it, and leaves that to others if it does not
/// get it.
#[unsafe(no_mangle)]
extern "C" fn holdfast_usrsctp_pthread_mutex_trylock(_lock: *mut c_void) -> c_int {
    match inner().held_back.get() {
        true => libc::EBUSY,
        false => 0,
    }
}

/// No threads: timers and packets are handled in our calls, and the work of the third, changes of addresses, is switched off.
#[unsafe(no_mangle)]
extern "C" fn holdfast_usrsctp_pthread_create(
    _thread: *mut c_void,
    _attributes: *const c_void,
    _start: *const c_void,
    _argument: *mut c_void,
) -> c_int {
    0
}
