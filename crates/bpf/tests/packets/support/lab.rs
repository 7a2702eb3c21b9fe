//! Hosts on segments: one Linux bridge per segment, and a router between several segments.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicU32, Ordering};

use super::host::Host;

/// Returns a name that no other test on this machine uses.
pub fn unique_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!(
        "hft{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

/// Position of a host: segment and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPosition {
    pub segment: u8,
    pub number: u8,
}

impl HostPosition {
    pub fn v4(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, self.segment, self.number)
    }

    pub fn v6(self) -> Ipv6Addr {
        Ipv6Addr::new(
            0xfd77,
            u16::from(self.segment),
            0,
            0,
            0,
            0,
            0,
            u16::from(self.number),
        )
    }

    pub fn address(self, v6: bool) -> IpAddr {
        if v6 {
            self.v6().into()
        } else {
            self.v4().into()
        }
    }

    pub fn link(self) -> [u8; 6] {
        [2, 0x77, 0, 0, self.segment, self.number]
    }
}

/// Returns a link address in the notation of `ip`.
pub fn link_text(link: [u8; 6]) -> String {
    link.map(|byte| format!("{byte:02x}")).join(":")
}

/// The router's number on each segment.
pub const ROUTER: u8 = 1;

pub struct Lab {
    pub name: String,
    hosts: BTreeMap<&'static str, (Host, HostPosition)>,
    pub router: Option<Host>,
    pub switch: Host,
}

impl Lab {
    /// Creates one segment for each list of hosts. Names that begin with `n` are nodes; each host has `eth0`.
    pub fn new(segments: &[&[&'static str]]) -> Self {
        let name = unique_name();
        let switch = Host::new(&format!("{name}-sw"), false);
        // If bridges pass packets to the firewall, it would drop the malformed packets of the tests.
        for kind in ["iptables", "ip6tables"] {
            let path = format!("net/bridge/bridge-nf-call-{kind}");
            if std::path::Path::new("/proc/sys").join(&path).exists() {
                switch.sysctl(&path, "0");
            }
        }
        let router = (segments.len() > 1).then(|| Host::new(&format!("{name}-r"), false));
        let mut lab = Self {
            name,
            hosts: BTreeMap::new(),
            router,
            switch,
        };
        for (segment, hosts) in (0u8..).zip(segments) {
            lab.switch.ip(&format!(
                "link add br{segment} type bridge forward_delay 0 mcast_snooping 0"
            ));
            lab.switch.ip(&format!("link set br{segment} up"));
            lab.add_router(segment);
            for (number, host) in (11u8..).zip(*hosts) {
                lab.add_host(host, HostPosition { segment, number });
            }
        }
        lab
    }

    fn add_router(&self, segment: u8) {
        let Some(router) = &self.router else { return };
        let position = HostPosition {
            segment,
            number: ROUTER,
        };
        let device = format!("eth{segment}");
        self.attach_to_bridge(router, &device, position);
        // Packets forwarded by a router have complete checksums, as if they came from a wire.
        router.feature(&device, "tx", "off");
        router.sysctl("net/ipv4/ip_forward", "1");
        router.sysctl("net/ipv6/conf/all/forwarding", "1");
    }

    fn add_host(&mut self, name: &'static str, position: HostPosition) {
        let host = Host::new(&format!("{}-{name}", self.name), name.starts_with('n'));
        self.attach_to_bridge(&host, "eth0", position);
        if self.router.is_some() {
            let router = HostPosition {
                number: ROUTER,
                ..position
            };
            host.ip(&format!("route add default via {}", router.v4()));
            host.ip(&format!("route add default via {}", router.v6()));
        }
        if !name.starts_with('n') {
            host.feature("eth0", "tx", "off");
        }
        self.hosts.insert(name, (host, position));
    }

    fn attach_to_bridge(&self, host: &Host, device: &str, position: HostPosition) {
        let port = format!("p{}-{}", position.segment, position.number);
        let link = link_text(position.link());
        self.switch.ip(&format!(
            "link add {port} type veth peer name {device} netns {} address {link}",
            host.namespace()
        ));
        self.switch
            .ip(&format!("link set {port} master br{} up", position.segment));
        // A redirect out of a node needs NAPI at this end. Elsewhere GRO would give the contact node packets with
        // partial checksums, which XDP on veth cannot complete.
        if host.is_node() {
            self.switch.feature(&port, "gro", "on");
        }
        host.ip(&format!("addr add {}/24 dev {device}", position.v4()));
        host.ip(&format!("addr add {}/64 dev {device} nodad", position.v6()));
        host.ip(&format!("link set {device} up"));
        host.wait_until_up(device);
        eventually("the port forwards", || {
            self.switch
                .ip_output(&format!("-d link show {port}"))
                .contains("state forwarding")
        });
    }

    pub fn host(&self, name: &str) -> &Host {
        &self.hosts[name].0
    }

    pub fn position(&self, name: &str) -> HostPosition {
        self.hosts[name].1
    }

    /// Returns the names of the hosts that begin with `prefix`, in order.
    pub fn names(&self, prefix: char) -> Vec<&'static str> {
        self.hosts
            .keys()
            .copied()
            .filter(|name| name.starts_with(prefix))
            .collect()
    }
}

/// Polls `condition` until it is true. The limit is generous, since machines are busy.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed().as_secs() < 60, "exceeded time: {what}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
