//! Associations: ordered, and reliable as long as they last. The messages of a cut association wait; after too long a
//! cut it breaks, on both sides and at different times.

use bytes::Bytes;
use holdfast_proto::registrar::PoolProtocol;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

/// Number of an end: registrars from 0 on, then elements.
pub type NodeIndex = usize;

pub struct Link {
    pub ends: [NodeIndex; 2],
    pub protocol: PoolProtocol,
    /// For each end: the messages in flight, with their earliest arrival times.
    pub queues: [VecDeque<(Duration, Bytes)>; 2],
    /// For each end, true until it notices the association's loss.
    pub open: [bool; 2],
}

#[derive(Default)]
pub struct Network {
    pub links: BTreeMap<u64, Link>,
    pub cut_pairs: BTreeSet<(NodeIndex, NodeIndex)>,
    last_id: u64,
}

impl Network {
    pub fn open(&mut self, ends: [NodeIndex; 2], protocol: PoolProtocol) -> u64 {
        self.last_id += 1;
        let link = Link {
            ends,
            protocol,
            queues: Default::default(),
            open: [true; 2],
        };
        self.links.insert(self.last_id, link);
        self.last_id
    }

    pub fn is_cut(&self, a: NodeIndex, b: NodeIndex) -> bool {
        self.cut_pairs.contains(&(a.min(b), a.max(b)))
    }

    pub fn cut(&mut self, a: NodeIndex, b: NodeIndex) {
        self.cut_pairs.insert((a.min(b), a.max(b)));
    }

    pub fn restore(&mut self, a: NodeIndex, b: NodeIndex) {
        self.cut_pairs.remove(&(a.min(b), a.max(b)));
    }

    /// Returns the links of an end.
    pub fn links_of(&self, end: NodeIndex) -> Vec<u64> {
        let links = self.links.iter();
        let matching = links.filter(|(_, link)| link.ends.contains(&end));
        matching.map(|(id, _)| *id).collect()
    }

    pub fn link_between(&self, a: NodeIndex, b: NodeIndex, protocol: PoolProtocol) -> Option<u64> {
        let links = self.links.iter();
        let mut between = links.filter(|(_, link)| {
            link.protocol == protocol
                && link.open == [true; 2]
                && (link.ends == [a, b] || link.ends == [b, a])
        });
        between.next().map(|(id, _)| *id)
    }
}

pub fn address(end: NodeIndex, registrars: usize, protocol: PoolProtocol) -> SocketAddr {
    let port = match protocol {
        _ if end >= registrars => 5_000,
        PoolProtocol::Asap => 3_863,
        PoolProtocol::Enrp => 9_901,
    };
    SocketAddr::from(([10, u8::from(end >= registrars), 0, end as u8 + 1], port))
}

pub fn node_at(address: SocketAddr) -> NodeIndex {
    let std::net::IpAddr::V4(address) = address.ip() else {
        panic!("an address of no node");
    };
    usize::from(address.octets()[3]) - 1
}
