//! The names of a zone with their addresses: the operator's list, joined with the services of the group and their health.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::dns_names::Label;
use crate::selection::SelectionRule;

/// Transport protocol of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TransportProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl TransportProtocol {
    /// Returns the label of SRV records (RFC 2782).
    pub(crate) fn srv_label(self) -> &'static str {
        match self {
            TransportProtocol::Tcp => "_tcp",
            TransportProtocol::Udp => "_udp",
        }
    }
}

/// The owner of records in a zone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NameOwner {
    /// The zone itself.
    Apex,
    /// A name below the zone.
    Below(Label),
}

/// `@` for the zone itself, as in zone files, or the label.
impl fmt::Display for NameOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NameOwner::Apex => f.write_str("@"),
            NameOwner::Below(label) => label.fmt(f),
        }
    }
}

/// A name as the operator configures it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredName {
    /// The owner of the records.
    pub owner: NameOwner,
    /// Name of the service in SRV records, without the underscore.
    pub service: Label,
    /// Protocol of the service.
    pub protocol: TransportProtocol,
    /// Port of the service.
    pub port: u16,
    /// Rule by which the addresses take turns.
    pub rule: SelectionRule,
    /// Maximum number of addresses in an answer.
    pub answers_max: usize,
    /// Addresses of the name, with their shares of the answers.
    pub addresses: Vec<ConfiguredAddress>,
}

/// An address of a configured name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfiguredAddress {
    /// Address to which the name resolves.
    pub address: IpAddr,
    /// Share of the answers; 0 for none.
    pub weight: u32,
}

/// A service address of this group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupService {
    /// Name of the service.
    pub name: Label,
    /// Protocol of the service.
    pub protocol: TransportProtocol,
    /// Service address and port.
    pub address: SocketAddr,
    /// True if new clients are served there.
    pub serves: bool,
}

/// A name as the zone has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedName {
    /// The owner of the records.
    pub owner: NameOwner,
    /// Name of the service in SRV records, without the underscore.
    pub service: Label,
    /// Rule by which the addresses take turns.
    pub rule: SelectionRule,
    /// Maximum number of addresses in an answer.
    pub answers_max: usize,
    /// The places where the service is offered.
    pub endpoints: Vec<Endpoint>,
}

/// A place where a name's service is offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// Protocol of the service.
    pub protocol: TransportProtocol,
    /// Address and port.
    pub address: SocketAddr,
    /// Share of the answers; 0 for none.
    pub weight: u32,
    /// True if new clients are served there.
    pub serves: bool,
}

impl ConfiguredName {
    /// Returns the address with the name's port.
    pub fn socket_address(&self, address: &ConfiguredAddress) -> SocketAddr {
        SocketAddr::new(address.address, self.port)
    }
}

impl PublishedName {
    /// Returns each address once, with its greatest weight, and true if the address serves.
    pub(crate) fn addresses(&self) -> Vec<(IpAddr, u32, bool)> {
        let mut addresses: Vec<(IpAddr, u32, bool)> = Vec::with_capacity(self.endpoints.len());
        for endpoint in &self.endpoints {
            let ip = endpoint.address.ip();
            match addresses.iter_mut().find(|(known, ..)| *known == ip) {
                Some((_, weight, serves)) => {
                    *weight = endpoint.weight.max(*weight);
                    *serves |= endpoint.serves;
                }
                None => addresses.push((ip, endpoint.weight, endpoint.serves)),
            }
        }
        addresses
    }
}

/// Returns the names of the zone. Each service of the group is a name, unless a configured name has the same owner. An
/// address that is not a service address of this group serves if `is_alive` says so.
pub fn published_names(
    configured: &[ConfiguredName],
    services: &[GroupService],
    is_alive: impl Fn(TransportProtocol, SocketAddr) -> bool,
) -> Vec<PublishedName> {
    let mut names: Vec<PublishedName> = Vec::with_capacity(configured.len() + services.len());
    for name in configured {
        let endpoint = |address: &ConfiguredAddress| {
            let (protocol, at) = (name.protocol, name.socket_address(address));
            let is_here =
                |service: &&GroupService| service.protocol == protocol && service.address == at;
            let serves = match services.iter().find(is_here) {
                Some(service) => service.serves,
                None => is_alive(protocol, at),
            };
            Endpoint {
                protocol,
                address: at,
                weight: address.weight,
                serves,
            }
        };
        names.push(PublishedName {
            owner: name.owner.clone(),
            service: name.service.clone(),
            rule: name.rule,
            answers_max: name.answers_max,
            endpoints: name.addresses.iter().map(endpoint).collect(),
        });
    }
    let configured_count = names.len();
    for service in services {
        let owner = NameOwner::Below(service.name.clone());
        let endpoint = Endpoint {
            protocol: service.protocol,
            address: service.address,
            weight: 1,
            serves: service.serves,
        };
        match names.iter().position(|name| name.owner == owner) {
            Some(position) if position < configured_count => {}
            Some(position) => names[position].endpoints.push(endpoint),
            None => names.push(PublishedName {
                owner,
                service: service.name.clone(),
                rule: SelectionRule::Rotate,
                answers_max: usize::MAX,
                endpoints: vec![endpoint],
            }),
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str, address: &str, serves: bool) -> GroupService {
        GroupService {
            name: name.parse().unwrap(),
            protocol: TransportProtocol::Tcp,
            address: address.parse().unwrap(),
            serves,
        }
    }

    fn configured(label: &str, addresses: &[(&str, u32)]) -> ConfiguredName {
        let address = |(address, weight): &(&str, u32)| ConfiguredAddress {
            address: address.parse().unwrap(),
            weight: *weight,
        };
        ConfiguredName {
            owner: NameOwner::Below(label.parse().unwrap()),
            service: "http".parse().unwrap(),
            protocol: TransportProtocol::Tcp,
            port: 80,
            rule: SelectionRule::Weighted,
            answers_max: 1,
            addresses: addresses.iter().map(address).collect(),
        }
    }

    #[test]
    fn addresses_of_one_service_are_one_name() {
        let services = [
            service("web", "10.9.0.1:80", true),
            service("web", "10.9.0.1:443", false),
            service("web", "[fd00::1]:80", false),
        ];
        let names = published_names(&[], &services, |_, _| unreachable!());
        assert_eq!(names.len(), 1);
        let (v4, v6) = ("10.9.0.1".parse().unwrap(), "fd00::1".parse().unwrap());
        assert_eq!(names[0].addresses(), [(v4, 1, true), (v6, 1, false)]);
        assert_eq!(names[0].rule, SelectionRule::Rotate);
    }

    #[test]
    fn configured_name_replaces_that_of_the_service() {
        let services = [
            service("web", "10.9.0.1:80", false),
            service("db", "10.9.0.2:80", true),
        ];
        let names = [configured("web", &[("10.9.0.1", 3), ("10.8.0.1", 1)])];
        let names = published_names(&names, &services, |_, _| true);
        let labels: Vec<String> = names
            .iter()
            .map(|name| format!("{:?}", name.owner))
            .collect();
        assert_eq!(labels, ["Below(Label(\"web\"))", "Below(Label(\"db\"))"]);
        let serving: Vec<bool> = names[0]
            .endpoints
            .iter()
            .map(|endpoint| endpoint.serves)
            .collect();
        // The group itself knows about its own address; the other one is judged by `is_alive`.
        assert_eq!(serving, [false, true]);
    }
}
