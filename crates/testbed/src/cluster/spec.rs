//! Parameters of a cluster.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use holdfast_api::Protocol;
use holdfast_lab::{ServiceReach, Topology};
use serde::Serialize;

use super::Cluster;

/// IPv4 or IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum IpFamily {
    /// IPv4.
    #[default]
    #[serde(rename = "4")]
    V4,
    /// IPv6.
    #[serde(rename = "6")]
    V6,
}

impl IpFamily {
    /// Returns the address of this family.
    pub fn select_address(self, v4: Ipv4Addr, v6: Ipv6Addr) -> IpAddr {
        match self {
            IpFamily::V4 => v4.into(),
            IpFamily::V6 => v6.into(),
        }
    }
}

/// Parameters of a cluster.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// Name of the lab; two clusters at the same time need two names.
    pub name: String,
    /// Number of nodes; the first is the contact node, at first if the group runs itself.
    pub nodes: u16,
    /// Number of clients.
    pub clients: u16,
    /// Number of segments that the nodes are spread over.
    pub segments: u16,
    /// Reach: the way of packets to a flow's owner.
    pub reach: ServiceReach,
    /// Links of the lab.
    pub topology: Topology,
    /// Processors of each node; none for all of the machine.
    pub processors: Option<f64>,
    /// Services of the group, each at the service address of either family.
    pub services: Vec<ClusterService>,
    /// Server programs on every node.
    pub programs: Vec<ExampleServer>,
    /// Address family between daemons.
    pub underlay: IpFamily,
    /// Lead of a node's TCP clock over the clock of the acceptor, by node name, in the timestamps' unit (milliseconds).
    pub clock_shift: BTreeMap<String, u32>,
    /// Further environment variables of the daemons.
    pub daemon_environment: BTreeMap<String, String>,
    /// True if daemons may migrate processes of any user and program.
    pub migration: bool,
    /// Entries that override the `[migration]` section, by key.
    pub migration_policy: toml::Table,
    /// True if daemons and server programs run with real-time priority, if allowed.
    pub is_realtime: bool,
    /// Log filter of the daemons.
    pub log: String,
    /// Log filter of the server programs.
    pub program_log: String,
    /// Pause before the restart of a daemon that has ended.
    pub restart_delay: Duration,
    /// Set for a group that runs itself: membership, contact node and services are the group's own. None: the files of
    /// the nodes name the contact node, the nodes and the services.
    pub self_running: Option<SelfRunningGroupSpec>,
    /// Number of etcd members that keep the views of a group that runs itself, each at a client host of its own: the last
    /// ones. 0: the voters vote.
    pub etcd_members: u16,
}

/// Parameters of a group that runs itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelfRunningGroupSpec {
    /// Number of backups beside the contact node; the nodes after them are server nodes.
    pub backups: u16,
}

impl ClusterSpec {
    /// Returns the parameters of three nodes and a client on one segment, with reach `steer` and no service.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            nodes: 3,
            clients: 1,
            segments: 1,
            reach: ServiceReach::Steer,
            topology: Topology::default(),
            processors: None,
            services: Vec::new(),
            programs: Vec::new(),
            underlay: IpFamily::V4,
            clock_shift: BTreeMap::new(),
            daemon_environment: BTreeMap::new(),
            migration: false,
            migration_policy: toml::Table::new(),
            is_realtime: false,
            log: "info".into(),
            program_log: "info".into(),
            restart_delay: Duration::from_millis(200),
            self_running: None,
            etcd_members: 0,
        }
    }

    /// Adds a server program and the services it needs. In a group that runs itself a service has one protocol, and so
    /// the program serves TCP alone; set `self_running` before.
    #[must_use]
    pub fn program(mut self, program: ExampleServer) -> Self {
        let services = program.services().into_iter();
        let is_self_running = self.self_running.is_some();
        let is_served =
            |service: &ClusterService| !is_self_running || service.protocol == Protocol::Tcp;
        self.services.extend(services.filter(is_served));
        self.programs.push(program);
        self
    }
}

/// One service, at the service address of either family.
#[derive(Clone, Debug)]
pub struct ClusterService {
    /// Pool of the service.
    pub pool: String,
    /// Port of the service.
    pub port: u16,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Shares of new flows by node; a node without an entry has 1.
    pub weights: BTreeMap<String, u32>,
    /// Time that a handoff waits for the send queue by default, milliseconds.
    pub drain_ms: Option<u64>,
}

impl ClusterService {
    /// Returns a service with equal shares.
    pub fn new(pool: &str, protocol: Protocol, port: u16) -> Self {
        Self {
            pool: pool.into(),
            port,
            protocol,
            weights: BTreeMap::new(),
            drain_ms: None,
        }
    }
}

/// A server program of the examples.
#[derive(Clone, Debug)]
pub enum ExampleServer {
    /// `fileserver`, pool `files`.
    FileServer {
        /// TCP port.
        port: u16,
        /// Most data sent on each connection, Mbit/s.
        rate_mbit: Option<u32>,
    },
    /// `echo`, pool `echo`.
    Echo {
        /// TCP and UDP port.
        port: u16,
    },
}

impl ExampleServer {
    /// Returns the file name of the program.
    pub fn name(&self) -> &'static str {
        match self {
            ExampleServer::FileServer { .. } => "fileserver",
            ExampleServer::Echo { .. } => "echo",
        }
    }

    /// Returns the pool that the program serves.
    pub fn pool_name(&self) -> &'static str {
        match self {
            ExampleServer::FileServer { .. } => "files",
            ExampleServer::Echo { .. } => "echo",
        }
    }

    fn services(&self) -> Vec<ClusterService> {
        match self {
            ExampleServer::FileServer { port, .. } => {
                vec![ClusterService::new(self.pool_name(), Protocol::Tcp, *port)]
            }
            ExampleServer::Echo { port } => [Protocol::Tcp, Protocol::Udp]
                .map(|protocol| ClusterService::new(self.pool_name(), protocol, *port))
                .into(),
        }
    }

    pub(super) fn arguments(&self, cluster: &Cluster) -> Vec<String> {
        let (ExampleServer::FileServer { port, .. } | ExampleServer::Echo { port }) = self;
        let addresses = [IpFamily::V4, IpFamily::V6]
            .map(|family| SocketAddr::new(cluster.service_address(family), *port).to_string());
        let with_addresses = |flag: &str| {
            addresses
                .clone()
                .map(|address| [flag.to_owned(), address])
                .into_iter()
        };
        let mut arguments: Vec<String> = with_addresses("--listen").flatten().collect();
        match self {
            ExampleServer::FileServer { rate_mbit, .. } => {
                arguments.extend(
                    rate_mbit
                        .iter()
                        .flat_map(|rate| ["--rate-mbit".into(), rate.to_string()]),
                );
            }
            ExampleServer::Echo { port } => {
                let mut services = cluster.spec().services.iter();
                if services.any(|each| each.protocol == Protocol::Udp && each.port == *port) {
                    arguments.extend(with_addresses("--udp").flatten());
                }
            }
        }
        arguments
    }
}
