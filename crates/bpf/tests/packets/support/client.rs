//! Clients with real sockets.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use holdfast_bpf::shared_with_c::FlowKey;

use super::host::Host;
use super::pool::{TCP, UDP, service};

const PATIENCE: Duration = Duration::from_secs(60);

/// A TCP connection to the service.
pub struct Client {
    pub stream: TcpStream,
    /// The node that sent the greeting.
    pub owner: u8,
}

impl Client {
    pub fn connect(host: &Host, v6: bool) -> Self {
        let mut stream = open(host, service(v6)).expect("connect");
        let mut owner = [0];
        stream.read_exact(&mut owner).expect("the greeting");
        Self {
            stream,
            owner: owner[0],
        }
    }

    pub fn key(&self) -> FlowKey {
        flow(TCP, self.stream.peer_addr().expect("peer"), self.address())
    }

    pub fn address(&self) -> SocketAddr {
        self.stream.local_addr().expect("local")
    }

    /// Sends bytes and expects their echo.
    pub fn echo(&mut self, bytes: &[u8]) {
        let mut writer = self.stream.try_clone().expect("clone");
        let mut back = vec![0; bytes.len()];
        std::thread::scope(|scope| {
            scope.spawn(move || writer.write_all(bytes).expect("write"));
            self.stream.read_exact(&mut back).expect("the echo");
        });
        assert!(back == bytes, "the echo differs");
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("write");
    }

    pub fn expect(&mut self, bytes: &[u8]) {
        let mut back = vec![0; bytes.len()];
        self.stream.read_exact(&mut back).expect("the echo");
        assert!(back == bytes, "the echo differs");
    }
}

/// Opens a connection with generous time limits.
pub fn open(host: &Host, to: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = host.run(|| TcpStream::connect_timeout(&to, PATIENCE))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

pub fn flow(protocol: u8, local: SocketAddr, remote: SocketAddr) -> FlowKey {
    FlowKey::new(protocol, local, remote)
}

/// A UDP socket of a client, connected to the service.
pub struct DatagramClient {
    pub socket: UdpSocket,
    /// The number appended to the next datagram, which tells a late answer from the answer to another attempt.
    next: AtomicU32,
    /// The numbers with an answer: each number gets at most one.
    answered: Mutex<HashSet<u32>>,
}

impl DatagramClient {
    pub fn new(host: &Host, bind_address: IpAddr) -> Self {
        let socket = host.run(|| UdpSocket::bind((bind_address, 0)).expect("bind"));
        host.run(|| {
            socket
                .connect(service(bind_address.is_ipv6()))
                .expect("connect")
        });
        Self {
            socket,
            next: AtomicU32::new(0),
            answered: Mutex::default(),
        }
    }

    pub fn key(&self) -> FlowKey {
        let peer = self.socket.peer_addr().expect("peer");
        flow(UDP, peer, self.socket.local_addr().expect("local"))
    }

    /// Sends `bytes` with the number of this attempt, and returns the number.
    pub fn send(&self, bytes: &[u8]) -> std::io::Result<u32> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let numbered = [bytes, &number.to_be_bytes()].concat();
        self.socket.send(&numbered)?;
        Ok(number)
    }

    /// Repeats a request until an answer arrives; returns the node that answered. Datagrams may be lost where the test
    /// says so.
    pub fn ask(&self, bytes: &[u8]) -> u8 {
        let first = self.next.load(Ordering::Relaxed);
        for _ in 0..60 {
            // A send may fail as too big or refused: the next attempt uses the path MTU that the stack has learnt.
            let _ = self.send(bytes);
            if let Some(owner) = self.answer(bytes, first, Duration::from_secs(1)) {
                return owner;
            }
        }
        panic!("no answer to a datagram of {} bytes", bytes.len());
    }

    /// Sends a request once, on a path without loss: afterwards none of its packets is in flight.
    pub fn ask_once(&self, bytes: &[u8]) -> u8 {
        let attempt = self.send(bytes).expect("send");
        let owner = self.answer(bytes, attempt, PATIENCE);
        owner.expect("an answer to the only attempt")
    }

    /// Returns the node that answered attempt `first` or a later one with `bytes`. Each answer arrives within `wait` of
    /// the previous one; late answers to earlier attempts are skipped.
    pub fn answer(&self, bytes: &[u8], first: u32, wait: Duration) -> Option<u8> {
        self.socket.set_read_timeout(Some(wait)).expect("timeout");
        let mut buffer = vec![0; 65536];
        loop {
            let length = self.socket.recv(&mut buffer).ok()?;
            let (echo, number) = buffer[1..length].split_last_chunk().expect("a number");
            let number = u32::from_be_bytes(*number);
            let is_new = self.answered.lock().expect("lock").insert(number);
            assert!(is_new, "two answers to attempt {number}");
            if number >= first {
                assert_eq!(echo, bytes, "the echo differs");
                return Some(buffer[0]);
            }
        }
    }
}

/// Returns a socket option of type `int`.
pub fn option(socket: &impl AsRawFd, level: i32, name: i32) -> i32 {
    let (mut value, mut size) = (0i32, 4u32);
    // SAFETY: `value` and `size` describe four writable bytes.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw mut value).cast(),
            &raw mut size,
        )
    };
    assert_eq!(
        got,
        0,
        "getsockopt {name}: {}",
        std::io::Error::last_os_error()
    );
    value
}

/// Sets a socket option of type `int`.
pub fn set_option(socket: &impl AsRawFd, level: i32, name: i32, value: i32) {
    // SAFETY: `value` is four readable bytes.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            4,
        )
    };
    assert_eq!(
        set,
        0,
        "setsockopt {name}: {}",
        std::io::Error::last_os_error()
    );
}

/// Returns the path MTU that a connected socket uses.
pub fn path_mtu(socket: &impl AsRawFd, v6: bool) -> i32 {
    if v6 {
        option(socket, libc::IPPROTO_IPV6, libc::IPV6_MTU)
    } else {
        option(socket, libc::IPPROTO_IP, libc::IP_MTU)
    }
}

/// Returns the unspecified address of a family.
pub fn unspecified(v6: bool) -> IpAddr {
    if v6 {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    }
}

/// Returns bytes in which a shift or a loss is visible.
pub fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}
