//! Socket options of usrsctp.

use super::endpoint_queue::NOTIFICATIONS;
use super::ffi::{self, Socket};
use crate::TransportConfig;
use crate::socket_api_layout::{Initmsg, RtoInfo, pack_addresses};
use holdfast_sys::sockopt::check;
use libc::{c_int, c_void, socklen_t};
use std::io;
use std::mem::{size_of, zeroed};
use std::net::SocketAddr;
use std::time::Duration;

/// `usrsctp_getpaddrs` or `usrsctp_getladdrs`.
pub type GetList = unsafe extern "C" fn(*mut Socket, u32, *mut *mut libc::sockaddr) -> c_int;
/// Function that frees such a list.
pub type FreeList = unsafe extern "C" fn(*mut libc::sockaddr);

/// `SCTP_FUTURE_ASSOC`: future associations.
const FUTURE_ASSOC: u32 = 0;

fn set_option<T>(socket: *mut Socket, level: c_int, name: c_int, value: &T) -> io::Result<()> {
    let pointer: *const T = value;
    let length = size_of::<T>() as socklen_t;
    // SAFETY: the socket is open; `value` outlives the call and is as long as said.
    check(unsafe { ffi::usrsctp_setsockopt(socket, level, name, pointer.cast(), length) })
}

fn set_sctp<T>(socket: *mut Socket, name: c_int, value: &T) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_SCTP, name, value)
}

/// Sets all options of `config`.
pub fn set_all(socket: *mut Socket, config: &TransportConfig) -> io::Result<()> {
    let buffer = |bytes: u32| c_int::try_from(bytes).unwrap_or(c_int::MAX);
    set_option(
        socket,
        libc::SOL_SOCKET,
        libc::SO_SNDBUF,
        &buffer(config.send_buffer),
    )?;
    set_option(
        socket,
        libc::SOL_SOCKET,
        libc::SO_RCVBUF,
        &buffer(config.receive_buffer),
    )?;
    set_sctp(socket, ffi::NODELAY, &c_int::from(config.no_delay))?;
    let delivery_point = config.message_len_max.min(config.receive_buffer / 2);
    set_sctp(socket, ffi::PARTIAL_DELIVERY_POINT, &delivery_point)?;
    for notification in NOTIFICATIONS {
        let subscription = ffi::EventSubscription {
            assoc: FUTURE_ASSOC,
            kind: notification,
            on: 1,
        };
        set_sctp(socket, ffi::EVENT, &subscription)?;
    }
    set_failure_detection(socket, config)
}

fn set_failure_detection(socket: *mut Socket, config: &TransportConfig) -> io::Result<()> {
    let failure = &config.failure;
    let ms = |duration: Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
    let rto = RtoInfo {
        assoc: FUTURE_ASSOC,
        initial: ms(failure.rto_initial),
        max: ms(failure.rto_max),
        min: ms(failure.rto_min),
    };
    set_sctp(socket, ffi::RTOINFO, &rto)?;
    let init = Initmsg {
        outbound_streams: config.outbound_streams,
        inbound_streams_max: config.inbound_streams_max,
        attempts_max: failure.init_retransmissions,
        timeout_ms_max: u16::try_from(ms(failure.rto_max)).unwrap_or(u16::MAX),
    };
    set_sctp(socket, ffi::INITMSG, &init)?;
    let assoc = ffi::AssocParams {
        assoc: FUTURE_ASSOC,
        peer_rwnd: 0,
        local_rwnd: 0,
        cookie_life: 0,
        retransmissions_max: failure.association_retransmissions,
        peer_destinations: 0,
    };
    set_sctp(socket, ffi::ASSOCINFO, &assoc)?;
    // SAFETY: all-zero bytes are a valid structure: no address, all paths.
    let mut path: ffi::PathParams = unsafe { zeroed() };
    path.heartbeat_ms = ms(failure.heartbeat);
    path.path_mtu = config.path_mtu;
    path.flags = ffi::HEARTBEAT_ENABLE | ffi::PMTU_DISCOVERY_DISABLE;
    path.retransmissions_max = failure.path_retransmissions;
    set_sctp(socket, ffi::PEER_ADDR_PARAMS, &path)
}

