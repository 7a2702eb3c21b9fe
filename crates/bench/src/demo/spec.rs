//! Parameters of the demonstration.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_lab::{LinkEntry, ServiceReach, Topology};
use serde::Serialize;

use holdfast_testbed::cluster::{ClusterSpec, ExampleServer, IpFamily};

/// Port of the file servers.
pub const PORT: u16 = 80;

/// Parameters of the demonstration.
#[derive(Clone, Debug, Serialize)]
pub struct DemoSpec {
    /// Name of the lab.
    pub name: String,
    /// Number of nodes; at least two.
    pub nodes: u16,
    /// Number of segments that the nodes are spread over.
    pub segments: u16,
    /// Reach: the way of packets to the owner.
    pub reach: ServiceReach,
    /// Address family of the client's connection.
    pub family: IpFamily,
    /// Bytes transferred while the connection moves from node to node.
    pub bytes: u64,
    /// Bytes transferred without handoffs.
    pub control_bytes: u64,
    /// Duration of the transfer of `bytes` at the sender's rate.
    pub duration: Duration,
    /// Time between the beginnings of two handoffs.
    pub interval: Duration,
    /// Promised number of handoffs.
    pub handoffs_min: usize,
    /// True if the client sends the data.
    pub upload: bool,
    /// Loss on the client's link, in each direction, in percent. With loss, repeated segments break no promise.
    pub loss_pct: f64,
    /// Lead of a node's TCP clock over the clock of the acceptor, by node name, in the timestamps' unit (milliseconds).
    pub clock_shift: BTreeMap<String, u32>,
}

impl Default for DemoSpec {
    /// Returns the parameters of `holdfast demo`: 1 GiB in about 17 s over three nodes.
    fn default() -> Self {
        Self {
            name: format!("demo-{}", std::process::id()),
            nodes: 3,
            segments: 1,
            reach: ServiceReach::Steer,
            family: IpFamily::V4,
            bytes: 1 << 30,
            control_bytes: 128 << 20,
            duration: Duration::from_secs(17),
            interval: Duration::from_millis(600),
            handoffs_min: 20,
            upload: false,
            loss_pct: 0.0,
            clock_shift: BTreeMap::new(),
        }
    }
}

impl DemoSpec {
    /// Refuses invalid parameters.
    ///
    /// # Errors
    /// Too few nodes, no bytes, no time, or too much loss.
    pub fn validate(&self) -> Result<()> {
        ensure!(
            self.nodes >= 2,
            "a handoff needs two nodes: --nodes 2 or more"
        );
        ensure!(
            self.bytes > 0 && self.control_bytes > 0,
            "nothing to transfer: --bytes 1 or more"
        );
        ensure!(
            !self.duration.is_zero() && !self.interval.is_zero(),
            "the transfer's duration and the handoff interval must not be 0"
        );
        ensure!(
            (0.0..50.0).contains(&self.loss_pct),
            "the loss must be at least 0 and less than 50 %, not {} %",
            self.loss_pct
        );
        Ok(())
    }

    /// Returns the sender's rate, Mbit/s.
    pub fn rate_mbit(&self) -> u32 {
        let rate = self.bytes as f64 * 8.0 / 1e6 / self.duration.as_secs_f64();
        rate.ceil().clamp(1.0, 1e6) as u32
    }

    /// Returns the parameters as text for the first line on the screen.
    pub fn describe(&self) -> String {
        let mut description = format!("{} nodes", self.nodes);
        if self.segments > 1 {
            description += &format!(" on {} segments", self.segments);
        }
        description += match self.reach {
            ServiceReach::Steer => ", reach steer",
            ServiceReach::Broadcast => ", reach broadcast",
        };
        description += match self.family {
            IpFamily::V4 => ", IPv4",
            IpFamily::V6 => ", IPv6",
        };
        if self.loss_pct > 0.0 {
            description += &format!(", {} % loss", self.loss_pct);
        }
        if !self.clock_shift.is_empty() {
            description += ", different TCP clocks";
        }
        description
    }

    pub(super) fn cluster_spec(&self) -> ClusterSpec {
        let rate_mbit = (!self.upload).then(|| self.rate_mbit());
        let mut spec = ClusterSpec::new(&self.name).program(ExampleServer::FileServer {
            port: PORT,
            rate_mbit,
        });
        spec.nodes = self.nodes;
        spec.segments = self.segments;
        spec.reach = self.reach;
        spec.underlay = self.family;
        spec.is_realtime = true;
        spec.clock_shift = self.clock_shift.clone();
        if self.loss_pct > 0.0 {
            let entry = LinkEntry {
                loss_pct: Some(self.loss_pct),
                ..LinkEntry::for_host("clients")
            };
            spec.topology = Topology::default().with_entry(entry);
        }
        spec
    }
}
