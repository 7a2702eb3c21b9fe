//! Names, segments and addresses of hosts: a pure function of the lab's number and size.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The link address that all nodes share with reach `broadcast`. No host ever sends from it, so the switch never
/// learns it and floods frames to it.
pub const SHARED_MAC: MacAddress = MacAddress([0x02, 0x68, 0x66, 0x73, 0x76, 0x63]);

/// The name of the switch, which is neither a node nor a client.
pub(crate) const SWITCH_NAME: &str = "sw";

/// Maximum lab number: the second byte of a lab's IPv4 addresses is its number plus 80.
pub(crate) const LAB_NUMBER_MAX: u16 = 99;
const NODES_MAX: u16 = 89;
const CLIENTS_MAX: u16 = 150;
const SEGMENTS_MAX: u16 = 200;
/// The segment number of the routed service address; no real segment has it.
const ROUTED_SEGMENT: u8 = 255;

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MacAddress(pub [u8; 6]);

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The purpose of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostKind {
    /// Runs the daemon and server programs.
    Node,
    /// Runs unmodified client programs.
    Client,
}

/// One host's name and addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabHost {
    /// `n1`, `n2`, …, `c1`, `c2`, ….
    pub name: String,
    /// Node or client.
    pub kind: HostKind,
    /// The segment that `eth0` is on, from 0.
    pub segment: u16,
    /// The link address of `eth0`.
    pub mac: MacAddress,
    /// The IPv4 address of `eth0`, with a prefix of 24 bits.
    pub v4: Ipv4Addr,
    /// The IPv6 address of `eth0`, with a prefix of 64 bits.
    pub v6: Ipv6Addr,
}

/// The lab's size and number, which determine all names and addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressPlan {
    /// The lab's number `k`, from 0; the lowest free one on the machine.
    pub number: u16,
    /// Number of nodes.
    pub nodes: u16,
    /// Number of clients.
    pub clients: u16,
    /// Number of segments for the nodes.
    pub segments: u16,
}

impl AddressPlan {
    /// Creates a plan after checking the sizes.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a size is out of range.
    pub fn new(number: u16, nodes: u16, clients: u16, segments: u16) -> Result<AddressPlan> {
        let in_range = |what: &str, value: u16, low: u16, high: u16| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(Error::Invalid(format!(
                "{what} must be {low} to {high}, not {value}"
            )))
        };
        in_range("the lab's number", number, 0, LAB_NUMBER_MAX)?;
        in_range("the number of nodes", nodes, 1, NODES_MAX)?;
        in_range("the number of clients", clients, 0, CLIENTS_MAX)?;
        in_range("the number of segments", segments, 1, SEGMENTS_MAX)?;
        Ok(AddressPlan {
            number,
            nodes,
            clients,
            segments,
        })
    }

    /// Returns all hosts, nodes first, without the switch.
    #[must_use]
    pub fn hosts(&self) -> Vec<LabHost> {
        let nodes = (1..=self.nodes).map(|index| self.host(HostKind::Node, index));
        let clients = (1..=self.clients).map(|index| self.host(HostKind::Client, index));
        nodes.chain(clients).collect()
    }

    /// Returns all segments, including the clients' one.
    #[must_use]
    pub fn all_segments(&self) -> std::ops::Range<u16> {
        0..self.client_segment().max(self.segments - 1) + 1
    }

    /// Returns the clients' segment: 0 if there is one segment, otherwise a separate one.
    #[must_use]
    pub fn client_segment(&self) -> u16 {
        if self.segments == 1 { 0 } else { self.segments }
    }

    /// Returns the router's addresses on a segment.
    #[must_use]
    pub fn router_addresses(&self, segment: u16) -> (Ipv4Addr, Ipv6Addr) {
        self.addresses(to_byte(segment), 1)
    }

    /// Returns the router's link address on a segment.
    #[must_use]
    pub fn router_mac(&self, segment: u16) -> MacAddress {
        self.mac(segment, 0, 1)
    }

    /// Returns the service address on link in segment 0: `10.<80+k>.0.100`, `fd80:<k>:0::100`. No host has the address
    /// until a daemon takes it.
    #[must_use]
    pub fn service_addresses(&self) -> (Ipv4Addr, Ipv6Addr) {
        self.addresses(0, 100)
    }

    /// Returns the service address outside all segments: `10.<80+k>.255.1`, `fd80:<k>:255::1`. The router sends it to
    /// the node selected by `Lab::route_service`, initially `n1`.
    #[must_use]
    pub fn routed_service_addresses(&self) -> (Ipv4Addr, Ipv6Addr) {
        self.addresses(ROUTED_SEGMENT, 1)
    }

    fn host(&self, kind: HostKind, index: u16) -> LabHost {
        let (letter, segment, station, group) = match kind {
            HostKind::Node => ('n', (index - 1) % self.segments, 10 + index, 1),
            HostKind::Client => ('c', self.client_segment(), 100 + index, 2),
        };
        let (v4, v6) = self.addresses(to_byte(segment), to_byte(station));
        LabHost {
            name: format!("{letter}{index}"),
            kind,
            segment,
            mac: self.mac(segment, group, to_byte(index)),
            v4,
            v6,
        }
    }

    fn addresses(&self, segment: u8, station: u8) -> (Ipv4Addr, Ipv6Addr) {
        let v4 = Ipv4Addr::new(10, to_byte(80 + self.number), segment, station);
        let [k, s, h] = [self.number, segment.into(), station.into()].map(decimal_as_hex);
        (v4, Ipv6Addr::new(0xfd80, k, s, 0, 0, 0, 0, h))
    }

    fn mac(&self, segment: u16, group: u8, index: u8) -> MacAddress {
        MacAddress([
            0x02,
            0x48,
            to_byte(self.number),
            to_byte(segment),
            group,
            index,
        ])
    }
}

