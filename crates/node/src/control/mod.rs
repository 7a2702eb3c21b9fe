//! The control API's server: HTTP on a Unix socket that only its owner may open.
//!
//! Requests become [`ControlRequest`] values for the engine, each with a channel for the answer. The table of routes
//! and the types are `holdfast_api::control`.

mod routes;
#[cfg(test)]
mod tests;

use std::io;

use holdfast_api::FlowText;
use holdfast_api::control::{
    CheckQuery, DropList, ErrorBody, FlowDetail, FlowList, FlowListQuery, HandoffAccepted,
    HandoffList, HandoffRequest, HandoffStatus, MigrationAccepted, MigrationList, MigrationRequest,
    MigrationStatus, NodeList, PlacementRequest, PlacementWeights, ProcessCheck, Status, UnitEntry,
};
use holdfast_daemon::control::{metrics_listener, serve};
use holdfast_daemon::socket_path::{SocketPath, SocketPermissions, acquire};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::config::Config;
use crate::metrics::Metrics;

/// Maximum number of requests that wait for the engine; further ones wait in their connections.
const WAITING_MAX: usize = 64;

/// Channel for the engine's answer. Dropping it signals to the caller that the daemon is stopping.
pub type ReplySender<T> = oneshot::Sender<Result<T, ErrorBody>>;

/// An operator's request to the engine.
#[derive(Debug)]
pub enum ControlRequest {
    /// Return the node's status.
    Status(ReplySender<Status>),
    /// List flows.
    Flows(FlowListQuery, ReplySender<FlowList>),
    /// Show one flow.
    Flow(FlowText, ReplySender<FlowDetail>),
    /// Hand flows off.
    StartHandoff(HandoffRequest, ReplySender<HandoffAccepted>),
    /// List remembered handoffs.
    Handoffs(ReplySender<HandoffList>),
    /// Show one handoff.
    Handoff(u64, ReplySender<HandoffStatus>),
    /// List the nodes of the group.
    Nodes(ReplySender<NodeList>),
    /// Return the data plane's drop counters.
    Drops(ReplySender<DropList>),
    /// Return the placement of new flows.
    Placement(ReplySender<PlacementWeights>),
    /// Change the placement of new flows.
    SetPlacement(PlacementRequest, ReplySender<PlacementWeights>),
    /// Find the process of a systemd unit.
    Unit(String, ReplySender<UnitEntry>),
    /// Check whether a process can move, optionally to a given node.
    Check(i32, CheckQuery, ReplySender<ProcessCheck>),
    /// Move a process.
    StartMigration(MigrationRequest, ReplySender<MigrationAccepted>),
    /// List remembered migrations.
    Migrations(ReplySender<MigrationList>),
    /// Show one migration.
    Migration(u64, ReplySender<MigrationStatus>),
    /// Cancel a migration.
    CancelMigration(u64, ReplySender<MigrationStatus>),
}

/// Server of the control API, and of `/metrics` over TCP if configured.
pub struct ControlServer {
    requests: mpsc::Receiver<ControlRequest>,
    tasks: Vec<JoinHandle<()>>,
    _path: SocketPath,
}

impl ControlServer {
    /// Listens at the addresses in `config`. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// Another daemon has the socket, or an address cannot be listened on.
    pub fn bind(config: &Config, metrics: Metrics) -> io::Result<ControlServer> {
        let access = SocketPermissions {
            mode: 0o600,
            group: None,
        };
        let (listener, path) = acquire(&config.control_socket(), access, |path| {
            UnixListener::bind(path)
        })?;
        let (sender, requests) = mpsc::channel(WAITING_MAX);
        let router = routes::router(sender, metrics.clone());
        let mut tasks = vec![tokio::spawn(serve(listener, router))];
        if let Some(address) = config.metrics_listen {
            let listener = metrics_listener(address)?;
            let router = routes::metrics_only(metrics);
            tasks.push(tokio::spawn(serve(listener, router)));
        }
        Ok(ControlServer {
            requests,
            tasks,
            _path: path,
        })
    }

    /// Returns the next request. Dropping the future loses nothing.
    pub async fn recv(&mut self) -> ControlRequest {
        match self.requests.recv().await {
            Some(request) => request,
            // The server's task holds a sender as long as this value exists.
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
