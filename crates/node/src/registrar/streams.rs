//! ASAP over TCP and TLS besides SCTP, if configured.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use holdfast_sys::transport::{Endpoint, Joined, Rules, Security, StreamConfig, Streams};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::asap::{Refusals, rules};
use crate::config::registrar::RegistrarConfig;
use crate::start::{StartError, failed};

/// Maximum length of a message from an element or user: several times the size of a registration.
const MESSAGE_LEN_MAX: usize = 16 * 1024;
/// Number of descriptors reserved for other uses than connections.
const OTHER_DESCRIPTORS: usize = 256;

/// State of TCP and TLS for the operator.
#[derive(Default)]
pub(super) struct StreamsSeen {
    /// Listening addresses: without TLS, and with TLS.
    pub(super) at: (Vec<SocketAddr>, Vec<SocketAddr>),
    /// Connections that were refused.
    pub(super) refusals: Refusals,
}

/// Returns the endpoint for elements and users, with TCP and TLS if configured.
///
/// # Errors
/// An address cannot be listened at.
pub(super) fn join(
    config: &RegistrarConfig,
    sctp: Box<dyn Endpoint>,
    security: Option<Arc<dyn Security>>,
) -> Result<(Box<dyn Endpoint>, StreamsSeen), StartError> {
    let streams = &config.streams;
    if !streams.is_on() {
        return Ok((sctp, StreamsSeen::default()));
    }
    let at = |port: u16| {
        let each = config.listen.iter();
        each.map(move |address: &IpAddr| SocketAddr::new(*address, port))
    };
    let mut limits = streams.limits;
    limits.connections = limits.connections.min(room_for(limits.connections));
    let endpoint = StreamConfig {
        tcp: streams.tcp_port.into_iter().flat_map(at).collect(),
        tls: streams
            .tls
            .iter()
            .flat_map(|_| at(streams.tls_port))
            .collect(),
        source: None,
        rules: Rules {
            handshake: streams.handshake,
            message: streams.message,
            ..rules(MESSAGE_LEN_MAX, security)
        },
        limits,
        failure: config.failure,
    };
    let streams = Streams::open(endpoint).map_err(failed("TCP ([tcp], registrar.listen)"))?;
    let seen = StreamsSeen {
        at: streams.listens_at(),
        ..StreamsSeen::default()
    };
    let joined = Joined::new(sctp, streams).map_err(failed("an event descriptor"))?;
    Ok((Box::new(joined), seen))
}

/// Returns the number of connections for which the limit of open files suffices, after raising the limit if possible.
fn room_for(connections: usize) -> usize {
    let wanted = connections.saturating_add(OTHER_DESCRIPTORS) as u64;
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return connections;
    };
    let reached = soft.max(wanted.min(hard));
    if reached > soft && setrlimit(Resource::RLIMIT_NOFILE, reached, hard).is_err() {
        return usize::try_from(soft).map_or(connections, |soft| soft / 2);
    }
    if reached < wanted {
        tracing::warn!(
            hard,
            wanted,
            "fewer connections over TCP than configured: raise the limit of open files (LimitNOFILE)"
        );
    }
    usize::try_from(reached).map_or(connections, |reached| {
        reached.saturating_sub(OTHER_DESCRIPTORS).max(reached / 2)
    })
}
