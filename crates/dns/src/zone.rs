//! The zone: owners of records, and the records that answer a question.
//!
//! ```text
//! example.test.                        SOA, NS, addresses of the name `@`
//! web.example.test.                    A, AAAA
//! 10-9-0-1.web.example.test.           A: one address of `web`, the target of SRV records
//! _http._tcp.web.example.test.         SRV
//! _web._tcp.example.test.              SRV, if the service is called as the name
//! n1.ns.example.test.                  A, AAAA of a name server
//! ```

use std::collections::HashMap;
use std::net::IpAddr;

use hickory_proto::rr::rdata::{A, AAAA, HINFO, NS, SOA, SRV};
use hickory_proto::rr::{LowerName, Name, RData, Record, RecordType};

use crate::dns_names::{DnsZoneName, Label, below};
use crate::published_names::{NameOwner, PublishedName, TransportProtocol};
use crate::selection::{Random, SelectionRule, select};

/// Time after which a secondary server would ask for changes, in seconds. There are no zone transfers.
const SOA_REFRESH_S: i32 = 60;
/// Time after which a secondary server would ask again, in seconds.
const SOA_RETRY_S: i32 = 10;
/// Time after which a secondary server would give the zone up, in seconds.
const SOA_EXPIRE_S: i32 = 600;

/// Settings of the zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZoneSettings {
    /// Name of the zone, below which all its names are.
    pub origin: DnsZoneName,
    /// Time for which resolvers may keep an answer, also a negative one, in seconds.
    pub ttl_s: u32,
    /// The zone's name servers, not empty; the first one is the zone's primary.
    pub name_servers: Vec<NameServer>,
}

/// A name server of the zone, called `LABEL.ns.ZONE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameServer {
    /// Label of the server, usually the name of its node.
    pub label: Label,
    /// Addresses of the server.
    pub addresses: Vec<IpAddr>,
}

/// The records of the zone.
#[derive(Debug)]
pub struct Zone {
    settings: ZoneSettings,
    serial: u32,
    names: Vec<ZoneName>,
    owners: HashMap<LowerName, Owner>,
}

/// A published name, and the turns of its addresses.
#[derive(Debug)]
struct ZoneName {
    published: PublishedName,
    full_name: Name,
    /// Numbers of answers with IPv4 addresses, IPv6 addresses and SRV records. Each has turns of its own, because a
    /// client often asks for both families at once.
    turns: [u64; 3],
}

/// The records of one owner. An owner without records has descendants with records (RFC 8020).
#[derive(Debug, Default)]
struct Owner {
    addresses: Option<AddressSource>,
    /// Name whose service the SRV records offer.
    srv: Option<(usize, TransportProtocol)>,
    /// True for the zone itself.
    is_apex: bool,
}

/// Source of the addresses of an owner.
#[derive(Debug, Clone, Copy)]
enum AddressSource {
    /// All addresses of a name.
    Name(usize),
    /// One address of a name.
    OneAddress(usize, IpAddr),
    /// A name server's addresses.
    NameServer(usize),
}

/// Answer of the zone to a question.
#[derive(Debug, Clone, PartialEq)]
pub enum Lookup {
    /// The zone does not have the name's domain.
    OutsideZone,
    /// Neither the name nor a name below it exists.
    NoSuchName,
    /// The name has no records of the type.
    NoData,
    /// The name has records of the type, and none that serves.
    Unavailable,
    /// The zone has records that answer the question.
    Found {
        /// Records of the name.
        answers: Vec<Record>,
        /// Addresses of hosts in `answers`.
        additionals: Vec<Record>,
    },
}

impl Zone {
    /// Returns a zone of these names.
    pub fn new(settings: ZoneSettings, serial: u32, names: Vec<PublishedName>) -> Zone {
        let mut zone = Zone {
            settings,
            serial,
            names: Vec::new(),
            owners: HashMap::new(),
        };
        zone.set_names(serial, names);
        zone
    }

    /// Replaces all names. Names that stay keep their turns.
    pub fn set_names(&mut self, serial: u32, names: Vec<PublishedName>) {
        self.serial = serial;
        let former = std::mem::take(&mut self.names);
        let turns: HashMap<NameOwner, [u64; 3]> = (former.into_iter())
            .map(|name| (name.published.owner, name.turns))
            .collect();
        let origin = self.settings.origin.name().clone();
        let zone_name = |published: PublishedName| ZoneName {
            full_name: match &published.owner {
                NameOwner::Apex => origin.clone(),
                NameOwner::Below(label) => below(label.as_str(), &origin),
            },
            turns: turns.get(&published.owner).copied().unwrap_or_default(),
            published,
        };
        self.names = names.into_iter().map(zone_name).collect();
        self.owners.clear();
        self.index();
    }

