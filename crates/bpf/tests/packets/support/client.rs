//! Real client sockets.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use holdfast_bpf::shared::FlowKey;

use super::host::Host;
use super::pool::{TCP, UDP, service};

const PATIENCE: Duration = Duration::from_secs(60);

/// A TCP connection to the service.
pub struct Client {
    pub stream: TcpStream,
    /// The node that greeted it.
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

    /// Sends bytes and expects the same back.
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

/// A connection attempt with generous limits.
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
pub struct Datagrams(pub UdpSocket);

impl Datagrams {
    pub fn new(host: &Host, own: IpAddr) -> Self {
        let socket = host.run(|| UdpSocket::bind((own, 0)).expect("bind"));
        host.run(|| socket.connect(service(own.is_ipv6())).expect("connect"));
        Self(socket)
    }

    pub fn key(&self) -> FlowKey {
        let peer = self.0.peer_addr().expect("peer");
        flow(UDP, peer, self.0.local_addr().expect("local"))
    }

    /// Asks until an answer comes; returns who answered. Datagrams may be lost where the test says so.
    pub fn ask(&self, bytes: &[u8]) -> u8 {
        for _ in 0..60 {
            // Too big or refused: the next attempt goes by what the stack has learnt.
            let _ = self.0.send(bytes);
            if let Some(owner) = self.answer(bytes, Duration::from_secs(1)) {
                return owner;
            }
        }
        panic!("no answer to a datagram of {} bytes", bytes.len());
    }

    /// As [`Datagrams::ask`], where answers to earlier datagrams may still come.
    pub fn ask_again(&self, bytes: &[u8]) -> u8 {
        let wait = Some(Duration::from_secs(1));
        self.0.set_read_timeout(wait).expect("timeout");
        let mut buffer = [0; 64];
        for _ in 0..60 {
            // Full queues lose datagrams: without an answer, it is asked once more.
            self.0.send(bytes).expect("send");
            while let Ok(length) = self.0.recv(&mut buffer) {
                if buffer[1..length] == *bytes {
                    return buffer[0];
                }
            }
        }
        panic!("no answer among many");
    }

    /// Who answered with `bytes` within `wait`.
    pub fn answer(&self, bytes: &[u8], wait: Duration) -> Option<u8> {
        self.0.set_read_timeout(Some(wait)).expect("timeout");
        let mut buffer = vec![0; 65536];
        let length = self.0.recv(&mut buffer).ok()?;
        assert_eq!(&buffer[1..length], bytes, "the echo differs");
        Some(buffer[0])
    }
}

/// A socket option that is an `int`.
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

/// Sets a socket option that is an `int`.
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

/// The path MTU a connected socket works with.
pub fn path_mtu(socket: &impl AsRawFd, v6: bool) -> i32 {
    if v6 {
        option(socket, libc::IPPROTO_IPV6, libc::IPV6_MTU)
    } else {
        option(socket, libc::IPPROTO_IP, libc::IP_MTU)
    }
}

/// Any address of a family.
pub fn any(v6: bool) -> IpAddr {
    if v6 {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    }
}

/// Bytes in which a shift or a loss shows.
pub fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}
