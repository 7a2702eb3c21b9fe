//! The legs as the operator sees them.

use super::Replication;
use super::legs::Doubt;
use holdfast_wire::NodeId;
use holdfast_wire::replication_frames::LegIndex;

/// A leg of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LegReport {
    /// Position of the leg.
    pub leg: LegIndex,
    /// Node with the leg's server.
    pub node: NodeId,
    /// True for the leg that clients see.
    pub is_primary: bool,
    /// Reason for which the leg would be promoted late or not at all, if any.
    pub standing: LegStanding,
    /// Number of bytes that the leg lacks, in all connections together, as of the last samples.
    pub behind_bytes: u64,
}

/// Confidence in a leg, from the greatest to the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LegStanding {
    /// The leg has all input, and its output does not differ.
    Sound,
    /// The leg's node does not answer at present.
    Suspected,
    /// The leg is new, and not level with the primary.
    CatchingUp,
    /// The leg's output was not compared without a gap.
    Uncompared,
    /// The leg's output has differed.
    Diverged,
}

impl From<Doubt> for LegStanding {
    fn from(doubt: Doubt) -> LegStanding {
        match doubt {
            Doubt::None => LegStanding::Sound,
            Doubt::Suspected => LegStanding::Suspected,
            Doubt::CatchingUp => LegStanding::CatchingUp,
            Doubt::Uncompared => LegStanding::Uncompared,
            Doubt::Diverged => LegStanding::Diverged,
        }
    }
}

impl Replication {
    /// Returns the legs of the service in order.
    pub fn leg_reports(&self) -> Vec<LegReport> {
        let standing = self.standing();
        let report = |(leg, state): (LegIndex, &super::legs::Leg)| LegReport {
            leg,
            node: state.node,
            is_primary: leg == self.legs.primary,
            standing: self.legs.doubt(leg, &standing).into(),
            behind_bytes: standing.behind[leg.position()],
        };
        self.legs.iter().map(report).collect()
    }
}
