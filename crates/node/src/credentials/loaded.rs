//! The certificates and revocation lists that a node has in force.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use holdfast_daemon::tls::{RevocationLists, Tls, TlsError};

use crate::config::Config;
use crate::metrics::Metrics;

/// Certificates and revocation lists in force.
#[derive(Debug, Clone)]
pub struct LoadedCredentials {
    /// TLS with the other nodes.
    pub tls: Tls,
    /// The lists, and the authorities that may sign them.
    pub lists: RevocationLists,
}

impl LoadedCredentials {
    /// Reads the files of `[tls]`, and the lists that other nodes sent.
    ///
    /// # Errors
    /// A file is missing or damaged, or the files do not fit each other.
    pub fn load(config: &Config) -> Result<LoadedCredentials, TlsError> {
        let mut lists = RevocationLists::from_files(&config.tls)?;
        lists.add_saved(&lists_path(config))?;
        LoadedCredentials::with_lists(config, lists)
    }

    /// Reads the certificates, and combines them with these lists.
    ///
    /// # Errors
    /// As [`LoadedCredentials::load`].
    pub fn with_lists(
        config: &Config,
        lists: RevocationLists,
    ) -> Result<LoadedCredentials, TlsError> {
        let tls = Tls::with_lists(&config.tls, &config.node.name, &lists)?;
        Ok(LoadedCredentials { tls, lists })
    }

    /// Sets the metrics of certificates and revocation lists.
    pub fn record(&self, metrics: &Metrics) {
        metrics.set_certificate_end(self.tls.end());
        metrics.set_revoked_certificates(self.lists.lists().map(|list| list.revoked).sum());
    }

    /// Returns the remaining and the whole life of the node's certificate.
    pub fn certificate_life(&self) -> (Duration, Duration) {
        let (begin, end) = self.tls.own_validity();
        let left = end.duration_since(SystemTime::now()).unwrap_or_default();
        (left, end.duration_since(begin).unwrap_or_default())
    }
}

/// Returns the path of the lists that other nodes sent.
pub(super) fn lists_path(config: &Config) -> PathBuf {
    config.credentials_dir().join("revocations.der")
}
