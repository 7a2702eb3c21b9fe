use super::*;
use std::net::UdpSocket;

/// Number of packets, more than one call reads.
const CAME: usize = 40;

/// Returns true if a datagram waits at a socket.
fn has_some(fd: RawFd) -> bool {
    let mut byte = 0u8;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the buffer is writable for its length.
    unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, flags) >= 0 }
}

#[test]
fn who_pauses_between_two_calls_has_no_work_left_meanwhile() {
    let stack = Stack::lock();
    let setup = Setup {
        raw: false,
        udp_port: Some(0),
    };
    stack.start(setup).unwrap();
    let port = stack.udp_port().unwrap();
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    for _ in 0..CAME {
        sender.send_to(&[0; 24], ("127.0.0.1", port)).unwrap();
    }
    let sockets = stack.inner().sockets.borrow().clone();
    assert!(sockets.iter().any(|socket| has_some(socket.fd)));
    for socket in &sockets {
        stack.read(socket.fd).unwrap();
    }
    assert!(!sockets.iter().any(|socket| has_some(socket.fd)));
}
