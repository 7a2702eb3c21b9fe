//! Configuration of the daemon: one TOML file, read once at start.
//!
//! `docs/configuration.md` describes every key; `docs/holdfast.example.toml` is a complete file. The file is first
//! parsed into types of `sections` and then checked into the types here, in which a broken reference (an unknown node, two
//! services at one address) cannot be expressed. Every error names the file, the line, the key and the remedy.

mod check;
mod etcd_config;
mod sections;
#[cfg(test)]
mod tests;

pub(crate) use check::load_fraction;
pub use etcd_config::{EtcdConfig, EtcdEndpoint};

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_daemon::config::{ConfigError, ConfigFile, LogConfig, TlsConfig};
use holdfast_dns::{ConfiguredName, ZoneSettings};
use holdfast_proto::health::CheckKind;
use holdfast_wire::group_data::ServicePolicy;
use holdfast_wire::health_frames::ServiceEndpoint;
use holdfast_wire::membership_frames::{JoinRole, Member};
use holdfast_wire::{NodeId, Protocol};

/// Default port of the channel between nodes.
pub const DEFAULT_PORT: u16 = 7400;

/// Environment variable with the cgroup, used if `node.cgroup` is absent.
pub const CGROUP_VARIABLE: &str = "HOLDFAST_CGROUP";

/// A checked configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Name, addresses and directories of this node, from `[node]`.
    pub node: NodeConfig,
    /// Group of the node.
    pub group: GroupConfig,
    /// Certificate of the node, and the group's authority.
    pub tls: TlsConfig,
    /// Enrolment of new hosts at this node, if there is any.
    pub joining: Option<JoiningConfig>,
    /// The *other* nodes of the group, in the order of the file.
    pub peers: Vec<PeerConfig>,
    /// Services that the group offers: of the file, or in a group that runs itself of the group's settings.
    pub services: Vec<ServiceConfig>,
    /// Timing and buffers of the channel between nodes.
    pub channel: ChannelConfig,
    /// Users that may open the server programs' socket.
    pub app: AppSocketConfig,
    /// Processes that may move here and away.
    pub migration: MigrationConfig,
    /// Limits and rules for moves that the conductor decides on.
    pub balance: BalanceConfig,
    /// Answers to DNS queries, if this node gives any.
    pub dns: Option<DnsConfig>,
    /// Address for metrics over TCP, besides the control socket, if any.
    pub metrics_listen: Option<SocketAddr>,
    /// Format and filter of the log.
    pub log: LogConfig,
}

/// `[node]`: this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    /// Name of the node: lower-case letters, digits and hyphens, at most 40.
    pub name: String,
    /// Number of the node, unique in the group. In a group that runs itself, 0 until [`Config::join_group`].
    pub id: NodeId,
    /// Address of the channel between nodes.
    pub address: IpAddr,
    /// TCP port of the channel between nodes.
    pub port: u16,
    /// Network device on which clients' packets arrive.
    pub interface: String,
    /// Directory for files that survive a reboot.
    pub state_dir: PathBuf,
    /// Directory for sockets and the pid file; emptied by a reboot.
    pub run_dir: PathBuf,
    /// Directory of the check scripts that the group's settings may name.
    pub checks_dir: PathBuf,
    /// Directory (on a bpf file system) in which maps, programs and links are pinned.
    pub bpffs: PathBuf,
    /// Maximum number of flows that this node can own; determines the sizes of maps.
    pub capacity: u32,
    /// True if the daemon runs at real-time priority.
    pub realtime: bool,
    cgroup: Option<PathBuf>,
}

/// `[group]`: settings on which all nodes must agree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupConfig {
    /// Name of the group; a node of another group is refused.
    pub name: String,
    /// Way in which clients' packets reach the owner.
    pub reach: PacketRouting,
    /// Holder of the steering table (with `steer`: the contact node). In a group that runs itself, 0 until
    /// [`Config::join_group`].
    pub contact: NodeId,
    /// Program that a new and a former contact node run, for networks in which routes lead to the service addresses.
    pub on_contact: Option<PathBuf>,
    /// Settings of a node whose group runs itself; none if the group's nodes are configured.
    pub self_running: Option<SelfRunningGroupConfig>,
}

