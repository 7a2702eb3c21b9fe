//! Settings of the replication of one service.

use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::health_frames::ServiceEndpoint;

/// The reaction to a leg whose output differs from the primary's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DivergencePolicy {
    /// Report the leg, and promote it only when no sound leg lives.
    #[default]
    Report,
    /// Report and drop the leg.
    Drop,
    /// With three or more legs, keep the majority: also a primary can be outvoted. With two, drop the replica.
    Vote,
}

/// The reaction to a leg that holds up the client because it is slow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LagPolicy {
    /// Drop the leg.
    #[default]
    Drop,
    /// Let the client wait, and report the leg.
    Wait,
}

/// The settings of a [`super::Replication`]. [`ReplicatedServiceConfig::new`] has the defaults; each is documented at its field.
#[derive(Debug, Clone)]
pub struct ReplicatedServiceConfig {
    /// Number of this node.
    pub node: NodeId,
    /// Service that is replicated.
    pub service: ServiceEndpoint,
    /// Wanted number of replicas beside the primary (1).
    pub replicas: usize,
    /// Reaction to a leg whose output differs.
    pub divergence: DivergencePolicy,
    /// Reaction to a slow leg.
    pub lagging: LagPolicy,
    /// Limits of the data plane's watch.
    pub limits: WatchLimits,
    /// Silence of a node's heartbeats and of all its connections after which a leg there is suspected (200 ms).
    pub heartbeat_silence: Duration,
    /// Time between two probes of a suspected leg (10 ms).
    pub probe_interval: Duration,
    /// Time for which a connection may have no answer from a leg whose node answers probes (1 s): TCP repeats a lost segment
    /// after 0.2 s, and again after 0.4 s.
    pub unresponsive_max: Duration,
    /// Time that the other legs have to end a connection after one leg has ended it (80 ms). Then the majority decides, or
    /// else the primary.
    pub fin_patience: Duration,
    /// Longest wait for legs that lack output where others have ended a connection (1 s).
    pub fin_hold_max: Duration,
    /// Silence after which a leg is dropped although no other leg is heard: the last one, or all (5 s).
    pub last_leg_patience: Duration,
    /// Time that a new leg has to catch up (30 s).
    pub catch_up_max: Duration,
    /// A new leg is level with the primary at this number of bytes behind it, or less (64 KiB).
    pub level_bytes: u32,
    /// Maximum number of connections (65,536).
    pub connections_max: usize,
    /// Longest wait of a change for others with which it travels to the backup (10 ms).
    pub backup_delay: Duration,
    /// Time after which a backup that acknowledges nothing is lost (200 ms).
    pub backup_ack_max: Duration,
    /// Time from the loss of a backup to the next attempt (1 s).
    pub backup_retry: Duration,
}

/// Limits of the data plane's watch over the legs of each connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchLimits {
    /// A busy leg is silent after this number of round trips (3), plus `silence_extra`.
    pub silence_round_trips: u32,
    /// See `silence_round_trips` (60 ms).
    pub silence_extra: Duration,
    /// Time after which a leg that acknowledges input, but lacks output that others have, is stopped (300 ms).
    pub stall_max: Duration,
    /// The primary may be ahead of the slowest leg by this number of bytes (1 MiB).
    pub lag_bytes_max: u32,
    /// Time for which a slow leg may hold up the client (80 ms).
    pub lag_time_max: Duration,
}

impl WatchLimits {
    /// Returns the silence after which a busy leg is taken for lost on a connection with this round trip.
    pub fn silence_max(&self, round_trip: Duration) -> Duration {
        round_trip.saturating_mul(self.silence_round_trips) + self.silence_extra
    }
}

impl Default for WatchLimits {
    fn default() -> WatchLimits {
        WatchLimits {
            silence_round_trips: 3,
            silence_extra: Duration::from_millis(60),
            stall_max: Duration::from_millis(300),
            lag_bytes_max: 1 << 20,
            lag_time_max: Duration::from_millis(80),
        }
    }
}

impl ReplicatedServiceConfig {
    /// Returns the defaults for a service at this node.
    pub fn new(node: NodeId, service: ServiceEndpoint) -> ReplicatedServiceConfig {
        ReplicatedServiceConfig {
            node,
            service,
            replicas: 1,
            divergence: DivergencePolicy::default(),
            lagging: LagPolicy::default(),
            limits: WatchLimits::default(),
            heartbeat_silence: Duration::from_millis(200),
            probe_interval: Duration::from_millis(10),
            unresponsive_max: Duration::from_secs(1),
            fin_patience: Duration::from_millis(80),
            fin_hold_max: Duration::from_secs(1),
            last_leg_patience: Duration::from_secs(5),
            catch_up_max: Duration::from_secs(30),
            level_bytes: 64 << 10,
            connections_max: 65_536,
            backup_delay: Duration::from_millis(10),
            backup_ack_max: Duration::from_millis(200),
            backup_retry: Duration::from_secs(1),
        }
    }
}
