//! The daemon's configuration: one TOML file, read once at start.
//!
//! `docs/configuration.md` describes every key, `docs/holdfast.example.toml` is a complete file. The file is parsed
//! into `raw` shapes first and then checked into the types here, in which a broken reference (an unknown node, two
//! services on one address) cannot be written. Every error names the file, the line, the key and what to do.

mod check;
mod error;
pub mod pool;
mod raw;
pub mod registrar;
#[cfg(test)]
mod tests;

pub use error::ConfigError;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_wire::{NodeId, Protocol};

/// The port of the channel between nodes where none is configured.
pub const DEFAULT_PORT: u16 = 7400;

/// The environment variable that names the cgroup when `node.cgroup` is absent.
pub const CGROUP_VARIABLE: &str = "HOLDFAST_CGROUP";

/// A checked configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// This node.
    pub node: NodeConfig,
    /// The group it belongs to.
    pub group: GroupConfig,
    /// Its certificate and the group's authority.
    pub tls: TlsConfig,
    /// Every *other* node of the group, in the order of the file.
    pub peers: Vec<Peer>,
    /// The services the group answers for.
    pub services: Vec<Service>,
    /// Timing and buffers of the channel between nodes.
    pub channel: ChannelConfig,
    /// Who may open the server programs' socket.
    pub app: AppConfig,
    /// Which processes may come and go.
    pub migration: MigrationConfig,
    /// Where metrics are served over TCP besides the control socket, if anywhere.
    pub metrics_listen: Option<SocketAddr>,
    /// Form and filter of the log.
    pub log: LogConfig,
}

/// `[node]`: this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    /// Its name: lower-case letters, digits and hyphens, at most 40.
    pub name: String,
    /// Its number, unique in the group.
    pub id: NodeId,
    /// Its address for the channel between nodes.
    pub address: IpAddr,
    /// Its TCP port for that channel.
    pub port: u16,
    /// The network device that clients' packets arrive on.
    pub interface: String,
    /// Files that survive a reboot.
    pub state_dir: PathBuf,
    /// Sockets and the pid file; emptied by a reboot.
    pub run_dir: PathBuf,
    /// Where maps, programs and links are pinned (on a bpf file system).
    pub bpffs: PathBuf,
    /// The most flows this node can own at once; maps are sized by it.
    pub capacity: u32,
    /// Whether the daemon runs ahead of ordinary programs.
    pub realtime: bool,
    cgroup: Option<PathBuf>,
}

/// `[group]`: what all nodes must agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupConfig {
    /// The group's name; a node of another group is refused.
    pub name: String,
    /// How clients' packets get to the owner.
    pub reach: Reach,
    /// The holder of the steering table (with `steer`: the contact node).
    pub contact: NodeId,
}

/// How a client's packets get to the owner of its flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// The contact node forwards each flow to its owner.
    Steer,
    /// Every node receives every packet and accepts its own flows.
    Broadcast {
        /// The link address that the service addresses resolve to; never a source.
        shared_mac: [u8; 6],
    },
}

/// `[tls]`: PEM files. Relative paths are relative to the configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsConfig {
    /// The group's authority.
    pub ca: PathBuf,
    /// This node's certificate (and intermediates, if any).
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority's revocation list.
    pub crl: Option<PathBuf>,
}

/// `[[peer]]`: another node of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its name, which its certificate must bear.
    pub name: String,
    /// Its number.
    pub id: NodeId,
    /// Where its channel listens.
    pub address: SocketAddr,
}

/// `[[service]]`: one address that clients connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// The pool it belongs to; several services may share one.
    pub pool: String,
    /// The service address and port.
    pub address: SocketAddr,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// How the owner of a new flow is found.
    pub placement: Placement,
    /// Share of new flows for every node of the group (0: none); not all zero.
    pub weights: BTreeMap<NodeId, u32>,
    /// How long a handoff may wait for the send queue to empty, where the request does not say; `None`: not at all.
    pub drain: Option<Duration>,
}

/// How the owner of a new flow is found in the weighted table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
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
    /// Bytes that may wait for one peer's socket before `send` refuses.
    pub queue_bytes: usize,
}

/// `[app]`: who may open the server programs' socket.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AppConfig {
    /// The group that owns the socket file (mode 0660); `None`: root's.
    pub group: Option<String>,
    /// If not empty, only these users and root; the file's mode then admits everyone and the daemon checks.
    pub allowed_uids: Vec<u32>,
}

