//! `GET /v1/registrar`, `/v1/pools`, `/v1/pools/{handle}` and `/v1/peers`: the state of a registrar.
//!
//! Numbers of registrars and elements are eight hexadecimal digits. A pool's handle is text with all but printable
//! ASCII escaped as in Rust: `\x00`, `\n`, `\\`.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Status of this registrar. Answer of `GET /v1/registrar`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RegistrarStatus {
    /// The registrar's number.
    pub id: String,
    /// Version of the daemon.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// True if elements and users are served: the registrar has finished its start.
    pub ready: bool,
    /// The SCTP implementation: `kernel` or `usrsctp`.
    pub sctp: String,
    /// True if SCTP runs directly over IP.
    pub raw: bool,
    /// UDP port of SCTP over UDP.
    pub encapsulation_port: Option<u16>,
    /// Addresses for elements and users over SCTP.
    pub asap: Vec<SocketAddr>,
    /// Addresses for elements and users over TCP, without TLS.
    #[serde(default)]
    pub tcp: Vec<SocketAddr>,
    /// Addresses for elements and users over TLS.
    #[serde(default)]
    pub tls: Vec<SocketAddr>,
    /// Addresses for other registrars.
    pub enrp: Vec<SocketAddr>,
    /// Number of associations that are up or being set up.
    pub associations: u64,
    /// Number of pools, with elements of any home registrar.
    pub pools: u64,
    /// Number of elements, of any home registrar.
    pub elements: u64,
    /// Number of elements with this registrar as home.
    pub own_elements: u64,
    /// Checksum of these elements (RFC 5353 section 3.6.2).
    pub checksum: u16,
    /// Event counters.
    pub counters: RegistrarCounters,
}

/// Event counters of a registrar since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RegistrarCounters {
    /// Elements that registered for the first time.
    pub registrations: u64,
    /// Re-registrations of elements.
    pub reregistrations: u64,
    /// Registrations that were refused.
    pub refusals: u64,
    /// Elements that deregistered.
    pub deregistrations: u64,
    /// Resolutions that were answered.
    pub resolutions: u64,
    /// Resolutions that were refused.
    pub resolutions_refused: u64,
    /// Keep-alives sent.
    pub keep_alives: u64,
    /// Elements reported as unreachable by users.
    pub unreachable_reports: u64,
    /// Updates sent to other registrars.
    pub updates_sent: u64,
    /// Updates received from other registrars.
    pub updates_received: u64,
    /// Handle tables requested because a checksum differed.
    pub resynchronisations: u64,
    /// Takeovers of failed registrars' elements.
    pub takeovers: u64,
    /// Malformed messages.
    pub malformed: u64,
    /// Messages dropped because their host exceeded its rate limit.
    pub rate_limited: u64,
    /// Requests and reports from hosts without permission, and registrar messages from hosts that may not be
    /// registrars.
    pub access_denied: u64,
    /// Registrations refused because of a limit.
    pub limit_refusals: u64,
    /// Reports of unreachable elements that caused no keep-alive: the host had reported the element before, or the
    /// element had just answered.
    pub reports_ignored: u64,
    /// Associations refused because there are too many.
    pub associations_refused: u64,
    /// TCP connections refused: too many, too slow, without TLS where TLS is required, or with a certificate that
    /// grants no access.
    #[serde(default)]
    pub connections_refused: u64,
    /// Associations ended because of invalid messages, or because of silence.
    pub associations_aborted: u64,
    /// Multicast datagrams ignored as untrusted.
    pub multicast_ignored: u64,
    /// Messages dropped because an association's buffer was full.
    pub sends_refused: u64,
}

/// The query of `GET /v1/pools`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolQuery {
    /// Maximum number of pools (default 1000, at most 10,000).
    pub limit: Option<u64>,
    /// Start of the page: `next` of the previous answer.
    pub after: Option<String>,
}

/// Answer of `GET /v1/pools`: pools in no particular order. A pool that exists throughout appears exactly once in all
/// answers. An answer may have no pool and still a `next`, if many pools were removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PoolList {
    /// Pools of this page of the list.
    pub pools: Vec<PoolEntry>,
    /// Total number of pools.
    pub total: u64,
    /// Start of the next page, if there are more pools.
    pub next: Option<String>,
}

/// An entry in a registrar's list of pools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PoolEntry {
    /// The pool's handle.
    pub handle: String,
    /// Short name of the pool's policy, such as `LU`.
    pub policy: String,
    /// Number of elements in the pool.
    pub elements: u64,
}

/// Answer of `GET /v1/pools/{handle}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PoolDetail {
    /// The pool's handle.
    pub handle: String,
    /// Short name of the pool's policy.
    pub policy: String,
    /// Number of elements in the pool.
    #[serde(default)]
    pub total: u64,
    /// The pool's elements, ordered by number; at most 10,000 of a larger pool.
    pub elements: Vec<ElementEntry>,
}

/// An element of a pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ElementEntry {
    /// The element's number.
    pub id: String,
    /// Number of the home registrar.
    pub home: String,
    /// The element's figures for the pool's policy.
    pub policy: PolicyDetail,
    /// Lifetime of the registration, as on the wire; -1: unlimited.
    pub registration_life: i32,
    /// Transport protocol of the service: `sctp`, `tcp`, `udp`, `dccp`, `udp-lite` or `opaque`.
    pub transport: String,
    /// Addresses for pool users.
    pub addresses: Vec<SocketAddr>,
    /// Addresses for registrars.
    pub registrar_addresses: Vec<SocketAddr>,
}

/// A policy with its figures; figures that the policy lacks are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PolicyDetail {
    /// Short name of the policy.
    pub name: String,
    /// Weight: relative share of the sessions.
    pub weight: Option<u32>,
    /// Priority: elements of higher priority are chosen first.
    pub priority: Option<u32>,
    /// Load, 0 to 1.
    pub load: Option<f64>,
    /// Increase of the load by one more session, 0 to 1.
    pub degradation: Option<f64>,
    /// Increase of the load, or decrease of the weight, per millisecond of distance, 0 to 1.
    pub delay_penalty: Option<f64>,
    /// One-way delay between the home registrar and the element, in milliseconds.
    pub distance_ms: Option<u32>,
}

/// Answer of `GET /v1/peers`, ordered by number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PeerList {
    /// The other registrars of the scope.
    pub peers: Vec<PeerEntry>,
}

/// Another registrar.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PeerEntry {
    /// The registrar's number.
    pub id: String,
    /// Addresses of the registrar, if known.
    pub addresses: Vec<SocketAddr>,
    /// True if an association with the registrar is up.
    pub connected: bool,
    /// True if the registrar is neither silent nor being taken over.
    pub active: bool,
    /// Milliseconds since its last message.
    pub last_heard_ms: u64,
    /// Number of elements with this registrar as home.
    pub elements: u64,
    /// Checksum of its elements as stored here.
    pub checksum: u16,
    /// Checksum that it announced last.
    pub announced_checksum: Option<u16>,
}
