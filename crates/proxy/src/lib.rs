//! The proxy of a node: accepts the connections of a service, and joins each to an unmodified server on the same host
//! (paper 000, section 3.1.5).
//!
//! - [`Proxy`] accepts connections, limits their number, and drains.
//! - `join` passes bytes, ends of streams and resets between the two connections of a client, with splice(2).
//! - [`proxy_protocol`] tells the server the client's address.
//!
//! The proxy is a server program like any other: it uses the local daemon by [`holdfast_api::Session`]. Only the proxy
//! of the node that accepted a connection can serve the connection, because the server behind it has the other half of
//! the state. So the proxy declines handoffs ([`Session::without_handoffs`](holdfast_api::Session::without_handoffs)).
#![forbid(unsafe_code)]

mod descriptor_limit;
mod event;
mod join;
mod pipe_pool;
mod proxy;
pub mod proxy_protocol;
mod relay;

pub use descriptor_limit::{DescriptorShortage, connections_max};
pub use event::{ProxyEvent, Totals};
pub use proxy::{ListenError, Proxy, ProxyConfig};