/// Sets the remote UDP port of future associations; `None`: they send raw packets.
pub fn set_encapsulation(socket: *mut Socket, port: Option<u16>) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid structure: no address, all paths of future associations.
    let mut encapsulation: ffi::UdpEncaps = unsafe { zeroed() };
    encapsulation.port = port.unwrap_or(0).to_be();
    set_sctp(socket, ffi::REMOTE_UDP_ENCAPS_PORT, &encapsulation)
}

/// Returns the smoothed round-trip time of the primary path.
pub fn round_trip(socket: *mut Socket, assoc: u32) -> io::Result<Duration> {
    // SAFETY: all-zero bytes are a valid structure.
    let mut status: ffi::AssocStatus = unsafe { zeroed() };
    status.assoc = assoc;
    let mut length = size_of::<ffi::AssocStatus>() as socklen_t;
    let pointer: *mut c_void = (&raw mut status).cast();
    // The query only checks that the association exists: the round-trip time in its result includes delayed
    // acknowledgements.
    // SAFETY: the structure is writable for `length` bytes, and both outlive the call.
    check(unsafe {
        let level = libc::IPPROTO_SCTP;
        ffi::usrsctp_getsockopt(socket, level, ffi::STATUS, pointer, &raw mut length)
    })?;
    // SAFETY: the socket is open.
    let round_trip_us = unsafe { ffi::holdfast_usrsctp_round_trip_us(socket, assoc) };
    Ok(Duration::from_micros(round_trip_us))
}

/// Starts a measurement of the primary path's round trip.
pub fn measure(socket: *mut Socket, assoc: u32) {
    // SAFETY: the socket is open.
    unsafe { ffi::holdfast_usrsctp_measure(socket, assoc) };
}

/// Returns true if the peer has answered at an address; false also for an address that is not the peer's.
pub fn is_confirmed(socket: *mut Socket, assoc: u32, address: SocketAddr) -> bool {
    // SAFETY: all-zero bytes are a valid structure.
    let mut info: ffi::PathInfo = unsafe { zeroed() };
    info.assoc = assoc;
    let address = pack_addresses(&[address]);
    let to: *mut u8 = (&raw mut info.address).cast();
    // SAFETY: a packed address is no longer than `sockaddr_storage`, which fits any address.
    unsafe { std::ptr::copy_nonoverlapping(address.as_ptr(), to, address.len()) };
    let mut length = size_of::<ffi::PathInfo>() as socklen_t;
    let pointer: *mut c_void = (&raw mut info).cast();
    // SAFETY: the structure is writable for `length` bytes, and both outlive the call.
    let outcome = check(unsafe {
        let (level, name) = (libc::IPPROTO_SCTP, ffi::GET_PEER_ADDR_INFO);
        ffi::usrsctp_getsockopt(socket, level, name, pointer, &raw mut length)
    });
    outcome.is_ok() && info.state & ffi::UNCONFIRMED == 0
}

/// Returns the bytes of a list of `count` packed addresses.
///
/// # Safety
/// `list` has that many IPv4 or IPv6 addresses, one after another.
pub unsafe fn read_list(list: *const u8, count: usize) -> Vec<u8> {
    let mut length = 0;
    for _ in 0..count {
        // SAFETY: the caller vouches for an address here, and its family comes first.
        let family = unsafe { list.add(length).cast::<u16>().read_unaligned() };
        length += match i32::from(family) {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
            _ => break,
        };
    }
    // SAFETY: the loop above has read these addresses.
    unsafe { std::slice::from_raw_parts(list, length) }.to_vec()
}
