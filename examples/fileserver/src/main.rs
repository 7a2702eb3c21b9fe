//! An HTTP/1.1 file server with Holdfast. The server handles GET, HEAD and ranges, accepts PUT and POST, and hands a
//! connection to another node at any point: between requests, in the middle of a response, in the middle of an upload.
//!
//! | path | response |
//! | --- | --- |
//! | `GET /synthetic/SIZE` | a fixed pseudo-random stream of SIZE bytes, generated while it is sent |
//! | `GET /synthetic/SIZE.sha256` | the digest of this stream |
//! | `PUT /digest` | the digest of the request's body |
//! | `GET /NAME`, `PUT /NAME` | a file below `--root`, read or written |
#![forbid(unsafe_code)]

mod chunked;
mod connection;
mod head;
mod response;
mod source;
mod state;
mod synthetic;
mod upload;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use clap::Parser;
use holdfast_api::{Arrival, Service, Session, app};
use tokio::net::{TcpListener, TcpSocket};
use tracing_subscriber::EnvFilter;

use crate::state::State;

/// An HTTP/1.1 file server with Holdfast.
#[derive(Debug, Parser)]
#[command(version)]
struct Flags {
    /// Address to listen on; repeatable.
    #[arg(long, value_name = "ADDRESS:PORT", required = true)]
    listen: Vec<SocketAddr>,
    /// Directory to serve and for uploads. The nodes of a pool must share it, or have the same content in it.
    #[arg(long, value_name = "DIRECTORY")]
    root: Option<PathBuf>,
    /// The daemon's socket for server programs.
    #[arg(long, value_name = "PATH", default_value = app::SOCKET_PATH)]
    socket: PathBuf,
    /// The pool that this server belongs to.
    #[arg(long, default_value = "files")]
    pool: String,
    /// Maximum sending rate of each connection.
    #[arg(long, value_name = "MBIT_PER_S")]
    rate_mbit: Option<u32>,
}

/// Settings shared by all connections.
#[derive(Debug)]
struct Site {
    root: Option<PathBuf>,
    rate_bytes_per_s: Option<u64>,
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
    let rate_bytes_per_s = flags.rate_mbit.map(|rate| u64::from(rate) * 125_000);
    let site = Arc::new(Site {
        root: flags.root,
        rate_bytes_per_s,
    });
    let mut services = tokio::task::JoinSet::new();
    for address in flags.listen {
        let listener = listen(address).with_context(|| {
            format!("cannot listen on {address}; is it an address of this host?")
        })?;
        println!("listening on {}", listener.local_addr()?);
        let service = session.serve(&flags.pool, listener)?;
        services.spawn(accept(service, Arc::clone(&site)));
    }
    services
        .join_next()
        .await
        .context("nothing to listen on")??
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(1024)
}

async fn accept(service: Service, site: Arc<Site>) -> anyhow::Result<()> {
    loop {
        let (connection, state) = match service.accept().await {
            Ok(Arrival::New(connection)) => (connection, State::default()),
            Ok(Arrival::HandedOff { connection, state }) => match State::decode(&state) {
                Ok(state) => (connection, state),
                Err(error) => {
                    tracing::error!(flow = %connection.flow(), %error, "cannot decode a handed-off state");
                    continue;
                }
            },
            Err(error) => {
                // Out of descriptors, or a client that left before it was accepted: the listener is still usable.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                continue;
            }
        };
        tokio::spawn(connection::serve(connection, state, Arc::clone(&site)));
    }
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
