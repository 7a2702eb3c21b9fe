//! Handoffs of a connection between the servers of a test network, and filters for its sockets.
#![allow(dead_code, missing_docs)]

pub mod vary;

use holdfast_lab::testing::{RouteTarget, TestNamespace, TestNetwork, stream, wait_for};
use holdfast_sys::socket_filter::{FilterInstruction, SocketFilter};
use holdfast_sys::sockopt::set_int;
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use holdfast_sys::tun::{Tun, VnetHeader};
use holdfast_tcp_repair::{
    TcpDynamicState, TcpStaticState, WindowProbe, abandon, activate, extract, injected_peer_packet,
    prepare, read_static, restore, set_deferred_options_and_timeout,
};
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Returns the connection's TCP state.
pub fn tcp_state(socket: impl AsFd) -> TcpState {
    TcpInfo::read(socket.as_fd()).expect("TCP_INFO").state
}

/// A connection that has moved.
pub struct MovedConnection {
    pub socket: TcpStream,
    /// True if the descriptor was non-blocking when it was activated.
    pub nonblocking: bool,
    pub fixed: TcpStaticState,
    pub state: TcpDynamicState,
}

/// Moves the connection of `server` from `a` to `b` by [`hand_off_from`], without a window probe.
pub fn hand_off(net: &TestNetwork, server: TcpStream) -> MovedConnection {
    hand_off_from(
        net,
        (&net.a, &net.b, RouteTarget::B),
        server,
        WindowProbe::Never,
    )
}

/// Moves the connection of `server` from one host to another, with every step, and encodes and decodes both states. The
/// client's packets are dropped in between.
pub fn hand_off_from(
    net: &TestNetwork,
    (donor, acceptor, to): (&TestNamespace, &TestNamespace, RouteTarget),
    server: TcpStream,
    probe: WindowProbe,
) -> MovedConnection {
    let fixed = donor.run(|| read_static(server.as_fd()).expect("static state"));
    let fixed: TcpStaticState =
        postcard::from_bytes(&postcard::to_stdvec(&fixed).expect("coded")).expect("decoded");
    let prepared = acceptor.run(|| prepare(&fixed).expect("prepared"));
    net.route(RouteTarget::Unreachable);
    let frozen = extract(server.as_fd(), &fixed).expect("dynamic state");
    let frozen: TcpDynamicState =
        postcard::from_bytes(&postcard::to_stdvec(&frozen).expect("coded")).expect("decoded");
    let restored = acceptor.run(|| restore(prepared, &fixed, &frozen).expect("restored"));
    if let Some(packet) = injected_peer_packet(&fixed, &frozen) {
        let before = tcp_state(&restored);
        acceptor.run(|| {
            let tun = Tun::open("hold").expect("a TUN");
            tun.write(VnetHeader::default(), &packet).expect("injected");
        });
        assert_ne!(
            tcp_state(&restored),
            before,
            "the injected packet had no effect"
        );
    }
    net.route(to);
    abandon(server.as_fd()).expect("abandoned");
    let fd = acceptor.run(|| activate(restored, &fixed, &frozen, probe).expect("active"));
    // The acceptor's program may use the socket from here on.
    // SAFETY: F_GETFL takes no argument and touches no memory.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    set_deferred_options_and_timeout(fd.as_fd(), &fixed).expect("settled");
    MovedConnection {
        socket: stream(fd),
        nonblocking: flags & libc::O_NONBLOCK != 0,
        fixed,
        state: frozen,
    }
}

/// A classic filter: code, both jumps, operand.
pub type Filter = [(u16, u8, u8, u32)];

/// A filter that accepts only packets shorter than 9,000 bytes, and accepts them whole.
pub const SHORT_PACKETS_ONLY: [(u16, u8, u8, u32); 4] = [
    // `ld #len`, `jge #9000, 0, 1`, `ret #0`, `ret #-1`.
    (0x80, 0, 0, 0),
    (0x35, 0, 1, 9000),
    (0x06, 0, 0, 0),
    (0x06, 0, 0, u32::MAX),
];

pub fn attach_filter(socket: BorrowedFd<'_>, filter: &Filter) {
    let filter = SocketFilter {
        program: filter.iter().map(instruction).collect(),
        locked: false,
    };
    filter.attach(socket).expect("attached");
}

fn instruction(&(code, jump_true, jump_false, operand): &(u16, u8, u8, u32)) -> FilterInstruction {
    FilterInstruction {
        code,
        jump_true,
        jump_false,
        operand,
    }
}

/// Returns the filter of a socket.
pub fn read_filter(socket: BorrowedFd<'_>) -> Vec<(u16, u8, u8, u32)> {
    let program = SocketFilter::read(socket).expect("a filter").program;
    let tuple = |one: &FilterInstruction| (one.code, one.jump_true, one.jump_false, one.operand);
    program.iter().map(tuple).collect()
}

/// Attaches an eBPF program that accepts every packet.
pub fn attach_ebpf(socket: BorrowedFd<'_>) {
    // `r0 = -1`, `exit`.
    let program = [0xffff_ffff_0000_00b7_u64, 0x95];
    // `union bpf_attr`: a socket filter of two instructions.
    let mut attributes = [0u64; 16];
    attributes[0] = 1 | 2 << 32;
    attributes[1] = program.as_ptr() as u64;
    attributes[2] = c"GPL".as_ptr() as u64;
    let size = size_of_val(&attributes);
    // SAFETY: `BPF_PROG_LOAD` reads the attributes and the memory they point to, which outlive the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, 5, attributes.as_ptr(), size) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the call succeeded, so this is a new descriptor that nothing else owns.
    let program = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let number = program.as_raw_fd();
    set_int(socket, libc::SOL_SOCKET, libc::SO_ATTACH_BPF, number).expect("attached");
}

/// Writes until the client's window and the send buffer are full; returns the number of bytes written.
pub fn fill_send_queue(server: &mut TcpStream, bytes: &[u8]) -> usize {
    server.set_nonblocking(true).expect("nonblocking");
    let mut written = 0;
    wait_for("a full queue", || match server.write(&bytes[written..]) {
        Ok(count) => {
            written += count;
            assert!(written < bytes.len(), "the queue never fills");
            false
        }
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
            let info = TcpInfo::read(server.as_fd()).expect("TCP_INFO");
            info.unacked == 0 && info.notsent_bytes > 0
        }
    });
    written
}
