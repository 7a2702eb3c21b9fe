//! What a cluster is to be like.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use holdfast_api::Protocol;
use holdfast_lab::{Reach, Topology};
use serde::Serialize;

use super::Cluster;

/// IPv4 or IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Family {
    /// IPv4.
    #[default]
    #[serde(rename = "4")]
    V4,
    /// IPv6.
    #[serde(rename = "6")]
    V6,
}

impl Family {
    /// The one of two addresses that is of this family.
    pub fn of(self, v4: Ipv4Addr, v6: Ipv6Addr) -> IpAddr {
        match self {
            Family::V4 => v4.into(),
            Family::V6 => v6.into(),
        }
    }
}

/// What a cluster is to be like.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// The lab's name; two clusters at the same time need two names.
    pub name: String,
    /// How many nodes; the first is the contact node.
    pub nodes: u16,
    /// How many clients.
    pub clients: u16,
    /// Over how many segments the nodes are spread.
    pub segments: u16,
    /// How packets reach a flow's owner.
    pub reach: Reach,
    /// What the links are like.
    pub topology: Topology,
    /// What the group answers for; each at the service address of either family.
    pub services: Vec<Service>,
    /// The server programs on every node.
    pub programs: Vec<Program>,
    /// The family that daemons speak with each other by.
    pub underlay: Family,
    /// By how much a node's TCP clock runs ahead of that of the node it gives a connection to, by its name, in the
    /// timestamps' unit (milliseconds).
    pub clock_shift: BTreeMap<String, u32>,
    /// What else the daemons' environment has.
    pub daemon_environment: BTreeMap<String, String>,
    /// Daemons move processes of any user and program.
    pub migration: bool,
    /// What `[migration]` says instead, by key.
    pub migration_policy: toml::Table,
    /// Daemons and server programs run with real-time priority, where that is allowed.
    pub realtime: bool,
    /// The daemons' log filter.
    pub log: String,
    /// The server programs' log filter.
    pub program_log: String,
}

impl ClusterSpec {
    /// Three nodes and a client on one segment, reach `steer`, nothing served yet.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            nodes: 3,
            clients: 1,
            segments: 1,
            reach: Reach::Steer,
            topology: Topology::default(),
            services: Vec::new(),
            programs: Vec::new(),
            underlay: Family::V4,
            clock_shift: BTreeMap::new(),
            daemon_environment: BTreeMap::new(),
            migration: false,
            migration_policy: toml::Table::new(),
            realtime: false,
            log: "info".into(),
            program_log: "info".into(),
        }
    }

    /// Adds a server program and the services it needs.
    #[must_use]
    pub fn program(mut self, program: Program) -> Self {
        self.services.extend(program.services());
        self.programs.push(program);
        self
    }
}

/// One service, at the service address of either family.
#[derive(Clone, Debug)]
pub struct Service {
    /// The pool.
    pub pool: String,
    /// The port.
    pub port: u16,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Shares of new flows by node; a node that is not named has 1.
    pub weights: BTreeMap<String, u32>,
    /// How long a handoff waits for the send queue where the request does not say, milliseconds.
    pub drain_ms: Option<u64>,
}

impl Service {
    /// A service placed evenly.
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
pub enum Program {
    /// `fileserver`, pool `files`.
    FileServer {
        /// The TCP port.
        port: u16,
        /// The most it sends on each connection, Mbit/s.
        rate_mbit: Option<u32>,
    },
    /// `echo`, pool `echo`.
    Echo {
        /// The TCP and UDP port.
        port: u16,
    },
}

impl Program {
    /// The name of its file.
    pub fn name(&self) -> &'static str {
        match self {
            Program::FileServer { .. } => "fileserver",
            Program::Echo { .. } => "echo",
        }
    }

    /// The pool it serves.
    pub fn pool(&self) -> &'static str {
        match self {
            Program::FileServer { .. } => "files",
            Program::Echo { .. } => "echo",
        }
    }

    fn services(&self) -> Vec<Service> {
        match self {
            Program::FileServer { port, .. } => {
                vec![Service::new(self.pool(), Protocol::Tcp, *port)]
            }
            Program::Echo { port } => [Protocol::Tcp, Protocol::Udp]
                .map(|protocol| Service::new(self.pool(), protocol, *port))
                .into(),
        }
    }

    pub(super) fn arguments(&self, cluster: &Cluster) -> Vec<String> {
        let (Program::FileServer { port, .. } | Program::Echo { port }) = self;
        let addresses = [Family::V4, Family::V6]
            .map(|family| SocketAddr::new(cluster.service_address(family), *port).to_string());
        let at = |flag: &str| {
            addresses
                .clone()
                .map(|address| [flag.to_owned(), address])
                .into_iter()
        };
        let mut arguments: Vec<String> = at("--listen").flatten().collect();
        match self {
            Program::FileServer { rate_mbit, .. } => {
                arguments.extend(
                    rate_mbit
                        .iter()
                        .flat_map(|rate| ["--rate-mbit".into(), rate.to_string()]),
                );
            }
            Program::Echo { .. } => arguments.extend(at("--udp").flatten()),
        }
        arguments
    }
}
