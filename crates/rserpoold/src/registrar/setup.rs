//! Start-up: from the configuration to a registrar with open endpoints.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use holdfast_daemon::service_manager;
use holdfast_daemon::socket_path::is_in_use;
use holdfast_daemon::start_check::{AddressUse, StartCheck};
use holdfast_proto::registrar::{PoolProtocol, Registrar, RegistrarMachineConfig as MachineConfig};
use holdfast_sctp::{
    self, ENCAPSULATION_PORT, TransportConfig as EndpointConfig, TransportEndpoint,
};
use holdfast_sys::caps::keep_only_capabilities;
use holdfast_sys::syscall_confinement::confine;
use holdfast_wire::rserpool::{RegistrarId, Transport};

use super::adaptive_batch_delay::AdaptiveBatchDelay;
use super::asap_tcp_streams;
use super::associations::AssociationTable;
use super::backlog::Backlog;
use super::control::RegistrarApiServer;
use super::event_loop::RegistrarEventLoop;
use crate::asap_over_tcp::tls_security;
use crate::config::registrar::RegistrarConfig;
use crate::mailbox::mailbox;
use crate::multicast::MulticastGroups;
use crate::sctp_addresses::{data_transport, reachable_addresses};
use crate::start_error::{StartError, start_error};

/// Examines the conditions of a start, while the registrar runs or not. Changes nothing.
pub fn examine_start(config: &RegistrarConfig) -> StartCheck {
    let mut check = StartCheck::default();
    let socket = config.control_socket();
    let address_use = match is_in_use(&socket) {
        true => AddressUse::RunningDaemon,
        false => AddressUse::Free,
    };
    check.directory("registrar.run_dir", &config.run_dir);
    check.socket(&socket, address_use);
    if let Some(tls) = &config.streams.tls {
        check.certificates(tls, None);
    }
    let tls_port = (config.streams.tls.is_some()).then_some(config.streams.tls_port);
    for address in &config.listen {
        check.local_address("registrar.listen", *address);
        for (setting, port) in [
            ("tcp.port", config.streams.tcp_port),
            ("tcp.tls_port", tls_port),
        ] {
            if let Some(port) = port {
                check.tcp_address(setting, SocketAddr::new(*address, port), address_use);
            }
        }
    }
    if let Some(address) = config.metrics_listen {
        check.tcp_address("metrics.listen", address, address_use);
    }
    check
}

/// Runs a registrar until a signal stops it.
///
/// # Errors
/// The registrar cannot start, or the transport's sockets became unusable.
pub fn run(config: &RegistrarConfig) -> Result<(), StartError> {
    let (mailbox, requests) = mailbox().map_err(start_error("an event descriptor"))?;
    let server =
        RegistrarApiServer::bind(config, &mailbox).map_err(start_error("the control socket"))?;
    let groups = join_groups(config).map_err(start_error("[multicast]"))?;
    let security = tls_security(config.streams.tls.as_ref()).map_err(start_error("[tls]"))?;
    let asap = open_endpoint(config, config.asap_port)?;
    let (asap, streams) = asap_tcp_streams::add_streams(config, asap, security)?;
    let enrp = open_endpoint(config, config.enrp_port)?;
    // All sockets are open. Dropped before other threads start, so that these have no capabilities either.
    keep_only_capabilities(&[]).map_err(start_error("dropping capabilities"))?;
    if !confine().map_err(start_error("restricting system calls"))? {
        tracing::warn!("this kernel has no seccomp filters: system calls are not restricted");
    }
    let local_addresses = |endpoint: &dyn TransportEndpoint| {
        reachable_addresses(endpoint)
            .map_err(start_error("the transport's addresses (registrar.listen)"))
    };
    let (asap_addresses, enrp_addresses) = (
        local_addresses(asap.as_ref())?,
        local_addresses(enrp.as_ref())?,
    );
    let default_encapsulation_port = (!asap.is_raw()).then_some(ENCAPSULATION_PORT);
    let machine = machine_config(config, &asap_addresses, &enrp_addresses);
    tracing::info!(
        id = %machine.id,
        asap = ?asap_addresses,
        enrp = ?enrp_addresses,
        tcp = ?streams.addresses.0,
        tls = ?streams.addresses.1,
        raw = asap.is_raw(),
        encapsulation_port = asap.encapsulation_port(),
        "starting"
    );
    let mut daemon = RegistrarEventLoop {
        machine: Registrar::new(Duration::ZERO, machine),
        started: Instant::now(),
        remote_encapsulation: config.remote_encapsulation.or(default_encapsulation_port),
        asap,
        enrp,
        groups,
        links: AssociationTable::default(),
        encapsulations: config.encapsulations(),
        backlog: Backlog::new(config.update_delay, config.send_to_all_at_once),
        batch_delay: AdaptiveBatchDelay::new(config.batch_delay),
        requests,
        streams,
        sends_refused: 0,
        next_round_trip_check: Duration::ZERO,
        events: Vec::new(),
    };
    // The socket file is removed when this value is dropped.
    let _path = server.run().map_err(start_error("the control thread"))?;
    service_manager::report_ready();
    let ended = daemon.run();
    service_manager::report_stopping();
    // A daemon that has served may be started again: the kind of the error, which may be that of a firewall, is left out.
    ended.map_err(|error| start_error("the transport")(io::Error::other(error)))
}

fn open_endpoint(
    config: &RegistrarConfig,
    port: u16,
) -> Result<Box<dyn TransportEndpoint>, StartError> {
    let at = |address: &IpAddr| SocketAddr::new(*address, port);
    let endpoint = EndpointConfig {
        raw: config.raw,
        encapsulation: config.encapsulation,
        failure: config.failure,
        path_mtu: config.path_mtu,
        // Only the first stream is used here, regardless of the remote end.
        outbound_streams: 1,
        ..EndpointConfig::new(config.listen.iter().map(at).collect())
    };
    let operation = || {
        format!(
            "SCTP at {:?}, port {port} (registrar.listen)",
            config.listen
        )
    };
    holdfast_sctp::open(&endpoint).map_err(|source| start_error(operation())(source))
}

/// Joins the multicast groups that the configuration uses.
fn join_groups(config: &RegistrarConfig) -> io::Result<MulticastGroups<PoolProtocol>> {
    let (groups, settings) = (&config.multicast, &config.settings);
    let mut groups_wanted = Vec::new();
    if settings.announce_cycle.is_some() {
        groups_wanted.push((PoolProtocol::Asap, groups.asap_group));
    }
    if settings.enrp_multicast {
        groups_wanted.push((PoolProtocol::Enrp, groups.enrp_group));
    }
    MulticastGroups::join(&groups_wanted, &groups.interfaces)
}

fn machine_config(
    config: &RegistrarConfig,
    asap: &[SocketAddr],
    enrp: &[SocketAddr],
) -> MachineConfig {
    let id = config
        .id
        .unwrap_or_else(|| rand::random_range(1..=u32::MAX));
    let transport = data_transport(enrp);
    let mut machine = MachineConfig::new(RegistrarId(id), rand::random(), transport);
    let mentors = config.peers.iter().map(|peer| peer.addresses.clone());
    machine.mentors = mentors.collect();
    machine.announced_transports = vec![Transport::Sctp(data_transport(asap))];
    machine.settings = config.settings.clone();
    machine
}
