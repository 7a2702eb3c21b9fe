//! Requests, configurations, and properties of hosts that prevent a handoff or a move.

use super::{SystemError, Text};
use crate::{Flow, OwnershipRecord};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::Duration;

/// A failure that the operator can usually remove.
///
/// The order of the variants is part of the format: append new ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum OperatorFault {
    /// A record of a move could not be written to the run directory.
    #[error("{path}: {error}; free space in the run directory")]
    RecordNotWritten {
        /// Path of the record.
        path: Text,
        /// The kernel's error.
        error: SystemError,
    },
    /// The daemon has no file descriptor left.
    #[error(
        "the daemon has no descriptor left; raise its limit of open files (LimitNOFILE) or try again"
    )]
    NoDescriptorLeft,
    /// The machine refused a request as a whole.
    #[error("{0}")]
    RequestRefused(Text),
    /// No node of the group has this name.
    #[error("there is no node {0} in this group; `holdfast status` shows those there are")]
    UnknownNode(Text),
    /// The named flow does not exist on this node.
    #[error("there is no such flow on this node; `holdfast flow list` shows those there are")]
    UnknownFlow,
    /// The named flow does not exist on this node, and the contact node lists all flows.
    #[error(
        "this node has no such flow; `holdfast flow list` on {contact} shows all flows of the group"
    )]
    UnknownFlowHere {
        /// Name of the contact node.
        contact: Text,
    },
    /// Another node owns the flow.
    #[error("this node does not own the flow: {}", describe_owner(.0))]
    FlowOwnedElsewhere(Option<OwnershipRecord>),
    /// The node with this name owns the flow.
    #[error("node {0} owns the flow; run `holdfast handoff` on {0}")]
    FlowOwnedBy(Text),
    /// The flow takes part in a handoff or move on this node.
    #[error("the flow is moving already; try again when that has ended")]
    FlowAlreadyMoving,
    /// A flow of the process takes part in another move on this node.
    #[error("flow {0} of the process is moving already; try again when that has ended")]
    FlowOfProcessAlreadyMoving(Flow),
    /// The other end of a connection of the process is moving.
    #[error("the other end of connection {0} is moving; try again when that has ended")]
    OtherEndMoving(Flow),
    /// Another node owns a flow of the process.
    #[error("this node does not own flow {flow} of the process: {record}")]
    FlowOfProcessOwnedElsewhere {
        /// The flow of the process that another node owns.
        flow: Flow,
        /// The holder's record of the flow.
        record: OwnershipRecord,
    },
    /// No process has this PID.
    #[error("process {pid} has ended; use the PID of a process on this node; `ps -e` lists them")]
    NoSuchProcess {
        /// The PID, as requested.
        pid: u64,
    },
    /// The operator cancelled the move.
    #[error("the move was cancelled")]
    Cancelled,
    /// Only a rehearsal was requested, and the acceptor would take the process.
    #[error("the process can move; only a check was requested")]
    Rehearsed,
    /// The predicted freeze exceeds the requested limit.
    #[error(
        "the predicted freeze is {:.1} ms, more than {:.1} ms; allow more, or try again when the process is less busy",
        .predicted.as_secs_f64() * 1e3, .max.as_secs_f64() * 1e3
    )]
    FreezeTooLong {
        /// The least freeze that the donor predicted.
        predicted: Duration,
        /// The longest freeze that the request allows.
        max: Duration,
    },
    /// No server program at the acceptor serves the flow's service.
    #[error("no server program on node {node} serves {address}; start one there")]
    NoProgramServes {
        /// Name of the acceptor.
        node: Text,
        /// Address of the service.
        address: SocketAddr,
    },
    /// An address belongs to no service of the group.
    #[error("{0} is not a service of the group")]
    NotAService(SocketAddr),
    /// No program at the acceptor listens at a service address.
    #[error("no program listens at {address} on node {node}")]
    NoProgramListens {
        /// The service address that no program listens at.
        address: SocketAddr,
        /// Name of the acceptor.
        node: Text,
    },
    /// No server program with a session has the flow.
    #[error(
        "no server program with a session has the flow; let the program connect to the daemon's socket"
    )]
    NoProgramHasFlow,
    /// Another socket of the acceptor uses the address.
    #[error(
        "{0} is in use at the acceptor: end the program that uses it, or try again if connections of that port have \
         just closed"
    )]
    AddressInUse(SocketAddr),
    /// The acceptor has no device of this name, to which a socket is bound.
    #[error("the socket is bound to device '{0}', which the acceptor does not have")]
    DeviceAbsent(Text),
    /// Both ends of a connection at the node's own address are at this node.
    #[error("both ends of connection {0} are at this node: move the process at {remote} first", remote = .0.remote)]
    BothEndsHere(Flow),
    /// The other end of a connection has left this node.
    #[error("the other end of connection {0} has left this node; move it back first")]
    OtherEndLeft(Flow),
    /// The acceptor takes no processes.
    #[error(
        "the acceptor takes no processes: set enabled = true in [migration] of its configuration"
    )]
    MigrationDisabled,
    /// The acceptor's policy does not allow a part of the process.
    #[error("{0}")]
    NotAllowed(Text),
    /// The acceptor's policy does not allow sockets of this family.
    #[error(
        "the process has a socket of family {0}, which is not in the acceptor's [migration] families"
    )]
    FamilyNotAllowed(Text),
    /// The acceptor lacks something that the process needs, or has something different.
    #[error("this machine cannot take the process: {0}")]
    MachineUnsuitable(Text),
    /// The acceptor lacks memory for the process.
    #[error(
        "the process needs {needed_mib} MiB of memory, the acceptor has {available_mib} MiB available"
    )]
    TooLittleMemory {
        /// Memory of the process, in MiB.
        needed_mib: u64,
        /// Available memory of the acceptor, in MiB.
        available_mib: u64,
    },
    /// The control group of the process cannot be made at the acceptor.
    #[error("{0}")]
    ControlGroup(Text),
    /// The control group of the process does not belong to a service.
    #[error("control group {0} does not belong to a service")]
    NotAServiceGroup(Text),
}

fn describe_owner(record: &Option<OwnershipRecord>) -> String {
    match record {
        Some(record) => record.to_string(),
        None => "another node does".to_owned(),
    }
}