    /// Fills the table of owners.
    fn index(&mut self) {
        let origin = self.settings.origin.name().clone();
        self.owner(&origin).is_apex = true;
        let name_servers = self.settings.name_servers.len();
        for server in 0..name_servers {
            let name = self.name_server_name(server);
            self.owner(&name).addresses = Some(AddressSource::NameServer(server));
        }
        for index in 0..self.names.len() {
            let name = &self.names[index];
            let (full_name, published) = (name.full_name.clone(), name.published.clone());
            self.owner(&full_name).addresses = Some(AddressSource::Name(index));
            for endpoint in &published.endpoints {
                let ip = endpoint.address.ip();
                let target = below(&address_label(ip), &full_name);
                self.owner(&target).addresses = Some(AddressSource::OneAddress(index, ip));
                let srv_label = format!("_{}", published.service);
                let srv_name = |parent: &Name| {
                    below(&srv_label, &below(endpoint.protocol.srv_label(), parent))
                };
                let srv = Some((index, endpoint.protocol));
                self.owner(&srv_name(&full_name)).srv = srv;
                if published.owner == NameOwner::Below(published.service.clone()) {
                    self.owner(&srv_name(&origin))
                        .srv
                        .get_or_insert((index, endpoint.protocol));
                }
            }
        }
    }

    /// Returns the owner of this name, and adds it and the owners between it and the zone.
    fn owner(&mut self, name: &Name) -> &mut Owner {
        let labels = self.settings.origin.name().num_labels();
        let mut ancestor = name.base_name();
        while ancestor.num_labels() > labels {
            self.owners.entry(LowerName::new(&ancestor)).or_default();
            ancestor = ancestor.base_name();
        }
        self.owners.entry(LowerName::new(name)).or_default()
    }

    fn name_server_name(&self, index: usize) -> Name {
        let parent = below("ns", self.settings.origin.name());
        below(self.settings.name_servers[index].label.as_str(), &parent)
    }

    /// Answers a question of class IN. Also returns the published name that the question is about.
    pub fn look_up(
        &mut self,
        name: &Name,
        record_type: RecordType,
        random: &mut Random,
    ) -> (Lookup, Option<&NameOwner>) {
        if !self.settings.origin.name().zone_of(name) {
            return (Lookup::OutsideZone, None);
        }
        let Some(owner) = self.owners.get(&LowerName::new(name)) else {
            return (Lookup::NoSuchName, None);
        };
        let (source, srv, is_apex) = (owner.addresses, owner.srv, owner.is_apex);
        let published = match (source, srv) {
            (Some(AddressSource::Name(index) | AddressSource::OneAddress(index, _)), _)
            | (_, Some((index, _))) => Some(index),
            _ => None,
        };
        let lookup = match (record_type, source, srv) {
            (RecordType::SOA, ..) if is_apex => found(vec![self.soa()]),
            (RecordType::NS, ..) if is_apex => self.name_servers(),
            (RecordType::A | RecordType::AAAA, Some(source), _) => {
                self.addresses(name, source, record_type, random)
            }
            (RecordType::SRV, _, Some((index, protocol))) => self.services(name, index, protocol),
            (RecordType::ANY, source, srv) if is_apex || source.is_some() || srv.is_some() => {
                // "A DNS responder can return a single RRset [...] a synthesized HINFO" (RFC 8482 section 4.2).
                let hinfo = HINFO::new("RFC8482".to_owned(), String::new());
                found(vec![self.record(name, RData::HINFO(hinfo))])
            }
            _ => Lookup::NoData,
        };
        (
            lookup,
            published.map(|index| &self.names[index].published.owner),
        )
    }

    /// Returns the SOA record, which negative answers have too.
    pub fn soa(&self) -> Record {
        let origin = self.settings.origin.name();
        let soa = SOA::new(
            self.name_server_name(0),
            below("hostmaster", origin),
            self.serial,
            SOA_REFRESH_S,
            SOA_RETRY_S,
            SOA_EXPIRE_S,
            self.settings.ttl_s,
        );
        self.record(origin, RData::SOA(soa))
    }

    fn record(&self, name: &Name, data: RData) -> Record {
        Record::from_rdata(name.clone(), self.settings.ttl_s, data)
    }

