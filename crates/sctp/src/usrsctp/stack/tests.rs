use super::*;
use std::net::UdpSocket;

/// Number of packets, more than one call reads.
const PACKETS: usize = 40;

/// Returns true if a datagram waits at a socket.
fn has_datagram(fd: RawFd) -> bool {
    let mut byte = 0u8;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the buffer is writable for its length.
    unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, flags) >= 0 }
}

#[test]
fn read_drains_more_packets_than_one_batch() {
    let stack = LockedStack::lock();
    let setup = StackSettings {
        raw: false,
        udp_port: Some(0),
    };
    stack.start(setup).unwrap();
    let port = stack.udp_port().unwrap();
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    for _ in 0..PACKETS {
        sender.send_to(&[0; 24], ("127.0.0.1", port)).unwrap();
    }
    let sockets = stack.state().sockets.borrow().clone();
    assert!(sockets.iter().any(|socket| has_datagram(socket.fd)));
    for socket in &sockets {
        stack.read(socket.fd).unwrap();
    }
    assert!(!sockets.iter().any(|socket| has_datagram(socket.fd)));
}
