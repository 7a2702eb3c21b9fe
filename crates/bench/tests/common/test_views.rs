//! Views of the group that a test gives to daemons with `HOLDFAST_TEST_VIEWS`, instead of the group itself.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use holdfast_testbed::cluster::Cluster;
use serde_json::json;

use super::PATIENCE;

/// A lease that no test outlives.
pub const LONG_LEASE: Duration = Duration::from_secs(3600);

/// A view of the group.
pub struct View<'a> {
    /// Number of the view.
    pub epoch: u64,
    /// Name of the contact node.
    pub contact: &'a str,
    /// Nodes outside of the view.
    pub without: &'a [&'a str],
}

impl View<'_> {
    /// Gives the view to all nodes in it; the contact node also gets a lease. Another contact node's lease ends before.
    pub fn give(&self, cluster: &Cluster, lease: Duration) {
        let nodes = cluster.nodes();
        let members = nodes
            .iter()
            .filter(|node| !self.without.contains(&node.as_str()));
        // The contact node decides about the view, and so has the view first.
        let (contact, others): (Vec<_>, Vec<_>) = members.partition(|node| **node == self.contact);
        std::thread::scope(|scope| {
            for node in contact.into_iter().chain(others) {
                scope.spawn(move || self.give_to(cluster, node, lease));
            }
        });
    }

    /// Gives the view to one node; the contact node also gets a lease.
    pub fn give_to(&self, cluster: &Cluster, node: &str, lease: Duration) {
        let is_contact = node == self.contact;
        let body = json!({
            "epoch": self.epoch,
            "contact": self.contact,
            "without": self.without,
            "lease_ms": is_contact.then_some(lease.as_millis() as u64),
        });
        let answer = post(cluster, node, "/test/view", &body.to_string());
        assert!(answer.starts_with("HTTP/1.1 200"), "{node}: {answer}");
    }
}

/// Posts to a node's control API, and returns the whole answer.
fn post(cluster: &Cluster, node: &str, path: &str, body: &str) -> String {
    let socket = cluster.run_path(node, "control.sock").unwrap();
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}
