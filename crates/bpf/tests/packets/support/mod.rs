//! Support shared by the tests.

pub mod client;
pub mod host;
pub mod lab;
pub mod node;
pub mod pool;
pub mod raw_peer;
pub mod server;
pub mod tun;

pub use client::{Client, DatagramClient, flow, open, path_mtu, pattern, set_option, unspecified};
pub use lab::{HostPosition, eventually};
pub use pool::{Options, Pool, TCP, UDP, service};
pub use raw_peer::RawPeer;
pub use server::unsent_bytes;
