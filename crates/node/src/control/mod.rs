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
    BalanceLog, BalancePlan, BalanceStatus, DrainReport, DrainRequest, DropList, ErrorBody,
    FlowDetail, FlowList, FlowListQuery, HandoffAccepted, HandoffList, HandoffRequest,
    HandoffStatus, LoadReportEntry, LoadReportRequest, LoadWithdrawRequest, LoadWithdrawn,
    MembershipChange, MigrationAccepted, MigrationList, MigrationRequest, MigrationStatus,
    NewToken, NodeList, NodeLoadStatus, PinRequest, PlacementRequest, PlacementWeights,
    ProcessCheck, ProcessCheckQuery, ReplicationAccepted, ReplicationList, ReplicationRequest,
    RevocationRequest, RevocationStatus, ServiceChangeRequest, ServiceChanged, ServiceList, Status,
    TokenEntry, TokenList, TokenRequest, UnitEntry,
};
use holdfast_daemon::control::{metrics_listener, serve, serve_users};
use holdfast_daemon::socket_path::{SocketPath, SocketPermissions, acquire};
use holdfast_wire::drain_frames::DrainOrder;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::config::Config;
use crate::membership::OperatorRequest;
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
    /// Return the load of the node and of its processes.
    Load(ReplySender<NodeLoadStatus>),
    /// Keep a load that the user of this number reports.
    ReportLoad(LoadReportRequest, Option<u32>, ReplySender<LoadReportEntry>),
    /// End a report for the user of this number.
    WithdrawLoad(LoadWithdrawRequest, Option<u32>, ReplySender<LoadWithdrawn>),
    /// Return the data plane's drop counters.
    Drops(ReplySender<DropList>),
    /// Return the placement of new flows.
    Placement(ReplySender<PlacementWeights>),
    /// Change the placement of new flows, for the user of this number.
    SetPlacement(PlacementRequest, Option<u32>, ReplySender<PlacementWeights>),
    /// List the services of the group.
    Services(ReplySender<ServiceList>),
    /// Change the services of the group, for the user of this number.
    ChangeServices(
        ServiceChangeRequest,
        Option<u32>,
        ReplySender<ServiceChanged>,
    ),
    /// List the replicated services.
    Replications(ReplySender<ReplicationList>),
    /// Begin, change or end the replication of a service, for the user of this number.
    ChangeReplication(
        ReplicationRequest,
        Option<u32>,
        ReplySender<ReplicationAccepted>,
    ),
    /// Find the process of a systemd unit.
    Unit(String, ReplySender<UnitEntry>),
    /// Check whether a process can move, optionally to a given node.
    Check(i32, ProcessCheckQuery, ReplySender<ProcessCheck>),
    /// Move a process.
    StartMigration(MigrationRequest, ReplySender<MigrationAccepted>),
    /// List remembered migrations.
    Migrations(ReplySender<MigrationList>),
    /// Show one migration.
    Migration(u64, ReplySender<MigrationStatus>),
    /// Cancel a migration.
    CancelMigration(u64, ReplySender<MigrationStatus>),
    /// Begin a drain of this node, or change its deadline.
    Drain(DrainRequest, ReplySender<DrainReport>),
    /// Return the progress of a drain.
    DrainReport(ReplySender<DrainReport>),
    /// End a drain.
    Undrain(ReplySender<DrainReport>),
    /// Carry out an order about the drain of the named node.
    NodeDrain(String, DrainOrder, ReplySender<DrainReport>),
    /// Return the known loads.
    Balance(ReplySender<BalanceStatus>),
    /// Switch balancing on or off.
    SetBalancing(bool, ReplySender<BalanceStatus>),
    /// Pin a process to this node, or free it.
    Pin(PinRequest, ReplySender<BalanceStatus>),
    /// Decide at once, and begin the move.
    BalanceNow(ReplySender<BalancePlan>),
    /// Return the decision that would be made now.
    BalancePlan(ReplySender<BalancePlan>),
    /// Return the latest decisions.
    BalanceLog(ReplySender<BalanceLog>),
    /// Make a join token.
    NewToken(TokenRequest, ReplySender<NewToken>),
    /// List the join tokens.
    Tokens(ReplySender<TokenList>),
    /// Revoke a join token.
    RevokeToken(String, ReplySender<TokenEntry>),
    /// Return the revocation lists in force.
    Revocations(ReplySender<RevocationStatus>),
    /// Put a revocation list in force.
    PublishRevocations(RevocationRequest, ReplySender<RevocationStatus>),
    /// Change the membership of the group; the answer comes when the group has decided.
    Membership(OperatorRequest, ReplySender<MembershipChange>),
    /// Obey a view that a test gives.
    #[cfg(feature = "test-faults")]
    TestView(TestView, ReplySender<()>),
}

impl ControlRequest {
    /// Refuses a request of any kind.
    pub fn refuse(self, refusal: ErrorBody) {
        // Send errors are ignored: a client that has disconnected needs no answer.
        match self {
            ControlRequest::Status(reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Flows(_, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Flow(_, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::StartHandoff(_, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Handoffs(reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Handoff(_, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Nodes(reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Load(reply) => drop(reply.send(Err(refusal))),
            ControlRequest::ReportLoad(_, _, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::WithdrawLoad(_, _, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Drops(reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Placement(reply) | ControlRequest::SetPlacement(_, _, reply) => {
                drop(reply.send(Err(refusal)));
            }
            ControlRequest::Services(reply) => drop(reply.send(Err(refusal))),
            ControlRequest::ChangeServices(_, _, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Replications(reply) => drop(reply.send(Err(refusal))),
            ControlRequest::ChangeReplication(_, _, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Unit(_, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Check(_, _, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::StartMigration(_, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Migrations(reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Migration(_, reply) | ControlRequest::CancelMigration(_, reply) => {
                drop(reply.send(Err(refusal)));
            }
            ControlRequest::Drain(_, reply)
            | ControlRequest::DrainReport(reply)
            | ControlRequest::NodeDrain(_, _, reply)
            | ControlRequest::Undrain(reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Balance(reply)
            | ControlRequest::SetBalancing(_, reply)
            | ControlRequest::Pin(_, reply) => {
                drop(reply.send(Err(refusal)));
            }
            ControlRequest::BalanceNow(reply) | ControlRequest::BalancePlan(reply) => {
                drop(reply.send(Err(refusal)));
            }
            ControlRequest::BalanceLog(reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Membership(_, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::NewToken(_, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Tokens(reply) => drop(reply.send(Err(refusal))),
            ControlRequest::RevokeToken(_, reply) => drop(reply.send(Err(refusal))),
            ControlRequest::Revocations(reply) | ControlRequest::PublishRevocations(_, reply) => {
                drop(reply.send(Err(refusal)));
            }
            #[cfg(feature = "test-faults")]
            ControlRequest::TestView(_, reply) => drop(reply.send(Err(refusal))),
        }
    }
}

/// View of the group and lease of the node, from a test.
#[cfg(feature = "test-faults")]
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TestView {
    /// Epoch of the view.
    pub epoch: u64,
    /// Name of the contact node.
    pub contact: String,
    /// Names of configured nodes that are outside of the group.
    #[serde(default)]
    pub without: Vec<String>,
    /// Length of this node's lease from now on, in milliseconds; none for no lease.
    pub lease_ms: Option<u64>,
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
        let mut tasks = vec![tokio::spawn(serve_users(listener, router))];
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
