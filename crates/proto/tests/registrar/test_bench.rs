//! One registrar, with the other sides of its associations played by the test.

use bytes::{Bytes, BytesMut};
use holdfast_proto::registrar::{
    AssociationId, DialId, Event, Output, PoolProtocol, Registrar, RegistrarMachineConfig,
};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{EnrpBody, Message as Enrp};
use holdfast_wire::rserpool::{
    ElementId, Policy, PoolElement, PoolHandle, RegistrarId, SctpTransport, Transport, TransportUse,
};
use std::net::SocketAddr;
use std::time::Duration;

pub const OWN: RegistrarId = RegistrarId(0x50);
pub const SECOND: Duration = Duration::from_secs(1);

/// An output in a form that is easy to compare.
#[derive(Debug, Clone, PartialEq)]
pub enum TestOutput {
    Asap(u64, Asap),
    Enrp(Vec<u64>, Enrp),
    Multicast(PoolProtocol),
    Connect(DialId, PoolProtocol, SocketAddr),
    Abort(u64),
    Event(Event),
}

pub struct TestBench {
    pub machine: Registrar,
    pub now: Duration,
}

pub fn transport(address: [u8; 4], port: u16) -> SctpTransport {
    SctpTransport {
        port,
        usage: TransportUse::DataOnly,
        addresses: [address.into()].into_iter().collect(),
    }
}

pub fn config() -> RegistrarMachineConfig {
    let mut config = RegistrarMachineConfig::new(OWN, 7, transport([10, 0, 0, 1], 9901));
    config.settings.access.registrar =
        holdfast_proto::registrar::PermittedHosts::Only(vec!["10.0.0.0/24".parse().unwrap()]);
    config
}

/// Returns an element at 10.1.0.`host`.
pub fn element(id: u32, host: u8, policy: Policy) -> PoolElement {
    PoolElement {
        id: ElementId(id),
        home: RegistrarId(0),
        registration_life: 100_000,
        user_transport: Transport::Tcp {
            port: 80,
            usage: TransportUse::DataOnly,
            address: [10, 1, 0, host].into(),
        },
        policy,
        asap_transport: None,
    }
}

pub fn handle() -> PoolHandle {
    PoolHandle::from("pool")
}

pub fn bytes(write: impl FnOnce(&mut BytesMut)) -> Bytes {
    let mut buffer = BytesMut::new();
    write(&mut buffer);
    buffer.freeze()
}

impl TestBench {
    /// Returns a started registrar at time 0, without outputs.
    pub fn new(config: RegistrarMachineConfig) -> TestBench {
        let mut bench = TestBench {
            machine: Registrar::new(Duration::ZERO, config),
            now: Duration::ZERO,
        };
        bench.wait(Duration::ZERO);
        bench
    }

    pub fn outputs(&mut self) -> Vec<TestOutput> {
        let mut all = Vec::new();
        while let Some(output) = self.machine.poll_output() {
            let enrp = |message| Enrp::parse(&message).unwrap().message;
            all.push(match output {
                Output::Send {
                    to,
                    protocol: PoolProtocol::Asap,
                    message,
                } => TestOutput::Asap(to.0, Asap::parse(&message).unwrap().message),
                Output::Send { to, message, .. } => TestOutput::Enrp(vec![to.0], enrp(message)),
                Output::SendMany { to, message, .. } => {
                    TestOutput::Enrp(to.iter().map(|to| to.0).collect(), enrp(message))
                }
                Output::Connect {
                    dial,
                    protocol,
                    addresses,
                } => TestOutput::Connect(dial, protocol, addresses[0]),
                Output::Multicast { protocol, .. } => TestOutput::Multicast(protocol),
                Output::Abort(association) => TestOutput::Abort(association.0),
                Output::Event(event) => TestOutput::Event(event),
                Output::Measure(_) => continue,
            });
        }
        all
    }

    /// Opens an association of an element or user at 10.1.0.`host`, numbered by the host.
    pub fn open_association(&mut self, host: u8) -> u64 {
        let id = AssociationId(u64::from(host));
        let at = SocketAddr::from(([10, 1, 0, host], 5000));
        self.machine
            .handle_association_up(self.now, id, PoolProtocol::Asap, &[at], None);
        id.0
    }

    /// Opens an association of the registrar 10.0.0.`host`, numbered 1000 plus the host, and sends its presence.
    pub fn add_peer(&mut self, host: u8) -> RegistrarId {
        let id = AssociationId(1000 + u64::from(host));
        let at = SocketAddr::from(([10, 0, 0, host], 9901));
        self.machine
            .handle_association_up(self.now, id, PoolProtocol::Enrp, &[at], None);
        let peer = RegistrarId(u32::from(host));
        self.send_enrp(peer, presence(false, 0xffff));
        peer
    }

    pub fn send_asap(&mut self, from: u64, message: &Asap) -> Vec<TestOutput> {
        let message = bytes(|buffer| message.encode(buffer).unwrap());
        self.machine
            .handle_asap(self.now, AssociationId(from), &message);
        self.outputs()
    }

    pub fn send_enrp(&mut self, from: RegistrarId, body: EnrpBody) -> Vec<TestOutput> {
        let message = Enrp {
            sender: from,
            receiver: RegistrarId(0),
            body,
        };
        let message = bytes(|buffer| message.encode(buffer).unwrap());
        let association = AssociationId(1000 + u64::from(from.0));
        self.machine.handle_enrp(self.now, association, &message);
        self.outputs()
    }

    pub fn register(&mut self, from: u64, element: PoolElement) -> Vec<TestOutput> {
        let handle = handle();
        self.send_asap(from, &Asap::Registration { handle, element })
    }

    /// Lets time pass; handles timers when they are due.
    pub fn wait(&mut self, time: Duration) -> Vec<TestOutput> {
        let end = self.now + time;
        let mut all = Vec::new();
        while let Some(at) = self.machine.poll_timeout().filter(|at| *at <= end) {
            self.now = at.max(self.now);
            self.machine.handle_timeout(self.now);
            all.extend(self.outputs());
        }
        self.now = end;
        all
    }

    pub fn has_element(&self, id: u32) -> bool {
        self.machine.element(&handle(), ElementId(id)).is_some()
    }
}

pub fn presence(reply_required: bool, checksum: u16) -> EnrpBody {
    EnrpBody::Presence {
        reply_required,
        checksum: Some(checksum),
        server: None,
    }
}

/// Returns the H flags of the keep-alives.
pub fn keep_alives(outputs: &[TestOutput]) -> Vec<bool> {
    let homes = outputs.iter().filter_map(|output| match output {
        TestOutput::Asap(_, Asap::EndpointKeepAlive { home, .. }) => Some(*home),
        _ => None,
    });
    homes.collect()
}

/// Returns the number of ENRP messages with that name.
pub fn count_enrp_messages(outputs: &[TestOutput], name: &str) -> usize {
    let enrp = |output: &&TestOutput| matches!(output, TestOutput::Enrp(_, message) if message.body.name() == name);
    outputs.iter().filter(enrp).count()
}
