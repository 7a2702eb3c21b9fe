//! The registrar machine with arbitrary messages.

use bytes::{Bytes, BytesMut};
use holdfast_proto::registrar::{
    AssociationId, Output, PoolProtocol, Registrar, RegistrarMachineConfig,
};
use holdfast_wire::rserpool::{
    ElementId, PoolElement, PoolHandle, RegistrarId, SctpTransport, Transport, TransportUse, asap,
    enrp,
};
use std::net::SocketAddr;
use std::time::Duration;

/// Largest number of elements that the machine may know.
const ELEMENTS_MAX: usize = 50;
/// Number of associations. The last ones belong to registrars, and the very last of these has no right to be a
/// registrar.
const ASSOCIATIONS: u8 = 8;
const FIRST_REGISTRAR: u8 = 5;

/// Processes a stream of records: a byte for the origin, a byte for the event, the length of a message in two bytes,
/// and the message. For any records, the machine does not panic, comes to rest, keeps its limits, and sends only
/// parseable messages.
pub fn run(data: &[u8]) -> bool {
    let mut world = RegistrarHarness::new();
    let mut rest = data;
    while let [from, event, high, low, after @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(after.len());
        let (message, others) = after.split_at(length);
        world.handle_record(
            from % ASSOCIATIONS,
            *event,
            &Bytes::copy_from_slice(message),
        );
        rest = others;
    }
    world.advance(Duration::from_secs(200));
    world.had_effect
}

/// Builds a record: origin, event, and the message that arrives, if any.
pub fn record(from: u8, what: u8, message: &[u8]) -> Vec<u8> {
    let length = u16::try_from(message.len()).expect("short");
    let [high, low] = length.to_be_bytes();
    [&[from, what, high, low], message].concat()
}

struct RegistrarHarness {
    machine: Registrar,
    now: Duration,
    /// True if a message has changed the machine's state.
    had_effect: bool,
}

fn address(from: u8) -> SocketAddr {
    SocketAddr::from(([10, 1, 0, from], 5000 + u16::from(from)))
}

fn protocol(from: u8) -> PoolProtocol {
    match from < FIRST_REGISTRAR {
        true => PoolProtocol::Asap,
        false => PoolProtocol::Enrp,
    }
}

fn id(from: u8) -> AssociationId {
    AssociationId(from.into())
}

impl RegistrarHarness {
    fn new() -> RegistrarHarness {
        let own: SocketAddr = ([10, 1, 0, 100], 9901).into();
        let transport = SctpTransport {
            port: own.port(),
            usage: TransportUse::DataOnly,
            addresses: [own.ip()].into_iter().collect(),
        };
        let mut config = RegistrarMachineConfig::new(RegistrarId(0x50), 1, transport);
        let settings = &mut config.settings;
        settings.limits.elements = ELEMENTS_MAX;
        settings.limits.malformed_max = u32::MAX;
        settings.limits.first_message_timeout = Duration::MAX / 2;
        settings.enrp_multicast = true;
        settings.mentor_hunt_time = Duration::ZERO;
        settings.announce_cycle = Some(Duration::from_secs(30));
        // Recorded elements have other addresses than the associations here.
        settings.check_addresses = false;
        let registrars = (FIRST_REGISTRAR..ASSOCIATIONS - 1).map(|from| address(from).ip());
        let prefixes = registrars.map(|ip| ip.to_string().parse().expect("an address"));
        settings.access.registrar =
            holdfast_proto::registrar::PermittedHosts::Only(prefixes.collect());
        let mut world = RegistrarHarness {
            machine: Registrar::new(Duration::ZERO, config),
            now: Duration::ZERO,
            had_effect: false,
        };
        world.advance(Duration::ZERO);
        for from in 0..ASSOCIATIONS {
            world.associate(from);
        }
        world
    }

    fn associate(&mut self, from: u8) {
        let at = [address(from)];
        self.machine
            .handle_association_up(self.now, id(from), protocol(from), &at, None);
        self.execute_outputs();
    }

    fn handle_record(&mut self, from: u8, what: u8, message: &Bytes) {
        let before = self.summary();
        match what % 8 {
            0 => {
                self.machine.handle_association_down(self.now, id(from));
                self.execute_outputs();
                self.associate(from);
            }
            1 => self.machine.handle_restarted(self.now, id(from)),
            2 => {
                let (own, claimed) = ([address(from)], [address(what / 8)]);
                self.machine
                    .handle_addresses(self.now, id(from), &own, &claimed);
            }
            3 => {
                let (source, protocol) = (address(from), protocol(what / 8 % ASSOCIATIONS));
                self.machine
                    .handle_multicast(self.now, source, protocol, message);
            }
            4 => self.advance(Duration::from_millis(u64::from(what) * 100)),
            5 => self
                .machine
                .handle_send_failed(id(from), protocol(from), message),
            _ => match protocol(from) {
                PoolProtocol::Asap => self.machine.handle_asap(self.now, id(from), message),
                PoolProtocol::Enrp => self.machine.handle_enrp(self.now, id(from), message),
            },
        }
        self.execute_outputs();
        assert!(self.machine.elements() <= ELEMENTS_MAX);
        self.had_effect |= self.summary() != before;
    }

