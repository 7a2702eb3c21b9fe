//! ASAP over TCP and TLS (RFC 5352 section 2.1; ports of RFC 5352 section 8 and RFC 5356's registry), for registrars and pool daemons.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use holdfast_sys::transport::{Rules, Security};
use holdfast_wire::rserpool::{asap, message_length};

use crate::config::TlsConfig;
use crate::limit::LogLimit;
use crate::tls::Tls;

/// asap-tcp-tls.
pub(crate) const TLS_PORT: u16 = 3864;

/// How long it may take until a connection is up, where nobody says.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long a message may take, where nobody says.
pub(crate) const MESSAGE: Duration = Duration::from_secs(10);

/// Bytes that may wait to be sent on a connection.
const SEND_BUFFER: usize = 1 << 20;

/// What keeps messages apart, for messages of at most so many bytes.
pub(crate) fn rules(message_len_max: usize, security: Option<Arc<dyn Security>>) -> Rules {
    Rules {
        ppid: asap::PPID,
        length_of,
        message_len_max,
        send_buffer: SEND_BUFFER,
        handshake: HANDSHAKE,
        message: MESSAGE,
        security,
    }
}

/// The length field of the message's header, and the padding that it does not count.
fn length_of(bytes: &[u8]) -> io::Result<Option<usize>> {
    message_length(bytes).map_err(|_| {
        let text = "a length that is shorter than a header";
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

/// TLS as the configuration has it, if it has any.
///
/// # Errors
/// As [`Tls::of_member`].
pub(crate) fn security(config: Option<&TlsConfig>) -> io::Result<Option<Arc<dyn Security>>> {
    let tls = config.map(Tls::of_member).transpose();
    let tls = tls.map_err(io::Error::other)?;
    Ok(tls.map(|tls| Arc::new(tls) as Arc<dyn Security>))
}

/// Connections that were not let in or did not come up: how many, and some of them in the log.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    count: u64,
    log: LogLimit,
}

impl Refusals {
    /// One more.
    pub(crate) fn tell(&mut self, remote: SocketAddr, why: &str) {
        self.count += 1;
        if self.log.admits() {
            tracing::warn!(%remote, why, "no connection over TCP");
        }
    }

    /// How many there were.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }
}
