//! Flooders: each is a process that sends until its standard input is closed.

use std::io::Read;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::{Child, Command, Stdio};

use bytes::{Bytes, BytesMut};
use holdfast_api::control::RegistrarStatus;
use holdfast_sctp::{
    AssocId, MessageToSend as Packet, TransportConfig, TransportEndpoint, TransportEvent, open,
};
use holdfast_wire::rserpool::asap::{self, Message};
use holdfast_wire::rserpool::enrp::{self, EnrpBody};
use holdfast_wire::rserpool::{
    ElementId, Policy, PoolElement, PoolHandle, RegistrarId, SctpTransport, ServerInformation,
    Transport, TransportUse,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};

/// Environment variable with a flooder's order: kind, own address, ASAP address, ENRP address, UDP port.
const FLOOD_ORDER: &str = "HOLDFAST_TEST_FLOOD";
/// Number of messages between two reads of received data.
const BURST: usize = 100;
/// Number of associations that a flooder keeps idle.
const IDLE_ASSOCIATIONS: usize = 60;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloodKind {
    /// Sends bytes over associations that are no message, or nearly one.
    Garbage,
    /// Sends datagrams that are no packet, and INIT chunks of associations that are never completed.
    Datagrams,
    /// Registers any number of elements and pools, of any size.
    Registrations,
    /// Reports the honest element as unreachable.
    Reports,
    /// Opens associations without sending any message.
    Idle,
    /// Multicasts announcements and presences of registrars that do not exist.
    Multicast,
}

const FLOOD_KINDS: [FloodKind; 6] = [
    FloodKind::Garbage,
    FloodKind::Datagrams,
    FloodKind::Registrations,
    FloodKind::Reports,
    FloodKind::Idle,
    FloodKind::Multicast,
];

/// A flooder that ends with the test.
pub struct Flood(Child);

impl Flood {
    /// Starts a flooder at the address `from`.
    pub fn start(kind: FloodKind, from: &str, registrar: &RegistrarStatus) -> Self {
        let (asap, enrp) = (registrar.asap[0], registrar.enrp[0]);
        let udp = registrar.encapsulation_port.expect("a port");
        let order = format!("{kind:?} {from} {asap} {enrp} {udp}");
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args(["flooder_process", "--exact"])
            .env(FLOOD_ORDER, order)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        Self(child.expect("a process"))
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Addresses of a flood.
struct Target {
    own_address: IpAddr,
    asap: SocketAddr,
    enrp: SocketAddr,
    udp: u16,
}

/// Floods if this process was started as a flooder.
pub fn run_if_flooder() {
    let Ok(order) = std::env::var(FLOOD_ORDER) else {
        return;
    };
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    let words: Vec<_> = order.split(' ').collect();
    let [kind, own, asap, enrp, udp] = words[..] else {
        panic!("an order of five words: {order}");
    };
    let kind = FLOOD_KINDS
        .into_iter()
        .find(|candidate| format!("{candidate:?}") == kind);
    let target = Target {
        own_address: own.parse().expect("an address"),
        asap: asap.parse().expect("an address"),
        enrp: enrp.parse().expect("an address"),
        udp: udp.parse().expect("a port"),
    };
    match kind.expect("a kind") {
        FloodKind::Datagrams => flood_datagrams(&target),
        FloodKind::Multicast => flood_multicast(&target),
        FloodKind::Idle => flood_idle(&target),
        kind => MessageFlooder::new(&target).run(kind),
    }
}

fn open_endpoint(own_address: IpAddr) -> Box<dyn TransportEndpoint> {
    let config = TransportConfig {
        encapsulation: Some(0),
        raw: false,
        ..TransportConfig::new(vec![SocketAddr::new(own_address, 0)])
    };
    open(&config).expect("an endpoint")
}

fn poll_events(endpoint: &mut dyn TransportEndpoint, events: &mut Vec<TransportEvent>) {
    // A transport error is ignored: a flooder may exhaust its own transport for a moment.
    let _ = endpoint.flush();
    let fd = PollFd::new(endpoint.fd(), PollFlags::POLLIN);
    let _ = poll(&mut [fd], PollTimeout::from(5_u8));
    let _ = endpoint.recv_batch(events);
}

/// Associations with both ports of the registrar, opened again when they end.
struct MessageFlooder<'a> {
    target: &'a Target,
    endpoint: Box<dyn TransportEndpoint>,
    associations: [Option<AssocId>; 2],
    random: SmallRng,
    count: u32,
}

impl<'a> MessageFlooder<'a> {
    fn new(target: &'a Target) -> Self {
        Self {
            target,
            endpoint: open_endpoint(target.own_address),
            associations: [None; 2],
            random: SmallRng::seed_from_u64(1),
            count: 0,
        }
    }