    fn summary(&self) -> (usize, usize, u64) {
        let counters = self.machine.counters();
        let served = counters.resolutions + counters.reregistrations + counters.deregistrations;
        (
            self.machine.elements(),
            self.machine.peers().count(),
            served,
        )
    }

    fn advance(&mut self, time: Duration) {
        let (end, mut steps) = (self.now + time, 0);
        while let Some(at) = self.machine.poll_timeout().filter(|at| *at <= end) {
            self.now = at.max(self.now);
            self.machine.handle_timeout(self.now);
            self.execute_outputs();
            steps += 1;
            assert!(steps < 1_000_000, "it never comes to rest");
        }
        self.now = end;
    }

    /// Executes outputs: no peer is reachable, and aborted associations end.
    fn execute_outputs(&mut self) {
        let mut steps = 0;
        while let Some(output) = self.machine.poll_output() {
            steps += 1;
            assert!(steps < 1_000_000, "it never comes to rest");
            match output {
                Output::Send {
                    protocol, message, ..
                }
                | Output::SendMany {
                    protocol, message, ..
                }
                | Output::Multicast { protocol, message } => {
                    assert_reports_encode(protocol, &message)
                }
                Output::Connect { dial, .. } => self.machine.handle_dial_failed(self.now, dial),
                Output::Abort(id) => self.machine.handle_association_down(self.now, id),
                Output::Measure(id) => {
                    let round_trip = Duration::from_millis(id.0 * 37);
                    self.machine.handle_round_trip(self.now, id, round_trip);
                }
                Output::Event(_) => {}
            }
        }
    }
}

fn assert_reports_encode(protocol: PoolProtocol, message: &Bytes) {
    let reports = match protocol {
        PoolProtocol::Asap => asap::Message::parse(message).map(|parsed| parsed.reports),
        PoolProtocol::Enrp => enrp::Message::parse(message).map(|parsed| parsed.reports),
    };
    assert!(reports.expect("what it says can be read").is_empty());
}

fn encode_message(message: &asap::Message) -> BytesMut {
    let mut buffer = BytesMut::new();
    message.encode(&mut buffer).expect("small");
    buffer
}

/// Returns the life cycle of an element and a user, with a peer that synchronizes other elements, as a start for the
/// corpus.
pub fn element_life_cycle() -> Vec<u8> {
    let handle = PoolHandle::from("pool");
    let element = |id| PoolElement {
        id: ElementId(id),
        home: RegistrarId(0),
        registration_life: 60_000,
        user_transport: Transport::Tcp {
            port: 80,
            usage: TransportUse::DataOnly,
            address: address(1).ip(),
        },
        policy: holdfast_wire::rserpool::Policy::RoundRobin,
        asap_transport: None,
    };
    let handle_update = enrp::Message {
        sender: RegistrarId(7),
        receiver: RegistrarId(0),
        body: enrp::EnrpBody::HandleUpdate {
            takeover_suggested: false,
            action: enrp::UpdateAction::Add,
            handle: handle.clone(),
            element: element(2),
        },
    };
    let mut update = BytesMut::new();
    handle_update.encode(&mut update).expect("small");
    let (one, id) = (element(1), ElementId(1));
    let registration = asap::Message::Registration {
        handle: handle.clone(),
        element: one,
    };
    let resolution = asap::Message::HandleResolution {
        updates: true,
        handle: handle.clone(),
        items_max: Some(2),
    };
    let report = asap::Message::EndpointUnreachable {
        handle: handle.clone(),
        id,
    };
    let answer = asap::Message::EndpointKeepAliveAck {
        handle: handle.clone(),
        id,
    };
    let leave = asap::Message::Deregistration { handle, id };
    [
        record(1, 7, &encode_message(&registration)),
        record(5, 7, &update),
        record(2, 7, &encode_message(&resolution)),
        record(0, 84, &[]),
        record(2, 7, &encode_message(&report)),
        record(1, 7, &encode_message(&answer)),
        record(5, 0, &[]),
        record(1, 7, &encode_message(&leave)),
    ]
    .concat()
}
