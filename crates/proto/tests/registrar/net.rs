//! Associations: ordered, and reliable as long as they last. While an association is cut its messages wait; when that takes too
//! long it breaks, on both sides and not at the same time.

use bytes::Bytes;
use holdfast_proto::registrar::Protocol;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

/// Registrars are the ends from 0 on, elements follow.
pub type End = usize;

pub struct Link {
    pub ends: [End; 2],
    pub protocol: Protocol,
    /// To each end: what is under way, and from when on it may arrive.
    pub queues: [VecDeque<(Duration, Bytes)>; 2],
    /// Neither end has noticed its end.
    pub open: [bool; 2],
}

#[derive(Default)]
pub struct Net {
    pub links: BTreeMap<u64, Link>,
    pub cuts: BTreeSet<(End, End)>,
    last: u64,
}

impl Net {
    pub fn open(&mut self, ends: [End; 2], protocol: Protocol) -> u64 {
        self.last += 1;
        let link = Link {
            ends,
            protocol,
            queues: Default::default(),
            open: [true; 2],
        };
        self.links.insert(self.last, link);
        self.last
    }

    pub fn is_cut(&self, a: End, b: End) -> bool {
        self.cuts.contains(&(a.min(b), a.max(b)))
    }

    pub fn cut(&mut self, a: End, b: End) {
        self.cuts.insert((a.min(b), a.max(b)));
    }

    pub fn mend(&mut self, a: End, b: End) {
        self.cuts.remove(&(a.min(b), a.max(b)));
    }

    /// The links of an end.
    pub fn of(&self, end: End) -> Vec<u64> {
        let links = self.links.iter();
        let of = links.filter(|(_, link)| link.ends.contains(&end));
        of.map(|(id, _)| *id).collect()
    }

    pub fn between(&self, a: End, b: End, protocol: Protocol) -> Option<u64> {
        let links = self.links.iter();
        let mut between = links.filter(|(_, link)| {
            link.protocol == protocol
                && link.open == [true; 2]
                && (link.ends == [a, b] || link.ends == [b, a])
        });
        between.next().map(|(id, _)| *id)
    }
}

pub fn address(end: End, registrars: usize, protocol: Protocol) -> SocketAddr {
    let port = match protocol {
        _ if end >= registrars => 5_000,
        Protocol::Asap => 3_863,
        Protocol::Enrp => 9_901,
    };
    SocketAddr::from(([10, u8::from(end >= registrars), 0, end as u8 + 1], port))
}

pub fn end_at(address: SocketAddr) -> End {
    let std::net::IpAddr::V4(address) = address.ip() else {
        panic!("an address of nobody");
    };
    usize::from(address.octets()[3]) - 1
}