    fn run(&mut self, kind: FloodKind) -> ! {
        let mut events = Vec::new();
        loop {
            let addresses = [self.target.asap, self.target.enrp];
            let wanted_count = if kind == FloodKind::Garbage { 2 } else { 1 };
            for (index, end) in addresses.iter().enumerate().take(wanted_count) {
                match self.associations[index] {
                    Some(assoc) => self.send_burst(kind, index, assoc),
                    // An association that is being opened already is an error here, and is ignored.
                    None => drop(self.endpoint.connect(&[*end], Some(self.target.udp))),
                }
            }
            poll_events(self.endpoint.as_mut(), &mut events);
            for event in events.drain(..) {
                match event {
                    TransportEvent::Up { assoc, .. } => self.on_association_up(assoc),
                    TransportEvent::Down { assoc, .. } => {
                        for up in self
                            .associations
                            .iter_mut()
                            .filter(|up| **up == Some(assoc))
                        {
                            *up = None;
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    fn on_association_up(&mut self, assoc: AssocId) {
        let Ok(addresses) = self.endpoint.remote_addresses(assoc) else {
            return;
        };
        let index = usize::from(addresses.contains(&self.target.enrp));
        self.associations[index] = Some(assoc);
    }

    fn send_burst(&mut self, kind: FloodKind, index: usize, assoc: AssocId) {
        for _ in 0..BURST {
            self.count += 1;
            let (ppid, data) = match kind {
                FloodKind::Registrations => (asap::PPID, self.registration()),
                FloodKind::Reports => (asap::PPID, unreachable_report()),
                _ => self.garbage(index),
            };
            if self.endpoint.send(assoc, &Packet::new(ppid, data)).is_err() {
                break;
            }
        }
    }

    fn registration(&mut self) -> Bytes {
        // Every fifth handle is too long.
        let is_long = self.count.is_multiple_of(5);
        let handle = format!(
            "flood-{}{}",
            self.count % 7,
            "-".repeat(if is_long { 400 } else { 0 })
        );
        let message = Message::Registration {
            handle: PoolHandle::from(handle.as_str()),
            element: PoolElement {
                id: ElementId(self.count),
                home: RegistrarId(0),
                registration_life: 3_600_000,
                user_transport: Transport::Tcp {
                    port: 80,
                    usage: TransportUse::DataOnly,
                    address: self.target.own_address,
                },
                policy: Policy::RoundRobin,
                asap_transport: None,
            },
        };
        encode(|buffer| message.encode(buffer))
    }

    /// Returns random bytes, or a message with some bytes changed, under the identifier of any protocol.
    fn garbage(&mut self, index: usize) -> (u32, Bytes) {
        let mut bytes = match self.count % 3 {
            0 => self.registration().to_vec(),
            1 => forged_presence(self.count).to_vec(),
            _ => vec![0; self.random.random_range(0..3000)],
        };
        if self.count % 3 == 2 {
            self.random.fill_bytes(&mut bytes);
        }
        for _ in 0..self.random.random_range(1..5) {
            let at = self.random.random_range(0..bytes.len().max(1));
            if let Some(byte) = bytes.get_mut(at) {
                *byte = self.random.random();
            }
        }
        let ppid_of_port = [asap::PPID, enrp::PPID][index];
        let ppid =
            [ppid_of_port, ppid_of_port, ppid_of_port, 99, 0][self.random.random_range(0..5)];
        // An empty message cannot be sent.
        bytes.push(0);
        (ppid, bytes.into())
    }
}

fn encode<E: std::fmt::Debug>(write: impl FnOnce(&mut BytesMut) -> Result<(), E>) -> Bytes {
    let mut buffer = BytesMut::new();
    write(&mut buffer).expect("an encoding");
    buffer.freeze()
}

fn unreachable_report() -> Bytes {
    let message = Message::EndpointUnreachable {
        handle: PoolHandle::from("echo"),
        id: crate::ELEMENT,
    };
    encode(|buffer| message.encode(buffer))
}

/// Returns a presence of a registrar that does not exist, at an address where one could be.
fn forged_presence(number: u32) -> Bytes {
    let id = RegistrarId(number.max(1));
    let message = enrp::Message {
        sender: id,
        receiver: RegistrarId(0),
        body: EnrpBody::Presence {
            reply_required: true,
            checksum: Some(number as u16),
            server: Some(ServerInformation {
                id,
                transport: SctpTransport {
                    port: number as u16,
                    usage: TransportUse::DataOnly,
                    addresses: [crate::SECOND_REGISTRAR.parse().expect("an address")]
                        .into_iter()
                        .collect(),
                },
            }),
        },
    };
    encode(|buffer| message.encode(buffer))
}

fn flood_idle(target: &Target) -> ! {
    let mut endpoint = open_endpoint(target.own_address);
    let (mut events, mut open) = (Vec::new(), 0);
    loop {
        if open < IDLE_ASSOCIATIONS
            && endpoint
                .connect_from_new_port(&[target.asap], Some(target.udp))
                .is_ok()
        {
            open += 1;
        }
        poll_events(endpoint.as_mut(), &mut events);
        let ended = events.drain(..);
        open -= ended
            .filter(|e| matches!(e, TransportEvent::Down { .. }))
            .count();
    }
}

fn open_socket(own_address: IpAddr) -> UdpSocket {
    UdpSocket::bind(SocketAddr::new(own_address, 0)).expect("a socket")
}

/// Returns an INIT chunk (RFC 9260 section 3.3.2) in a packet of section 3.1: the only packet that a host without an
/// association may send.
fn init_packet(random: &mut SmallRng, port: u16) -> Vec<u8> {
    let mut packet = Vec::new();
    packet.extend(random.random::<u16>().to_be_bytes());
    packet.extend(port.to_be_bytes());
    // Verification tag and checksum.
    packet.extend([0; 8]);
    packet.extend([1, 0, 0, 20]);
    packet.extend((random.random::<u32>() | 1).to_be_bytes());
    packet.extend(100_000_u32.to_be_bytes());
    packet.extend([0, 16, 0, 16]);
    packet.extend(random.random::<u32>().to_be_bytes());
    let checksum = crc::Crc::<u32>::new(&crc::CRC_32_ISCSI).checksum(&packet);
    packet[8..12].copy_from_slice(&checksum.to_le_bytes());
    packet
}

fn flood_datagrams(target: &Target) -> ! {
    let socket = open_socket(target.own_address);
    let to = SocketAddr::new(target.asap.ip(), target.udp);
    let mut random = SmallRng::seed_from_u64(2);
    loop {
        for _ in 0..BURST {
            let mut bytes = init_packet(&mut random, target.asap.port());
            if random.random() {
                let length = random.random_range(0..1400);
                bytes.resize(length, 0);
                random.fill_bytes(&mut bytes);
            }
            let _ = socket.send_to(&bytes, to);
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

fn flood_multicast(target: &Target) -> ! {
    let socket = open_socket(target.own_address);
    let mut number = 0;
    loop {
        for _ in 0..BURST {
            number += 1;
            let announce = Message::ServerAnnounce {
                registrar: RegistrarId(number),
                transports: Vec::new(),
            };
            let announce = encode(|buffer| announce.encode(buffer));
            let _ = socket.send_to(&announce, "239.0.0.50:3863");
            let _ = socket.send_to(&forged_presence(number), "239.0.0.51:9901");
            let _ = socket.send_to(&[number as u8; 40], "239.0.0.51:9901");
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