/// Settings of a node whose group runs itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelfRunningGroupConfig {
    /// Role in which the node joins.
    pub role: JoinRole,
    /// Addresses of daemons to ask for the contact node.
    pub seeds: Vec<SocketAddr>,
    /// The store of the group's views; none if the voters vote.
    pub store: Option<EtcdConfig>,
}

/// Way in which a client's packets reach the owner of its flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketRouting {
    /// The contact node forwards each flow to its owner.
    Steer,
    /// Every node receives every packet and accepts its own flows.
    Broadcast {
        /// Link address that the service addresses resolve to; never used as a source.
        shared_mac: [u8; 6],
    },
}

/// `[joining]`: enrolment of new hosts, and renewal of certificates, at this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoiningConfig {
    /// Directory of the group's authority (`holdfast ca`); none if certificates are signed elsewhere.
    pub authority: Option<PathBuf>,
    /// TCP port at which new hosts ask.
    pub port: u16,
    /// Validity of the certificates that this node signs, in days.
    pub days: u32,
}

/// `[[peer]]`: another node of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerConfig {
    /// Name of the peer, which its certificate must contain.
    pub name: String,
    /// Number of the peer.
    pub id: NodeId,
    /// Address of the peer's channel.
    pub address: SocketAddr,
}

/// `[[service]]`: one address that clients connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceConfig {
    /// Pool of the service; several services may share one.
    pub pool: String,
    /// Service address and port.
    pub address: SocketAddr,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Placement of new flows.
    pub placement: PlacementRule,
    /// Share of new flows for every node of the group (0: none); not all zero.
    pub weights: BTreeMap<NodeId, u32>,
    /// Default time that a handoff may wait for the send queue to empty; `None`: no wait.
    pub drain: Option<Duration>,
    /// Signs by which this node judges the service's server.
    pub check: CheckConfig,
    /// Pool policy by which the nodes share new flows.
    pub policy: ServicePolicy,
    /// Row of the service in this node's placement table.
    pub row: u16,
    /// True if the address was removed from its service: its flows go on until they end, and there are no new ones.
    pub is_ending: bool,
    /// Legs of the service, if it is replicated.
    pub replication: Option<ReplicationConfig>,
}

/// The replication of a service, from the group's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicationConfig {
    /// Node whose data plane replicates; none if it has left the group.
    pub replicator: Option<NodeId>,
    /// Nodes with a leg that are in the group, the primary first.
    pub legs: Vec<NodeId>,
    /// Number of wanted replicas beside the primary; 0: replication ends with the last connection.
    pub replicas: u8,
}

/// Signs by which a node judges a service's server, besides its listening sockets: `check` of a `[[service]]`, or the
/// checks in the group's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckConfig {
    /// True if the node connects to the server regularly.
    pub connect: bool,
    /// Program that tests the server, if any.
    pub script: Option<CheckScript>,
    /// Time between two checks.
    pub interval: Duration,
    /// Time limit of a check.
    pub timeout: Duration,
    /// Number of consecutive failed checks after which the server gets no new clients.
    pub fall: u32,
    /// Number of consecutive good checks after which the server gets new clients again.
    pub rise: u32,
    /// Time after which a server that takes no waiting client gets no new clients; `None`: never.
    pub stall_after: Option<Duration>,
}

/// A program that tests a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckScript {
    /// Path of the program.
    pub path: PathBuf,
    /// True if the group's settings name the program, and not this node's file: operators of other nodes chose it, so this
    /// node runs it only if nobody but root could have written it.
    pub is_named_by_group: bool,
}

impl CheckConfig {
    /// Returns the checks for which the node acts itself.
    pub fn kinds(&self) -> BTreeSet<CheckKind> {
        let connect = self.connect.then_some(CheckKind::Connect);
        let script = self.script.as_ref().map(|_| CheckKind::Script);
        connect.into_iter().chain(script).collect()
    }
}