/// `[migration]`: which processes may come and go. Where it is not enabled, none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MigrationConfig {
    /// Whether this node takes part at all; the daemon then keeps the capabilities that it takes.
    pub enabled: bool,
    /// Processes that come may run as these users.
    pub users: BTreeSet<u32>,
    /// They may belong to these groups; with user 0 among the users to any.
    pub groups: BTreeSet<u32>,
    /// They may run programs in these directories, or below them.
    pub paths: Vec<PathBuf>,
    /// They may have open what is in these directories, or below them, though their users could not open it.
    pub files: Vec<PathBuf>,
    /// They may have sockets of these families.
    pub families: BTreeSet<SocketFamily>,
    /// They may have sockets at these ports, though only root may bind them; at those of services they may anyway.
    pub ports: BTreeSet<u16>,
}

/// A family of sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SocketFamily {
    /// TCP and UDP over IPv4.
    Ipv4,
    /// The same over IPv6, also with addresses of IPv4.
    Ipv6,
    /// Unix sockets, also those between processes that come together.
    Unix,
    /// Netlink.
    Netlink,
}

impl SocketFamily {
    /// Every family.
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

/// `[log]`: form and filter of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// Text for people, JSON for machines.
    pub format: LogFormat,
    /// A `tracing` filter, such as `info` or `info,holdfast_node::channel=debug`.
    pub filter: String,
}

/// The form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One readable line.
    #[default]
    Text,
    /// One JSON object.
    Json,
}

/// What to do where a file that need not be there is named and cannot be read.
const IF_NONE_IS_NEEDED: &str =
    "name an existing file with --config, or leave that out: every key has a default";

/// The text of a configuration file.
fn read(path: &Path, what_to_do: &str) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|error| {
        ConfigError::whole_file(path, format!("cannot be read: {error}"), what_to_do)
    })
}

impl Config {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, has an unknown or missing key, or contradicts itself.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let text = read(
            path,
            "name an existing file with --config; docs/holdfast.example.toml is a start",
        )?;
        Config::parse(path, &text)
    }

    /// Checks `text` as if it were the content of `path`; relative paths in it are relative to the directory of `path`.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(path: &Path, text: &str) -> Result<Config, ConfigError> {
        let raw: raw::Raw =
            toml::from_str(text).map_err(|error| ConfigError::from_toml(path, text, &error))?;
        check::Check::new(path, text).config(raw)
    }

    /// The number of the node called `name`, this one included.
    pub fn id_of(&self, name: &str) -> Option<NodeId> {
        self.nodes()
            .find(|(_, known)| *known == name)
            .map(|(id, _)| id)
    }

    /// The name of node `id`, this one included.
    pub fn name_of(&self, id: NodeId) -> Option<&str> {
        self.nodes()
            .find(|(known, _)| *known == id)
            .map(|(_, name)| name)
    }

    /// Number and name of every node of the group: this one first, then the others in the order of the file.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &str)> {
        let own = (self.node.id, self.node.name.as_str());
        std::iter::once(own).chain(self.peers.iter().map(|peer| (peer.id, peer.name.as_str())))
    }

    /// Address and number of every node of the group.
    pub fn addresses(&self) -> impl Iterator<Item = (IpAddr, NodeId)> {
        let own = (self.node.address, self.node.id);
        let peers = self.peers.iter();
        std::iter::once(own).chain(peers.map(|peer| (peer.address.ip(), peer.id)))
    }

    /// Whether this node holds the steering table.
    pub fn is_holder(&self) -> bool {
        self.group.contact == self.node.id
    }

    /// The Unix socket of the control API.
    pub fn control_socket(&self) -> PathBuf {
        self.node.run_dir.join("control.sock")
    }

    /// The Unix socket of server programs.
    pub fn app_socket(&self) -> PathBuf {
        self.node.run_dir.join("app.sock")
    }

    /// The file that holds the daemon's process id.
    pub fn pid_file(&self) -> PathBuf {
        self.node.run_dir.join("holdfastd.pid")
    }
}

impl NodeConfig {
    /// The cgroup whose sockets are watched: `node.cgroup`, else the environment's `HOLDFAST_CGROUP`, else the root of
    /// the cgroup2 hierarchy that `/proc/mounts` names.
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
            ConfigError::whole_file(
                Path::new("/proc/mounts"),
                "no cgroup2 file system is mounted".to_owned(),
                "mount one (mount -t cgroup2 none DIR), or set node.cgroup or HOLDFAST_CGROUP",
            )
        })
    }
}

/// The mount point of the first cgroup2 file system in the text of `/proc/mounts`, whose fields are separated by spaces
/// and whose own spaces are written `\040`.
fn cgroup2_root(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let point = fields.nth(1)?;
        (fields.next()? == "cgroup2").then(|| PathBuf::from(point.replace("\\040", " ")))
    })
}
