//! A pool on a lab: every node runs the programs and the servers.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use holdfast_bpf::shared_with_c::{
    Config, HAS_PREVIOUS, NODE_ENCAP, NODE_KNOWN, NODE_V6, Node as NodeEntry, PLACEMENT_SLOTS,
    REACH_BROADCAST, REACH_STEER, Service, ServiceKey, to_mapped,
};
use holdfast_bpf::{Dataplane, LEASE_WITHOUT_END};

use super::lab::{HostPosition, Lab, ROUTER, link_text};
use super::node::Node;
use super::tun::Tun;

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const PORT: u16 = 7000;
/// A service port without a listener.
pub const SILENT_PORT: u16 = 7001;
pub const SHARED_LINK: [u8; 6] = [2, 0x77, 0xff, 0xff, 0, 1];

/// Returns the service address.
pub fn service(v6: bool) -> SocketAddr {
    let ip: IpAddr = if v6 {
        Ipv6Addr::new(0xfd77, 0xff, 0, 0, 0, 0, 0, 1).into()
    } else {
        Ipv4Addr::new(10, 77, 255, 1).into()
    };
    SocketAddr::new(ip, PORT)
}

/// Returns every service: its row of the placement table, protocol and address.
fn services() -> impl Iterator<Item = (u16, u8, SocketAddr)> {
    let ports = |v6, port| SocketAddr::new(service(v6).ip(), port);
    let all = [false, true].map(|v6| {
        [
            (TCP, ports(v6, PORT)),
            (UDP, ports(v6, PORT)),
            (TCP, ports(v6, SILENT_PORT)),
        ]
    });
    (0..)
        .zip(all.into_iter().flatten())
        .map(|(row, (protocol, address))| (row, protocol, address))
}

/// Settings that differ between pools.
#[derive(Clone, Copy)]
pub struct Options {
    pub reach: u8,
    /// True if the outer header of encapsulated packets is IPv6.
    pub outer_v6: bool,
    /// True if the MSS of SYN-ACKs is clamped.
    pub clamp: bool,
    /// True if nodes other than the contact node run XDP (they need it to decapsulate).
    pub xdp_everywhere: bool,
    pub flows_max: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            reach: REACH_STEER,
            outer_v6: false,
            clamp: true,
            xdp_everywhere: true,
            flows_max: 4096,
        }
    }
}

pub struct Pool {
    // Declared before the lab: hosts cannot be removed while threads are in them.
    nodes: BTreeMap<&'static str, Node>,
    pub options: Options,
    pub lab: Lab,
}

