//! The nodes that sent segments of each connection, as captured at the client's interface.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use holdfast_lab::HostKind;
use holdfast_testbed::capture::TcpSegment;
use holdfast_testbed::cluster::Cluster;

/// For each client, the nodes that sent segments, in order; a node occurs once for each run of its segments.
pub type SendersByClient = BTreeMap<SocketAddr, Vec<String>>;

/// Groups by client the segments that the service sent. The source link address identifies the node, since client and
/// nodes are on one segment. Resets are marked.
pub fn senders_by_client(
    cluster: &Cluster,
    service: SocketAddr,
    segments: &[TcpSegment],
) -> SendersByClient {
    let nodes: BTreeMap<[u8; 6], &str> = cluster
        .lab()
        .hosts()
        .iter()
        .filter(|host| host.kind == HostKind::Node)
        .map(|host| (host.mac.0, host.name.as_str()))
        .collect();
    let mut speakers = SendersByClient::new();
    for segment in segments.iter().filter(|segment| segment.from == service) {
        let node = nodes
            .get(&segment.source_mac)
            .copied()
            .unwrap_or("unknown node");
        let sender = match segment.rst {
            true => format!("{node} (RST)"),
            false => node.to_owned(),
        };
        let senders = speakers.entry(segment.to).or_default();
        if senders.last() != Some(&sender) {
            senders.push(sender);
        }
    }
    speakers
}

/// Returns the connections with a sender out of order. A connection may pass from the first node of `allowed_order`
/// towards the last, never back: the donor sends before the acceptor.
pub fn order_violations(speakers: &SendersByClient, allowed_order: &[&str]) -> Vec<String> {
    let wrong = speakers.iter().filter(|(_, of)| {
        let mut remaining = allowed_order.iter();
        !of.iter()
            .all(|speaker| remaining.any(|node| node == speaker))
    });
    wrong
        .map(|(client, of)| format!("{client}: sent by {}", of.join(", then ")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_violation(senders: &[&str], path: &[&str]) -> bool {
        let client = SocketAddr::from(([10, 0, 0, 1], 1));
        let of = senders.iter().map(|node| (*node).to_owned()).collect();
        !order_violations(&[(client, of)].into(), path).is_empty()
    }

    #[test]
    fn out_of_order_sender_is_violation() {
        let allowed_order = ["n2", "n3"];
        assert!(!is_violation(&["n2"], &allowed_order));
        assert!(!is_violation(&["n3"], &allowed_order));
        assert!(!is_violation(&["n2", "n3"], &allowed_order));
        assert!(is_violation(&["n2", "n3", "n2"], &allowed_order));
        assert!(is_violation(&["n3", "n2"], &allowed_order));
        assert!(is_violation(&["n2", "n1"], &allowed_order));
        assert!(is_violation(&["n2", "n2 (RST)"], &allowed_order));
    }
}
