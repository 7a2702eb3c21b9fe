//! Start-up: from the configuration to a registrar with open endpoints.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use holdfast_proto::registrar::{Config as MachineConfig, Protocol, Registrar};
use holdfast_sys::caps::keep_only;
use holdfast_sys::confine::confine;
use holdfast_sys::transport::{self, Config as EndpointConfig, ENCAPSULATION_PORT, Endpoint};
use holdfast_wire::rserpool::{RegistrarId, Transport};

use super::backlog::Backlog;
use super::control::Server;
use super::event_loop::Daemon;
use super::links::Links;
use super::pace::Pace;
use super::streams;
use crate::asap::security;
use crate::config::registrar::RegistrarConfig;
use crate::mailbox::mailbox;
use crate::multicast::Groups;
use crate::sctp::{data_transport, reached_at};
use crate::start::{StartError, failed};

/// Runs a registrar until a signal stops it.
///
/// # Errors
/// The registrar cannot start, or the transport's sockets became unusable.
pub fn run(config: &RegistrarConfig) -> Result<(), StartError> {
    let (to, requests) = mailbox().map_err(failed("an event descriptor"))?;
    let server = Server::bind(config, &to).map_err(failed("the control socket"))?;
    let groups = join(config).map_err(failed("[multicast]"))?;
    let security = security(config.streams.tls.as_ref()).map_err(failed("[tls]"))?;
    let asap = open(config, config.asap_port)?;
    let (asap, streams) = streams::join(config, asap, security)?;
    let enrp = open(config, config.enrp_port)?;
    // All sockets are open. Dropped before other threads start, so that these have no capabilities either.
    keep_only(&[]).map_err(failed("dropping capabilities"))?;
    if !confine().map_err(failed("giving up system calls"))? {
        tracing::warn!("this kernel has no seccomp filters: system calls are not restricted");
    }
    let at = |endpoint: &dyn Endpoint| {
        reached_at(endpoint).map_err(failed("the transport's addresses (registrar.listen)"))
    };
    let (asap_at, enrp_at) = (at(asap.as_ref())?, at(enrp.as_ref())?);
    let otherwise = (!asap.is_raw()).then_some(ENCAPSULATION_PORT);
    let machine = machine_config(config, &asap_at, &enrp_at);
    tracing::info!(
        id = %machine.id,
        asap = ?asap_at,
        enrp = ?enrp_at,
        tcp = ?streams.at.0,
        tls = ?streams.at.1,
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
        backlog: Backlog::new(config.update_delay, config.one_send),
        pace: Pace::new(config.pause),
        requests,
        streams,
        sends_refused: 0,
        next_round_trips: Duration::ZERO,
        events: Vec::new(),
    };
    // The socket file is removed when this value is dropped.
    let _path = server.run().map_err(failed("the control thread"))?;
    daemon.run().map_err(failed("the transport"))
}

fn open(config: &RegistrarConfig, port: u16) -> Result<Box<dyn Endpoint>, StartError> {
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
    let what = || {
        format!(
            "SCTP at {:?}, port {port} (registrar.listen)",
            config.listen
        )
    };
    transport::open(&endpoint).map_err(|source| failed(what())(source))
}

/// Joins the multicast groups that the configuration uses.
fn join(config: &RegistrarConfig) -> io::Result<Groups<Protocol>> {
    let (groups, settings) = (&config.multicast, &config.settings);
    let mut wanted = Vec::new();
    if settings.announce_cycle.is_some() {
        wanted.push((Protocol::Asap, groups.asap_group));
    }
    if settings.enrp_multicast {
        wanted.push((Protocol::Enrp, groups.enrp_group));
    }
    Groups::join(&wanted, &groups.interfaces)
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
    machine.announced = vec![Transport::Sctp(data_transport(asap))];
    machine.settings = config.settings.clone();
    machine
}
