//! ASAP over TCP and TLS (RFC 5352 section 2.1; ports of RFC 5352 section 8 and RFC 5356's registry), for registrars
//! and pool daemons.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use holdfast_daemon::config::TlsConfig;
use holdfast_daemon::log_limit::LogLimit;
use holdfast_daemon::tls::{Tls, node_name};
use holdfast_sctp::{ConnectionRules, TlsSecurity};
use holdfast_wire::rserpool::{asap, message_length};
use rustls::pki_types::CertificateDer;
use rustls::{ClientConnection, Error, ServerConnection};

/// Port asap-tcp-tls.
pub(crate) const TLS_PORT: u16 = 3864;

/// Default time limit for establishing a connection.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Default time limit for a message.
pub(crate) const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of bytes that wait to be sent on a connection.
const SEND_BUFFER_BYTES_MAX: usize = 1 << 20;

/// Returns the framing rules for messages of at most `message_len_max` bytes.
pub(crate) fn framing_rules(
    message_len_max: usize,
    security: Option<Arc<dyn TlsSecurity>>,
) -> ConnectionRules {
    ConnectionRules {
        ppid: asap::PPID,
        length_of: first_message_length,
        message_len_max,
        send_buffer: SEND_BUFFER_BYTES_MAX,
        handshake_timeout: HANDSHAKE_TIMEOUT,
        message_timeout: MESSAGE_TIMEOUT,
        security,
    }
}

/// Returns the length of the first message: the header's length field, plus the padding that the field excludes.
fn first_message_length(bytes: &[u8]) -> io::Result<Option<usize>> {
    message_length(bytes).map_err(|_| {
        let text = "the message's length field is shorter than its header";
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

/// Returns the TLS settings of the configuration, if any.
///
/// # Errors
/// As [`Tls::for_any_member`].
pub(crate) fn tls_security(config: Option<&TlsConfig>) -> io::Result<Option<Arc<dyn TlsSecurity>>> {
    let tls = config.map(Tls::for_any_member).transpose();
    let tls = tls.map_err(io::Error::other)?;
    Ok(tls.map(|tls| Arc::new(MemberTls(tls)) as Arc<dyn TlsSecurity>))
}

/// TLS with any member of the group.
#[derive(Debug)]
struct MemberTls(Tls);

impl TlsSecurity for MemberTls {
    fn client_session(&self) -> Result<ClientConnection, Error> {
        // The name is neither sent nor checked: `Tls::for_any_member` accepts the name in the certificate.
        self.0.dial("any")
    }

    fn server_session(&self) -> Result<ServerConnection, Error> {
        self.0.accept()
    }

    fn admitted_name(&self, chain: &[CertificateDer<'_>]) -> Result<String, String> {
        self.0.admits(chain).map_err(|error| error.to_string())?;
        let name = chain.first().and_then(node_name);
        name.ok_or_else(|| "the certificate names no member of the group".to_owned())
    }
}

/// Counter of TCP connections that were refused or failed; some of them are logged.
#[derive(Debug, Default)]
pub(crate) struct FailedConnections {
    count: u64,
    log_limit: LogLimit,
}

impl FailedConnections {
    /// Counts a TCP connection that was refused or failed, and logs the reason within the limit on lines.
    pub(crate) fn record(&mut self, remote: SocketAddr, reason: &str) {
        self.count += 1;
        if self.log_limit.admits() {
            tracing::warn!(%remote, reason, "a TCP connection was refused or failed");
        }
    }

    /// Returns the number of TCP connections that were refused or failed.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }
}
