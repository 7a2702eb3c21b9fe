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
pub(super) struct RawNodeConfig {
    pub node: RawNode,
    pub group: RawGroup,
    pub tls: TlsSection,
    #[serde(default)]
    pub peer: Vec<RawPeer>,
    #[serde(default)]
    pub service: Vec<RawService>,
    #[serde(default)]
    pub channel: RawChannel,
    #[serde(default)]
    pub app: RawApp,
    #[serde(default)]
    pub migration: RawMigration,
    #[serde(default)]
    pub metrics: MetricsSection,
    #[serde(default)]
    pub log: LogSection,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawNode {
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
pub(super) enum RawReach {
    Steer,
    Broadcast,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawGroup {
    pub name: Spanned<String>,
    pub reach: Spanned<RawReach>,
    pub contact: Spanned<String>,
    pub shared_mac: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPeer {
    pub name: Spanned<String>,
    pub id: Option<Spanned<u16>>,
    pub address: Spanned<IpAddr>,
    pub port: Option<Spanned<u16>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum RawProtocol {
    Tcp,
    Udp,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub(super) enum RawPlacement {
    #[default]
    Hash,
    Port,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawService {
    pub name: Spanned<String>,
    pub address: Spanned<IpAddr>,
    pub port: Spanned<u16>,
    pub protocol: RawProtocol,
    #[serde(default)]
    pub placement: RawPlacement,
    #[serde(default)]
    pub weights: BTreeMap<String, Spanned<u32>>,
    pub drain_ms: Option<Spanned<u64>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct RawChannel {
    pub ping_interval_ms: Option<Spanned<u64>>,
    pub dead_after_ms: Option<Spanned<u64>>,
    pub queue_mib: Option<Spanned<u32>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct RawApp {
    pub group: Option<String>,
    #[serde(default)]
    pub allowed_uids: Vec<u32>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct RawMigration {
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
