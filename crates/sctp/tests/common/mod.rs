//! Two hosts with two links, and an SCTP peer on the second host. The peer is this program, started again, because each
//! host needs its own SCTP stack.
#![allow(dead_code, missing_docs)]

use holdfast_lab::testing::TestNamespace;
use holdfast_sctp::{TransportEndpoint, TransportEvent};
use std::net::SocketAddr;
use std::process::{Child, Command};
use std::time::Duration;

/// Environment variable that is set for the peer's process.
const PEER: &str = "HOLDFAST_TEST_PEER";

/// The peer's process, killed when dropped. The process runs the test named `peer`, which does nothing unless
/// [`is_peer`].
pub struct Peer(Child);

impl Peer {
    pub fn start(host: &TestNamespace) -> Self {
        let start = || {
            Command::new(std::env::current_exe().expect("this program"))
                .args(["peer", "--exact"])
                .env(PEER, "1")
                .spawn()
        };
        Self(host.run(start).expect("the peer"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn is_peer() -> bool {
    std::env::var_os(PEER).is_some()
}

/// Returns host 1 and host 2 of the networks 10.1.0.0/24 (link "left") and 10.2.0.0/24 (link "right").
pub fn hosts_with_two_links() -> (TestNamespace, TestNamespace) {
    let (local, remote) = (TestNamespace::new(), TestNamespace::new());
    for (name, net) in [("left", 1), ("right", 2)] {
        local.link_to(&remote, name);
        for (host, namespace) in [(1, &local), (2, &remote)] {
            namespace.ip(&format!("address add 10.{net}.0.{host}/24 dev {name}"));
            namespace.ip(&format!("link set {name} up"));
        }
    }
    (local, remote)
}

pub fn socket_address(address: &str) -> SocketAddr {
    SocketAddr::new(address.parse().expect("an address"), 3863)
}

/// Sends pending packets, waits up to 50 ms for packets of the peer, and returns the events.
pub fn poll_events(endpoint: &mut dyn TransportEndpoint) -> Vec<TransportEvent> {
    let mut events = Vec::new();
    endpoint
        .wait_for_events(Duration::from_millis(50), &mut events)
        .expect("a working transport");
    events
}
