//! Start-up: from the configuration to a pool daemon with an open endpoint.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Instant;

use holdfast_proto::pool_user::{Config as UserConfig, PoolUser};
use holdfast_sys::caps::keep_only;
use holdfast_sys::confine::confine;
use holdfast_sys::transport::{
    self, Config as EndpointConfig, ENCAPSULATION_PORT, Endpoint, Joined, Provider, StreamConfig,
    StreamLimits, Streams, provider,
};
use holdfast_wire::rserpool::LENGTH_MAX;
use tokio::runtime::Handle;

use super::callers::Callers;
use super::elements::hunt;
use super::event_loop::Daemon;
use super::links::Links;
use super::names::Names;
use super::probes::Probes;
use super::requests::Request;
use super::roles::Programs;
use super::server::Server;
use super::users::Users;
use crate::asap::{Refusals, rules, security};
use crate::config::pool::{Encapsulation, PoolConfig};
use crate::mailbox::{Inbox, Mailbox, mailbox};
use crate::multicast::Groups;
use crate::start::{StartError, failed};

/// Runs a pool daemon until a signal stops it, or with `with_parent` until its standard input ends.
///
/// # Errors
/// The daemon cannot start, or the transport's sockets became unusable.
pub fn run(config: &PoolConfig, with_parent: bool) -> Result<(), StartError> {
    let (to_self, requests) = mailbox().map_err(failed("an event descriptor"))?;
    let own = with_streams(config, open(config)?)?;
    let wanted = [((), config.announces.group)];
    let wanted = &wanted[..usize::from(config.announces.believed)];
    let groups =
        Groups::join(wanted, &config.announces.interfaces).map_err(failed("[multicast]"))?;
    let server = Server::bind(config, &to_self, with_parent).map_err(failed("the sockets"))?;
    // Dropped before other threads start, so that these have no capabilities either.
    keep_only(&[]).map_err(failed("dropping capabilities"))?;
    if !confine().map_err(failed("giving up system calls"))? {
        tracing::warn!("this kernel has no seccomp filters: system calls are not restricted");
    }
    // The socket files are removed when this value is dropped.
    let (_paths, tasks) = server.run().map_err(failed("the control thread"))?;
    tracing::info!(
        registrars = ?config.known_registrars().iter().map(ToString::to_string).collect::<Vec<_>>(),
        announces = config.announces.believed,
        raw = own.is_raw(),
        encapsulation_port = own.encapsulation_port(),
        "starting"
    );
    let mut daemon = Daemon::new(config, own, groups, (to_self, requests), tasks);
    daemon.run().map_err(failed("the transport"))
}

impl Daemon {
    /// Creates a daemon without programs; `mail` is its mailbox.
    pub(super) fn new(
        config: &PoolConfig,
        own: Box<dyn Endpoint>,
        groups: Groups<()>,
        (to_self, requests): (Mailbox<Request>, Inbox<Request>),
        tasks: Handle,
    ) -> Daemon {
        let user = UserConfig::new(hunt(config), rand::random());
        Daemon {
            config: config.clone(),
            started: Instant::now(),
            own,
            groups,
            requests,
            to_self,
            tasks,
            user: PoolUser::new(user),
            users: Users::default(),
            elements: BTreeMap::new(),
            names: Names::default(),
            services: HashSet::new(),
            programs: Programs::default(),
            links: Links::default(),
            callers: Callers::default(),
            probes: Probes::default(),
            streams: HashMap::new(),
            streams_made: 0,
            ways: HashMap::new(),
            inputs: VecDeque::new(),
            wakes: BTreeSet::new(),
            woken_at: HashMap::new(),
            stalled: BTreeSet::new(),
            ends_at: None,
            events: Vec::new(),
            refusals: Refusals::default(),
        }
    }
}

fn open(config: &PoolConfig) -> Result<Box<dyn Endpoint>, StartError> {
    let local = config
        .listen
        .iter()
        .map(|address| SocketAddr::new(*address, config.port));
    let endpoint = EndpointConfig {
        raw: config.raw,
        encapsulation: encapsulation(config),
        failure: config.failure,
        path_mtu: config.path_mtu,
        ..EndpointConfig::new(local.collect())
    };
    let what = || format!("SCTP at {:?} (pool.listen)", endpoint.local);
    transport::open(&endpoint).map_err(|error| failed(what())(error))
}

/// Adds registrars over TCP and TLS to the endpoint, if configured.
fn with_streams(
    config: &PoolConfig,
    sctp: Box<dyn Endpoint>,
) -> Result<Box<dyn Endpoint>, StartError> {
    if config.registrars.iter().all(|at| at.over.is_none()) {
        return Ok(sctp);
    }
    let security = security(config.tls.as_ref()).map_err(failed("[tls]"))?;
    let endpoint = StreamConfig {
        tcp: Vec::new(),
        tls: Vec::new(),
        source: config.listen.first().copied(),
        rules: rules(LENGTH_MAX, security),
        limits: StreamLimits {
            connections: 0,
            connections_per_host: 0,
            handshakes_per_host: 0,
        },
        failure: config.failure,
    };
    let streams = Streams::open(endpoint).map_err(failed("TCP"))?;
    let joined = Joined::new(sctp, streams).map_err(failed("an event descriptor"))?;
    Ok(Box::new(joined))
}

fn encapsulation(config: &PoolConfig) -> Option<u16> {
    match config.encapsulation {
        Encapsulation::Off => None,
        Encapsulation::Port(port) => Some(port),
        Encapsulation::Usual if provider() == Provider::Kernel => None,
        Encapsulation::Usual => {
            let any: IpAddr = match config.listen.first() {
                Some(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
                _ => Ipv4Addr::UNSPECIFIED.into(),
            };
            let is_free = UdpSocket::bind((any, ENCAPSULATION_PORT)).is_ok();
            Some(if is_free { ENCAPSULATION_PORT } else { 0 })
        }
    }
}