    fn name_servers(&self) -> Lookup {
        let origin = self.settings.origin.name();
        let (mut answers, mut additionals) = (Vec::new(), Vec::new());
        for (index, server) in self.settings.name_servers.iter().enumerate() {
            let host = self.name_server_name(index);
            let addresses = server.addresses.iter();
            additionals.extend(addresses.map(|address| self.record(&host, address_data(*address))));
            answers.push(self.record(origin, RData::NS(NS(host))));
        }
        Lookup::Found {
            answers,
            additionals,
        }
    }

    fn addresses(
        &mut self,
        name: &Name,
        source: AddressSource,
        record_type: RecordType,
        random: &mut Random,
    ) -> Lookup {
        let is_asked = |address: &IpAddr| address.is_ipv4() == (record_type == RecordType::A);
        let chosen = match source {
            AddressSource::NameServer(index) => {
                let addresses = self.settings.name_servers[index].addresses.iter();
                let addresses: Vec<IpAddr> = addresses.copied().filter(is_asked).collect();
                if addresses.is_empty() {
                    return Lookup::NoData;
                }
                addresses
            }
            AddressSource::Name(index) | AddressSource::OneAddress(index, _) => {
                let zone_name = &mut self.names[index];
                let mut addresses = zone_name.published.addresses();
                addresses.retain(|(address, ..)| match source {
                    AddressSource::OneAddress(_, only) => is_asked(address) && *address == only,
                    _ => is_asked(address),
                });
                if addresses.is_empty() {
                    return Lookup::NoData;
                }
                let serving = addresses.iter().filter(|(.., serves)| *serves);
                let candidates: Vec<(IpAddr, u32)> = serving
                    .map(|(address, weight, _)| (*address, *weight))
                    .collect();
                let turn = &mut zone_name.turns[usize::from(record_type == RecordType::AAAA)];
                let (rule, answers_max) =
                    (zone_name.published.rule, zone_name.published.answers_max);
                let chosen = select(rule, &candidates, answers_max, *turn, random);
                *turn = turn.wrapping_add(1);
                chosen
            }
        };
        match chosen.is_empty() {
            true => Lookup::Unavailable,
            false => {
                let records = chosen.iter();
                found(
                    records
                        .map(|address| self.record(name, address_data(*address)))
                        .collect(),
                )
            }
        }
    }

    /// Returns an SRV record for each place that serves, with its weight, so that the client chooses (RFC 2782).
    fn services(&mut self, name: &Name, index: usize, protocol: TransportProtocol) -> Lookup {
        let turn = self.names[index].turns[2];
        self.names[index].turns[2] = turn.wrapping_add(1);
        let zone_name = &self.names[index];
        let endpoints = zone_name.published.endpoints.iter();
        let offered: Vec<_> = endpoints
            .filter(|endpoint| endpoint.protocol == protocol)
            .collect();
        if offered.is_empty() {
            return Lookup::NoData;
        }
        let serving = offered.iter().filter(|endpoint| endpoint.serves);
        let candidates: Vec<_> = serving
            .map(|endpoint| (*endpoint, endpoint.weight))
            .collect();
        let unused = &mut Random::new(0);
        let chosen = select(SelectionRule::Rotate, &candidates, usize::MAX, turn, unused);
        if chosen.is_empty() {
            return Lookup::Unavailable;
        }
        let full_name = &zone_name.full_name;
        let (mut answers, mut additionals) = (Vec::new(), Vec::new());
        for endpoint in chosen {
            let ip = endpoint.address.ip();
            let target = below(&address_label(ip), full_name);
            let additional = self.record(&target, address_data(ip));
            if !additionals.contains(&additional) {
                additionals.push(additional);
            }
            let weight = u16::try_from(endpoint.weight).unwrap_or(u16::MAX);
            let srv = SRV::new(0, weight, endpoint.address.port(), target);
            answers.push(self.record(name, RData::SRV(srv)));
        }
        Lookup::Found {
            answers,
            additionals,
        }
    }
}

fn found(answers: Vec<Record>) -> Lookup {
    Lookup::Found {
        answers,
        additionals: Vec::new(),
    }
}

fn address_data(address: IpAddr) -> RData {
    match address {
        IpAddr::V4(address) => RData::A(A(address)),
        IpAddr::V6(address) => RData::AAAA(AAAA(address)),
    }
}

/// Returns the label of an address: `10-9-0-1`, or all groups of an IPv6 address, `fd00-0-0-0-0-0-0-1`.
fn address_label(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => address.octets().map(|octet| octet.to_string()).join("-"),
        IpAddr::V6(address) => address
            .segments()
            .map(|segment| format!("{segment:x}"))
            .join("-"),
    }
}
