//! Start-up: from the configuration to a pool daemon with an open endpoint.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Instant;

use holdfast_daemon::service_manager;
use holdfast_daemon::socket_path::is_in_use;
use holdfast_daemon::start_check::{AddressUse, StartCheck};
use holdfast_proto::pool_user::PoolUserConfig as UserConfig;
use holdfast_sctp::{
    self, ENCAPSULATION_PORT, SctpAndTcpEndpoint, SctpProvider, TcpLimits, TcpTransport,
    TcpTransportConfig, TransportConfig as EndpointConfig, TransportEndpoint, provider,
};
use holdfast_sys::caps::keep_only_capabilities;
use holdfast_sys::syscall_confinement::confine;
use holdfast_wire::rserpool::LENGTH_MAX;
use tokio::runtime::Handle;

use super::api_server::PoolApiServer;
use super::endpoints::PoolEndpoints;
use super::event_loop::PoolEventLoop;
use super::hosted_elements::{HostedElements, hunt_config};
use super::links::LinkTable;
use super::machine_timers::MachineTimers;
use super::pool_users::PoolUsers;
use super::probes::Probes;
use super::program_roles::PoolPrograms;
use super::requests::PoolRequest;
use super::session_streams::SessionStreams;
use super::unconfirmed_callers::UnconfirmedCallers;
use crate::asap_over_tcp::{framing_rules, tls_security};
use crate::config::pool::{PoolConfig, UdpEncapsulation};
use crate::mailbox::{Inbox, Mailbox, mailbox};
use crate::multicast::MulticastGroups;
use crate::start_error::{StartError, start_error};

/// Examines the conditions of a start, while the pool daemon runs or not. Changes nothing.
pub fn examine_start(config: &PoolConfig) -> StartCheck {
    let mut check = StartCheck::default();
    let address_use = match is_in_use(&config.control_socket()) {
        true => AddressUse::RunningDaemon,
        false => AddressUse::Free,
    };
    check.directory("pool.run_dir", &config.run_dir);
    for socket in [config.control_socket(), config.program_socket()] {
        check.socket(&socket, address_use);
    }
    if let Some(tls) = &config.tls {
        check.certificates(tls, None);
    }
    for address in &config.listen {
        check.local_address("pool.listen", *address);
    }
    check
}

/// Runs a pool daemon until a signal stops it, or with `with_parent` until its standard input ends.
///
/// # Errors
/// The daemon cannot start, or the transport's sockets became unusable.
pub fn run(config: &PoolConfig, with_parent: bool) -> Result<(), StartError> {
    let (to_self, requests) = mailbox().map_err(start_error("an event descriptor"))?;
    let endpoint = add_streams(config, open_endpoint(config)?)?;
    let announce_groups = [((), config.announces.group)];
    let groups_to_join = &announce_groups[..usize::from(config.announces.trusted)];
    let groups = MulticastGroups::join(groups_to_join, &config.announces.interfaces)
        .map_err(start_error("[multicast]"))?;
    let server =
        PoolApiServer::bind(config, &to_self, with_parent).map_err(start_error("the sockets"))?;
    // Dropped before other threads start, so that these have no capabilities either.
    keep_only_capabilities(&[]).map_err(start_error("dropping capabilities"))?;
    if !confine().map_err(start_error("restricting system calls"))? {
        tracing::warn!("this kernel has no seccomp filters: system calls are not restricted");
    }
    // The socket files are removed when this value is dropped.
    let (_paths, tasks) = server.run().map_err(start_error("the control thread"))?;
    tracing::info!(
        registrars = ?config.known_registrars().iter().map(ToString::to_string).collect::<Vec<_>>(),
        announces = config.announces.trusted,
        raw = endpoint.is_raw(),
        encapsulation_port = endpoint.encapsulation_port(),
        "starting"
    );
    let mut daemon = PoolEventLoop::new(config, endpoint, groups, (to_self, requests), tasks);
    service_manager::report_ready();
    let ended = daemon.run();
    service_manager::report_stopping();
    // A daemon that has served may be started again: the kind of the error, which may be that of a firewall, is left out.
    ended.map_err(|error| start_error("the transport")(io::Error::other(error)))
}

impl PoolEventLoop {
    /// Creates a daemon without programs; `mail` is its mailbox.
    pub(super) fn new(
        config: &PoolConfig,
        own_endpoint: Box<dyn TransportEndpoint>,
        groups: MulticastGroups<()>,
        (to_self, requests): (Mailbox<PoolRequest>, Inbox<PoolRequest>),
        tasks: Handle,
    ) -> PoolEventLoop {
        let user = UserConfig::new(hunt_config(config), rand::random());
        PoolEventLoop {
            config: config.clone(),
            started: Instant::now(),
            endpoints: PoolEndpoints::new(own_endpoint),
            groups,
            requests,
            users: PoolUsers::new(user),
            elements: HostedElements::default(),
            programs: PoolPrograms::default(),
            links: LinkTable::default(),
            pending_callers: UnconfirmedCallers::default(),
            probes: Probes::default(),
            streams: SessionStreams::new(to_self, tasks),
            inputs: VecDeque::new(),
            timers: MachineTimers::default(),
            stop_deadline: None,
            events: Vec::new(),
        }
    }
}

fn open_endpoint(config: &PoolConfig) -> Result<Box<dyn TransportEndpoint>, StartError> {
    let local = config
        .listen
        .iter()
        .map(|address| SocketAddr::new(*address, config.port));
    let endpoint = EndpointConfig {
        raw: config.raw,
        encapsulation: local_encapsulation(config),
        failure: config.failure,
        path_mtu: config.path_mtu,
        ..EndpointConfig::new(local.collect())
    };
    let operation = || format!("SCTP at {:?} (pool.listen)", endpoint.local);
    holdfast_sctp::open(&endpoint).map_err(|error| start_error(operation())(error))
}

/// Adds registrars over TCP and TLS to the endpoint, if configured.
fn add_streams(
    config: &PoolConfig,
    sctp: Box<dyn TransportEndpoint>,
) -> Result<Box<dyn TransportEndpoint>, StartError> {
    if config.registrars.iter().all(|at| at.transport.is_none()) {
        return Ok(sctp);
    }
    let security = tls_security(config.tls.as_ref()).map_err(start_error("[tls]"))?;
    let endpoint = TcpTransportConfig {
        tcp: Vec::new(),
        tls: Vec::new(),
        source: config.listen.first().copied(),
        rules: framing_rules(LENGTH_MAX, security),
        limits: TcpLimits {
            connections: 0,
            connections_per_host: 0,
            handshakes_per_host: 0,
        },
        failure: config.failure,
    };
    let streams = TcpTransport::open(endpoint).map_err(start_error("TCP"))?;
    let joined =
        SctpAndTcpEndpoint::new(sctp, streams).map_err(start_error("an event descriptor"))?;
    Ok(Box::new(joined))
}

fn local_encapsulation(config: &PoolConfig) -> Option<u16> {
    match config.encapsulation {
        UdpEncapsulation::Off => None,
        UdpEncapsulation::Port(port) => Some(port),
        UdpEncapsulation::Standard if provider() == SctpProvider::Kernel => None,
        UdpEncapsulation::Standard => {
            let any: IpAddr = match config.listen.first() {
                Some(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
                _ => Ipv4Addr::UNSPECIFIED.into(),
            };
            let is_free = UdpSocket::bind((any, ENCAPSULATION_PORT)).is_ok();
            Some(if is_free { ENCAPSULATION_PORT } else { 0 })
        }
    }
}
