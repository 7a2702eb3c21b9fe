//! An authoritative DNS server for the names of a group, without sockets and clock.
//!
//! [`Responder::handle_query`] turns the bytes of a query into the bytes of the answer. The records come from two sides:
//! [`ZoneSettings`] and [`ConfiguredName`]s from the operator, and [`GroupService`]s with their health from the group.
//! [`published_names`] joins both, and only addresses that serve are in answers.
//!
//! ```text
//! ConfiguredName ──┐
//! GroupService ────┼─► published_names ─► Zone ─► Responder ─► answer
//! live addresses ──┘                                ▲
//!                                                 query
//! ```
#![forbid(unsafe_code)]

mod dns_names;
mod published_names;
mod responder;
mod response_limit;
mod selection;
mod zone;

pub use dns_names::{DnsNameError, DnsZoneName, Label};
pub use published_names::{
    ConfiguredAddress, ConfiguredName, Endpoint, GroupService, NameOwner, PublishedName,
    TransportProtocol, published_names,
};
pub use responder::{Outcome, QueryTransport, Responder, Response, UDP_PAYLOAD_MAX};
pub use response_limit::{ClientPrefix, ResponseLimit};
pub use selection::{Random, SelectionRule};
pub use zone::{NameServer, ZoneSettings};
