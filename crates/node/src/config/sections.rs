//! The node's file as written: optional keys, with spans for error positions.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use holdfast_daemon::config::{LogSection, MetricsSection, TlsSection};
use serde::Deserialize;
use toml::Spanned;

use super::SocketFamily;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeFile {
    pub node: NodeSection,
    pub group: GroupSection,
    pub tls: TlsSection,
    #[serde(default)]
    pub peer: Vec<PeerSection>,
    #[serde(default)]
    pub service: Vec<ServiceSection>,
    #[serde(default)]
    pub channel: ChannelSection,
    #[serde(default)]
    pub app: AppSection,
    #[serde(default)]
    pub migration: MigrationSection,
    #[serde(default)]
    pub metrics: MetricsSection,
    #[serde(default)]
    pub log: LogSection,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeSection {
    pub name: Spanned<String>,
    pub id: Option<Spanned<u16>>,
    pub address: Option<Spanned<IpAddr>>,
    pub port: Option<Spanned<u16>>,
    pub interface: Spanned<String>,
    pub state_dir: Option<PathBuf>,
    pub run_dir: Option<PathBuf>,
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
pub(super) struct GroupSection {
    pub name: Spanned<String>,
    pub reach: Spanned<ReachKey>,
    pub contact: Spanned<String>,
    pub shared_mac: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PeerSection {
    pub name: Spanned<String>,
    pub id: Option<Spanned<u16>>,
    pub address: Spanned<IpAddr>,
    pub port: Option<Spanned<u16>>,
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
pub(super) struct ServiceSection {
    pub name: Spanned<String>,
    pub address: Spanned<IpAddr>,
    pub port: Spanned<u16>,
    pub protocol: ProtocolSetting,
    #[serde(default)]
    pub placement: PlacementSetting,
    #[serde(default)]
    pub weights: BTreeMap<String, Spanned<u32>>,
    pub drain_ms: Option<Spanned<u64>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct ChannelSection {
    pub ping_interval_ms: Option<Spanned<u64>>,
    pub dead_after_ms: Option<Spanned<u64>>,
    pub queue_mib: Option<Spanned<u32>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct AppSection {
    pub group: Option<String>,
    #[serde(default)]
    pub allowed_uids: Vec<u32>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct MigrationSection {
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