impl Pool {
    /// Creates a pool. Nodes are numbered by their names; `n1` is the contact node. All new flows go to `n1` at first.
    pub fn new(segments: &[&[&'static str]], options: Options) -> Self {
        let lab = Lab::new(segments);
        let mut nodes = BTreeMap::new();
        for name in lab.names('n') {
            let id = name[1..].parse().expect("nodes are called n1, n2, …");
            nodes.insert(name, Node::new(&lab, name, id));
        }
        let pool = Self {
            nodes,
            options,
            lab,
        };
        for name in pool.lab.names('n') {
            pool.start_node(name);
            pool.give_service_address(name);
            pool.start_servers(name);
        }
        pool.place_all_on(1);
        pool.route_clients();
        pool
    }

    pub fn node(&self, name: &str) -> &Node {
        &self.nodes[name]
    }

    /// Loads the programs of a node (again), and fills all maps but the placement.
    pub fn start_node(&self, name: &'static str) {
        let node = self.node(name);
        let host = self.lab.host(name);
        let ifindex = host.ifindex("eth0");
        let xdp = node.id == 1 || self.options.xdp_everywhere;
        let plane = host.run(|| {
            let mut plane = Dataplane::load(node.pins(), self.options.flows_max).expect("load");
            plane.attach_interface(ifindex, xdp).expect("attach");
            plane.attach_cgroup(host.cgroup()).expect("cgroup");
            plane
        });
        plane.set_config(&self.config(node)).expect("config");
        plane.lease.writer().set_until_ns(LEASE_WITHOUT_END);
        plane.lease.set_table_ready(true);
        self.fill_nodes(name, &plane);
        node.set_plane(plane);
    }

    pub fn config(&self, node: &Node) -> Config {
        let clamp = |header: u16| {
            if self.options.clamp {
                1500 - self.outer_size() - header
            } else {
                0
            }
        };
        Config {
            own_id: node.id,
            reach: self.options.reach,
            role: u8::from(node.id == 1),
            hold_ifindex: self.lab.host(node.name).ifindex(Tun::NAME),
            mss_clamp_v4: clamp(40),
            mss_clamp_v6: clamp(60),
            mtu: 1500,
            shared_link: SHARED_LINK,
            ready: 1,
        }
    }

    /// Returns the number of bytes that encapsulation adds to a packet.
    pub fn outer_size(&self) -> u16 {
        if self.options.outer_v6 { 40 } else { 20 }
    }

    fn fill_nodes(&self, name: &str, plane: &Dataplane) {
        let own_position = self.lab.position(name);
        for peer in self.nodes.values() {
            let entry = self.path_to(name, own_position, self.lab.position(peer.name));
            plane.nodes.set(&u32::from(peer.id), &entry).expect("node");
            plane.peers.set(&entry.address, &peer.id).expect("peer");
        }
    }

    fn path_to(&self, name: &str, own_position: HostPosition, to: HostPosition) -> NodeEntry {
        let is_routed = own_position.segment != to.segment;
        let hop = if is_routed {
            HostPosition {
                number: ROUTER,
                ..own_position
            }
        } else {
            to
        };
        let v6 = if self.options.outer_v6 { NODE_V6 } else { 0 };
        NodeEntry {
            address: to_mapped(to.address(self.options.outer_v6)),
            link: hop.link(),
            own_link: own_position.link(),
            ifindex: self.lab.host(name).ifindex("eth0"),
            flags: NODE_KNOWN | v6 | if is_routed { NODE_ENCAP } else { 0 },
            pad: 0,
        }
    }

    fn give_service_address(&self, name: &str) {
        let host = self.lab.host(name);
        let is_contact = name == "n1" && self.options.reach == REACH_STEER;
        host.sysctl("net/ipv4/conf/all/arp_ignore", "1");
        host.sysctl("net/ipv4/conf/all/arp_announce", "2");
        let device = if is_contact { "eth0" } else { "lo" };
        host.ip(&format!("addr add {}/32 dev {device}", service(false).ip()));
        host.ip(&format!(
            "addr add {}/128 dev {device} nodad",
            service(true).ip()
        ));
    }

    fn start_servers(&self, name: &str) {
        let (node, host) = (self.node(name), self.lab.host(name));
        let id = u8::try_from(node.id).expect("small");
        for v6 in [false, true] {
            node.server.start_tcp(host, service(v6), id);
            node.server.start_udp(host, service(v6), id);
        }
    }

    /// Routes clients to the service through the contact node, on the link with broadcast, or by the router.
    fn route_clients(&self) {
        let contact = self.lab.position("n1");
        for v6 in [false, true] {
            let (to, length) = (service(v6).ip(), if v6 { 128 } else { 32 });
            let via = format!("via {}", contact.address(v6));
            if let Some(router) = &self.lab.router {
                router.ip(&format!("route add {to}/{length} {via}"));
                continue;
            }
            let route = if self.options.reach == REACH_BROADCAST {
                "dev eth0"
            } else {
                &via
            };
            for client in self.lab.names('c') {
                self.lab
                    .host(client)
                    .ip(&format!("route add {to}/{length} {route}"));
            }
        }
    }

    /// Places all new flows on `owner`, without a previous table.
    pub fn place_all_on(&self, owner: u16) {
        self.set_services(&[owner; PLACEMENT_SLOTS], Service::default());
    }

    /// Changes the table from "all to `before`" to "all to `after`".
    pub fn change_placement(&self, before: u16, after: u16) {
        self.place_all_on(before);
        let next = Service {
            generation: 1,
            flags: HAS_PREVIOUS,
            ..Service::default()
        };
        self.set_services(&[after; PLACEMENT_SLOTS], next);
    }

    /// Sets every service at every node; `template` gives the fields other than the row.
    pub fn set_services(&self, slots: &[u16; PLACEMENT_SLOTS], template: Service) {
        for node in self.nodes.values().filter(|node| node.runs()) {
            node.with_dataplane(|plane| set_services(plane, slots, template));
        }
    }

    /// Sets every service at one node; `template` gives the fields other than the row.
    pub fn set_services_at(&self, name: &str, slots: &[u16; PLACEMENT_SLOTS], template: Service) {
        self.node(name)
            .with_dataplane(|plane| set_services(plane, slots, template));
    }

    /// Adds a permanent neighbour entry for an address that only a test uses, at all nodes and the router.
    pub fn add_neighbour(&self, position: HostPosition, link: [u8; 6]) {
        let mut hosts: Vec<_> = self
            .lab
            .names('n')
            .into_iter()
            .map(|name| (self.lab.host(name), self.lab.position(name)))
            .collect();
        hosts.retain(|(_, at)| at.segment == position.segment);
        let device = format!("eth{}", position.segment);
        for v6 in [false, true] {
            let entry = format!(
                "neigh replace {} lladdr {} nud permanent",
                position.address(v6),
                link_text(link)
            );
            for (host, _) in &hosts {
                host.ip(&format!("{entry} dev eth0"));
            }
            if let Some(router) = &self.lab.router {
                router.ip(&format!("{entry} dev {device}"));
            }
        }
    }
}

fn set_services(plane: &Dataplane, slots: &[u16; PLACEMENT_SLOTS], template: Service) {
    for (index, protocol, address) in services() {
        plane
            .set_placement(index, template.generation, slots)
            .expect("placement");
        let value = Service { index, ..template };
        for port in [address.port(), 0] {
            let key = ServiceKey {
                address: to_mapped(address.ip()),
                port: port.to_be_bytes(),
                protocol,
                pad: 0,
            };
            plane.services.set(&key, &value).expect("service");
        }
    }
}
