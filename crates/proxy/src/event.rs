//! Reports of a proxy to its operator.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

/// Minimum interval between two reports of the same problem.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// An event for the operator. In JSON an object with the field `event`; the text form is one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ProxyEvent {
    /// The proxy accepts connections at a service address.
    Listening {
        /// The service address.
        address: SocketAddr,
        /// The local server.
        to: SocketAddr,
    },
    /// The service has an address at which the proxy cannot listen. The proxy tries again.
    CannotListen {
        /// The service address.
        address: SocketAddr,
        /// The reason and its remedy.
        reason: String,
    },
    /// The service no longer has this address; connections that came by it continue.
    StoppedListening {
        /// The service address.
        address: SocketAddr,
    },
    /// The local server refuses connections, or does not answer. Reported once in 10 seconds at most.
    ServerUnavailable {
        /// The local server.
        to: SocketAddr,
        /// The system's error.
        reason: String,
        /// Number of clients that were reset for this reason since the proxy started.
        clients_reset: u64,
    },
    /// The local server accepts connections again.
    ServerAvailable {
        /// The local server.
        to: SocketAddr,
    },
    /// The maximum number of connections is open; new clients wait. Reported once in 10 seconds at most.
    ConnectionsMaxReached {
        /// Maximum number of open connections.
        connections_max: usize,
    },
    /// The system gives no connection to the proxy, or no pipe to a connection. Reported once in 10 seconds at most.
    SystemError {
        /// The refused operation.
        operation: &'static str,
        /// The system's error.
        reason: String,
    },
    /// The session with the daemon broke. Connections continue, and new ones are accepted.
    DaemonLost,
    /// The session with the daemon is open again.
    DaemonFound,
    /// The proxy accepts no more connections, and waits for the end of the open ones.
    Draining {
        /// Number of open connections.
        open: usize,
    },
    /// The proxy has ended.
    Stopped {
        /// Numbers since the start of the proxy.
        #[serde(flatten)]
        totals: Totals,
    },
}

impl fmt::Display for ProxyEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listening { address, to } => {
                write!(f, "joining connections at {address} to {to}")
            }
            Self::CannotListen { address, reason } => {
                write!(f, "cannot listen at {address}: {reason}")
            }
            Self::StoppedListening { address } => {
                write!(
                    f,
                    "the service no longer has {address}; open connections continue"
                )
            }
            Self::ServerUnavailable {
                to,
                reason,
                clients_reset,
            } => write!(
                f,
                "the local server at {to} is not available: {reason}; {clients_reset} clients were reset so far"
            ),
            Self::ServerAvailable { to } => {
                write!(f, "the local server at {to} accepts connections again")
            }
            Self::ConnectionsMaxReached { connections_max } => write!(
                f,
                "{connections_max} connections are open, the maximum; new clients wait (--max-connections, LimitNOFILE=)"
            ),
            Self::SystemError { operation, reason } => write!(f, "cannot {operation}: {reason}"),
            Self::DaemonLost => {
                f.write_str("the session with the daemon broke; connections continue")
            }
            Self::DaemonFound => f.write_str("the session with the daemon is open again"),
            Self::Draining { open } => write!(
                f,
                "accepting no more connections; waiting for {open} open ones"
            ),
            Self::Stopped { totals } => write!(f, "stopped: {totals}"),
        }
    }
}

/// Numbers since the start of a proxy. Every accepted connection that has ended is in exactly one of the next six.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Connections of clients.
    pub accepted: u64,
    /// Connections that both sides ended.
    pub complete: u64,
    /// Connections that the client reset.
    pub client_resets: u64,
    /// Connections that the local server reset.
    pub server_resets: u64,
    /// Connections that were reset because a side took none of the bytes that waited for it for 60 s.
    pub stalled: u64,
    /// Clients that were reset because the local server was not available, or because of a system error.
    pub refused: u64,
    /// Connections that were reset because they were open at the end of the drain.
    pub cut: u64,
    /// Bytes passed from clients to the server.
    pub to_server_bytes: u64,
    /// Bytes passed from the server to clients.
    pub to_client_bytes: u64,
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} connections accepted, {} complete, {} reset by clients, {} reset by the server, {} stalled, {} refused, \
             {} cut; {} bytes to the server, {} bytes to clients",
            self.accepted,
            self.complete,
            self.client_resets,
            self.server_resets,
            self.stalled,
            self.refused,
            self.cut,
            self.to_server_bytes,
            self.to_client_bytes
        )
    }
}

/// [`Totals`] that connections add to.
#[derive(Debug, Default)]
pub(crate) struct TotalCounters {
    pub(crate) accepted: AtomicU64,
    pub(crate) complete: AtomicU64,
    pub(crate) client_resets: AtomicU64,
    pub(crate) server_resets: AtomicU64,
    pub(crate) stalled: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) cut: AtomicU64,
    pub(crate) to_server_bytes: AtomicU64,
    pub(crate) to_client_bytes: AtomicU64,
}

impl TotalCounters {
    pub(crate) fn totals(&self) -> Totals {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Totals {
            accepted: read(&self.accepted),
            complete: read(&self.complete),
            client_resets: read(&self.client_resets),
            server_resets: read(&self.server_resets),
            stalled: read(&self.stalled),
            refused: read(&self.refused),
            cut: read(&self.cut),
            to_server_bytes: read(&self.to_server_bytes),
            to_client_bytes: read(&self.to_client_bytes),
        }
    }
}

/// Limits the reports of one problem to one in [`REPORT_INTERVAL`].
#[derive(Debug, Default)]
pub(crate) struct ReportLimit {
    last: Option<Instant>,
}

impl ReportLimit {
    /// Returns true if the problem, met at `now`, is to be reported.
    pub(crate) fn admits(&mut self, now: Instant) -> bool {
        let is_due = self
            .last
            .is_none_or(|last| now.saturating_duration_since(last) >= REPORT_INTERVAL);
        if is_due {
            self.last = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_problem_is_reported_once_in_an_interval() {
        let start = Instant::now();
        let mut limit = ReportLimit::default();
        let seconds = [0, 1, 9, 10, 11, 19, 20];
        let reported = seconds.map(|second| limit.admits(start + Duration::from_secs(second)));
        assert_eq!(reported, [true, false, false, true, false, false, true]);
    }

    #[test]
    fn json_form_names_the_event() {
        let totals = Totals {
            accepted: 3,
            ..Totals::default()
        };
        let json = serde_json::to_value(ProxyEvent::Stopped { totals }).unwrap();
        assert_eq!(
            (&json["event"], &json["accepted"]),
            (&"stopped".into(), &3.into())
        );
        let json = serde_json::to_value(ProxyEvent::DaemonLost).unwrap();
        assert_eq!(json, serde_json::json!({"event": "daemon_lost"}));
    }
}
