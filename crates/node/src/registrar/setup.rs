//! Start-up: from the configuration to a registrar whose endpoints are open.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_proto::registrar::{Config as MachineConfig, Registrar};
use holdfast_sys::caps::keep_only;
use holdfast_sys::transport::{self, Config as EndpointConfig, ENCAPSULATION_PORT, Endpoint};
use holdfast_wire::rserpool::{Addresses, RegistrarId, SctpTransport, Transport, TransportUse};
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::mpsc;

use super::control::{Loop, Server, WAITING_MAX};
use super::event_loop::Daemon;
use super::links::Links;
use super::multicast::Groups;
use crate::config::registrar::RegistrarConfig;

/// The registrar cannot start, or cannot go on.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct StartError {
    what: String,
    source: io::Error,
}

fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> StartError {
    let what = what.into();
    move |source| StartError { what, source }
}

/// Runs a registrar until a signal says stop.
///
/// # Errors
/// It cannot start, or the transport's sockets became unusable.
pub fn run(config: &RegistrarConfig) -> Result<(), StartError> {
    let (requests, waiting) = mpsc::channel(WAITING_MAX);
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let wake = EventFd::from_value_and_flags(0, flags);
    let wake = Arc::new(wake.map_err(|error| failed("an event descriptor")(error.into()))?);
    let to = Loop {
        requests,
        wake: wake.clone(),
    };
    let server = Server::bind(config, &to).map_err(failed("the control socket"))?;
    let groups = Groups::join(config).map_err(failed("[multicast]"))?;
    let asap = open(config, config.asap_port, true)?;
    // Updates that follow each other closely share packets.
    let enrp = open(config, config.enrp_port, false)?;
    // All sockets are open. Threads that start later have no capabilities either.
    keep_only(&[]).map_err(failed("dropping capabilities"))?;
    let (asap_at, enrp_at) = (reached_at(asap.as_ref())?, reached_at(enrp.as_ref())?);
    let otherwise = (!asap.is_raw()).then_some(ENCAPSULATION_PORT);
    let machine = machine_config(config, &asap_at, &enrp_at);
    tracing::info!(
        id = %machine.id,
        asap = ?asap_at,
        enrp = ?enrp_at,
        raw = asap.is_raw(),
        encapsulation_port = asap.encapsulation_port(),
        "starting"
    );
    let mut daemon = Daemon {
        machine: Registrar::new(Duration::ZERO, machine),
        started: Instant::now(),
        remote_encapsulation: config.remote_encapsulation.or(otherwise),
        asap,
        enrp,
        groups,
        links: Links::default(),
        encapsulations: config.encapsulations(),
        one_send: config.one_send,
        pause: config.pause,
        heard: 0,
        requests: waiting,
        wake,
        sends_refused: 0,
        next_round_trips: Duration::ZERO,
        events: Vec::new(),
        receivers: Vec::new(),
    };
    // Its file goes with it.
    let _path = server.run().map_err(failed("the control thread"))?;
    daemon.run().map_err(failed("the transport"))
}

fn open(
    config: &RegistrarConfig,
    port: u16,
    no_delay: bool,
) -> Result<Box<dyn Endpoint>, StartError> {
    let at = |address: &IpAddr| SocketAddr::new(*address, port);
    let endpoint = EndpointConfig {
        raw: config.raw,
        encapsulation: config.encapsulation,
        failure: config.failure,
        path_mtu: config.path_mtu,
        no_delay,
        ..EndpointConfig::new(config.listen.iter().map(at).collect())
    };
    let what = || {
        format!(
            "SCTP at {:?}, port {port} (registrar.listen)",
            config.listen
        )
    };
    transport::open(&endpoint).map_err(|source| failed(what())(source))
}

/// Where others reach an endpoint: on loopback only if it has no other address.
fn reached_at(endpoint: &dyn Endpoint) -> Result<Vec<SocketAddr>, StartError> {
    let mut addresses = endpoint
        .local_addresses()
        .map_err(failed("the transport's addresses"))?;
    if addresses.iter().any(|address| !address.ip().is_loopback()) {
        addresses.retain(|address| !address.ip().is_loopback());
    }
    if addresses.is_empty() {
        let error = io::ErrorKind::AddrNotAvailable.into();
        return Err(failed("this host has no address (registrar.listen)")(error));
    }
    Ok(addresses)
}

fn machine_config(
    config: &RegistrarConfig,
    asap: &[SocketAddr],
    enrp: &[SocketAddr],
) -> MachineConfig {
    let id = config
        .id
        .unwrap_or_else(|| rand::random_range(1..=u32::MAX));
    let transport = sctp(enrp);
    let mut machine = MachineConfig::new(RegistrarId(id), rand::random(), transport);
    let mentors = config.peers.iter().map(|peer| peer.addresses.clone());
    machine.mentors = mentors.collect();
    machine.announced = vec![Transport::Sctp(sctp(asap))];
    machine.settings = config.settings.clone();
    machine
}

fn sctp(addresses: &[SocketAddr]) -> SctpTransport {
    let port = addresses.first().map_or(0, SocketAddr::port);
    SctpTransport {
        port,
        usage: TransportUse::DataOnly,
        addresses: addresses.iter().map(SocketAddr::ip).collect::<Addresses>(),
    }
}
