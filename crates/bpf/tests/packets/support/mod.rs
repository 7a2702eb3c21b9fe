//! Support shared by the tests.

pub mod client;
pub mod host;
pub mod lab;
pub mod node;
pub mod pool;
pub mod raw;
pub mod server;
pub mod tun;

pub use client::{Client, Datagrams, any, flow, open, path_mtu, pattern, set_option};
pub use lab::{Place, eventually};
pub use pool::{Options, Pool, TCP, UDP, service};
pub use raw::RawPeer;
pub use server::unsent;
