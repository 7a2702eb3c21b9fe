//! ASAP over TCP and TLS beside SCTP, where it is configured.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use holdfast_sys::transport::{Endpoint, Joined, Rules, Security, StreamConfig, Streams};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::asap::{Refusals, rules};
use crate::config::registrar::RegistrarConfig;
use crate::start::{StartError, failed};

/// Longest message from an element or a user: several times what a registration may have.
const MESSAGE_LEN_MAX: usize = 16 * 1024;
/// Descriptors that are not connections.
const OTHER_DESCRIPTORS: usize = 256;

/// What there is to tell of TCP and TLS.
#[derive(Default)]
pub(super) struct StreamsSeen {
    /// Where they are spoken: without TLS, and with.
    pub(super) at: (Vec<SocketAddr>, Vec<SocketAddr>),
    /// Connections that were not let in.
    pub(super) refusals: Refusals,
}

/// The endpoint of elements and users, with TCP and TLS if the configuration has them.
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

/// How many connections there may be descriptors for, of those that are wanted: each has one.
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
