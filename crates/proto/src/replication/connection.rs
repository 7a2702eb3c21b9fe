//! The state of one connection.

use super::legs::Standing;
use core::time::Duration;
use holdfast_wire::replication_frames::{ConnectionRecord, LEGS_MAX, LegIndex, LegSet};

/// A connection, as far as the machine decides about it: at most 256 bytes.
#[derive(Debug, Clone)]
pub(super) struct Connection {
    /// The part that a backup knows. The legs that serve the connection are `record.live`.
    pub record: ConnectionRecord,
    /// The leg that the client sees.
    pub primary: LegIndex,
    /// True if the data plane has roles for this connection alone.
    pub has_own_roles: bool,
    /// Legs that have ended their output.
    pub finished: LegSet,
    /// Time at which unfinished and finished legs are compared.
    pub fin_deadline: Option<Duration>,
    /// Time of the first end of a leg's output, while others have not ended.
    pub fin_since: Duration,
    /// Legs whose output differs.
    pub diverged: LegSet,
    /// Legs whose output was not compared without a gap.
    pub uncompared: LegSet,
    /// Legs that differ from the primary while too few legs have voted.
    pub disputed: LegSet,
    /// Legs that were reported as lagging.
    pub lagging: LegSet,
    /// Bytes that each leg lacks.
    pub behind: [u32; LEGS_MAX],
    /// Number of input bytes that the client was told are acknowledged.
    pub acknowledged: u32,
    /// Legs that no longer serve the connection, and still serve others.
    pub left: LegSet,
    /// Number of input bytes that each finished leg, or leg that left, had acknowledged.
    pub left_at: [u32; LEGS_MAX],
    /// Legs that left under a former contact node: how much input they had is unknown.
    pub left_before: LegSet,
}

impl Connection {
    pub fn new(record: ConnectionRecord, primary: LegIndex, uncompared: LegSet) -> Connection {
        Connection {
            record,
            primary,
            has_own_roles: false,
            finished: LegSet::EMPTY,
            fin_deadline: None,
            fin_since: Duration::ZERO,
            diverged: LegSet::EMPTY,
            uncompared,
            disputed: LegSet::EMPTY,
            lagging: LegSet::EMPTY,
            behind: [0; LEGS_MAX],
            acknowledged: 0,
            left: LegSet::EMPTY,
            left_at: [0; LEGS_MAX],
            left_before: LegSet::EMPTY,
        }
    }

    /// Returns the standing of the legs in this connection.
    pub fn standing(&self) -> Standing {
        Standing {
            behind: self.behind.map(u64::from),
            diverged: self.diverged,
            uncompared: self.uncompared.union(self.disputed),
        }
    }

    /// Records the input that a leg acknowledged before it ended.
    pub fn set_left_at(&mut self, leg: LegIndex, acknowledged: u32) {
        self.left_at[leg.position()] = acknowledged;
        self.left_before.remove(leg);
    }

    /// Removes a leg; returns false if it did not serve the connection.
    pub fn remove_leg(&mut self, leg: LegIndex) -> bool {
        let served = self.record.live.contains(leg);
        self.record.live.remove(leg);
        self.finished.remove(leg);
        served
    }

    /// Returns the legs that have left and lack input that the others have acknowledged since. A leg of which this is unknown
    /// is taken to lack input as soon as there is any.
    pub fn legs_without_input(&self) -> LegSet {
        let lacks_input = |leg: &LegIndex| {
            let left_at = self.left_at[leg.position()];
            // Sequence numbers wrap: a difference below 2^31 is ahead.
            let ahead = self.acknowledged.wrapping_sub(left_at);
            match self.left_before.contains(*leg) {
                true => self.acknowledged != 0,
                false => ahead != 0 && ahead < 1 << 31,
            }
        };
        self.left.iter().filter(lacks_input).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_takes_at_most_256_bytes() {
        assert!(
            size_of::<Connection>() <= 256,
            "{}",
            size_of::<Connection>()
        );
    }
}
