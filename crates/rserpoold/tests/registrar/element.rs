//! Pool elements and a pool user on one SCTP endpoint: they send the messages that a test requests, and answer
//! keep-alives.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::BytesMut;
use holdfast_api::control::RegistrarStatus;
use holdfast_sctp::{
    AssocId, FailureDetection, MessageToSend as Packet, TransportConfig, TransportEndpoint,
    TransportEvent, open,
};
use holdfast_wire::rserpool::asap::{Message, PPID};
use holdfast_wire::rserpool::{
    ElementId, Policy, PoolElement, PoolHandle, RegistrarId, Transport, TransportUse,
};

pub struct TestHost {
    address: IpAddr,
    endpoint: Box<dyn TransportEndpoint>,
    events: Vec<TransportEvent>,
    associations: Vec<AssocId>,
    /// Received messages that no test has taken yet.
    received: Vec<(AssocId, Message)>,
    /// For each element of this host, the registrar that claimed to be its home in the last keep-alive.
    pub homes: Vec<(ElementId, RegistrarId)>,
    elements: Vec<(PoolHandle, ElementId)>,
}

impl TestHost {
    pub fn open(address: &str) -> Self {
        let address = address.parse().expect("an address");
        let config = TransportConfig {
            encapsulation: Some(0),
            raw: false,
            failure: FailureDetection {
                // A machine may be slow, and a registrar flooded, so associations must survive many losses.
                path_retransmissions: 1000,
                association_retransmissions: 1000,
                ..FailureDetection::default()
            },
            ..TransportConfig::new(vec![SocketAddr::new(address, 0)])
        };
        Self {
            address,
            endpoint: open(&config).expect("an endpoint"),
            events: Vec::new(),
            associations: Vec::new(),
            received: Vec::new(),
            homes: Vec::new(),
            elements: Vec::new(),
        }
    }

    pub fn udp_port(&self) -> u16 {
        self.endpoint.encapsulation_port().expect("a port")
    }

    pub fn connect(&mut self, to: &RegistrarStatus) -> AssocId {
        let assoc = self.endpoint.connect(&to.asap, to.encapsulation_port);
        assoc.expect("a connection in progress")
    }

    pub fn is_up(&self, assoc: AssocId) -> bool {
        self.associations.contains(&assoc)
    }

    pub fn register(&mut self, assoc: AssocId, handle: &PoolHandle, id: ElementId) {
        let element = PoolElement {
            id,
            home: RegistrarId(0),
            registration_life: 3_600_000,
            user_transport: Transport::Tcp {
                port: 80,
                usage: TransportUse::DataOnly,
                address: self.address,
            },
            policy: Policy::LeastUsed { load: u32::MAX / 2 },
            asap_transport: None,
        };
        let handle = handle.clone();
        if !self.elements.contains(&(handle.clone(), id)) {
            self.elements.push((handle.clone(), id));
        }
        self.send(assoc, &Message::Registration { handle, element });
    }

    pub fn resolve(&mut self, assoc: AssocId, handle: &PoolHandle) {
        let message = Message::HandleResolution {
            updates: false,
            handle: handle.clone(),
            items_max: None,
        };
        self.send(assoc, &message);
    }

    /// Returns the first message from this association for which `is_wanted` is true.
    pub fn take_message(
        &mut self,
        from: AssocId,
        is_wanted: fn(&Message) -> bool,
    ) -> Option<Message> {
        let is_match = |(at, message): &(AssocId, Message)| *at == from && is_wanted(message);
        let found = self.received.iter().position(is_match)?;
        Some(self.received.remove(found).1)
    }

    /// Receives for up to 20 ms.
    pub fn receive(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        self.endpoint
            .wait_for_events(Duration::from_millis(20), &mut events)
            .expect("a working transport");
        for event in events.drain(..) {
            match event {
                TransportEvent::Up { assoc, .. } => self.associations.push(assoc),
                TransportEvent::Down { assoc, .. } => self
                    .associations
                    .retain(|association| *association != assoc),
                TransportEvent::Message { assoc, message } => self.handle_packet(assoc, &message),
                _ => {}
            }
        }
        self.events = events;
        self.endpoint.flush().expect("a working transport");
    }

    fn handle_packet(&mut self, from: AssocId, packet: &Packet) {
        assert_eq!(packet.ppid, PPID);
        let message = Message::parse(&packet.data)
            .expect("an ASAP message")
            .message;
        let Message::EndpointKeepAlive {
            home,
            registrar,
            handle,
            id,
        } = message
        else {
            self.received.push((from, message));
            return;
        };
        let is_meant = |(own, number): &(PoolHandle, ElementId)| {
            *own == handle && id.is_none_or(|id| id == *number)
        };
        let (_, id) = *self
            .elements
            .iter()
            .find(|candidate| is_meant(candidate))
            .expect("an element of ours");
        if home {
            self.homes.retain(|(element, _)| *element != id);
            self.homes.push((id, registrar));
        }
        self.send(from, &Message::EndpointKeepAliveAck { handle, id });
    }

    fn send(&mut self, to: AssocId, message: &Message) {
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes).expect("an encoding");
        let packet = Packet::new(PPID, bytes.freeze());
        // A failed answer does not matter: the registrar repeats its keep-alive.
        let _ = self.endpoint.send(to, &packet);
    }
}
