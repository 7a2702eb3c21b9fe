//! The node's file as written: optional keys, with spans for error positions.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use super::{LogFormat, SocketFamily, TlsConfig};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawNodeConfig {
    pub node: RawNode,
    pub group: RawGroup,
    pub tls: RawTls,
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
    pub metrics: RawMetrics,
    #[serde(default)]
    pub log: RawLog,
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
pub(super) struct RawTls {
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
    pub crl: Option<PathBuf>,
}

impl RawTls {
    /// Returns the files, with relative paths resolved against the directory of `path`.
    pub(super) fn resolve_paths(self, path: &Path) -> TlsConfig {
        let resolve = |file: PathBuf| path.parent().unwrap_or(Path::new("")).join(file);
        TlsConfig {
            ca: resolve(self.ca),
            cert: resolve(self.cert),
            key: resolve(self.key),
            crl: self.crl.map(resolve),
        }
    }
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

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct RawMetrics {
    pub listen: Option<SocketAddr>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLog {
    #[serde(default)]
    pub format: LogFormat,
    pub filter: Option<String>,
}
