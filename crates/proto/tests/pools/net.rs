//! Links: ordered and reliable while both ends live, like SCTP's. Each has its delay. The handshake crosses the link
//! four times, and early data travels with the third.

use bytes::{Bytes, BytesMut};
use holdfast_proto::pool_element::LinkId;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{SctpTransport, Transport, TransportUse};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Node {
    Registrar(usize),
    Element(usize),
    User(usize),
}

impl Node {
    pub fn transport(self) -> Transport {
        let (kind, index) = match self {
            Node::Registrar(index) => (1, index),
            Node::Element(index) => (2, index),
            Node::User(index) => (3, index),
        };
        Transport::Sctp(SctpTransport {
            port: index as u16,
            usage: TransportUse::DataAndControl,
            addresses: [IpAddr::V4(Ipv4Addr::new(10, 0, kind, 1))]
                .into_iter()
                .collect(),
        })
    }

    pub fn at_transport(transport: &Transport) -> Node {
        let Transport::Sctp(SctpTransport {
            port, addresses, ..
        }) = transport
        else {
            panic!("no node is at {transport:?}");
        };
        let IpAddr::V4(address) = addresses[0] else {
            panic!("no node is at {transport:?}");
        };
        let index = usize::from(*port);
        match address.octets()[2] {
            1 => Node::Registrar(index),
            2 => Node::Element(index),
            _ => Node::User(index),
        }
    }
}

/// A packet on a link.
#[derive(Debug, Clone)]
pub enum Packet {
    /// An ASAP message as bytes.
    Asap(Bytes),
    /// User data: the next step of the session.
    Request { session: (usize, u64) },
    /// The element's answer to a step.
    Response { session: (usize, u64) },
}

impl Packet {
    pub fn asap(message: &Message) -> Packet {
        let mut buffer = BytesMut::new();
        message
            .encode(&mut buffer)
            .expect("machines send encodable messages");
        Packet::Asap(buffer.freeze())
    }
}

/// One end of a link: a node in one of its lives, and the link's identifier there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkEnd {
    pub node: Node,
    pub boot: u64,
    pub link: LinkId,
}

#[derive(Debug)]
pub struct Connection {
    /// The end that made the link, and the end that accepted it.
    pub ends: [LinkEnd; 2],
    pub delay: Duration,
    /// Arrival times of the last packets, in each direction.
    pub last_arrivals: [Duration; 2],
    pub open: bool,
}
