//! Packets read from a TUN are written to another, and a TCP receiver accepts them: whole, with any checksum state.

use holdfast_lab::testing::TestNamespace;
use holdfast_lab::testing::wait_for;
use holdfast_sys::packet::{TcpSegmentHeader, tcp_flags, tcp_packet, udp_packet};
use holdfast_sys::sysctl;
use holdfast_sys::tun::{DATA_VALID, NEEDS_CSUM, PACKET_LEN_MAX, Tun, VnetHeader};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

/// Addresses of the host and the far host, both families.
const ADDRESSES: [(&str, &str, u8); 2] = [("10.9.0.1", "10.9.0.2", 24), ("fd09::1", "fd09::2", 64)];

/// Two hosts, each behind a TUN; the test carries the packets between them.
struct Pair {
    hosts: [TestNamespace; 2],
    tuns: [Tun; 2],
}

impl Pair {
    fn new() -> Self {
        let hosts = [TestNamespace::new(), TestNamespace::new()];
        let tuns = [0, 1].map(|at: usize| {
            hosts[at].run(|| {
                let tun = Tun::open("hf0").expect("a TUN");
                for (left, right, prefix) in ADDRESSES {
                    let own: IpAddr = [left, right][at].parse().expect("an address");
                    holdfast_sys::net::add_address(tun.interface().index, own, prefix)
                        .expect("added");
                }
                tun
            })
        });
        Self { hosts, tuns }
    }

    /// Carries all waiting packets, each changed by `change`; returns their number.
    fn forward_packets(
        &self,
        mut change: impl FnMut(VnetHeader, &mut [u8]) -> VnetHeader,
    ) -> usize {
        let mut buffer = vec![0; PACKET_LEN_MAX];
        let mut count = 0;
        for (from, to) in [(0, 1), (1, 0)] {
            while let Ok((header, packet)) = self.tuns[from].read(&mut buffer) {
                let header = change(header, packet);
                self.tuns[to].write(header, packet).expect("written");
                count += 1;
            }
        }
        count
    }
}

/// Sends 1 MB through TCP while `change` treats each packet; returns the number of packets larger than an MTU.
fn transfer(
    address: &str,
    mut change: impl FnMut(VnetHeader, &mut [u8]) -> VnetHeader + Send,
) -> usize {
    let pair = Pair::new();
    let listener = pair.hosts[1].run(|| {
        TcpListener::bind(SocketAddr::new(address.parse().expect("an address"), 80))
            .expect("listen")
    });
    let to = listener.local_addr().expect("address");
    let sent = holdfast_lab::testing::pattern(3, 1 << 20);
    let mut large = 0;
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut client = pair.hosts[0].run(|| TcpStream::connect(to).expect("connect"));
            client.write_all(&sent).expect("write");
        });
        let receiver = scope.spawn(|| {
            let (mut server, _) = listener.accept().expect("accept");
            server
                .set_read_timeout(Some(holdfast_lab::testing::WAIT_LIMIT))
                .expect("timeout");
            let mut arrived = Vec::new();
            server.read_to_end(&mut arrived).expect("read");
            arrived
        });
        wait_for("the transfer", || {
            pair.forward_packets(|header, packet| {
                large += usize::from(packet.len() > 1600 && header.gso_type != 0);
                change(header, packet)
            });
            sender.is_finished() && receiver.is_finished()
        });
        assert!(receiver.join().expect("received") == sent, "bytes changed");
    });
    large
}

#[test]
fn partial_checksums_and_gso_packets_are_reinjected_unchanged() {
    for (_, far, _) in ADDRESSES {
        let mut partial = 0;
        let large = transfer(far, |header, packet| {
            partial += usize::from(header.flags & NEEDS_CSUM != 0);
            header.for_reinjection(packet)
        });
        assert!(
            partial > 0 && large > 0,
            "{partial} packets with a partial checksum, {large} large packets"
        );
    }
}

