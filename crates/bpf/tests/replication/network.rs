//! A network for replication: a client and legs, each on a link of its own to the contact host, which is also the router.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Command;

use holdfast_bpf::replication::shared_with_c::{Endpoint, LegPath, LinkPath, ReplicatedService};

use super::Host;
use super::support::lab::{link_text, unique_name};

/// Port of the service and of its servers.
pub const PORT: u16 = 7001;

/// Hosts named by their numbers: 0 is the client, 1 to 4 are legs.
pub struct Network {
    pub contact: Host,
    hosts: Vec<Host>,
}

impl Network {
    /// Makes a network with this number of legs.
    pub fn new(legs: u8) -> Self {
        let name = unique_name();
        let contact = Host::new(&format!("{name}-c"), false);
        contact.sysctl("net/ipv4/ip_forward", "1");
        contact.sysctl("net/ipv6/conf/all/forwarding", "1");
        let hosts = (0..=legs).map(|number| {
            let host = Host::new(&format!("{name}-{number}"), false);
            join(&contact, &host, number);
            host
        });
        let hosts = hosts.collect();
        Self { contact, hosts }
    }

    pub fn client(&self) -> &Host {
        &self.hosts[0]
    }

    /// Returns the host of a leg by the leg's index.
    pub fn leg(&self, index: u8) -> &Host {
        &self.hosts[usize::from(index) + 1]
    }

    /// Returns the service with this number of legs.
    pub fn service(&self, legs: u8, v6: bool) -> ReplicatedService {
        let mut service = ReplicatedService {
            endpoint: Endpoint::new(service_address(v6)),
            lag_bytes_max: 1 << 20,
            ..ReplicatedService::default()
        };
        for (number, leg) in (1..=legs).zip(&mut service.legs) {
            *leg = LegPath {
                endpoint: Endpoint::new(SocketAddr::new(host_address(number, v6), PORT)),
                path: LinkPath {
                    ifindex: self.contact.ifindex(&device(number)),
                    to_link: link(number, 2),
                    own_link: link(number, 1),
                },
            };
        }
        service
    }

    /// Loses one of `of` packets on their way to a host. GSO packets are lost whole.
    pub fn lose_packets(&self, number: u8, of: u32) {
        let rules = format!(
            "add table netdev t; \
             add chain netdev t c {{ type filter hook ingress device eth0 priority 0; }}; \
             add rule netdev t c numgen inc mod {of} 0 drop"
        );
        let host = &self.hosts[usize::from(number)];
        let outcome = host.run(|| Command::new("nft").arg(&rules).output());
        let outcome = outcome.expect("nft");
        assert!(outcome.status.success(), "nft: {outcome:?}");
    }

    /// Cuts or restores the link of a leg.
    pub fn set_link(&self, leg: u8, state: &str) {
        self.contact
            .ip(&format!("link set {} {state}", device(leg + 1)));
    }
}

/// Returns the name of the contact host's device for a host.
pub fn device(number: u8) -> String {
    format!("to{number}")
}

/// Returns the service address with its port: an address that no host has.
pub fn service_address(v6: bool) -> SocketAddr {
    let address: IpAddr = match v6 {
        true => Ipv6Addr::new(0xfd77, 100, 0, 0, 0, 0, 0, 1).into(),
        false => Ipv4Addr::new(10, 77, 100, 1).into(),
    };
    SocketAddr::new(address, PORT)
}

/// Returns the address of a host.
pub fn host_address(number: u8, v6: bool) -> IpAddr {
    end_address(number, v6, 2)
}

fn end_address(number: u8, v6: bool, end: u8) -> IpAddr {
    match v6 {
        true => Ipv6Addr::new(0xfd77, u16::from(number), 0, 0, 0, 0, 0, u16::from(end)).into(),
        false => Ipv4Addr::new(10, 77, number, end).into(),
    }
}

fn link(number: u8, end: u8) -> [u8; 6] {
    [2, 0x77, 0, 0, number, end]
}

/// Joins a host to the contact host. Neighbours are static: a lost packet of their discovery would be another test's subject.
fn join(contact: &Host, host: &Host, number: u8) {
    let own = device(number);
    contact.ip(&format!(
        "link add {own} address {} type veth peer name eth0 address {} netns {}",
        link_text(link(number, 1)),
        link_text(link(number, 2)),
        host.namespace()
    ));
    for (at, device, end) in [(contact, own.as_str(), 1), (host, "eth0", 2)] {
        at.ip(&format!(
            "addr add {}/24 dev {device}",
            end_address(number, false, end)
        ));
        at.ip(&format!(
            "addr add {}/64 dev {device} nodad",
            end_address(number, true, end)
        ));
        at.ip(&format!("link set {device} up"));
    }
    for v6 in [false, true] {
        let (near, far) = (end_address(number, v6, 1), end_address(number, v6, 2));
        contact.ip(&format!(
            "neigh replace {far} lladdr {} dev {own}",
            link_text(link(number, 2))
        ));
        host.ip(&format!(
            "neigh replace {near} lladdr {} dev eth0",
            link_text(link(number, 1))
        ));
        host.ip(&format!("route add default via {near}"));
    }
    host.wait_until_up("eth0");
    contact.wait_until_up(&own);
}
