//! Bindings to libusrsctp 0.9.5: `usrsctp.h`, and the few internal functions by which `usrsctp_conninput` processes a
//! packet (`user_socket.c`), because the public function does not support IP addresses.

use libc::{c_char, c_int, c_uint, c_void, size_t, sockaddr, socklen_t, ssize_t};

/// `struct socket`, opaque.
#[repr(C)]
pub struct Socket {
    _opaque: [u8; 0],
}

/// The beginning of `struct mbuf` (`user_mbuf.h`, `struct m_hdr`).
#[repr(C)]
pub struct Mbuf {
    pub next: *mut Mbuf,
    pub next_packet: *mut Mbuf,
    pub data: *mut u8,
    pub len: c_int,
}

/// `union sctp_sockstore`: as large and aligned as required for a `sockaddr_in6` and a pointer.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct SockStore(pub [u8; 32]);

/// `struct sctp_rcvinfo`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RcvInfo {
    pub sid: u16,
    pub ssn: u16,
    pub flags: u16,
    pub ppid: u32,
    pub tsn: u32,
    pub cumtsn: u32,
    pub context: u32,
    pub assoc: u32,
}

/// `struct sctp_sndinfo`.
#[repr(C)]
pub struct SndInfo {
    pub sid: u16,
    pub flags: u16,
    pub ppid: u32,
    pub context: u32,
    pub assoc: u32,
}

/// `struct sctp_assocparams`.
#[repr(C)]
pub struct AssocParams {
    pub assoc: u32,
    pub peer_rwnd: u32,
    pub local_rwnd: u32,
    pub cookie_life: u32,
    pub retransmissions_max: u16,
    pub peer_destinations: u16,
}

/// `struct sctp_paddrparams`.
#[repr(C)]
pub struct PathParams {
    pub address: libc::sockaddr_storage,
    pub assoc: u32,
    pub heartbeat_ms: u32,
    pub path_mtu: u32,
    pub flags: u32,
    pub flow_label: u32,
    pub retransmissions_max: u16,
    pub dscp: u8,
}

/// `struct sctp_udpencaps`.
#[repr(C)]
pub struct UdpEncaps {
    pub address: libc::sockaddr_storage,
    pub assoc: u32,
    pub port: u16,
}

/// `struct sctp_paddrinfo`.
#[repr(C)]
pub struct PathInfo {
    pub address: libc::sockaddr_storage,
    pub assoc: u32,
    pub state: i32,
    pub cwnd: u32,
    pub srtt_ms: u32,
    pub rto: u32,
    pub mtu: u32,
}

/// `struct sctp_status`.
#[repr(C)]
pub struct AssocStatus {
    pub assoc: u32,
    pub state: i32,
    pub rwnd: u32,
    pub unacknowledged: u16,
    pub pending: u16,
    pub inbound_streams: u16,
    pub outbound_streams: u16,
    pub fragmentation_point: u32,
    pub primary: PathInfo,
}

/// `struct sctp_event`.
#[repr(C)]
pub struct EventSubscription {
    pub assoc: u32,
    pub kind: u16,
    pub on: u8,
}

pub const RTOINFO: c_int = 1;
pub const ASSOCINFO: c_int = 2;
pub const INITMSG: c_int = 3;
pub const NODELAY: c_int = 4;
pub const PEER_ADDR_PARAMS: c_int = 10;
pub const PARTIAL_DELIVERY_POINT: c_int = 0x11;
pub const EVENT: c_int = 0x1e;
pub const REMOTE_UDP_ENCAPS_PORT: c_int = 0x24;
pub const STATUS: c_int = 0x100;
pub const GET_PEER_ADDR_INFO: c_int = 0x101;
/// Path state `SCTP_UNCONFIRMED`.
pub const UNCONFIRMED: i32 = 0x200;

pub const HEARTBEAT_ENABLE: u32 = 1;
pub const PMTU_DISCOVERY_DISABLE: u32 = 0x10;

pub const SENDV_SNDINFO: c_uint = 1;
pub const SEND_EOF: u16 = 0x100;
pub const SEND_ABORT: u16 = 0x200;
pub const UNORDERED: u16 = 0x400;
pub const BINDX_ADD_ADDR: c_int = 0x8001;
/// `MSG_NOTIFICATION` (`usrsctp.h`).
pub const MSG_NOTIFICATION: c_int = 0x2000;

/// `receive_cb`: owns `data`, which was allocated by `malloc`. Returns 1.
pub type ReceiveCallback = unsafe extern "C" fn(
    socket: *mut Socket,
    address: SockStore,
    data: *mut c_void,
    length: size_t,
    info: RcvInfo,
    flags: c_int,
    ulp_info: *mut c_void,
) -> c_int;

