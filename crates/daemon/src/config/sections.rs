//! Sections that the files of several daemons have.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// PEM files of a member of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsConfig {
    /// Certificate of the group's authority.
    pub ca: PathBuf,
    /// Certificate of this member (and intermediates, if any).
    pub cert: PathBuf,
    /// Private key of this member.
    pub key: PathBuf,
    /// Revocation list of the authority.
    pub crl: Option<PathBuf>,
}

/// `[tls]` as written: paths may be relative to the configuration file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfigSection {
    ca: PathBuf,
    cert: PathBuf,
    key: PathBuf,
    crl: Option<PathBuf>,
}

impl TlsConfigSection {
    /// Returns the files, with relative paths resolved against the directory of the configuration file `path`.
    pub fn resolve_paths(self, path: &Path) -> TlsConfig {
        let resolve = |file: PathBuf| path.parent().unwrap_or(Path::new("")).join(file);
        TlsConfig {
            ca: resolve(self.ca),
            cert: resolve(self.cert),
            key: resolve(self.key),
            crl: self.crl.map(resolve),
        }
    }
}

/// Format and filter of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// Text for people, JSON for machines.
    pub format: LogFormat,
    /// A `tracing` filter, such as `info` or `info,holdfast_node::peer_channel=debug`, or `holdfast_rserpoold::registrar=debug`.
    pub filter: String,
}

impl Default for LogConfig {
    fn default() -> LogConfig {
        LogConfig {
            format: LogFormat::default(),
            filter: "info".to_owned(),
        }
    }
}

/// Format of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One readable line.
    #[default]
    Text,
    /// One JSON object.
    Json,
}

/// `[log]` as written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogConfigSection {
    #[serde(default)]
    format: LogFormat,
    filter: Option<String>,
}

impl LogConfigSection {
    /// Returns the section with its defaults.
    pub fn into_config(self) -> LogConfig {
        LogConfig {
            format: self.format,
            filter: self.filter.unwrap_or(LogConfig::default().filter),
        }
    }
}

/// `[metrics]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetricsConfigSection {
    /// Address for metrics over TCP, besides the control socket, if any.
    pub listen: Option<SocketAddr>,
}