impl Default for CheckConfig {
    fn default() -> CheckConfig {
        CheckConfig {
            connect: false,
            script: None,
            interval: Duration::from_secs(1),
            timeout: Duration::from_millis(500),
            fall: 2,
            rise: 2,
            stall_after: Some(Duration::from_millis(500)),
        }
    }
}

impl ServiceConfig {
    /// Returns the service's protocol and address.
    pub fn endpoint(&self) -> ServiceEndpoint {
        ServiceEndpoint {
            protocol: self.protocol,
            address: self.address,
        }
    }
}

/// Way in which the weighted table places a new flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlacementRule {
    /// By a hash of the client's address and port.
    Hash,
    /// By the client's port (paper 002, section V-B).
    Port,
}

/// `[channel]`: timing and buffers of the channel between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelConfig {
    /// Time between two pings to a peer.
    pub ping_interval: Duration,
    /// Silence after which a peer counts as lost; at least two ping intervals.
    pub dead_after: Duration,
    /// Silence after which the contact node gives a peer no new clients.
    pub silent_after: Duration,
    /// Maximum number of bytes that wait for one peer's socket before `send` refuses.
    pub queue_bytes: usize,
}

/// `[app]`: users that may open the server programs' socket.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AppSocketConfig {
    /// Group that owns the socket file (mode 0660); `None`: root's.
    pub group: Option<String>,
    /// If not empty, only these users and root are admitted; the file's mode then admits every user, and the daemon
    /// checks.
    pub allowed_uids: Vec<u32>,
}

/// `[migration]`: processes that may move here and away. None if not enabled.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MigrationConfig {
    /// True if this node takes part in migration; the daemon then keeps the necessary capabilities.
    pub enabled: bool,
    /// Users that restored processes may run as.
    pub users: BTreeSet<u32>,
    /// Groups that restored processes may belong to; any group if user 0 is allowed.
    pub groups: BTreeSet<u32>,
    /// Directories of programs that restored processes may run, including subdirectories.
    pub paths: Vec<PathBuf>,
    /// Directories of files that restored processes may have open although their users could not open them, including
    /// subdirectories.
    pub files: Vec<PathBuf>,
    /// Socket families that restored processes may use.
    pub families: BTreeSet<SocketFamily>,
    /// Privileged ports that sockets of restored processes may have, besides the ports of services.
    pub ports: BTreeSet<u16>,
}

/// `[balance]`: limits and rules for moves that the conductor decides on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BalanceConfig {
    /// Most moves from and to this node in any minute, drains aside.
    pub moves_per_minute: usize,
    /// Rules, at most one for each name of a process.
    pub rules: Vec<BalanceRule>,
}

/// `[[balance.rule]]`: which processes stay, and which run together or apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BalanceRule {
    /// Name of the processes (`comm`).
    pub process: String,
    /// True if the processes stay at their node, also when the node is drained.
    pub is_pinned: bool,
    /// Label of processes that stay together.
    pub together: Option<String>,
    /// Label of processes of which no two run at one node.
    pub apart: Option<String>,
}

/// `[dns]`: the node answers DNS queries for the names of its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsConfig {
    /// Addresses at which queries arrive, by UDP and TCP.
    pub listen: Vec<SocketAddr>,
    /// The zone and its name servers.
    pub zone: ZoneSettings,
    /// Maximum number of answers by UDP per second to the clients of one network.
    pub responses_per_s: u32,
    /// Names besides the names of the group's services.
    pub names: Vec<ConfiguredName>,
}

/// A family of sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SocketFamily {
    /// TCP and UDP over IPv4.
    Ipv4,
    /// TCP and UDP over IPv6, including IPv4-mapped addresses.
    Ipv6,
    /// Unix sockets, including sockets between processes that move together.
    Unix,
    /// Netlink.
    Netlink,
}

impl SocketFamily {
    /// All families.
    pub const ALL: [SocketFamily; 4] = [
        SocketFamily::Ipv4,
        SocketFamily::Ipv6,
        SocketFamily::Unix,
        SocketFamily::Netlink,
    ];
}

impl std::fmt::Display for SocketFamily {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SocketFamily::Ipv4 => "ipv4",
            SocketFamily::Ipv6 => "ipv6",
            SocketFamily::Unix => "unix",
            SocketFamily::Netlink => "netlink",
        })
    }
}