unsafe extern "C" {
    pub fn usrsctp_init_nothreads(
        udp_port: u16,
        conn_output: Option<unsafe extern "C" fn()>,
        debug_printf: Option<unsafe extern "C" fn(*const c_char, ...)>,
    );
    pub fn usrsctp_handle_timers(elapsed_ms: u32);
    pub fn usrsctp_socket(
        domain: c_int,
        kind: c_int,
        protocol: c_int,
        receive: Option<ReceiveCallback>,
        send: Option<unsafe extern "C" fn(*mut Socket, u32, *mut c_void) -> c_int>,
        send_threshold: u32,
        ulp_info: *mut c_void,
    ) -> *mut Socket;
    pub fn usrsctp_setsockopt(
        socket: *mut Socket,
        level: c_int,
        name: c_int,
        value: *const c_void,
        length: socklen_t,
    ) -> c_int;
    pub fn usrsctp_getsockopt(
        socket: *mut Socket,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        length: *mut socklen_t,
    ) -> c_int;
    pub fn usrsctp_set_non_blocking(socket: *mut Socket, on: c_int) -> c_int;
    pub fn usrsctp_bindx(
        socket: *mut Socket,
        addresses: *mut sockaddr,
        count: c_int,
        flags: c_int,
    ) -> c_int;
    pub fn usrsctp_bind(socket: *mut Socket, address: *mut sockaddr, length: socklen_t) -> c_int;
    pub fn usrsctp_listen(socket: *mut Socket, backlog: c_int) -> c_int;
    pub fn usrsctp_connectx(
        socket: *mut Socket,
        addresses: *const sockaddr,
        count: c_int,
        assoc: *mut u32,
    ) -> c_int;
    pub fn usrsctp_sendv(
        socket: *mut Socket,
        data: *const c_void,
        length: size_t,
        to: *mut sockaddr,
        count: c_int,
        info: *mut c_void,
        info_length: socklen_t,
        info_type: c_uint,
        flags: c_int,
    ) -> ssize_t;
    pub fn usrsctp_getpaddrs(socket: *mut Socket, assoc: u32, list: *mut *mut sockaddr) -> c_int;
    pub fn usrsctp_freepaddrs(list: *mut sockaddr);
    pub fn usrsctp_getladdrs(socket: *mut Socket, assoc: u32, list: *mut *mut sockaddr) -> c_int;
    pub fn usrsctp_freeladdrs(list: *mut sockaddr);
    pub fn usrsctp_close(socket: *mut Socket);

    // Functions of `c/round_trip.c`.
    pub fn holdfast_usrsctp_round_trip_us(socket: *mut Socket, assoc: u32) -> u64;
    pub fn holdfast_usrsctp_measure(socket: *mut Socket, assoc: u32);

    pub fn usrsctp_sysctl_set_sctp_udp_tunneling_port(port: u32) -> c_int;
    pub fn usrsctp_sysctl_set_sctp_no_csum_on_loopback(on: u32) -> c_int;
    pub fn usrsctp_sysctl_set_sctp_blackhole(level: u32) -> c_int;
    pub fn usrsctp_sysctl_set_sctp_asconf_enable(on: u32) -> c_int;
    pub fn usrsctp_sysctl_set_sctp_auto_asconf(on: u32) -> c_int;
    pub fn usrsctp_sysctl_set_sctp_max_chunks_on_queue(chunks: u32) -> c_int;
    pub fn usrsctp_sysctl_set_sctp_max_burst_default(packets: u32) -> c_int;
    pub fn usrsctp_sysctl_set_sctp_ecn_enable(on: u32) -> c_int;
    pub fn usrsctp_tunable_set_sctp_pcbtblsize(buckets: u32) -> c_int;
    pub fn usrsctp_tunable_set_sctp_hashtblsize(buckets: u32) -> c_int;

    // Internal functions. The first opens the stack's raw and UDP sockets, and would start threads to read them.
    pub fn recv_thread_init();
    pub fn sctp_get_mbuf_for_msg(
        length: c_uint,
        want_header: c_int,
        how: c_int,
        all_one_buffer: c_int,
        kind: c_int,
    ) -> *mut Mbuf;
    pub fn m_copyback(mbuf: *mut Mbuf, offset: c_int, length: c_int, from: *mut c_char);
    pub fn m_freem(mbuf: *mut Mbuf);
    pub fn sctp_common_input_processing(
        mbuf: *mut *mut Mbuf,
        ip_header_length: c_int,
        offset: c_int,
        length: c_int,
        source: *mut sockaddr,
        destination: *mut sockaddr,
        header: *mut u8,
        chunk: *mut u8,
        compute_crc: u8,
        ecn_bits: u8,
        vrf: u32,
        encapsulation_port: u16,
    );
}

/// `M_NOWAIT` (`user_malloc.h`) and `MT_DATA` (`user_mbuf.h`).
pub const M_NOWAIT: c_int = 1;
pub const MT_DATA: c_int = 1;
