//! `[tcp]` and `[tls]`: ASAP over TCP, with and without TLS.

use std::path::Path;
use std::time::Duration;

use holdfast_daemon::config::{ConfigError, TlsConfig, TlsConfigSection};
use holdfast_proto::registrar::OperationPermissions;
use holdfast_sctp::TcpLimits;
use serde::Deserialize;

use crate::asap_over_tcp::{HANDSHAKE_TIMEOUT, MESSAGE_TIMEOUT, TLS_PORT};
use crate::config::optional_keys::{set_if_present, set_ms};

/// ASAP over TCP and TLS; off unless configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AsapTcpConfig {
    /// Port without TLS, if enabled; 0 lets the system choose.
    pub tcp_port: Option<u16>,
    /// Port with TLS, if there are certificates; 0 lets the system choose.
    pub tls_port: u16,
    /// Certificates for ASAP over TLS.
    pub tls: Option<TlsConfig>,
    /// Limits for remote hosts.
    pub limits: TcpLimits,
    /// Time limit for establishing a connection.
    pub handshake_timeout: Duration,
    /// Time limit for a message from its first byte to its last, and for a peer to receive data that is sent to it.
    pub message_timeout: Duration,
}

impl Default for AsapTcpConfig {
    fn default() -> AsapTcpConfig {
        AsapTcpConfig {
            tcp_port: None,
            tls_port: TLS_PORT,
            tls: None,
            limits: TcpLimits {
                connections: 10_000,
                connections_per_host: 1_000,
                handshakes_per_host: 50,
            },
            handshake_timeout: HANDSHAKE_TIMEOUT,
            message_timeout: MESSAGE_TIMEOUT,
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TcpConfigSection {
    port: Option<u16>,
    tls_port: Option<u16>,
    connections: Option<usize>,
    connections_per_host: Option<usize>,
    handshakes_per_host: Option<usize>,
    handshake_ms: Option<u64>,
    message_ms: Option<u64>,
}

impl TcpConfigSection {
    pub(super) fn apply(
        self,
        tls: Option<TlsConfigSection>,
        path: &Path,
        config: &mut AsapTcpConfig,
    ) {
        config.tcp_port = self.port;
        set_if_present(&mut config.tls_port, self.tls_port);
        config.tls = tls.map(|tls| tls.resolve_paths(path));
        let limits = &mut config.limits;
        set_if_present(&mut limits.connections, self.connections);
        set_if_present(&mut limits.connections_per_host, self.connections_per_host);
        set_if_present(&mut limits.handshakes_per_host, self.handshakes_per_host);
        set_ms(&mut config.handshake_timeout, self.handshake_ms);
        set_ms(&mut config.message_timeout, self.message_ms);
    }
}

impl AsapTcpConfig {
    /// Returns true if a transport other than SCTP is enabled.
    pub fn is_on(&self) -> bool {
        self.tcp_port.is_some() || self.tls.is_some()
    }

    pub(super) fn check(
        &self,
        access: &OperationPermissions,
        path: &Path,
    ) -> Result<(), ConfigError> {
        let fail =
            |problem: &str, advice| Err(ConfigError::for_file(path, problem.to_owned(), advice));
        if access.registrar.requires_certificates() {
            let advice = "registrars speak SCTP with each other, which has no TLS: list addresses";
            return fail("access.registrar names certificates", advice);
        }
        let asks =
            access.register.requires_certificates() || access.resolve.requires_certificates();
        if asks && self.tls.is_none() {
            let advice = "give [tls] ca, cert and key, or list addresses";
            return fail("[access] names certificates, but there is no TLS", advice);
        }
        let ports = (self.tcp_port, self.tls.as_ref().map(|_| self.tls_port));
        if ports.0 == ports.1 && ports.0.is_some_and(|port| port != 0) {
            return fail(
                "tcp.port and tcp.tls_port are the same",
                "use 3863 and 3864",
            );
        }
        let zero = Duration::ZERO;
        if self.handshake_timeout == zero || self.message_timeout == zero {
            return fail(
                "tcp.handshake_ms or tcp.message_ms is 0",
                "allow some seconds",
            );
        }
        Ok(())
    }
}
