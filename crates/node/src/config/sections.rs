//! The node's file as written: optional keys, with spans for error positions.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use holdfast_daemon::config::{LogConfigSection, MetricsConfigSection, TlsConfigSection};
use serde::Deserialize;
use toml::Spanned;

use super::SocketFamily;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeFile {
    pub node: NodeConfigSection,
    pub group: GroupConfigSection,
    pub tls: TlsConfigSection,
    pub joining: Option<JoiningConfigSection>,
    #[serde(default)]
    pub peer: Vec<PeerConfigSection>,
    #[serde(default)]
    pub service: Vec<ServiceConfigSection>,
    #[serde(default)]
    pub channel: ChannelConfigSection,
    #[serde(default)]
    pub app: AppConfigSection,
    #[serde(default)]
    pub migration: MigrationConfigSection,
    #[serde(default)]
    pub balance: BalanceConfigSection,
    #[serde(default)]
    pub metrics: MetricsConfigSection,
    pub dns: Option<DnsConfigSection>,
    pub etcd: Option<EtcdConfigSection>,
    #[serde(default)]
    pub log: LogConfigSection,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeConfigSection {
    pub name: Spanned<String>,
    pub id: Option<Spanned<u16>>,
    pub address: Option<Spanned<IpAddr>>,
    pub port: Option<Spanned<u16>>,
    pub interface: Spanned<String>,
    pub state_dir: Option<PathBuf>,
    pub run_dir: Option<PathBuf>,
    pub checks_dir: Option<PathBuf>,
    pub bpffs: Option<PathBuf>,
    pub cgroup: Option<PathBuf>,
    pub capacity: Option<Spanned<u32>>,
    pub realtime: Option<bool>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum ReachKey {
    Steer,
    Broadcast,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GroupConfigSection {
    pub name: Spanned<String>,
    pub reach: Spanned<ReachKey>,
    pub contact: Option<Spanned<String>>,
    pub on_contact: Option<Spanned<PathBuf>>,
    pub shared_mac: Option<Spanned<String>>,
    pub role: Option<Spanned<RoleKey>>,
    #[serde(default)]
    pub seeds: Vec<Spanned<String>>,
    pub store: Option<Spanned<StoreKey>>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum StoreKey {
    Voters,
    Etcd,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EtcdConfigSection {
    pub endpoints: Spanned<Vec<Spanned<String>>>,
    pub prefix: Option<Spanned<String>>,
    pub ca: Option<PathBuf>,
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
    pub user: Option<Spanned<String>>,
    pub password_file: Option<PathBuf>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum RoleKey {
    Backup,
    Server,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct JoiningConfigSection {
    pub authority: Option<PathBuf>,
    pub port: Option<Spanned<u16>>,
    pub days: Option<Spanned<u32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PeerConfigSection {
    pub name: Spanned<String>,
    pub id: Option<Spanned<u16>>,
    pub address: Spanned<IpAddr>,
    pub port: Option<Spanned<u16>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct BalanceConfigSection {
    pub moves_per_minute: Option<Spanned<usize>>,
    #[serde(default)]
    pub rule: Vec<BalanceRuleSection>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BalanceRuleSection {
    pub process: Spanned<String>,
    #[serde(default)]
    pub pinned: bool,
    pub together: Option<String>,
    pub apart: Option<String>,
}

/// Value of `protocol` of a service.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ProtocolSetting {
    Tcp,
    Udp,
}

/// Value of `placement` of a service.
#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub(super) enum PlacementSetting {
    #[default]
    Hash,
    Port,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ServiceConfigSection {
    pub name: Spanned<String>,
    pub address: Spanned<IpAddr>,
    pub port: Spanned<u16>,
    pub protocol: ProtocolSetting,
    #[serde(default)]
    pub placement: PlacementSetting,
    #[serde(default)]
    pub weights: BTreeMap<String, Spanned<u32>>,
    pub drain_ms: Option<Spanned<u64>>,
    #[serde(default)]
    pub check: CheckConfigSection,
    pub policy: Option<Spanned<String>>,
    pub load_degradation: Option<Spanned<f64>>,
    pub load_dpf: Option<Spanned<f64>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct CheckConfigSection {
    pub connect: Option<Spanned<bool>>,
    pub script: Option<Spanned<PathBuf>>,
    pub interval_ms: Option<Spanned<u64>>,
    pub timeout_ms: Option<Spanned<u64>>,
    pub fall: Option<Spanned<u32>>,
    pub rise: Option<Spanned<u32>>,
    pub stall_ms: Option<Spanned<u64>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct ChannelConfigSection {
    pub ping_interval_ms: Option<Spanned<u64>>,
    pub dead_after_ms: Option<Spanned<u64>>,
    pub silent_after_ms: Option<Spanned<u64>>,
    pub queue_mib: Option<Spanned<u32>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct AppConfigSection {
    pub group: Option<String>,
    #[serde(default)]
    pub allowed_uids: Vec<u32>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct MigrationConfigSection {
    #[serde(default)]
    pub enabled: bool,
    #[serde(default)]
    pub users: BTreeSet<u32>,
    #[serde(default)]
    pub groups: BTreeSet<u32>,
    #[serde(default)]
    pub paths: Vec<Spanned<PathBuf>>,
    #[serde(default)]
    pub files: Vec<Spanned<PathBuf>>,
    /// `None` means all families.
    pub families: Option<BTreeSet<SocketFamily>>,
    #[serde(default)]
    pub ports: BTreeSet<u16>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DnsConfigSection {
    #[serde(default)]
    pub listen: Vec<Spanned<SocketAddr>>,
    pub zone: Spanned<String>,
    pub ttl_s: Option<Spanned<u32>>,
    pub responses_per_s: Option<Spanned<u32>>,
    #[serde(default)]
    pub name_servers: BTreeMap<Spanned<String>, Vec<Spanned<IpAddr>>>,
    #[serde(default)]
    pub name: Vec<DnsNameConfigSection>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DnsNameConfigSection {
    pub name: Spanned<String>,
    pub service: Option<Spanned<String>>,
    #[serde(default)]
    pub protocol: DnsProtocolSetting,
    pub port: Spanned<u16>,
    pub policy: Option<DnsPolicySetting>,
    pub answers: Option<Spanned<usize>>,
    pub addresses: Vec<DnsAddressConfigSection>,
}

/// Value of `protocol` of a name.
#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub(super) enum DnsProtocolSetting {
    #[default]
    Tcp,
    Udp,
}

/// Value of `policy` of a name.
#[derive(Deserialize, Clone, Copy)]
pub(super) enum DnsPolicySetting {
    #[serde(rename = "RR")]
    RoundRobin,
    #[serde(rename = "WRAND")]
    WeightedRandom,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DnsAddressConfigSection {
    pub address: Spanned<IpAddr>,
    pub weight: Option<Spanned<u32>>,
}
