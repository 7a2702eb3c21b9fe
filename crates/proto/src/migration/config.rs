//! Configuration of a migration machine.

use core::time::Duration;
use holdfast_wire::NodeId;

/// The settings of a [`super::Migration`]. [`MigrationMachineConfig::new`] has the defaults; each is documented at its field.
#[derive(Debug, Clone)]
pub struct MigrationMachineConfig {
    /// The node of the machine.
    pub node: NodeId,
    /// Number of this daemon start, greater than any earlier one of this node (for example nanoseconds since 1970).
    pub boot: u64,
    /// Most processes that this node takes at a time (1).
    pub incoming_max: usize,
    /// Most rounds of copying (30).
    pub rounds_max: u32,
    /// Longest time for rounds after the first (2 minutes).
    pub rounds_time_max: Duration,
    /// Longest time for an acceptor to answer an offer (10 s: it compares files).
    pub offer_timeout: Duration,
    /// Longest time for the acceptor to make the stub process (30 s).
    pub build_timeout: Duration,
    /// Longest time for acceptor and peers to prepare for the divert (2 s).
    pub arm_timeout: Duration,
    /// Longest time for the holder to divert (500 ms).
    pub divert_timeout: Duration,
    /// Longest time from the last byte sent to the acceptor's `Done` (1 s), plus four times the predicted transfer time
    /// of the bytes.
    pub transfer_timeout: Duration,
    /// Longest time an acceptor waits for the process (15 minutes, more than any rounds take).
    pub inbound_timeout: Duration,
    /// Interval at which a peer with a prepared translation asks the holder when no other frame of the move arrives (5
    /// s).
    pub outcome_query_interval: Duration,
    /// Time until a request is first repeated (50 ms); the wait doubles each time.
    pub retry_min: Duration,
    /// Longest wait between two repetitions (1 s).
    pub retry_max: Duration,
    /// Time until a failed `Thaw`, `Release` or `Resume` is retried (20 ms), up to five times.
    pub command_retry_interval: Duration,
}

impl MigrationMachineConfig {
    /// Returns the defaults for `node`, for a daemon that started at `boot`.
    pub fn new(node: NodeId, boot: u64) -> MigrationMachineConfig {
        MigrationMachineConfig {
            node,
            boot,
            incoming_max: 1,
            rounds_max: 30,
            rounds_time_max: Duration::from_secs(120),
            offer_timeout: Duration::from_secs(10),
            build_timeout: Duration::from_secs(30),
            arm_timeout: Duration::from_secs(2),
            divert_timeout: Duration::from_millis(500),
            transfer_timeout: Duration::from_secs(1),
            inbound_timeout: Duration::from_secs(900),
            outcome_query_interval: Duration::from_secs(5),
            retry_min: Duration::from_millis(50),
            retry_max: Duration::from_secs(1),
            command_retry_interval: Duration::from_millis(20),
        }
    }
}
