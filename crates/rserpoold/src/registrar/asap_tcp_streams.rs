//! ASAP over TCP and TLS besides SCTP, if configured.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use holdfast_sctp::{
    ConnectionRules, SctpAndTcpEndpoint, TcpTransport, TcpTransportConfig, TlsSecurity,
    TransportEndpoint,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::asap_over_tcp::{FailedConnections, framing_rules};
use crate::config::registrar::RegistrarConfig;
use crate::start_error::{StartError, start_error};

/// Maximum length of a message from an element or user: several times the size of a registration.
const MESSAGE_LEN_MAX: usize = 16 * 1024;
/// Number of descriptors reserved for other uses than connections.
const OTHER_DESCRIPTORS: usize = 256;

/// State of TCP and TLS for the operator.
#[derive(Default)]
pub(super) struct StreamsStatus {
    /// Listening addresses: without TLS, and with TLS.
    pub(super) addresses: (Vec<SocketAddr>, Vec<SocketAddr>),
    /// Connections that were refused or failed.
    pub(super) failed_connections: FailedConnections,
}

/// Returns the endpoint for elements and users, with TCP and TLS if configured.
///
/// # Errors
/// An address cannot be listened at.
pub(super) fn add_streams(
    config: &RegistrarConfig,
    sctp: Box<dyn TransportEndpoint>,
    security: Option<Arc<dyn TlsSecurity>>,
) -> Result<(Box<dyn TransportEndpoint>, StreamsStatus), StartError> {
    let streams = &config.streams;
    if !streams.is_on() {
        return Ok((sctp, StreamsStatus::default()));
    }
    let addresses_at = |port: u16| {
        let each = config.listen.iter();
        each.map(move |address: &IpAddr| SocketAddr::new(*address, port))
    };
    let mut limits = streams.limits;
    limits.connections = limits
        .connections
        .min(connections_allowed(limits.connections));
    let endpoint = TcpTransportConfig {
        tcp: streams
            .tcp_port
            .into_iter()
            .flat_map(addresses_at)
            .collect(),
        tls: streams
            .tls
            .iter()
            .flat_map(|_| addresses_at(streams.tls_port))
            .collect(),
        source: None,
        rules: ConnectionRules {
            handshake_timeout: streams.handshake_timeout,
            message_timeout: streams.message_timeout,
            ..framing_rules(MESSAGE_LEN_MAX, security)
        },
        limits,
        failure: config.failure,
    };
    let streams =
        TcpTransport::open(endpoint).map_err(start_error("TCP ([tcp], registrar.listen)"))?;
    let status = StreamsStatus {
        addresses: streams.listen_addresses(),
        ..StreamsStatus::default()
    };
    let joined =
        SctpAndTcpEndpoint::new(sctp, streams).map_err(start_error("an event descriptor"))?;
    Ok((Box::new(joined), status))
}

/// Returns the number of connections for which the limit of open files suffices, after raising the limit if possible.
fn connections_allowed(connections: usize) -> usize {
    let descriptors_needed = connections.saturating_add(OTHER_DESCRIPTORS) as u64;
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return connections;
    };
    let limit_reached = soft.max(descriptors_needed.min(hard));
    if limit_reached > soft && setrlimit(Resource::RLIMIT_NOFILE, limit_reached, hard).is_err() {
        return usize::try_from(soft).map_or(connections, |soft| soft / 2);
    }
    if limit_reached < descriptors_needed {
        tracing::warn!(
            hard,
            descriptors_needed,
            "fewer TCP connections are possible than configured: raise the limit of open files (LimitNOFILE)"
        );
    }
    usize::try_from(limit_reached).map_or(connections, |limit_reached| {
        limit_reached
            .saturating_sub(OTHER_DESCRIPTORS)
            .max(limit_reached / 2)
    })
}
