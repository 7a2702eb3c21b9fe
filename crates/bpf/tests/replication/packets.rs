//! Single packets: what the programs make of them, and what the maps hold then. Each link ends in a packet socket in place of a host.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use holdfast_bpf::replication::shared_with_c::{
    Connection, ConnectionKey, HANDSHAKE_ANSWERED, HANDSHAKE_SHOWN, HAS_TIMESTAMPS, HalfOpen,
    LEG_DIVERGED, LEG_RESET, LegRoles, LegState, REPLICATION_DIVERGED, REPLICATION_OPENED,
    REPLICATION_OUTPUT_AFTER_FIN, REPLICATION_REFUSED, SERVICE_COMPARE, SERVICE_STRIP_TIMESTAMPS,
};

use super::driver::{Driver, SERVICE};
use super::frames::{ACK, CWR, ECE, FIN, RST, SYN, Segment, build, read, sack, timestamps};
use super::network::{Network, PORT, device, host_address, service_address};

const REDIRECTED: i32 = 7;
const DROPPED: i32 = 2;
const PASSED_ON: i32 = -1;

const CLIENT_ISN: u32 = 0xffff_fff0;
const LEG_ISN: [u32; 3] = [1000, 0xffff_fff8, 77_000];
const CLIENT_OPTIONS: [u8; 12] = [2, 4, 5, 0xb4, 4, 2, 1, 3, 3, 7, 1, 1];

/// A replicator between packet sockets.
struct Bench {
    links: Vec<OwnedFd>,
    driver: Driver,
    network: Network,
    v6: bool,
}

impl Bench {
    fn new(legs: u8, v6: bool, flags: u32) -> Self {
        let network = Network::new(legs);
        let mut service = network.service(legs, v6);
        service.flags = flags;
        let hosts = std::iter::once(network.client()).chain((0..legs).map(|leg| network.leg(leg)));
        let links = hosts.map(|host| {
            // The host's own stack would answer.
            host.ip("addr flush dev eth0");
            host.run(|| packet_socket(host.ifindex("eth0")))
        });
        let links = links.collect();
        let roles = LegRoles {
            primary: 0,
            live: (1 << legs) - 1,
        };
        let driver = Driver::start_quiet(&network, &service, roles);
        Self {
            links,
            driver,
            network,
            v6,
        }
    }

    fn client(&self) -> SocketAddr {
        SocketAddr::new(host_address(0, self.v6), 40_000)
    }

    fn leg(&self, leg: u8) -> SocketAddr {
        SocketAddr::new(host_address(leg + 1, self.v6), PORT)
    }

    fn key(&self) -> ConnectionKey {
        ConnectionKey::new(self.client(), SERVICE)
    }

    /// Returns a frame that the replicator has sent to a host: 0 is the client, 1 the first leg.
    fn received(&self, host: usize) -> Segment {
        let frame = receive(&self.links[host]).expect("a frame");
        let (from, to, segment) = read(&frame);
        self.check_addresses(host, from, to);
        segment
    }

    fn check_addresses(&self, host: usize, from: SocketAddr, to: SocketAddr) {
        match host.checked_sub(1) {
            None => assert_eq!((from, to), (service_address(self.v6), self.client())),
            Some(leg) => assert_eq!((from, to), (self.client(), self.leg(leg as u8))),
        }
    }

    fn is_silent(&self, host: usize) -> bool {
        receive(&self.links[host]).is_none()
    }

    /// Runs the program with a frame; returns its code, and the last packet if that is redirected.
    fn run(&self, frame: Vec<u8>, host: u8) -> (i32, Option<(SocketAddr, SocketAddr, Segment)>) {
        let ifindex = self.network.contact.ifindex(&device(host));
        let run = move |replicator: &holdfast_bpf::replication::Replicator| {
            replicator.run("replicate_ingress", &frame, ifindex)
        };
        let outcome = self.driver.with(run).expect("run");
        let last = (outcome.code == REDIRECTED).then(|| read(&outcome.frame));
        (outcome.code, last)
    }

