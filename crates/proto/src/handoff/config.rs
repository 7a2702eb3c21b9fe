//! What a machine is told when it starts.

use core::time::Duration;
use holdfast_wire::{Epoch, NodeId};
use std::collections::BTreeSet;

/// The settings of a [`super::Handoff`]. [`Config::new`] has the defaults; each is documented at its field.
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
    /// Where this node, as holder, starts the epochs of new flows; see [`crate::ownership::Floors::new`].
    pub epoch_floor: Epoch,
    /// The freeze a batch may be predicted to have (1.2 ms: DESIGN.md says under 2, and one in a hundred takes twice what
    /// was predicted).
    pub freeze_max: Duration,
    /// The most connections in a batch, whatever is predicted (512).
    pub batch_flows_max: usize,
    /// The most predicted bytes of a batch of more than one connection (4 MiB: a quarter of a frame).
    pub batch_bytes_max: usize,
    /// Batches of one acceptor that prepare while another is in its freeze (2).
    pub prepare_ahead: usize,
    /// The same when they drain, which takes longer and costs nothing (16).
    pub drain_ahead: usize,
    /// How long an acceptor may take to prepare sockets (2 s).
    pub prepare_timeout: Duration,
    /// How long the holder may take to divert (500 ms); the donor still serves meanwhile.
    pub divert_timeout: Duration,
    /// How long the acceptor may take from the state's leaving to `Done` (1 s), besides the time that the bytes take
    /// four times over.
    pub transfer_timeout: Duration,
    /// How long an acceptor waits, after `Prepared`, for the state (30 s, more than any drain).
    pub state_timeout: Duration,
    /// When a question to the holder is first asked again (50 ms); the wait doubles each time.
    pub ask_retry_min: Duration,
    /// The longest wait between two times (1 s).
    pub ask_retry_max: Duration,
    /// When a failed `Resume`, `Close` or `Activate` is tried again (20 ms), up to five times.
    pub command_retry: Duration,
    /// The longest rest between two batches (20 ms).
    pub rest_max: Duration,
    /// The longest a send queue may drain when the request does not say (2 s).
    pub drain_wait_max: Duration,
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
            epoch_floor: 1,
            freeze_max: Duration::from_micros(1_200),
            batch_flows_max: 512,
            batch_bytes_max: 4 << 20,
            prepare_ahead: 2,
            drain_ahead: 16,
            prepare_timeout: Duration::from_secs(2),
            divert_timeout: Duration::from_millis(500),
            transfer_timeout: Duration::from_secs(1),
            state_timeout: Duration::from_secs(30),
            ask_retry_min: Duration::from_millis(50),
            ask_retry_max: Duration::from_secs(1),
            command_retry: Duration::from_millis(20),
            rest_max: Duration::from_millis(20),
            drain_wait_max: Duration::from_secs(2),
        }
    }
}
