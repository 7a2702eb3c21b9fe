//! The nodes that sent segments of each connection, as captured at the client's interface.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use holdfast_bench::capture::Segment;
use holdfast_bench::cluster::Cluster;
use holdfast_lab::Kind;

/// For each client, the nodes that sent segments, in order; a node occurs once for each run of its segments.
pub type Speakers = BTreeMap<SocketAddr, Vec<String>>;

/// Groups by client the segments that the service sent. The source link address identifies the node, since client and
/// nodes are on one segment. Resets are marked.
pub fn speakers(cluster: &Cluster, service: SocketAddr, segments: &[Segment]) -> Speakers {
    let nodes: BTreeMap<[u8; 6], &str> = cluster
        .lab()
        .hosts()
        .iter()
        .filter(|host| host.kind == Kind::Node)
        .map(|host| (host.mac.0, host.name.as_str()))
        .collect();
    let mut speakers = Speakers::new();
    for segment in segments.iter().filter(|segment| segment.from == service) {
        let node = nodes.get(&segment.link).copied().unwrap_or("a stranger");
        let speaker = match segment.rst {
            true => format!("{node} with a reset"),
            false => node.to_owned(),
        };
        let of = speakers.entry(segment.to).or_default();
        if of.last() != Some(&speaker) {
            of.push(speaker);
        }
    }
    speakers
}

/// Returns the connections with a speaker out of order. A connection may pass from the first node of `way` towards the
/// last, never back: the donor speaks before the acceptor.
pub fn violations(speakers: &Speakers, way: &[&str]) -> Vec<String> {
    let wrong = speakers.iter().filter(|(_, of)| {
        let mut rest = way.iter();
        !of.iter().all(|speaker| rest.any(|node| node == speaker))
    });
    wrong
        .map(|(client, of)| format!("{client}: {} spoke", of.join(", then ")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(of: &[&str], way: &[&str]) -> bool {
        let client = SocketAddr::from(([10, 0, 0, 1], 1));
        let of = of.iter().map(|node| (*node).to_owned()).collect();
        !violations(&[(client, of)].into(), way).is_empty()
    }

    #[test]
    fn a_connection_goes_one_way() {
        let way = ["n2", "n3"];
        assert!(!wrong(&["n2"], &way));
        assert!(!wrong(&["n3"], &way));
        assert!(!wrong(&["n2", "n3"], &way));
        assert!(wrong(&["n2", "n3", "n2"], &way));
        assert!(wrong(&["n3", "n2"], &way));
        assert!(wrong(&["n2", "n1"], &way));
        assert!(wrong(&["n2", "n2 with a reset"], &way));
    }
}
