//! Observation of this node's servers: their sockets, their newest connections, and active checks. The machine of
//! `proto::health` judges what is observed; the engine feeds the machine and carries out its decisions.

mod active_checks;
mod newest_connections;
mod observer;

pub(crate) use active_checks::RunningChecks;
pub(crate) use newest_connections::NewestConnections;
pub(crate) use observer::{InspectionRequest, SocketObserverThread};

use holdfast_proto::health::{CheckKind, ListenerSample};
use holdfast_wire::Flow;
use holdfast_wire::health_frames::{ServerProblem, ServiceEndpoint};
use tokio::sync::mpsc;

/// Most observations that wait for the engine. Later ones are dropped: the next inspection follows soon.
const WAITING_MAX: usize = 256;

/// An observation of a server, for the engine.
#[derive(Debug)]
pub(crate) enum Observation {
    /// The listening sockets of services.
    Listeners(Vec<(ServiceEndpoint, ListenerSample)>),
    /// Inspected connections whose requests the server has not read.
    UnreadConnections(Vec<Flow>),
    /// The result of an active check.
    Check {
        /// Service whose server was checked.
        service: ServiceEndpoint,
        /// Kind of the active check.
        kind: CheckKind,
        /// Success, or the problem that the check found.
        result: Result<(), ServerProblem>,
    },
}

/// The end of the channel into which observing threads put observations.
pub(crate) type ObservationSender = mpsc::Sender<Observation>;
/// The engine's end of the channel with observations.
pub(crate) type ObservationReceiver = mpsc::Receiver<Observation>;

/// Returns a channel for observations.
pub(crate) fn observation_channel() -> (ObservationSender, ObservationReceiver) {
    mpsc::channel(WAITING_MAX)
}
