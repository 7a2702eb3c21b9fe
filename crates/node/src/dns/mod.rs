//! Answers to DNS queries: sockets, and connection checks of addresses outside the group. `holdfast_dns` makes the answers.
//!
//! The server has a thread of its own without privileges, so that no query delays the engine. The engine tells the server
//! through a [`DnsFeed`] which service addresses serve.

mod listen;
mod remote_checks;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use holdfast_dns::{
    ConfiguredName, GroupService, PublishedName, QueryTransport, Random, Responder, ResponseLimit,
    published_names,
};
use holdfast_sys::caps::keep_only_capabilities;
use tokio::sync::watch;
use tokio::task::{LocalSet, spawn_local};

use self::listen::{TcpConnections, serve_tcp, serve_udp};
use self::remote_checks::RemoteChecks;
use crate::config::DnsConfig;
use crate::metrics::Metrics;

/// The services of the group; none before the engine knows them.
type KnownServices = Option<Vec<GroupService>>;

/// Tells the server which service addresses serve. The server ends with the feed.
#[derive(Debug)]
pub struct DnsFeed {
    services: watch::Sender<KnownServices>,
}

impl DnsFeed {
    /// Replaces the services of the group.
    pub fn publish(&self, services: Vec<GroupService>) {
        self.services.send_if_modified(|known| {
            let is_changed = known.as_ref() != Some(&services);
            if is_changed {
                *known = Some(services);
            }
            is_changed
        });
    }
}

/// The DNS sockets of one address.
struct Sockets {
    udp: UdpSocket,
    tcp: TcpListener,
}

impl Sockets {
    fn bind(address: SocketAddr) -> io::Result<Sockets> {
        let udp = UdpSocket::bind(address)?;
        let tcp = TcpListener::bind(udp.local_addr()?)?;
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        Ok(Sockets { udp, tcp })
    }
}

/// Starts the server. Returns the addresses at which it answers, too.
///
/// # Errors
/// An address cannot be used, or there is no memory for a thread.
pub fn start(config: &DnsConfig, metrics: Metrics) -> io::Result<(DnsFeed, Vec<SocketAddr>)> {
    let bind = |address: &SocketAddr| {
        Sockets::bind(*address)
            .map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))
    };
    let sockets = config
        .listen
        .iter()
        .map(bind)
        .collect::<io::Result<Vec<_>>>()?;
    let addresses = sockets.iter().map(|sockets| sockets.udp.local_addr());
    let addresses = addresses.collect::<io::Result<Vec<_>>>()?;
    let (services, known) = watch::channel(None);
    let config = config.clone();
    std::thread::Builder::new()
        .name("dns".to_owned())
        .spawn(move || {
            // The sockets are bound: from here on strangers' bytes are read.
            if let Err(error) = keep_only_capabilities(&[]) {
                tracing::warn!(%error, "the DNS server keeps capabilities that it does not need");
            }
            if let Err(error) = run(sockets, &config, metrics, known) {
                tracing::error!(%error, "the DNS server has ended; restart the daemon");
            }
        })?;
    Ok((DnsFeed { services }, addresses))
}

fn run(
    sockets: Vec<Sockets>,
    config: &DnsConfig,
    metrics: Metrics,
    known: watch::Receiver<KnownServices>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    LocalSet::new().block_on(&runtime, async {
        let server = Rc::new(Server::new(config, metrics));
        for Sockets { udp, tcp } in sockets {
            let udp = tokio::net::UdpSocket::from_std(udp)?;
            let tcp = tokio::net::TcpListener::from_std(tcp)?;
            spawn_local(serve_udp(udp, server.clone()));
            spawn_local(serve_tcp(tcp, server.clone()));
        }
        follow_services(&server, &config.names, known).await;
        Ok(())
    })
}

/// State of the server, shared by the tasks of its thread.
struct Server {
    responder: RefCell<Responder>,
    connections: RefCell<TcpConnections>,
    metrics: Metrics,
    started: Instant,
}

impl Server {
    fn new(config: &DnsConfig, metrics: Metrics) -> Server {
        // Each state has random keys of its own.
        let seed = || RandomState::new().hash_one(());
        let limit = ResponseLimit::new(config.responses_per_s, seed());
        let responder = Responder::new(config.zone.clone(), limit, Random::new(seed()));
        Server {
            responder: RefCell::new(responder),
            connections: RefCell::default(),
            metrics,
            started: Instant::now(),
        }
    }

    /// Returns the answer to a query, if the client gets one.
    fn answer(&self, client: IpAddr, transport: QueryTransport, query: &[u8]) -> Option<Vec<u8>> {
        let now = self.started.elapsed();
        let mut responder = self.responder.borrow_mut();
        let response = responder.handle_query(now, client, transport, query)?;
        self.metrics
            .count_dns_query(response.name.as_ref(), response.outcome);
        response.bytes
    }
}

/// Follows the engine and the checks until the feed ends.
async fn follow_services(
    server: &Server,
    names: &[ConfiguredName],
    mut known: watch::Receiver<KnownServices>,
) {
    let checks = RemoteChecks::start(names);
    let mut serial = 0;
    let mut published: Option<Vec<PublishedName>> = None;
    loop {
        let services = known.borrow_and_update().clone();
        if let Some(services) = services {
            checks.leave_out(&services);
            let next = published_names(names, &services, |protocol, address| {
                checks.is_alive(protocol, address)
            });
            if published.as_ref() != Some(&next) {
                log_changes(published.as_deref().unwrap_or_default(), &next);
                serial = next_serial(serial);
                server
                    .responder
                    .borrow_mut()
                    .set_names(serial, next.clone());
                published = Some(next);
            }
        }
        tokio::select! {
            changed = known.changed() => if changed.is_err() {
                return;
            },
            () = checks.changed() => {}
        }
    }
}

/// Returns a serial number that is greater than the one before, also after a restart: the time in seconds.
fn next_serial(before: u32) -> u32 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    // Serial numbers wrap around (RFC 1982).
    let now_s = now.unwrap_or(Duration::ZERO).as_secs() as u32;
    match now_s.wrapping_sub(before) {
        0 => before.wrapping_add(1),
        ahead if ahead < 1 << 31 => now_s,
        _ => before.wrapping_add(1),
    }
}

fn log_changes(before: &[PublishedName], now: &[PublishedName]) {
    for name in now {
        let former = before.iter().find(|former| former.owner == name.owner);
        let former = former.map_or(&[][..], |former| &former.endpoints);
        for endpoint in &name.endpoints {
            let was = former
                .iter()
                .find(|other| other.address == endpoint.address);
            if was.map(|was| was.serves) == Some(endpoint.serves) {
                continue;
            }
            let (name, address) = (&name.owner, endpoint.address);
            match endpoint.serves {
                true => tracing::info!(%name, %address, "DNS answers have this address"),
                false => {
                    tracing::warn!(%name, %address, "DNS answers lack an address that does not serve")
                }
            }
        }
    }
}
