//! Nodes that the machine does not run for a while.

/// How often in a row that is taken for what a busy machine does: what is broken is late each time.
pub const LATE_MAX: usize = 3;

/// Whether this is why something was kept: a node was not heard of for as long as the others wait.
pub fn was_late(reason: &str) -> bool {
    let words = [
        "did not answer in time",
        "the channel to",
        "did not say what it had not read",
    ];
    words.iter().any(|words| reason.contains(words))
}
