//! `GET /v1/pool`, `/v1/elements`, `/v1/resolve/{handle}`, `/v1/select/{handle}` and `POST /v1/unreachable`: a pool daemon,
//! which speaks with registrars for the programs of its host. Numbers and handles are as in a registrar's answers.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ElementEntry;

/// What this pool daemon is and does. Answer of `GET /v1/pool`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PoolDaemonStatus {
    /// Version of the daemon.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// Whose SCTP it uses: `kernel` or `usrsctp`.
    pub sctp: String,
    /// Whether SCTP goes over IP itself.
    pub raw: bool,
    /// UDP port of SCTP inside UDP.
    pub encapsulation_port: Option<u16>,
    /// Where registrars reach it.
    pub asap: Vec<SocketAddr>,
    /// Registrars that it knows beforehand: `ADDRESS:PORT` over SCTP, `tcp://ADDRESS:PORT`, `tls://[NAME@]ADDRESS:PORT`.
    pub registrars: Vec<String>,
    /// Whether announces by multicast are believed.
    pub announces: bool,
    /// The number of the registrar that answers resolutions, if it has said so.
    pub home: Option<String>,
    /// Associations that are up or coming up.
    pub associations: u64,
    /// Elements of programs of this host.
    pub elements: u64,
    /// Sessions of users of this host.
    pub sessions: u64,
}

/// Answer of `GET /v1/elements`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OwnElementList {
    /// The elements of programs of this host.
    pub elements: Vec<OwnElement>,
}

/// An element of a program of this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OwnElement {
    /// Its pool's handle.
    pub handle: String,
    /// Its number.
    pub id: String,
    /// Whether a registrar has it in its handlespace, as far as is known here.
    pub registered: bool,
    /// The number of its home registrar, if that has said so.
    pub home: Option<String>,
    /// The transport of its service.
    pub transport: String,
    /// Where its users reach it.
    pub addresses: Vec<SocketAddr>,
    /// Users it has a session with, if the daemon takes those.
    pub sessions: u64,
}

/// The query of `GET /v1/resolve/{handle}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolveQuery {
    /// At most so many elements (as many as the registrar gives).
    pub items: Option<u32>,
    /// An answer of the last seconds is good enough (no: a registrar is asked).
    pub cached: Option<bool>,
}

/// Answer of `GET /v1/resolve/{handle}` and of `GET /v1/select/{handle}`, which has one element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Resolution {
    /// The pool's handle.
    pub handle: String,
    /// The short name of its policy.
    pub policy: String,
    /// Elements in the registrar's order: the first is to be used, the next if that is not reached.
    pub elements: Vec<ElementEntry>,
}

/// Body of `POST /v1/unreachable`: an element that the daemon named was not reached.
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
pub struct Reported {
    /// The element's number.
    pub id: String,
}
