//! Nodes that the machine does not run for some time.

/// Most consecutive failures attributed to a busy machine: a defect fails every time.
pub const STALLS_MAX: usize = 3;

/// Returns true if a move failed because a node was silent until the time limit of the others.
pub fn is_node_stall(reason: &str) -> bool {
    let words = [
        "did not answer in time",
        "the channel to",
        "did not return its unread datagrams",
    ];
    words.iter().any(|words| reason.contains(words))
}
