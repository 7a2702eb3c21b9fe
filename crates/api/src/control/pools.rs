//! `GET /v1/registrar`, `/v1/pools`, `/v1/pools/{handle}` and `/v1/peers`: what a registrar knows.
//!
//! Numbers of registrars and elements are eight hexadecimal digits. A pool's handle is text in which everything but
//! printable ASCII is escaped as in Rust: `\x00`, `\n`, `\\`.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What this registrar is and does. Answer of `GET /v1/registrar`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RegistrarStatus {
    /// Its number.
    pub id: String,
    /// Version of the daemon.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// Whether elements and users are served: it is past its start.
    pub ready: bool,
    /// Whose SCTP it uses: `kernel` or `usrsctp`.
    pub sctp: String,
    /// Whether SCTP goes over IP itself.
    pub raw: bool,
    /// UDP port of SCTP inside UDP.
    pub encapsulation_port: Option<u16>,
    /// Where elements and users reach it.
    pub asap: Vec<SocketAddr>,
    /// The same over TCP, without TLS.
    #[serde(default)]
    pub tcp: Vec<SocketAddr>,
    /// The same with TLS.
    #[serde(default)]
    pub tls: Vec<SocketAddr>,
    /// Where other registrars reach it.
    pub enrp: Vec<SocketAddr>,
    /// Associations that are up or coming up.
    pub associations: u64,
    /// Pools, whoever's the elements are.
    pub pools: u64,
    /// Elements, whoever's they are.
    pub elements: u64,
    /// Elements whose home it is.
    pub own_elements: u64,
    /// The checksum of those (RFC 5353 section 3.6.2).
    pub checksum: u16,
    /// What happened how often.
    pub counters: RegistrarCounters,
}

/// What happened how often since a registrar's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RegistrarCounters {
    /// Elements that registered for the first time.
    pub registrations: u64,
    /// Elements that registered anew.
    pub reregistrations: u64,
    /// Registrations that were refused.
    pub refusals: u64,
    /// Elements that left.
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
    /// Updates that came from other registrars.
    pub updates_received: u64,
    /// Handle tables asked for because a checksum differed.
    pub resynchronisations: u64,
    /// Registrars whose elements were taken over.
    pub takeovers: u64,
    /// Messages that were malformed.
    pub malformed: u64,
    /// Messages dropped because their host sends too many.
    pub limited: u64,
    /// Requests and reports of who may not make them, and messages of who may not be a registrar.
    pub denied: u64,
    /// Registrations refused because of a limit.
    pub over_limit: u64,
    /// Reports of unreachable elements that made nobody ask: their host had reported the element before, or it had just
    /// answered.
    pub reports_unheeded: u64,
    /// Associations refused because there are too many.
    pub associations_refused: u64,
    /// Connections over TCP that were not let in: too many, too slow, without TLS where it is spoken, or with a certificate that
    /// admits to nothing.
    #[serde(default)]
    pub connections_refused: u64,
    /// Associations ended for what was sent on them, or because nothing was.
    pub aborted: u64,
    /// Datagrams that came by multicast and were not believed.
    pub multicast_unheeded: u64,
    /// Messages for which an association's buffer had no room.
    pub sends_refused: u64,
}

/// The query of `GET /v1/pools`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolQuery {
    /// At most so many (1000, and never more than 10,000).
    pub limit: Option<u64>,
    /// Where to go on: the `next` of the answer before.
    pub after: Option<String>,
}

/// Answer of `GET /v1/pools`: pools in no order, each of those that are there all the time once in all answers. An answer may have none and a
/// `next` all the same, where many pools are gone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PoolList {
    /// The pools.
    pub pools: Vec<PoolEntry>,
    /// How many there are in all.
    pub total: u64,
    /// Where to go on, if there are more.
    pub next: Option<String>,
}

/// A pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PoolEntry {
    /// Its handle.
    pub handle: String,
    /// The short name of its policy, such as `LU`.
    pub policy: String,
    /// How many elements it has.
    pub elements: u64,
}

/// Answer of `GET /v1/pools/{handle}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PoolDetail {
    /// Its handle.
    pub handle: String,
    /// The short name of its policy.
    pub policy: String,
    /// How many elements it has.
    #[serde(default)]
    pub total: u64,
    /// Its elements, ordered by number: of a pool with very many, 10,000.
    pub elements: Vec<ElementEntry>,
}

/// An element of a pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ElementEntry {
    /// Its number.
    pub id: String,
    /// The number of its home registrar.
    pub home: String,
    /// What it said for the pool's policy.
    pub policy: PolicyDetail,
    /// How long a registration holds, as on the wire; -1: for ever.
    pub registration_life: i32,
    /// The transport of its service: `sctp`, `tcp`, `udp`, `dccp`, `udp-lite` or `opaque`.
    pub transport: String,
    /// Where its users reach it.
    pub addresses: Vec<SocketAddr>,
    /// Where registrars reach it.
    pub registrar_addresses: Vec<SocketAddr>,
}

/// A policy with its figures; those that it has not are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PolicyDetail {
    /// Its short name.
    pub name: String,
    /// Share of the sessions.
    pub weight: Option<u32>,
    /// The higher, the sooner chosen.
    pub priority: Option<u32>,
    /// Load, 0 to 1.
    pub load: Option<f64>,
    /// What one more session adds to the load, 0 to 1.
    pub degradation: Option<f64>,
    /// What one millisecond of distance costs, 0 to 1.
    pub delay_penalty: Option<f64>,
    /// One-way delay between the home registrar and the element, milliseconds.
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
    /// Its number.
    pub id: String,
    /// Where it is reached, if that is known.
    pub addresses: Vec<SocketAddr>,
    /// Whether there is an association with it.
    pub connected: bool,
    /// Neither silent nor being taken over.
    pub active: bool,
    /// Milliseconds since it was last heard.
    pub last_heard_ms: u64,
    /// Elements whose home it is.
    pub elements: u64,
    /// The checksum of its elements as they are known here.
    pub checksum: u16,
    /// The checksum that it announced last.
    pub announced_checksum: Option<u16>,
}
