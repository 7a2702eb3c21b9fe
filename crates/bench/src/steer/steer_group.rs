//! The group that forwards: the eBPF programs and maps of the contact node and of two owners, and the flows' steering
//! table.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::{Context, Result};
use holdfast_bpf::shared_with_c::{
    Config, FlowKey, NODE_ENCAP, NODE_KNOWN, Node, REACH_STEER, RECORD_OWNED, Record, Service,
    ServiceKey, to_mapped,
};
use holdfast_bpf::traffic::flow_client;
use holdfast_bpf::{Dataplane, LEASE_WITHOUT_END};

use super::DeliveryForm;
use super::test_network::{ENCAP_PAIR, LINK_PAIR, TestNetwork, link_address};

/// Service address of the flows.
pub const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 98, 255, 1);
/// Port of the service.
pub const PORT: u16 = 7000;
/// Address of the first flows' client.
pub const FIRST_CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 98, 200, 1);

const UDP_PROTOCOL: u8 = 17;
const FLOWS_MAX: u32 = 1 << 20;
/// Id of the contact node; owner 0 and 1 have the next ones.
const CONTACT_NODE_ID: u16 = 1;
const RECORDS_PER_BATCH: u32 = 10_000;

/// The data planes of the group: the contact node's, then owner 0 and 1.
pub struct SteerGroup {
    contact: Dataplane,
    owners: [Dataplane; 2],
    link_ifindexes: [u32; 2],
    encap_ifindexes: [u32; 2],
}

impl SteerGroup {
    /// Loads and attaches the programs and fills the steering table; all nodes are on one segment at first.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new(place: &TestNetwork, flows: u32) -> Result<Self> {
        let start = |host: &str, device: &str, id: u16| -> Result<Dataplane> {
            let ifindex = place.ifindex(host, device)?;
            let plane = place.run_in_namespace(host, || {
                let mut plane = Dataplane::load(&place.pins.join(host), FLOWS_MAX)?;
                plane.attach_interface(ifindex, true)?;
                Ok(plane)
            })?;
            let role = u8::from(id == CONTACT_NODE_ID);
            let config = Config {
                own_id: id,
                reach: REACH_STEER,
                role,
                mtu: 1500,
                ready: 1,
                ..Config::default()
            };
            plane.set_config(&config)?;
            plane.lease.writer().set_until_ns(LEASE_WITHOUT_END);
            plane.lease.set_table_ready(true);
            for port in [PORT, 0] {
                plane
                    .services
                    .set(&service_key(port), &Service::default())?;
            }
            Ok(plane)
        };
        let contact = start("s", "by-steer", CONTACT_NODE_ID)?;
        let owners = [
            start("o0", "encap", CONTACT_NODE_ID + 1)?,
            start("o1", "encap", CONTACT_NODE_ID + 2)?,
        ];
        let link = [place.ifindex("s", "link0")?, place.ifindex("s", "link1")?];
        let encap = [place.ifindex("s", "encap0")?, place.ifindex("s", "encap1")?];
        let group = Self {
            contact,
            owners,
            link_ifindexes: link,
            encap_ifindexes: encap,
        };
        group.write_records(flows)?;
        group.set_delivery_form(DeliveryForm::Link)?;
        Ok(group)
    }

    /// Sets the form in which the contact node sends to the owners.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_delivery_form(&self, form: DeliveryForm) -> Result<()> {
        let (first, ifindexes) = match form {
            DeliveryForm::Link => (LINK_PAIR, self.link_ifindexes),
            DeliveryForm::Encap => (ENCAP_PAIR, self.encap_ifindexes),
        };
        let contact = node_entry(ENCAP_PAIR, 0, 0, form);
        self.contact
            .nodes
            .set(&u32::from(CONTACT_NODE_ID), &contact)?;
        for (index, plane) in (0u8..).zip(&self.owners) {
            let id = CONTACT_NODE_ID + 1 + u16::from(index);
            let entry = node_entry(first + index, 1, ifindexes[usize::from(index)], form);
            self.contact.nodes.set(&u32::from(id), &entry)?;
            plane.nodes.set(&u32::from(id), &entry)?;
            plane.peers.set(&contact.address, &CONTACT_NODE_ID)?;
        }
        Ok(())
    }

    fn write_records(&self, flows: u32) -> Result<()> {
        for first in (0..flows).step_by(RECORDS_PER_BATCH as usize) {
            let batch = first..flows.min(first + RECORDS_PER_BATCH);
            let keys: Vec<FlowKey> = batch.clone().map(flow_key).collect();
            let records: Vec<Record> = batch.map(record_of_flow).collect();
            self.contact
                .steering
                .set_many(&keys, &records)
                .context("fill the steering table")?;
        }
        Ok(())
    }

    /// Returns a counter of the contact node.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        self.contact
            .counters()
            .iter()
            .find(|(n, _)| *n == name)
            .map_or(0, |(_, count)| *count)
    }
}

/// Returns the record of a flow: every other flow belongs to owner 1.
fn record_of_flow(index: u32) -> Record {
    let owner = CONTACT_NODE_ID + 1 + u16::from(index % 2 == 1);
    Record {
        epoch: 1,
        owner,
        state: RECORD_OWNED,
        ..Record::default()
    }
}

/// Returns the node at the far (1) or near (0) end of a pair, as reached by the contact node's interface.
fn node_entry(pair: u8, end: u8, ifindex: u32, form: DeliveryForm) -> Node {
    let encap = if form == DeliveryForm::Encap {
        NODE_ENCAP
    } else {
        0
    };
    let address = Ipv4Addr::new(10, 98, pair, 1 + end);
    Node {
        address: to_mapped(IpAddr::V4(address)),
        link: link_address(pair, end),
        own_link: link_address(pair, 0),
        ifindex,
        flags: NODE_KNOWN | encap,
        pad: 0,
    }
}

fn flow_key(index: u32) -> FlowKey {
    let (address, port) = flow_client(FIRST_CLIENT_ADDRESS, index);
    let local = SocketAddr::new(IpAddr::V4(SERVICE_ADDRESS), PORT);
    FlowKey::new(
        UDP_PROTOCOL,
        local,
        SocketAddr::new(IpAddr::V4(address), port),
    )
}

fn service_key(port: u16) -> ServiceKey {
    ServiceKey {
        address: to_mapped(IpAddr::V4(SERVICE_ADDRESS)),
        port: port.to_be_bytes(),
        protocol: UDP_PROTOCOL,
        pad: 0,
    }
}
