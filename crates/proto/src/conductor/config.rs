//! Configuration of a conductor.

use super::policy::Policies;
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::Utilization;

/// The settings of a [`super::Conductor`]. [`ConductorConfig::new`] has the defaults; each is documented at its field.
#[derive(Debug, Clone)]
pub struct ConductorConfig {
    /// The own node.
    pub node: NodeId,
    /// Number of this daemon start, greater than any earlier one of this node.
    pub boot: u64,
    /// Seed of random choices, different for each node.
    pub random_seed: u64,
    /// True if the node gives and takes processes to even out loads. A node that does not can be drained, and takes the
    /// processes of drained nodes.
    pub is_balancing: bool,
    /// The four policies of paper 002, section IV.
    pub policies: Policies,
    /// Time constant of the smoothed loads (10 s).
    pub smoothing: Duration,
    /// Age after which the load of a node does not count (15 s).
    pub freshness: Duration,
    /// Time between two decisions (1 s).
    pub decision_interval: Duration,
    /// Rest of both nodes after a move that evens out loads (10 s), in which their measured loads settle.
    pub calm_down: Duration,
    /// Most moves from and to this node in any minute (6).
    pub moves_per_minute_max: usize,
    /// The same limit for moves from a drained node, which includes all moves (60).
    pub drain_moves_per_minute_max: usize,
    /// Time in which a process that has moved is not moved again to even out loads (10 min).
    pub process_rest: Duration,
    /// Most moves of a process in `process_moves_window` to even out loads (2).
    pub process_moves_max: usize,
    /// Time after which an earlier move of a process is forgotten (1 h).
    pub process_moves_window: Duration,
    /// Least difference between the donor's load before a move and the acceptor's load afterwards (2 points).
    pub gain_min: Utilization,
    /// Least load of a process that is moved to even out loads, as a share of the donor's capacity (0.5 points).
    pub process_min: Utilization,
    /// Longest predicted freeze of a process that is moved to even out loads (200 ms).
    pub freeze_max: Duration,
    /// Highest load of an acceptor after it takes a process of a drained node (95 %).
    pub drain_ceiling: Utilization,
    /// Duration of a move in the estimate of a drain until one has ended (2 s).
    pub move_estimate: Duration,
    /// Time until an unanswered offer is withdrawn (1 s).
    pub answer_timeout: Duration,
    /// Time in which a node that declined an offer gets no further one (5 s).
    pub decline_rest: Duration,
    /// Time until an acceptor that heard nothing of an accepted offer asks the donor (2 s).
    pub inquiry_interval: Duration,
    /// Time after which either side gives up on a move without news (10 min).
    pub move_duration_max: Duration,
}

impl ConductorConfig {
    /// Returns the defaults for this node, whose daemon started at `boot`.
    pub fn new(node: NodeId, boot: u64) -> ConductorConfig {
        ConductorConfig {
            node,
            boot,
            random_seed: boot ^ u64::from(node.0),
            is_balancing: true,
            policies: Policies::DEFAULT,
            smoothing: Duration::from_secs(10),
            freshness: Duration::from_secs(15),
            decision_interval: Duration::from_secs(1),
            calm_down: Duration::from_secs(10),
            moves_per_minute_max: 6,
            drain_moves_per_minute_max: 60,
            process_rest: Duration::from_secs(600),
            process_moves_max: 2,
            process_moves_window: Duration::from_secs(3_600),
            gain_min: Utilization(200),
            process_min: Utilization(50),
            freeze_max: Duration::from_millis(200),
            drain_ceiling: Utilization(9_500),
            move_estimate: Duration::from_secs(2),
            answer_timeout: Duration::from_secs(1),
            decline_rest: Duration::from_secs(5),
            inquiry_interval: Duration::from_secs(2),
            move_duration_max: Duration::from_secs(600),
        }
    }
}