    fn send_as_client(&self, segment: &Segment) -> (i32, Option<Segment>) {
        let frame = build(self.client(), service_address(self.v6), segment);
        let (code, last) = self.run(frame, 0);
        (code, last.map(|(_, _, segment)| segment))
    }

    fn send_as_leg(&self, leg: u8, segment: &Segment) -> (i32, Option<Segment>) {
        let frame = build(self.leg(leg), self.client(), segment);
        let (code, last) = self.run(frame, leg + 1);
        (code, last.map(|(_, _, segment)| segment))
    }

    fn half_open(&self) -> Option<HalfOpen> {
        let key = self.key();
        self.driver
            .with(move |r| r.half_open.get(&key).expect("get"))
    }

    fn connection(&self) -> Connection {
        let key = self.key();
        let found = self
            .driver
            .with(move |r| r.connections.get(&key).expect("get"));
        found.expect("a connection")
    }

    fn has_connection(&self) -> bool {
        let key = self.key();
        self.driver
            .with(move |r| r.connections.get(&key).expect("get"))
            .is_some()
    }

    fn syn(&self, options: &[u8]) {
        let syn = Segment {
            sequence: CLIENT_ISN,
            flags: SYN,
            window: 60_000,
            options: options.to_vec(),
            ..Segment::default()
        };
        assert_eq!(self.send_as_client(&syn).0, DROPPED);
    }

    fn syn_ack(&self, leg: u8, options: &[u8]) {
        let answer = Segment {
            sequence: LEG_ISN[usize::from(leg)],
            ack: CLIENT_ISN.wrapping_add(1),
            flags: SYN | ACK,
            window: 30_000,
            options: options.to_vec(),
            ..Segment::default()
        };
        assert_eq!(self.send_as_leg(leg, &answer).0, DROPPED);
    }

    fn show(&self) -> bool {
        let key = self.key();
        self.driver
            .with(move |r| r.show_syn_ack(key))
            .expect("show")
    }

    /// Completes a handshake, and empties the links. All ends use timestamps: the client's is 500, a leg's 100 times its number.
    fn open(legs: u8, v6: bool, flags: u32) -> Self {
        let bench = Self::new(legs, v6, flags);
        bench.syn(&[&CLIENT_OPTIONS[..], &timestamps(500, 0)].concat());
        for leg in 0..legs {
            let value = 100 * (u32::from(leg) + 1);
            bench.syn_ack(
                leg,
                &[&CLIENT_OPTIONS[..], &timestamps(value, 500)].concat(),
            );
        }
        assert!(bench.show());
        bench.send_as_client(&Segment {
            sequence: CLIENT_ISN.wrapping_add(1),
            ack: LEG_ISN[0] + 1,
            flags: ACK,
            window: 1000,
            options: timestamps(501, 100),
            ..Segment::default()
        });
        for link in &bench.links {
            while receive(link).is_some() {}
        }
        bench
    }

    /// Output of a leg, from a position on.
    fn output(&self, leg: u8, position: u32, payload: &[u8]) -> Segment {
        Segment {
            sequence: LEG_ISN[usize::from(leg)].wrapping_add(1 + position),
            ack: CLIENT_ISN.wrapping_add(1),
            flags: ACK,
            window: 300,
            options: timestamps(100 * (u32::from(leg) + 1) + 5, 501),
            payload: payload.to_vec(),
        }
    }

    fn leg_state(&self, leg: u8) -> LegState {
        self.connection().legs[usize::from(leg)]
    }
}

fn packet_socket(ifindex: u32) -> OwnedFd {
    let all = u16::try_from(libc::ETH_P_ALL).expect("small").to_be();
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, i32::from(all)) };
    assert!(
        fd >= 0,
        "packet socket: {}",
        std::io::Error::last_os_error()
    );
    // SAFETY: the kernel has just returned this descriptor.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: an all-zero sockaddr_ll is valid.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = all;
    address.sll_ifindex = ifindex.cast_signed();
    let size = u32::try_from(size_of::<libc::sockaddr_ll>()).expect("small");
    // SAFETY: the address is valid for its size.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) };
    assert_eq!(bound, 0, "bind: {}", std::io::Error::last_os_error());
    socket
}

