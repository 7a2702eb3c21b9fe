//! What a machine is told when it starts.

use core::time::Duration;
use holdfast_wire::NodeId;
use std::collections::BTreeSet;

/// The settings of a [`super::Migration`]. [`Config::new`] has the defaults; each is documented at its field.
#[derive(Debug, Clone)]
pub struct Config {
    /// This node.
    pub node: NodeId,
    /// This daemon's start, greater than that of any earlier one of this node (for example nanoseconds since 1970).
    pub boot: u64,
    /// Who keeps the steering table.
    pub holder: NodeId,
    /// The other nodes of the group.
    pub peers: BTreeSet<NodeId>,
    /// How many processes this node takes at a time (1).
    pub incoming_max: usize,
    /// The most rounds of copying (30).
    pub rounds_max: u32,
    /// The longest time for rounds after the first (2 minutes).
    pub rounds_time_max: Duration,
    /// How long an acceptor may take to say whether it takes a process (10 s: it compares files).
    pub offer_timeout: Duration,
    /// How long it may take to make what the process is put into (30 s).
    pub build_timeout: Duration,
    /// How long acceptor and peers may take before the divert (2 s).
    pub arm_timeout: Duration,
    /// How long the holder may take to divert (500 ms).
    pub divert_timeout: Duration,
    /// How long the acceptor may take from the last byte to `Done` (1 s), besides the time that the bytes take four
    /// times over.
    pub transfer_timeout: Duration,
    /// How long an acceptor waits for the process (15 minutes, more than any rounds take).
    pub take_timeout: Duration,
    /// When a peer that prepared a translation and heard no more asks the holder, again and again (5 s).
    pub doubt_timeout: Duration,
    /// When a question is first asked again (50 ms); the wait doubles each time.
    pub ask_retry_min: Duration,
    /// The longest wait between two times (1 s).
    pub ask_retry_max: Duration,
    /// When a failed `Thaw`, `Release` or `Go` is tried again (20 ms), up to five times.
    pub command_retry: Duration,
}

impl Config {
    /// The defaults for `node`, whose daemon started at `boot`, in a group of `peers` where `holder` keeps the table.
    pub fn new(
        node: NodeId,
        boot: u64,
        holder: NodeId,
        peers: impl IntoIterator<Item = NodeId>,
    ) -> Config {
        let peers = peers.into_iter().filter(|peer| *peer != node).collect();
        Config {
            node,
            boot,
            holder,
            peers,
            incoming_max: 1,
            rounds_max: 30,
            rounds_time_max: Duration::from_secs(120),
            offer_timeout: Duration::from_secs(10),
            build_timeout: Duration::from_secs(30),
            arm_timeout: Duration::from_secs(2),
            divert_timeout: Duration::from_millis(500),
            transfer_timeout: Duration::from_secs(1),
            take_timeout: Duration::from_secs(900),
            doubt_timeout: Duration::from_secs(5),
            ask_retry_min: Duration::from_millis(50),
            ask_retry_max: Duration::from_secs(1),
            command_retry: Duration::from_millis(20),
        }
    }
}
