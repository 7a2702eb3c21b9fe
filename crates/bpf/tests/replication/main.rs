//! Tests of the replicator: single packets by test runs of the programs, and whole connections between real sockets. Need root, `ip`
//! and `nft`.

mod connections;
mod driver;
mod frames;
mod network;
mod packets;
mod server;

/// Hosts and waits, as in the tests of the steering programs.
#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "../packets/support"]
mod support {
    pub mod host;
    pub mod lab;
}

use support::host::Host;
use support::lab::eventually;
