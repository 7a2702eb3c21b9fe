//! The library for asynchronous programs, over tokio's sockets. Re-exported at the crate's root.

mod tcp;
mod udp;

pub use tcp::{Service, TcpConnection};
pub use udp::UdpService;
