//! `holdfast proxy`: joins the connections of a service to an unmodified server on this host.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use holdfast_api::control::{ControlClient, ServiceStatus, Status};
use holdfast_api::{Protocol, Session, app};
use holdfast_proxy::{Proxy, ProxyConfig, ProxyEvent, Totals, connections_max};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::ExitResult;
use crate::daemon_client::DaemonArgs;
use crate::output::output_line;

/// Interval at which the proxy asks the daemon for the service's addresses.
const ADDRESS_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Put an unmodified server of this host behind a service
///
/// The proxy accepts the connections that the group gives to this node, and joins each to the server by splice(2). It
/// follows the service's addresses while it runs. Its connections cannot be handed off to another node.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast proxy web --to 127.0.0.1:8080
  holdfast proxy web --to 127.0.0.1:8080 --proxy-protocol --drain 60
  holdfast proxy web --to 127.0.0.1:8080 --listen 10.0.0.80:80

SIGTERM and SIGINT end the proxy after its connections have ended; a second signal ends it at once.
Exit codes: 0 all connections ended, 1 the proxy cannot run or had to reset connections, 2 invalid arguments.")]
pub struct ProxyArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The service, by its name in the group; `holdfast status` lists the services
    service: String,
    /// Address of the server, usually on the loopback device
    #[arg(long, value_name = "ADDRESS:PORT")]
    to: SocketAddr,
    /// Begin each connection to the server with a PROXY protocol header (version 2), which has the client's address
    #[arg(long)]
    proxy_protocol: bool,
    /// Service address to listen at, instead of the ones that the daemon names to root; repeatable
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Vec<SocketAddr>,
    /// After SIGTERM: maximum time to wait for open connections
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    drain: u64,
    /// Maximum number of open connections; by default as many as the limit of open descriptors permits
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_connections: Option<u64>,
    /// The daemon's socket for server programs
    #[arg(long, value_name = "PATH", default_value = app::SOCKET_PATH)]
    app_socket: PathBuf,
    /// Print each event as a line of JSON
    #[arg(long)]
    json: bool,
}

/// Runs `holdfast proxy` until a signal ends it.
///
/// # Errors
/// There is no daemon or no such service, the proxy cannot listen at an address, or the limit of open descriptors is
/// too low.
pub fn run(args: &ProxyArgs) -> Result<ExitResult> {
    let config = ProxyConfig {
        to: args.to,
        sends_header: args.proxy_protocol,
        connections_max: connections_max(raise_descriptor_limit()?, args.max_connections)?,
    };
    let addresses = if args.listen.is_empty() {
        let client = args.daemon.client()?;
        let status = args.daemon.ask(&client, |client| client.status())?;
        service_addresses(&status, &args.service)?
    } else {
        args.listen.iter().copied().collect()
    };
    check_server_address(args.to, &addresses)?;
    let session = Session::connect(&args.app_socket)?;
    let runtime = runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.context("start the proxy's threads")?;
    let totals = runtime.block_on(run_proxy(args, config, session, addresses))?;
    Ok(match totals.cut {
        0 => ExitResult::Success,
        _ => ExitResult::Failed,
    })
}

async fn run_proxy(
    args: &ProxyArgs,
    config: ProxyConfig,
    session: Session,
    addresses: BTreeSet<SocketAddr>,
) -> Result<Totals> {
    let mut signals = EndSignals::new().context("wait for signals")?;
    let json = args.json;
    let mut proxy = Proxy::new(&session, &args.service, config, move |event| {
        print_event(&event, json)
    });
    for address in &addresses {
        proxy.listen(*address)?;
    }
    let (sender, mut receiver) = watch::channel(addresses);
    let follows_addresses = args.listen.is_empty();
    let client = follows_addresses.then(|| args.daemon.asynchronous_client());
    tokio::select! {
        never = proxy.serve(&mut receiver) => match never {},
        () = follow_daemon(client.as_ref(), &session, &args.service, &sender, json) => {}
        () = signals.recv() => {}
    }
    let give_up = async {
        tokio::select! {
            () = sleep(Duration::from_secs(args.drain)) => {}
            () = signals.recv() => {}
        }
    };
    Ok(proxy.drain(give_up).await)
}