impl Config {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, has an unknown or missing key, or contradicts itself.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let what_to_do =
            "name an existing file with --config; docs/holdfast.example.toml is a start";
        let text = ConfigFile::read(path, what_to_do)?;
        Config::parse(path, &text)
    }

    /// Checks `text` as if it were the content of `path`; relative paths in it are relative to the directory of `path`.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(path: &Path, text: &str) -> Result<Config, ConfigError> {
        let file = ConfigFile::new(path, text);
        check::ConfigChecker::new(file).config(file.parse()?)
    }

    /// Returns the number of the node called `name`; may be this node.
    pub fn id_of(&self, name: &str) -> Option<NodeId> {
        self.nodes()
            .find(|(_, known)| *known == name)
            .map(|(id, _)| id)
    }

    /// Returns the name of node `id`; may be this node.
    pub fn name_of(&self, id: NodeId) -> Option<&str> {
        self.nodes()
            .find(|(known, _)| *known == id)
            .map(|(_, name)| name)
    }

    /// Returns number and name of every node of the group: this one first, then the others in the order of the file.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &str)> {
        let this_node = (self.node.id, self.node.name.as_str());
        std::iter::once(this_node)
            .chain(self.peers.iter().map(|peer| (peer.id, peer.name.as_str())))
    }

    /// Returns address and number of every node of the group.
    pub fn addresses(&self) -> impl Iterator<Item = (IpAddr, NodeId)> {
        let this_node = (self.node.address, self.node.id);
        let peers = self.peers.iter();
        std::iter::once(this_node).chain(peers.map(|peer| (peer.address.ip(), peer.id)))
    }

    /// Enters what a group that runs itself has told this node: its number, the contact node, and all members.
    pub fn join_group(&mut self, own: NodeId, contact: NodeId, members: &[Member]) {
        self.node.id = own;
        self.group.contact = contact;
        let others = members.iter().filter(|member| member.id != own);
        self.peers = others
            .map(|member| PeerConfig {
                name: member.name.to_string(),
                id: member.id,
                address: member.address,
            })
            .collect();
    }

    /// Returns the path of the control API's Unix socket.
    pub fn control_socket(&self) -> PathBuf {
        self.node.run_dir.join("control.sock")
    }

    /// Returns the path of the server programs' Unix socket.
    pub fn app_socket(&self) -> PathBuf {
        self.node.run_dir.join("app.sock")
    }

    /// Returns the directory of join tokens and of revocation lists that other nodes sent.
    pub fn credentials_dir(&self) -> PathBuf {
        self.node.state_dir.join("credentials")
    }

    /// Returns the path of the file with the daemon's process id.
    pub fn pid_file(&self) -> PathBuf {
        self.node.run_dir.join("holdfastd.pid")
    }
}

impl NodeConfig {
    /// Returns the cgroup whose sockets are watched: `node.cgroup`, else the environment's `HOLDFAST_CGROUP`, else the
    /// root of the cgroup2 hierarchy in `/proc/mounts`.
    ///
    /// # Errors
    /// None of the three exists.
    pub fn cgroup(&self) -> Result<PathBuf, ConfigError> {
        if let Some(path) = &self.cgroup {
            return Ok(path.clone());
        }
        if let Some(path) = std::env::var_os(CGROUP_VARIABLE).filter(|value| !value.is_empty()) {
            return Ok(path.into());
        }
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
        cgroup2_root(&mounts).ok_or_else(|| {
            ConfigError::for_file(
                Path::new("/proc/mounts"),
                "no cgroup2 file system is mounted".to_owned(),
                "mount one (mount -t cgroup2 none DIR), or set node.cgroup or HOLDFAST_CGROUP",
            )
        })
    }
}

/// Returns the mount point of the first cgroup2 file system in the text of `/proc/mounts`, in which spaces separate
/// fields and `\040` stands for a space.
fn cgroup2_root(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let point = fields.nth(1)?;
        (fields.next()? == "cgroup2").then(|| PathBuf::from(point.replace("\\040", " ")))
    })
}
