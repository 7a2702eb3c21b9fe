//! Features and actions of server programs, and of their clients, that prevent a handoff or a move.

use super::Text;
use crate::Flow;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// A failure for which the moving or serving program is usually to blame.
///
/// The order of the variants is part of the format: append new ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ProgramFault {
    /// The process has more flows than a request to the holder can name.
    #[error("the process has {0} flows, more than can be moved at once")]
    TooManyFlows(u64),
    /// The queues of a flow are larger than a frame may be.
    #[error(
        "the queues of the flow hold {bytes} bytes, more than fits into a frame; drain first, or try again later"
    )]
    FlowTooBig {
        /// Size of the state, in bytes.
        bytes: u64,
    },
    /// Another server program has the flow.
    #[error("another server program has the flow")]
    OtherProgramHasFlow,
    /// The flow's server program has ended.
    #[error("the flow's server program has ended")]
    ProgramEnded,
    /// The acceptor's server program has ended.
    #[error("the acceptor's server program has ended")]
    AcceptingProgramEnded,
    /// The acceptor's server program refused the flow.
    #[error("the acceptor's server program refused: {0}")]
    AcceptingProgramRefused(Text),
    /// The acceptor's server program did not take the flow in time.
    #[error("the acceptor's server program did not take the flow within {limit_ms} ms")]
    AcceptingProgramLate {
        /// The time limit, in milliseconds.
        limit_ms: u32,
    },
    /// The flow's server program declined to hand it off.
    #[error("the flow's server program declined: {0}")]
    ProgramDeclined(Text),
    /// The flow's server program did not answer a request in time.
    #[error("the flow's server program did not reach a safe point within {limit_s} s")]
    NoSafePoint {
        /// The time limit, in seconds.
        limit_s: u32,
    },
    /// The flow's server program answered a request after the time limit.
    #[error("the server program answered too late; request the handoff again")]
    ProgramAnsweredLate,
    /// The server program sent no descriptor with a TCP flow.
    #[error("the server program sent no descriptor")]
    NoDescriptorSent,
    /// The server program sent the descriptor of another connection.
    #[error("the descriptor belongs to another connection")]
    DescriptorOfOtherFlow,
    /// The server program did not return the unread datagrams of a flow.
    #[error("the server program did not return its unread datagrams")]
    DatagramsNotReturned,
    /// The server program sent too much application state.
    #[error("the flow has more than {limit_kib} KiB of application state")]
    TooMuchApplicationState {
        /// The limit, in KiB.
        limit_kib: u32,
    },
    /// The flow was closed before the end of its handoff.
    #[error("the flow was closed meanwhile")]
    FlowClosed,
    /// The kernel refused to put a connection into the accept queue of its listener.
    #[error("the listener is closed, or its accept queue is full")]
    AcceptQueueFull,
    /// The socket has a feature or state that cannot move. The text says how to remove the obstacle.
    #[error("{0}")]
    UnmovableSocket(Text),
    /// A socket has an address that only this host has.
    #[error(
        "the socket at {0} has an address that only this host has: use a service address of the group"
    )]
    HostOnlyAddress(SocketAddr),
    /// Both ends of a connection are on this host.
    #[error(
        "the connection from {local} to {remote} stays within this host: close it, or move both ends together"
    )]
    ConnectionWithinHost {
        /// Local address.
        local: SocketAddr,
        /// Remote address.
        remote: SocketAddr,
    },
    /// One end of a loopback connection would stay behind.
    #[error("{0}")]
    LoopbackSplit(Text),
    /// Connections wait to be accepted at an address where they cannot be handed off.
    #[error("connections at {0} wait to be accepted: try again when the program has accepted them")]
    UnacceptedConnections(SocketAddr),
    /// A client reused a port during the freeze.
    #[error("a client reused the port of a connection that was just closed ({0}); try again")]
    PortReused(Flow),
    /// An eBPF program selects among the sockets of a port.
    #[error(
        "an eBPF program selects the port's socket (SO_ATTACH_REUSEPORT_EBPF), and cannot be read from the kernel: \
         use a classic one (SO_ATTACH_REUSEPORT_CBPF), or none"
    )]
    EbpfPortSelector,
    /// A classic BPF program selects by the order of binding, which is not the order of descriptors.
    #[error(
        "a program selects the port's socket by binding order (SO_ATTACH_REUSEPORT_CBPF), but the sockets were not \
         bound in the order of their descriptors: bind them so"
    )]
    PortBindingOrder,
    /// A process or one of its threads has ended.
    #[error("process {0} has ended")]
    ProcessEnded(i32),
    /// Parts of a process tree cannot move.
    #[error("cannot move: {0}")]
    CannotMove(Text),
    /// A part of a process cannot move.
    #[error("{}: {reason}", describe_part(*.pid, *.fd, .path.as_ref()))]
    Obstacle {
        /// PID of the process with the part that cannot move.
        pid: i32,
        /// The descriptor that cannot move; none if the part is not a descriptor.
        fd: Option<u32>,
        /// The file or object that the descriptor refers to.
        path: Option<Text>,
        /// The reason why the part cannot move, and the remedy.
        reason: Text,
    },
    /// The process has keys in its own keyring.
    #[error(
        "the process has keys in its own keyring (keyctl), which would be lost: let it remove them"
    )]
    OwnKeys,
    /// The session keyring of the process has keys.
    #[error(
        "the session keyring has keys (keyctl), which would be lost: start the process in a session without (`keyctl \
         session - COMMAND`), or remove them"
    )]
    SessionKeys,
    /// The process is in a Landlock domain.
    #[error("the process is in a Landlock domain, which would be lost: run it without Landlock")]
    LandlockDomain,
    /// An exclusive lock of the process would be free for a moment.
    #[error("{0}")]
    RiskyLock(Text),
    /// Another process took a lock during the move.
    #[error(
        "another process took a lock on the file of descriptor {fd} of process {process} meanwhile; try again"
    )]
    LockTaken {
        /// A process that has the descriptor, by its PID inside the tree.
        process: i32,
        /// Number of the descriptor of the file with the lock.
        fd: u32,
    },
    /// The process ended at the acceptor before all its pages had arrived.
    #[error("the process has ended on the acceptor")]
    EndedAtAcceptor,
    /// The process or the acceptor's daemon ended before all pages had arrived.
    #[error("the moved process or its daemon ended before all pages had arrived")]
    EndedBeforeAllPages,
    /// The process is a server of a replicated service.
    #[error(
        "its server at {0} is a leg of a replicated service, which cannot move; `holdfast replicate status` on the contact node names \
         the service"
    )]
    ReplicatedServer(SocketAddr),
}

/// Returns the text that names a part of a process.
fn describe_part(pid: i32, fd: Option<u32>, path: Option<&Text>) -> String {
    let mut text = format!("process {pid}");
    if let Some(fd) = fd {
        text += &format!(", descriptor {fd}");
    }
    if let Some(path) = path {
        text += &format!(" ({path})");
    }
    text
}
