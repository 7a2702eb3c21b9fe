//! Configuration of a handoff machine.

use core::time::Duration;
use holdfast_wire::{Epoch, NodeId};

/// The settings of a [`super::Handoff`]. [`HandoffMachineConfig::new`] has the defaults; each is documented at its field.
#[derive(Debug, Clone)]
pub struct HandoffMachineConfig {
    /// The node of the machine.
    pub node: NodeId,
    /// Number of this daemon start, greater than any earlier one of this node (for example nanoseconds since 1970).
    pub boot: u64,
    /// Epoch at which this node, as holder, starts new flows; see [`crate::flow_ownership::EpochFloors::new`].
    pub new_flow_epoch_min: Epoch,
    /// Longest predicted freeze of a batch (1.2 ms: freezes shall stay under 2 ms, and one batch in a hundred takes twice its
    /// prediction).
    pub freeze_max: Duration,
    /// Most connections in a batch, independent of the prediction (512).
    pub batch_flows_max: usize,
    /// Most predicted bytes of a batch of more than one connection (4 MiB: a quarter of a frame).
    pub batch_bytes_max: usize,
    /// Number of batches of one acceptor that prepare while another is in its freeze (2).
    pub prepare_ahead: usize,
    /// Number of batches that prepare ahead when they drain, which takes longer and costs nothing (16).
    pub drain_ahead: usize,
    /// Longest time for an acceptor to prepare sockets (2 s).
    pub prepare_timeout: Duration,
    /// Longest time for the holder to divert (500 ms); the donor still serves meanwhile.
    pub divert_timeout: Duration,
    /// Longest time from the sending of the state to the acceptor's `Done` (1 s), plus four times the predicted
    /// transfer time of the bytes.
    pub transfer_timeout: Duration,
    /// Longest time an acceptor waits for the state after `PrepareResponse` (30 s, more than any drain).
    pub state_timeout: Duration,
    /// Time until a request to the holder is first repeated (50 ms); the wait doubles each time.
    pub holder_retry_min: Duration,
    /// Longest wait between two repetitions (1 s).
    pub holder_retry_max: Duration,
    /// Time until a failed `Resume`, `Close` or `Activate` is retried (20 ms), up to five times.
    pub command_retry_interval: Duration,
    /// Longest pause between two batches (20 ms).
    pub yield_pause_max: Duration,
    /// Longest wait for a send queue to drain when the request names none (2 s).
    pub drain_wait_max: Duration,
}

impl HandoffMachineConfig {
    /// Returns the defaults for `node`, for a daemon that started at `boot`.
    pub fn new(node: NodeId, boot: u64) -> HandoffMachineConfig {
        HandoffMachineConfig {
            node,
            boot,
            new_flow_epoch_min: 1,
            freeze_max: Duration::from_micros(1_200),
            batch_flows_max: 512,
            batch_bytes_max: 4 << 20,
            prepare_ahead: 2,
            drain_ahead: 16,
            prepare_timeout: Duration::from_secs(2),
            divert_timeout: Duration::from_millis(500),
            transfer_timeout: Duration::from_secs(1),
            state_timeout: Duration::from_secs(30),
            holder_retry_min: Duration::from_millis(50),
            holder_retry_max: Duration::from_secs(1),
            command_retry_interval: Duration::from_millis(20),
            yield_pause_max: Duration::from_millis(20),
            drain_wait_max: Duration::from_secs(2),
        }
    }
}