/// Turns a packet into one that was verified on the way, but with an incomplete checksum field.
fn mark_verified(header: VnetHeader, packet: &mut [u8]) -> VnetHeader {
    if header.flags & NEEDS_CSUM != 0 {
        let at = usize::from(header.checksum_start + header.checksum_offset);
        packet[at..at + 2].copy_from_slice(&[0xde, 0xad]);
    }
    VnetHeader {
        flags: DATA_VALID,
        checksum_start: 0,
        checksum_offset: 0,
        ..header
    }
}

#[test]
fn verified_packets_are_accepted_with_any_checksum_field() {
    for (_, far, _) in ADDRESSES {
        transfer(far, |header, packet| {
            mark_verified(header, packet).for_reinjection(packet)
        });
    }
}

#[test]
fn complete_checksums_are_verified() {
    let host = TestNamespace::new();
    let tun = host.run(|| Tun::open("hf0").expect("a TUN"));
    for (own, far, prefix) in ADDRESSES {
        let ip: IpAddr = own.parse().expect("an address");
        host.run(|| {
            holdfast_sys::net::add_address(tun.interface().index, ip, prefix).expect("added")
        });
        let socket = host.run(|| UdpSocket::bind((ip, 7)).expect("bind"));
        let from = SocketAddr::new(far.parse().expect("an address"), 9);
        let to = SocketAddr::new(ip, 7);
        let good = udp_packet(from, to, b"good").expect("a packet");
        let mut bad = udp_packet(from, to, b"evil").expect("a packet");
        *bad.last_mut().expect("a byte") ^= 1;
        tun.write(VnetHeader::default().for_reinjection(&mut bad), &bad)
            .expect("written");
        tun.write(VnetHeader::default(), &good).expect("written");
        socket
            .set_read_timeout(Some(holdfast_lab::testing::WAIT_LIMIT))
            .expect("timeout");
        let mut buffer = [0; 16];
        let (length, source) = socket.recv_from(&mut buffer).expect("a datagram");
        assert_eq!((&buffer[..length], source), (&b"good"[..], from));
    }
}

#[test]
fn non_tcp_udp_packets_are_unchanged() {
    let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
    let segment = TcpSegmentHeader {
        sequence: 1,
        acknowledgement: 2,
        flags: tcp_flags::ACK,
        window: 3,
        timestamp: None,
    };
    let tcp_packet_bytes =
        tcp_packet(address("10.0.0.1:1"), address("10.0.0.2:2"), &segment, b"x").expect("a packet");
    let valid = VnetHeader {
        flags: DATA_VALID,
        ..VnetHeader::default()
    };
    let mut fragment = tcp_packet_bytes.clone();
    fragment[6] = 0x20;
    let mut icmp = tcp_packet_bytes.clone();
    icmp[9] = 1;
    for packet in [
        fragment,
        icmp,
        tcp_packet_bytes[..30].to_vec(),
        vec![0x45],
        vec![],
    ] {
        let mut after = packet.clone();
        assert_eq!(valid.for_reinjection(&mut after), VnetHeader::default());
        assert_eq!(after, packet);
    }
    let mut after = tcp_packet_bytes.clone();
    let header = valid.for_reinjection(&mut after);
    assert_eq!(
        (header.flags, header.checksum_start, header.checksum_offset),
        (NEEDS_CSUM, 20, 16)
    );
    assert_eq!(VnetHeader::parse(&header.to_bytes()), Some(header));
}

#[test]
fn device_sends_no_packets() {
    let host = TestNamespace::new();
    host.run(|| {
        sysctl::write("net/ipv4/conf/all/rp_filter", "1").expect("strict");
        let tun = Tun::open("hf0").expect("a TUN");
        assert_eq!(
            sysctl::read("net/ipv4/conf/hf0/rp_filter").expect("read"),
            "2"
        );
        assert_eq!(tun.interface().mtu, 65_535);
        // A link-local address would cause a router solicitation within a second or two, so there must be none.
        let addresses =
            std::fs::read_to_string("/proc/thread-self/net/if_inet6").expect("addresses");
        assert!(!addresses.contains("hf0"), "{addresses}");
        std::thread::sleep(Duration::from_millis(100));
        let mut buffer = vec![0; PACKET_LEN_MAX];
        let error = tun.read(&mut buffer).expect_err("silence");
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        assert!(Tun::open("a-name-that-is-too-long").is_err());
    });
}