/// Returns the next TCP frame that has arrived. A frame crosses a veth within the call that sends it, or soon after.
fn receive(link: &OwnedFd) -> Option<Vec<u8>> {
    loop {
        let mut poll = libc::pollfd {
            fd: link.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid pollfd.
        if unsafe { libc::poll(&raw mut poll, 1, 200) } != 1 {
            return None;
        }
        let mut frame = vec![0u8; 70_000];
        // SAFETY: the buffer is valid for its length.
        let length =
            unsafe { libc::recv(link.as_raw_fd(), frame.as_mut_ptr().cast(), frame.len(), 0) };
        frame.truncate(usize::try_from(length).unwrap_or(0));
        // Neighbour discovery and the like are not TCP.
        let is_tcp = match frame.get(12..14) {
            Some([8, 0]) => frame.get(23) == Some(&6),
            Some([0x86, 0xdd]) => frame.get(20) == Some(&6),
            _ => false,
        };
        if is_tcp {
            return Some(frame);
        }
    }
}

#[test]
fn syn_goes_to_all_legs_and_answer_waits_for_user_space() {
    for v6 in [false, true] {
        let bench = Bench::new(2, v6, 0);
        // MPTCP (30) would tie the connection to one server.
        let mptcp = [30, 4, 1, 2];
        bench.syn(&[&CLIENT_OPTIONS[..], &mptcp].concat());
        for host in [1, 2] {
            let syn = bench.received(host);
            assert_eq!((syn.sequence, syn.flags), (CLIENT_ISN, SYN | ECE | CWR));
            assert_eq!(syn.options[..10], [2, 4, 5, 0xb4, 4, 2, 1, 3, 3, 4]);
            assert_eq!(syn.options[12..], [1, 1, 1, 1]);
        }
        bench.syn_ack(0, &[2, 4, 5, 0xb4, 4, 2, 1, 3, 3, 7, 1, 1]);
        assert!(bench.driver.events().is_empty());
        assert!(!bench.show());
        bench.syn_ack(1, &[2, 4, 4, 0, 1, 3, 3, 9]);
        let opened = bench.driver.wait_for(REPLICATION_OPENED);
        assert_eq!((opened.key, opened.answered), (bench.key(), 3));
        assert_eq!(
            bench.half_open().expect("an entry").state,
            HANDSHAKE_ANSWERED
        );
        assert!(bench.is_silent(0));
        assert!(bench.show());
        let answer = bench.received(0);
        assert_eq!((answer.sequence, answer.flags), (LEG_ISN[0], SYN | ACK));
        assert_eq!(
            (answer.ack, answer.window),
            (CLIENT_ISN.wrapping_add(1), 30_000)
        );
        // The least MSS, the largest scale, and no SACK, which one leg lacks.
        assert_eq!(answer.options, [2, 4, 4, 0, 1, 1, 1, 1, 1, 3, 3, 9]);
        // A repeated SYN is answered without the legs.
        while receive(&bench.links[1]).is_some() {}
        bench.syn(&CLIENT_OPTIONS);
        assert_eq!(bench.received(0), answer);
        assert!(bench.is_silent(1));
        assert_eq!(bench.half_open().expect("an entry").state, HANDSHAKE_SHOWN);
        assert!(!bench.has_connection());
    }
}

#[test]
fn refusal_is_reported_and_hidden() {
    let bench = Bench::new(2, false, SERVICE_STRIP_TIMESTAMPS);
    bench.syn(&[&CLIENT_OPTIONS[..], &timestamps(500, 0)].concat());
    assert_eq!(bench.received(1).options[12..], [1; 12]);
    let refusal = Segment {
        ack: CLIENT_ISN.wrapping_add(1),
        flags: RST | ACK,
        ..Segment::default()
    };
    assert_eq!(bench.send_as_leg(1, &refusal).0, DROPPED);
    let event = bench.driver.wait_for(REPLICATION_REFUSED);
    assert_eq!((event.legs, event.answered), (0b10, 0));
    bench.syn_ack(0, &CLIENT_OPTIONS);
    assert!(bench.is_silent(0));
    // Without the leg that refused, the window update finds the handshake complete.
    let key = bench.key();
    bench.driver.with(move |replicator| {
        let roles = LegRoles {
            primary: 0,
            live: 1,
        };
        replicator.set_roles(SERVICE, roles);
        assert!(replicator.send_window_update(key).expect("window update"));
    });
    bench.driver.wait_for(REPLICATION_OPENED);
    assert!(bench.show());
    assert_eq!(bench.half_open().expect("an entry").live & 0xf, 1);
}

#[test]
fn client_data_is_translated_for_each_leg() {
    for v6 in [false, true] {
        let bench = Bench::open(2, v6, 0);
        let data = Segment {
            sequence: CLIENT_ISN.wrapping_add(1),
            ack: LEG_ISN[0] + 1,
            flags: ACK,
            window: 1000,
            options: timestamps(502, 100),
            payload: b"an odd number of bytes!".to_vec(),
        };
        let (code, last) = bench.send_as_client(&data);
        assert_eq!(code, REDIRECTED);
        let (first, second) = (bench.received(1), last.expect("the last copy"));
        for (leg, copy) in [(0, first), (1, second)] {
            assert_eq!(copy.sequence, data.sequence);
            assert_eq!(copy.ack, LEG_ISN[leg].wrapping_add(1));
            assert_eq!(copy.flags, ACK | CWR);
            assert_eq!(copy.payload, data.payload);
            assert_eq!(copy.options, timestamps(502, 100 * (leg as u32 + 1)));
            // The client's window is 1000 << 7 bytes, a leg's scale 4, and a replica may send nothing.
            assert_eq!(copy.window, if leg == 0 { 8000 } else { 0 });
        }
        let connection = bench.connection();
        assert_eq!(connection.client_nxt, CLIENT_ISN.wrapping_add(24));
        assert_ne!(connection.options & HAS_TIMESTAMPS, 0);
        assert!(connection.legs[0].owes_since_ns > 0 && connection.legs[1].owes_since_ns > 0);
    }
}

#[test]
fn hostile_packets_of_clients_change_no_state() {
    let bench = Bench::open(2, false, 0);
    let before = bench.connection();
    let base = Segment {
        sequence: before.client_nxt,
        ack: before.sent,
        flags: ACK,
        options: timestamps(600, 100),
        ..Segment::default()
    };
    let acks_unsent = Segment {
        ack: before.sent.wrapping_add(1),
        ..base.clone()
    };
    let outside = Segment {
        sequence: before.shown_edge.wrapping_add(1),
        payload: vec![1; 10],
        ..base.clone()
    };
    for unacceptable in [acks_unsent, outside] {
        assert_eq!(bench.send_as_client(&unacceptable).0, DROPPED);
        let answer = bench.received(0);
        assert_eq!((answer.flags, answer.ack), (ACK, before.shown_ack));
        assert!(bench.is_silent(1));
    }
    let reset_outside = Segment {
        sequence: before.client_nxt.wrapping_add(5),
        flags: RST,
        ..base.clone()
    };
    bench.send_as_client(&reset_outside);
    let mut after = bench.connection();
    (after.legs[0].owes_since_ns, after.legs[1].owes_since_ns) = (0, 0);
    assert_eq!(after, before);
    assert_eq!(bench.driver.counter("unsent_acked"), 1);
    assert_eq!(bench.driver.counter("outside_window"), 1);
    // A SYN within the connection is answered, RFC 5961, section 4.
    bench.syn(&CLIENT_OPTIONS);
    let answer = bench.received(0);
    assert_eq!((answer.flags, answer.ack), (ACK, before.shown_ack));
    // Malformed headers are passed on to the stack, which drops them.
    let mut malformed = build(bench.client(), service_address(false), &base);
    malformed[14 + 20 + 12] = 0x40;
    assert_eq!(bench.run(malformed, 0).0, PASSED_ON);
    assert_eq!(bench.driver.counter("malformed"), 1);
    // A segment of no connection leaves no state; the ownership filter judges it.
    let stranger = build(
        SocketAddr::new(host_address(0, false), 41_000),
        service_address(false),
        &base,
    );
    assert_eq!(bench.run(stranger, 0).0, PASSED_ON);
    assert_eq!(bench.driver.connections().len(), 1);
}

#[test]
fn output_of_primary_reaches_client_and_replicas_end_here() {
    for v6 in [false, true] {
        let bench = Bench::open(2, v6, SERVICE_COMPARE);
        let (code, last) = bench.send_as_leg(0, &bench.output(0, 0, b"hello, world"));
        let shown = last.expect("passed");
        assert_eq!((code, shown.sequence), (REDIRECTED, LEG_ISN[0] + 1));
        assert_eq!(shown.payload, b"hello, world");
        assert_eq!(shown.options, timestamps(105, 501));
        // The lowest window of the legs' answers is 30,000 bytes, and the shown scale is 7.
        assert_eq!(shown.window, 30_000 >> 7);
        assert_eq!(bench.connection().tip.position, 12);
        // The same bytes of the replica, in two segments that overlap and arrive in the wrong order.
        assert_eq!(
            bench.send_as_leg(1, &bench.output(1, 5, b", world")).0,
            DROPPED
        );
        assert_eq!(bench.leg_state(1).nxt, LEG_ISN[0] + 1);
        assert_eq!(
            bench.send_as_leg(1, &bench.output(1, 0, b"hello, w")).0,
            DROPPED
        );
        let replica = bench.leg_state(1);
        assert_eq!(replica.nxt, LEG_ISN[0] + 13);
        assert_eq!(replica.digest, bench.leg_state(0).digest);
        assert_eq!((replica.compared, replica.flags), (LEG_ISN[0] + 13, 0));
        assert!(bench.is_silent(0));
    }
}

#[test]
fn digest_is_that_of_the_definition() {
    let bench = Bench::open(2, false, SERVICE_COMPARE);
    let output: Vec<u8> = (0..1400u32).map(|i| (i * i / 7) as u8).collect();
    let mut position = 0;
    // Cuts at all alignments, below and above the program's chunk of 256 bytes.
    for length in [1, 2, 3, 5, 254, 255, 256, 257, 367] {
        bench.send_as_leg(
            0,
            &bench.output(0, position, &output[position as usize..][..length]),
        );
        position += length as u32;
    }
    assert_eq!(position, 1400);
    assert_eq!(bench.leg_state(0).digest, digest(&output));
    bench.send_as_leg(1, &bench.output(1, 0, &output));
    assert_eq!(bench.leg_state(1).digest, digest(&output));
}

/// The digest as `c/replicate_digest.h` defines it.
fn digest(output: &[u8]) -> u64 {
    let word = |bytes: &[u8]| {
        let mut whole = [0; 4];
        whole[..bytes.len()].copy_from_slice(bytes);
        u64::from(u32::from_le_bytes(whole))
    };
    let powers = std::iter::successors(Some(1u64), |p| Some(p.wrapping_mul(0x9fb2_1c65_1e98_df25)));
    let terms = output
        .chunks(4)
        .map(word)
        .zip(powers)
        .map(|(w, p)| w.wrapping_mul(p));
    terms.fold(0, u64::wrapping_add)
}

#[test]
fn second_gap_and_differing_byte_are_found() {
    let bench = Bench::open(2, false, SERVICE_COMPARE);
    bench.send_as_leg(0, &bench.output(0, 0, &[7; 300]));
    bench.send_as_leg(1, &bench.output(1, 100, &[7; 20]));
    bench.send_as_leg(1, &bench.output(1, 200, &[7; 20]));
    assert_eq!(bench.driver.counter("gaps"), 1);
    let mut wrong = [7; 300];
    wrong[250] = 8;
    bench.send_as_leg(1, &bench.output(1, 0, &wrong));
    let replica = bench.leg_state(1);
    assert_eq!(
        (replica.nxt, replica.flags),
        (LEG_ISN[0] + 301, LEG_DIVERGED)
    );
}

#[test]
fn output_that_precedes_the_primary_is_compared_when_the_primary_sends() {
    let bench = Bench::open(3, false, SERVICE_COMPARE);
    bench.send_as_leg(1, &bench.output(1, 0, b"$5 wrong"));
    bench.send_as_leg(2, &bench.output(2, 0, b"$5 right"));
    assert_eq!(bench.leg_state(1).flags, 0);
    bench.send_as_leg(0, &bench.output(0, 0, b"$5 right"));
    let [wrong, right] = [1, 2].map(|leg| bench.leg_state(leg));
    assert_eq!(
        (wrong.flags, wrong.compared),
        (LEG_DIVERGED, LEG_ISN[0] + 1)
    );
    assert_eq!((right.flags, right.compared), (0, LEG_ISN[0] + 9));
    let events = bench.driver.events();
    let diverged: Vec<_> = events
        .iter()
        .filter(|event| event.kind == REPLICATION_DIVERGED)
        .map(|event| (event.leg, event.known, event.position))
        .collect();
    assert_eq!(diverged, [(1, 0b11, 8)]);
    assert_eq!(bench.driver.counter("diverged"), 1);
}

/// The windows of replicas are told in units of 16 bytes, so that acknowledgements may be a few bytes short. These bytes are all that a
/// replica repeats after a loss, until it hears that they have arrived.
#[test]
fn replica_that_repeats_known_output_hears_of_all_of_it() {
    let bench = Bench::open(2, false, 0);
    bench.send_as_leg(0, &bench.output(0, 0, &[7; 1000]));
    bench.send_as_client(&Segment {
        sequence: CLIENT_ISN.wrapping_add(1),
        ack: LEG_ISN[0] + 1001,
        flags: ACK,
        window: 1000,
        options: timestamps(502, 105),
        ..Segment::default()
    });
    bench.send_as_leg(1, &bench.output(1, 0, &[7; 501]));
    let told = bench.leg_state(1).told - LEG_ISN[0] - 1;
    assert_eq!(told, 488, "1000 and 488 are equal modulo 16");
    while receive(&bench.links[2]).is_some() {}
    bench.send_as_leg(1, &bench.output(1, told, &[7; 13]));
    let ack = bench.received(2).ack;
    assert_eq!(ack, LEG_ISN[1].wrapping_add(1 + 501));
}

#[test]
fn client_is_shown_the_lowest_acknowledgement() {
    let bench = Bench::open(2, false, 0);
    let data = Segment {
        sequence: CLIENT_ISN.wrapping_add(1),
        ack: LEG_ISN[0] + 1,
        flags: ACK,
        window: 1000,
        options: timestamps(502, 100),
        payload: vec![1; 100],
    };
    bench.send_as_client(&data);
    let acknowledge = |leg, bytes: u32, options: Vec<u8>| Segment {
        ack: CLIENT_ISN.wrapping_add(1 + bytes),
        options,
        ..bench.output(leg, 0, &[])
    };
    assert_eq!(
        bench
            .send_as_leg(0, &acknowledge(0, 100, timestamps(105, 502)))
            .1,
        None
    );
    // A block beyond what the other leg has is not shown.
    let (left, right) = (CLIENT_ISN.wrapping_add(50), CLIENT_ISN.wrapping_add(200));
    let (code, shown) = bench.send_as_leg(1, &acknowledge(1, 40, sack(left, right)));
    let shown = shown.expect("passed");
    assert_eq!((code, shown.ack), (REDIRECTED, CLIENT_ISN.wrapping_add(41)));
    assert_eq!(shown.options, sack(left, CLIENT_ISN.wrapping_add(101)));
    assert_eq!(shown.sequence, LEG_ISN[0] + 1);
    let (_, shown) = bench.send_as_leg(1, &acknowledge(1, 100, timestamps(205, 502)));
    assert_eq!(shown.expect("passed").ack, CLIENT_ISN.wrapping_add(101));
}

#[test]
fn reset_and_end_of_a_leg_are_hidden_until_user_space_decides() {
    let bench = Bench::open(2, false, 0);
    let fin = Segment {
        flags: FIN | ACK,
        ..bench.output(0, 0, b"bye")
    };
    bench.send_as_leg(0, &fin);
    let shown = bench.received(0);
    assert_eq!((shown.flags, &shown.payload[..]), (ACK, &b"bye"[..]));
    // The replica may now send all that the client's window allows.
    assert_eq!(bench.received(2).window, 8000);
    let far = Segment {
        sequence: LEG_ISN[1].wrapping_sub(1 << 24),
        flags: RST,
        ..Segment::default()
    };
    bench.send_as_leg(1, &far);
    assert_eq!(bench.leg_state(1).flags & LEG_RESET, 0);
    let reset = Segment {
        flags: RST,
        ..bench.output(1, 0, &[])
    };
    assert_eq!(bench.send_as_leg(1, &reset).0, DROPPED);
    assert_ne!(bench.leg_state(1).flags & LEG_RESET, 0);
    assert!(bench.is_silent(0));
    // Without the replica, the end is agreed.
    let key = bench.key();
    bench.driver.with(move |replicator| {
        let roles = Some(LegRoles {
            primary: 0,
            live: 1,
        });
        assert!(replicator.set_connection_roles(key, roles).expect("roles"));
        assert!(replicator.send_window_update(key).expect("window update"));
    });
    let end = bench.received(0);
    assert_eq!((end.flags, end.sequence), (FIN | ACK, LEG_ISN[0] + 4));
    bench
        .driver
        .with(move |r| assert!(r.reset_client(key).expect("reset")));
    assert_eq!(bench.received(0).flags, RST | ACK);
    assert!(!bench.has_connection());
}

#[test]
fn end_that_the_client_has_not_acknowledged_is_repeated() {
    let bench = Bench::open(1, false, 0);
    bench.send_as_leg(0, &bench.output(0, 0, b"bye"));
    let acknowledge = |number: u32| {
        bench.send_as_client(&Segment {
            sequence: CLIENT_ISN.wrapping_add(1),
            ack: LEG_ISN[0] + 1 + number,
            flags: ACK,
            window: 1000,
            options: timestamps(502, 105),
            ..Segment::default()
        });
    };
    acknowledge(3);
    let fin = Segment {
        flags: FIN | ACK,
        ..bench.output(0, 3, &[])
    };
    bench.send_as_leg(0, &fin);
    // The first one may be lost.
    while receive(&bench.links[0]).is_some() {}
    let (_, repeated) = bench.send_as_leg(0, &fin);
    let repeated = repeated.expect("passed");
    assert_eq!(
        (repeated.flags, repeated.sequence),
        (FIN | ACK, LEG_ISN[0] + 4)
    );
    acknowledge(4);
    let (code, _) = bench.send_as_leg(0, &fin);
    assert_eq!(code, DROPPED);
    assert!(bench.is_silent(0));
}

#[test]
fn output_beyond_an_end_reaches_the_client() {
    let bench = Bench::open(3, false, 0);
    let fin = Segment {
        flags: FIN | ACK,
        ..bench.output(0, 0, b"bye")
    };
    bench.send_as_leg(0, &fin);
    assert_eq!(bench.received(0).payload, b"bye");
    // The first leg that is left is the primary now; the other one's output ends here.
    let (code, _) = bench.send_as_leg(2, &bench.output(2, 0, b"bye, no"));
    assert_eq!(code, DROPPED);
    let event = bench.driver.wait_for(REPLICATION_OUTPUT_AFTER_FIN);
    assert_eq!((event.leg, event.legs), (2, 0b001));
    assert_eq!(bench.connection().present, 0b110);
    let (_, shown) = bench.send_as_leg(1, &bench.output(1, 3, b", no"));
    let shown = shown.expect("passed");
    assert_eq!(
        (shown.sequence, &shown.payload[..]),
        (LEG_ISN[0] + 4, &b", no"[..])
    );
    bench.send_as_leg(1, &bench.output(1, 0, b"bye"));
    assert_eq!(bench.leg_state(1).nxt, LEG_ISN[0] + 8);
    let events = bench.driver.events();
    let output_after_fin = events
        .iter()
        .filter(|e| e.kind == REPLICATION_OUTPUT_AFTER_FIN);
    assert_eq!(output_after_fin.count(), 1);
}
