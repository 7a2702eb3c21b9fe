//! The messages about the health of servers: each node tells the contact node which of its servers take new clients, and
//! the contact node tells all nodes where new clients go.

use crate::frame::bounded_list_of;
use crate::membership_frames::{SERVER_NODES_MAX, VOTERS_MAX};
use crate::{NodeId, Protocol};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;

/// Maximum number of services in a frame.
pub const SERVICES_MAX: usize = 1_024;
/// Maximum number of nodes with a share of a service's new clients.
pub const SHARES_MAX: usize = SERVER_NODES_MAX + VOTERS_MAX;

/// A service as clients see it, written `tcp:10.0.0.1:80`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ServiceEndpoint {
    /// The transport protocol.
    pub protocol: Protocol,
    /// The service address and port.
    pub address: SocketAddr,
}

impl fmt::Display for ServiceEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.protocol, self.address)
    }
}

/// State of a service's server at one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServerState {
    /// The server takes new clients.
    Serving,
    /// No server has listened at the node since the node's daemon started, or the server moved to another node.
    Absent,
    /// New clients would not be served.
    Failing(ServerProblem),
}

/// Reason why a server takes no new clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServerProblem {
    /// The server had a listening socket, and has none now.
    ListenerClosed,
    /// Connections (TCP) or datagrams (UDP) wait for a server that takes none.
    QueueStalled {
        /// Number of waiting connections, or of bytes of waiting datagrams.
        waiting: u32,
    },
    /// The server accepts connections, and does not read the clients' requests.
    RequestsUnread {
        /// Number of inspected connections with unread data.
        connections: u32,
    },
    /// The connect check failed.
    ConnectFailed {
        /// Error number of the operating system.
        os_error: i32,
    },
    /// The connect check had no answer in time.
    ConnectTimedOut,
    /// The check script ended with another exit code than 0.
    ScriptFailed {
        /// The exit code.
        exit_code: i32,
    },
    /// A signal ended the check script.
    ScriptKilled {
        /// Number of the signal.
        signal: i32,
    },
    /// The check script did not end in time.
    ScriptTimedOut,
    /// The check script could not be started.
    ScriptNotStarted {
        /// Error number of the operating system.
        os_error: i32,
    },
    /// Another user than root could have written the check script that the group's settings name.
    ScriptUntrusted,
}

impl ServerProblem {
    /// Returns the problem's name, for metrics.
    pub fn name(&self) -> &'static str {
        match self {
            ServerProblem::ListenerClosed => "listener_closed",
            ServerProblem::QueueStalled { .. } => "queue_stalled",
            ServerProblem::RequestsUnread { .. } => "requests_unread",
            ServerProblem::ConnectFailed { .. } => "connect_failed",
            ServerProblem::ConnectTimedOut => "connect_timed_out",
            ServerProblem::ScriptFailed { .. } => "script_failed",
            ServerProblem::ScriptKilled { .. } => "script_killed",
            ServerProblem::ScriptTimedOut => "script_timed_out",
            ServerProblem::ScriptNotStarted { .. } => "script_not_started",
            ServerProblem::ScriptUntrusted => "script_untrusted",
        }
    }
}

impl fmt::Display for ServerProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerProblem::ListenerClosed => {
                f.write_str("the server has ended: nothing listens there")
            }
            ServerProblem::QueueStalled { waiting } => {
                write!(
                    f,
                    "the server hangs: it takes none of the clients that wait ({waiting} in its queue)"
                )
            }
            ServerProblem::RequestsUnread { connections } => {
                write!(
                    f,
                    "the server hangs: it does not read the requests of {connections} new connections"
                )
            }
            ServerProblem::ConnectFailed { os_error } => {
                let error = std::io::Error::from_raw_os_error(*os_error);
                write!(f, "the connect check fails: {error}")
            }
            ServerProblem::ConnectTimedOut => {
                f.write_str("the connect check has no answer in time")
            }
            ServerProblem::ScriptFailed { exit_code } => {
                write!(f, "the check script ends with exit code {exit_code}")
            }
            ServerProblem::ScriptKilled { signal } => {
                write!(f, "signal {signal} ends the check script")
            }
            ServerProblem::ScriptTimedOut => f.write_str("the check script does not end in time"),
            ServerProblem::ScriptNotStarted { os_error } => {
                let error = std::io::Error::from_raw_os_error(*os_error);
                write!(f, "the check script does not start: {error}")
            }
            ServerProblem::ScriptUntrusted => f.write_str(
                "the check script is not run: the file and its directory must belong to root, and no other user may write them",
            ),
        }
    }
}

/// State of one service's server in a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedServer {
    /// The service that the sender's server belongs to.
    pub service: ServiceEndpoint,
    /// State of the service's server at the sender of the report.
    pub state: ServerState,
}

/// Shares of one service's new clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceShares {
    /// The service whose new clients are shared.
    pub service: ServiceEndpoint,
    /// Share of each node, in the order of node numbers; a node that is not named gets none.
    #[serde(deserialize_with = "bounded_list_of::<_, _, SHARES_MAX>")]
    pub weights: Vec<(NodeId, u32)>,
    /// True if a node with a share can serve; otherwise the shares are a makeshift.
    pub is_served: bool,
}

/// A message about the health of servers. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HealthFrame {
    /// Any node to the contact node: the state of its servers. Replaces the node's earlier report.
    Report {
        /// State of the server of each service.
        #[serde(deserialize_with = "bounded_list_of::<_, _, SERVICES_MAX>")]
        servers: Vec<ReportedServer>,
    },
    /// Contact node to every node: the shares of new clients that are, or are about to be, in force. A node with both
    /// the present and the previous shares can pass on the last packet of a handshake that began at another node.
    Placement {
        /// Shares of each service that changed.
        #[serde(deserialize_with = "bounded_list_of::<_, _, SERVICES_MAX>")]
        services: Vec<ServiceShares>,
    },
}

impl HealthFrame {
    /// Returns the frame's name, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            HealthFrame::Report { .. } => "HealthReport",
            HealthFrame::Placement { .. } => "Placement",
        }
    }
}