/// The signals that end the proxy.
struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl EndSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn recv(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Reports when the session with the daemon breaks and returns; with a client, also lets the proxy's addresses follow
/// the service's. Never returns. While the daemon does not answer, the addresses stay.
async fn follow_daemon(
    client: Option<&ControlClient>,
    session: &Session,
    service: &str,
    addresses: &watch::Sender<BTreeSet<SocketAddr>>,
    json: bool,
) {
    let mut ticks = interval(ADDRESS_POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut was_open = session.is_open();
    loop {
        ticks.tick().await;
        let is_open = session.is_open();
        match (was_open, is_open) {
            (true, false) => print_event(&ProxyEvent::DaemonLost, json),
            (false, true) => print_event(&ProxyEvent::DaemonFound, json),
            _ => {}
        }
        was_open = is_open;
        if let Some(client) = client
            && let Ok(status) = client.status().await
        {
            addresses.send_replace(tcp_addresses(&status, service));
        }
    }
}

fn print_event(event: &ProxyEvent, json: bool) {
    match serde_json::to_string(event) {
        Ok(line) if json => output_line!("{line}"),
        _ => output_line!("{event}"),
    }
}

fn tcp_addresses(status: &Status, service: &str) -> BTreeSet<SocketAddr> {
    let is_wanted = |each: &&ServiceStatus| each.pool == service && each.protocol == Protocol::Tcp;
    let services = status.services.iter().filter(is_wanted);
    services.map(|each| each.address).collect()
}

/// Returns the TCP addresses of a service.
fn service_addresses(status: &Status, service: &str) -> Result<BTreeSet<SocketAddr>> {
    let addresses = tcp_addresses(status, service);
    if !addresses.is_empty() {
        return Ok(addresses);
    }
    if status.services.iter().any(|each| each.pool == service) {
        bail!("service {service} has no TCP address, and the proxy joins TCP connections only");
    }
    let names: BTreeSet<&str> = status
        .services
        .iter()
        .map(|each| each.pool.as_str())
        .collect();
    match names.is_empty() {
        true => bail!("there is no service {service}: the group has no service"),
        false => {
            let names: Vec<&str> = names.into_iter().collect();
            bail!(
                "there is no service {service}; the group has: {}",
                names.join(", ")
            )
        }
    }
}

/// Refuses the address of a server that would lead back to the proxy.
fn check_server_address(to: SocketAddr, addresses: &BTreeSet<SocketAddr>) -> Result<()> {
    if to.ip().is_unspecified() || to.port() == 0 {
        bail!("--to {to} is not the address of a server; name one, for example 127.0.0.1:8080");
    }
    if addresses.contains(&to) {
        bail!(
            "--to {to} is an address of the service, so the proxy would join connections to itself; let the server \
             listen at another address, for example 127.0.0.1:8080"
        );
    }
    Ok(())
}

/// Raises the limit of open descriptors to the maximum that the system allows, and returns the limit.
fn raise_descriptor_limit() -> Result<u64> {
    let (soft, hard) =
        getrlimit(Resource::RLIMIT_NOFILE).context("read the limit of open files")?;
    // A user may always raise the soft limit to the hard one; if the system still refuses, the soft limit holds.
    match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => Ok(hard),
        Err(_) => Ok(soft),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::control::ServerHealth;

    fn status(services: &[(&str, Protocol, &str)]) -> Status {
        let services = services
            .iter()
            .map(|(pool, protocol, address)| ServiceStatus {
                pool: (*pool).into(),
                protocol: *protocol,
                address: address.parse().unwrap(),
                server: ServerHealth::default(),
                nodes: Vec::new(),
            });
        serde_json::from_value(serde_json::json!({
            "node": "n1", "node_id": 1, "group": "lab", "version": "0", "uptime_s": 1, "reach": "steer",
            "contact_node": "n1", "services": services.collect::<Vec<_>>(), "programs": [],
            "flows": {"owned": 0, "transit": 0, "moved": 0},
            "handoffs": {"donated": 0, "accepted": 0, "kept": 0},
            "peers_connected": 0, "peers_total": 0, "problems": [],
        }))
        .unwrap()
    }

    #[test]
    fn every_tcp_address_of_the_service_is_used() {
        let status = status(&[
            ("web", Protocol::Tcp, "10.0.0.1:80"),
            ("web", Protocol::Tcp, "[fd00::1]:80"),
            ("web", Protocol::Udp, "10.0.0.1:80"),
            ("mail", Protocol::Tcp, "10.0.0.1:25"),
        ]);
        let addresses = service_addresses(&status, "web").unwrap();
        let expected = ["10.0.0.1:80", "[fd00::1]:80"].map(|text| text.parse().unwrap());
        assert_eq!(addresses, expected.into());
    }

    #[test]
    fn unknown_service_error_lists_the_services() {
        let status = status(&[
            ("web", Protocol::Tcp, "10.0.0.1:80"),
            ("dns", Protocol::Udp, "10.0.0.1:53"),
        ]);
        let error = |service| service_addresses(&status, service).unwrap_err().to_string();
        assert_eq!(
            error("wbe"),
            "there is no service wbe; the group has: dns, web"
        );
        assert!(
            error("dns").contains("TCP connections only"),
            "{}",
            error("dns")
        );
    }

    #[test]
    fn server_address_that_leads_to_the_proxy_is_refused() {
        let addresses = BTreeSet::from(["10.0.0.1:80".parse().unwrap()]);
        for to in ["10.0.0.1:80", "0.0.0.0:8080", "127.0.0.1:0"] {
            assert!(
                check_server_address(to.parse().unwrap(), &addresses).is_err(),
                "{to}"
            );
        }
        assert!(check_server_address("10.0.0.1:8080".parse().unwrap(), &addresses).is_ok());
    }
}
