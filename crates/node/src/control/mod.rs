//! The control API's server: HTTP on a Unix socket that only its owner may open.
//!
//! Requests become [`ControlRequest`] values for the engine, each with a place for the answer. The table of routes and
//! the types are `holdfast_api::control`.

pub(crate) mod answer;
pub(crate) mod bounded;
mod routes;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;

use axum::Router;
use axum::serve::Listener;
use holdfast_api::FlowText;
use holdfast_api::control::{
    CheckQuery, DropList, ErrorBody, FlowDetail, FlowList, FlowQuery, HandoffAccepted, HandoffList,
    HandoffRequest, HandoffStatus, MigrationAccepted, MigrationList, MigrationRequest,
    MigrationStatus, NodeList, Placement, PlacementRequest, ProcessCheck, Status, UnitEntry,
};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use bounded::{Bounded, Limits, Source};

use crate::config::Config;
use crate::metrics::Metrics;
use crate::socket_path::{Access, SocketPath, take};

/// Requests that may wait for the engine; further ones wait in their connections.
const WAITING_MAX: usize = 64;

/// Where the engine puts the answer. Dropping it tells the caller that the daemon is stopping.
pub type Reply<T> = oneshot::Sender<Result<T, ErrorBody>>;

/// What the operator asks of the engine.
#[derive(Debug)]
pub enum ControlRequest {
    /// What is this node, and what does it do?
    Status(Reply<Status>),
    /// Which flows does it know?
    Flows(FlowQuery, Reply<FlowList>),
    /// What of this flow?
    Flow(FlowText, Reply<FlowDetail>),
    /// Hand flows off.
    StartHandoff(HandoffRequest, Reply<HandoffAccepted>),
    /// Which handoffs does it remember?
    Handoffs(Reply<HandoffList>),
    /// What became of this handoff?
    Handoff(u64, Reply<HandoffStatus>),
    /// Which nodes are there?
    Nodes(Reply<NodeList>),
    /// What has the data plane dropped?
    Drops(Reply<DropList>),
    /// How are new flows placed?
    Placement(Reply<Placement>),
    /// Place new flows differently.
    SetPlacement(PlacementRequest, Reply<Placement>),
    /// Which process is this unit?
    Unit(String, Reply<UnitEntry>),
    /// Can this process move, to this node?
    Check(i32, CheckQuery, Reply<ProcessCheck>),
    /// Move a process.
    StartMigration(MigrationRequest, Reply<MigrationAccepted>),
    /// Which migrations does it remember?
    Migrations(Reply<MigrationList>),
    /// What became of this migration?
    Migration(u64, Reply<MigrationStatus>),
    /// Give this migration up.
    CancelMigration(u64, Reply<MigrationStatus>),
}

/// The server of the control API, and of `/metrics` where the configuration wants that over TCP too.
pub struct ControlServer {
    requests: mpsc::Receiver<ControlRequest>,
    tasks: Vec<JoinHandle<()>>,
    _path: SocketPath,
}

impl ControlServer {
    /// Listens where `config` says. Call within a tokio runtime.
    ///
    /// # Errors
    /// Another daemon has the socket, or an address cannot be listened on.
    pub fn bind(config: &Config, metrics: Metrics) -> io::Result<ControlServer> {
        let access = Access {
            mode: 0o600,
            group: None,
        };
        let (listener, path) = take(&config.control_socket(), access, |path| {
            UnixListener::bind(path)
        })?;
        let (sender, requests) = mpsc::channel(WAITING_MAX);
        let router = routes::router(sender, metrics.clone());
        let mut tasks = vec![tokio::spawn(serve(listener, router))];
        if let Some(address) = config.metrics_listen {
            let listener = listen(address)?;
            let router = routes::metrics_only(metrics);
            tasks.push(tokio::spawn(serve(listener, router)));
        }
        Ok(ControlServer {
            requests,
            tasks,
            _path: path,
        })
    }

    /// The next request. Dropping the future loses nothing.
    pub async fn recv(&mut self) -> ControlRequest {
        match self.requests.recv().await {
            Some(request) => request,
            // The server's task holds a sender as long as this is not dropped.
            None => std::future::pending().await,
        }
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Serves HTTP to the end of the task.
pub(crate) async fn serve<L: Listener>(listener: L, router: Router)
where
    L::Addr: Source + std::fmt::Debug,
{
    let listener = Bounded::new(listener, Limits::default());
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "the control API has ended");
    }
}

pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let failed = |error: io::Error| {
        let text = format!("{address}: {error}; correct [metrics] listen");
        io::Error::new(error.kind(), text)
    };
    let listener = std::net::TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}
