//! `GET /v1/pool`, `/v1/elements`, `/v1/resolve/{handle}`, `/v1/select/{handle}` and `POST /v1/unreachable`: the API of
//! a pool daemon, which talks to registrars for the programs of its host. Numbers and handles are as in a registrar's
//! answers.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ElementEntry;

/// Status of this pool daemon. Answer of `GET /v1/pool`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PoolDaemonStatus {
    /// Version of the daemon.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// The SCTP implementation: `kernel` or `usrsctp`.
    pub sctp: String,
    /// True if SCTP runs directly over IP.
    pub raw: bool,
    /// UDP port of SCTP over UDP.
    pub encapsulation_port: Option<u16>,
    /// Addresses of this daemon for registrars.
    pub asap: Vec<SocketAddr>,
    /// Configured registrars: `ADDRESS:PORT` over SCTP, `tcp://ADDRESS:PORT`, `tls://[NAME@]ADDRESS:PORT`.
    pub registrars: Vec<String>,
    /// True if the daemon trusts multicast announcements.
    pub announces: bool,
    /// Number of the registrar that answers resolutions, if it has told its number.
    pub home: Option<String>,
    /// Number of associations that are up or being set up.
    pub associations: u64,
    /// Number of elements of this host's programs.
    pub elements: u64,
    /// Number of sessions of this host's pool users.
    pub sessions: u64,
}

/// Answer of `GET /v1/elements`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OwnElementList {
    /// The elements of this host's programs.
    pub elements: Vec<OwnElement>,
}

/// An element of one of this host's programs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OwnElement {
    /// Handle of the element's pool.
    pub handle: String,
    /// The element's number.
    pub id: String,
    /// True if a registrar is known to have the element in its handlespace.
    pub registered: bool,
    /// Number of the home registrar, if it has told its number.
    pub home: Option<String>,
    /// Transport protocol of the element's service.
    pub transport: String,
    /// Addresses for pool users.
    pub addresses: Vec<SocketAddr>,
    /// Number of sessions with pool users, if the daemon accepts sessions for the element.
    pub sessions: u64,
}

/// The query of `GET /v1/resolve/{handle}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolveQuery {
    /// Maximum number of elements (default: as many as the registrar gives).
    pub items: Option<u32>,
    /// Accept an answer that is a few seconds old (default: no, ask a registrar).
    pub cached: Option<bool>,
}

/// Answer of `GET /v1/resolve/{handle}` and of `GET /v1/select/{handle}`, which has one element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Resolution {
    /// The pool's handle.
    pub handle: String,
    /// Short name of the pool's policy.
    pub policy: String,
    /// Elements in the registrar's order of preference: if one cannot be reached, use the next.
    pub elements: Vec<ElementEntry>,
}

/// Body of `POST /v1/unreachable`: an element from the daemon's answer could not be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct UnreachableReport {
    /// The pool's handle.
    pub handle: String,
    /// The element's number.
    pub id: String,
}

/// Answer of `POST /v1/unreachable`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReportAccepted {
    /// The element's number.
    pub id: String,
}
