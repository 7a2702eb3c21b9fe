//! An echo server with Holdfast, for TCP (RFC 862) and UDP. The server holds many thousands of connections, and hands
//! each to another node on request; the library combines simultaneous handoffs into few batches without code here.
#![forbid(unsafe_code)]

mod tcp;
mod udp;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use holdfast_api::{Session, app};
use tokio::net::{TcpListener, TcpSocket, UdpSocket};
use tracing_subscriber::EnvFilter;

/// A TCP and UDP echo server with Holdfast.
#[derive(Debug, Parser)]
#[command(version)]
struct Flags {
    /// TCP address to listen on; repeatable.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Vec<SocketAddr>,
    /// UDP address to answer on: a service address, not a wildcard; repeatable.
    #[arg(long, value_name = "ADDRESS:PORT")]
    udp: Vec<SocketAddr>,
    /// The daemon's socket for server programs.
    #[arg(long, value_name = "PATH", default_value = app::SOCKET_PATH)]
    socket: PathBuf,
    /// The pool that this server belongs to.
    #[arg(long, default_value = "echo")]
    pool: String,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // RUST_LOG=debug logs every handoff.
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    let flags = Flags::parse();
    raise_descriptor_limit();
    let session = Session::connect(&flags.socket).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot reach the daemon; serving without Holdfast until it is up");
        Session::connect_later(&flags.socket)
    });
    let mut services = tokio::task::JoinSet::new();
    for address in flags.listen {
        let listener = listen(address).with_context(|| {
            format!("cannot listen on {address}; is it an address of this host?")
        })?;
        println!("listening on {}", listener.local_addr()?);
        services.spawn(tcp::serve(session.serve(&flags.pool, listener)?));
    }
    for address in flags.udp {
        let socket = UdpSocket::bind(address)
            .await
            .with_context(|| format!("cannot bind {address}; is it an address of this host?"))?;
        println!("answering on {}", socket.local_addr()?);
        services.spawn(udp::serve(session.serve(&flags.pool, socket)?));
    }
    services
        .join_next()
        .await
        .context("nothing to serve: give --listen or --udp")??;
    Ok(())
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(16_384)
}

/// Raises the limit of open descriptors to the maximum that the system allows.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit of open descriptors");
    }
}