/// Returns the number with hexadecimal digits equal to `value`'s decimal digits, so that addresses look alike in both
/// families.
fn decimal_as_hex(value: u16) -> u16 {
    let [ones, tens, hundreds] = [value % 10, value / 10 % 10, value / 100 % 10];
    hundreds << 8 | tens << 4 | ones
}

/// Converts a number to a byte; `AddressPlan::new` has checked that it fits.
fn to_byte(value: u16) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn single_segment_contains_all_hosts() {
        let plan = AddressPlan::new(3, 2, 1, 1).unwrap();
        let hosts = plan.hosts();
        let seen: Vec<_> = hosts
            .iter()
            .map(|h| {
                (
                    h.name.as_str(),
                    h.segment,
                    h.v4.to_string(),
                    h.v6.to_string(),
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                (
                    "n1",
                    0,
                    "10.83.0.11".into(),
                    "fd80:3:0:0::11".parse::<Ipv6Addr>().unwrap().to_string()
                ),
                ("n2", 0, "10.83.0.12".into(), "fd80:3::12".into()),
                ("c1", 0, "10.83.0.101".into(), "fd80:3::101".into()),
            ]
        );
        assert_eq!(plan.all_segments(), 0..1);
        assert_eq!(plan.service_addresses().0.to_string(), "10.83.0.100");
        assert_eq!(plan.service_addresses().1.to_string(), "fd80:3::100");
        assert_eq!(
            plan.routed_service_addresses().1.to_string(),
            "fd80:3:255::1"
        );
        assert_eq!(plan.router_addresses(0).0.to_string(), "10.83.0.1");
    }

    #[test]
    fn nodes_are_assigned_round_robin_and_clients_get_own_segment() {
        let plan = AddressPlan::new(0, 5, 2, 2).unwrap();
        let segments: Vec<_> = plan.hosts().iter().map(|h| h.segment).collect();
        assert_eq!(segments, [0, 1, 0, 1, 0, 2, 2]);
        assert_eq!(plan.all_segments(), 0..3);
        assert_eq!(plan.hosts()[1].v4.to_string(), "10.80.1.12");
        assert_eq!(plan.hosts()[6].v6.to_string(), "fd80:0:2::102");
    }

    #[test]
    fn largest_lab_has_distinct_addresses() {
        let plan = AddressPlan::new(LAB_NUMBER_MAX, NODES_MAX, CLIENTS_MAX, SEGMENTS_MAX).unwrap();
        let hosts = plan.hosts();
        let mut seen = BTreeSet::new();
        for host in &hosts {
            assert!(
                seen.insert(host.v4.to_string())
                    && seen.insert(host.v6.to_string())
                    && seen.insert(host.mac.to_string())
            );
            assert_ne!(host.mac, SHARED_MAC);
        }
        for segment in plan.all_segments() {
            let (v4, v6) = plan.router_addresses(segment);
            assert!(seen.insert(v4.to_string()) && seen.insert(v6.to_string()));
            assert!(seen.insert(plan.router_mac(segment).to_string()));
        }
        for (v4, v6) in [plan.service_addresses(), plan.routed_service_addresses()] {
            assert!(seen.insert(v4.to_string()) && seen.insert(v6.to_string()));
        }
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        for (nodes, clients, segments) in
            [(0, 1, 1), (90, 1, 1), (1, 151, 1), (1, 1, 0), (1, 1, 201)]
        {
            assert!(matches!(
                AddressPlan::new(0, nodes, clients, segments),
                Err(Error::Invalid(_))
            ));
        }
        assert!(AddressPlan::new(LAB_NUMBER_MAX + 1, 1, 1, 1).is_err());
    }
}
