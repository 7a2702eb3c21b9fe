//! The legs of a service, and the choice among them.

use super::event::{CommandError, Protection};
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::replication_frames::{LEGS_MAX, LegIndex, LegSet, ReplicationRoles};
use std::collections::BTreeSet;
use std::net::SocketAddr;

/// A leg of the service.
#[derive(Debug)]
pub(super) struct Leg {
    /// Node with the server.
    pub node: NodeId,
    /// How far the leg is on its way into the service.
    pub phase: LegPhase,
    /// Time of the last sign of life of the leg or its node.
    pub last_heard: Duration,
    /// The suspicion that the leg's node is lost, if any.
    pub suspicion: Option<Suspicion>,
    /// True if the leg's output has differed in any connection.
    pub has_diverged: bool,
}

/// How far a leg is on its way into the service.
#[derive(Debug)]
pub(super) enum LegPhase {
    /// The server is being made. The data plane does not know the leg.
    Preparing,
    /// The leg gets all input, and holds back acknowledgements.
    CatchingUp {
        /// Time by which the new leg must be level with the primary.
        deadline: Duration,
        /// The connections in which it is not level.
        not_level: BTreeSet<SocketAddr>,
    },
    /// The leg is level with the primary, and counts.
    CaughtUp,
}

/// The suspicion that a leg's node is lost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Suspicion {
    /// Start of the suspicion.
    pub since: Duration,
    /// Time at which the leg is dropped, unless it is heard before.
    pub deadline: Duration,
    /// Time of the next probe.
    pub probe_at: Duration,
}

/// Doubt about a leg, from the least to the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Doubt {
    None,
    Suspected,
    CatchingUp,
    Uncompared,
    Diverged,
}

impl Doubt {
    /// Returns true if the leg's output may be wrong.
    pub fn is_about_output(self) -> bool {
        self >= Doubt::Uncompared
    }
}

/// The standing of all legs, in one connection or in all.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Standing {
    /// Bytes that each leg lacks.
    pub behind: [u64; LEGS_MAX],
    /// Legs whose output differs.
    pub diverged: LegSet,
    /// Legs whose output was not compared without a gap.
    pub uncompared: LegSet,
}

impl Standing {
    /// Adds the standing of the legs in another connection.
    pub fn add(&mut self, other: &Standing) {
        for (sum, behind) in self.behind.iter_mut().zip(other.behind) {
            *sum = sum.saturating_add(behind);
        }
        self.diverged = self.diverged.union(other.diverged);
        self.uncompared = self.uncompared.union(other.uncompared);
    }
}

/// The legs of a service.
#[derive(Debug)]
pub(super) struct Legs {
    legs: [Option<Leg>; LEGS_MAX],
    /// The leg that clients see; of no meaning if no leg serves.
    pub primary: LegIndex,
}

impl Legs {
    /// Returns legs that are level, the first of which is the primary.
    pub fn new(now: Duration, nodes: [Option<NodeId>; LEGS_MAX], primary: LegIndex) -> Legs {
        let level = |node| Leg {
            node,
            phase: LegPhase::CaughtUp,
            last_heard: now,
            suspicion: None,
            has_diverged: false,
        };
        Legs {
            legs: nodes.map(|node| node.map(level)),
            primary,
        }
    }

    pub fn get(&self, leg: LegIndex) -> Option<&Leg> {
        self.legs[leg.position()].as_ref()
    }

    pub fn get_mut(&mut self, leg: LegIndex) -> Option<&mut Leg> {
        self.legs[leg.position()].as_mut()
    }

    pub fn remove(&mut self, leg: LegIndex) {
        self.legs[leg.position()] = None;
    }

    /// Adds a leg that is being prepared.
    pub fn add(&mut self, now: Duration, node: NodeId) -> Result<LegIndex, CommandError> {
        if self.iter().any(|(_, leg)| leg.node == node) {
            return Err(CommandError::NodeHasLeg(node));
        }
        let is_free = |leg: &LegIndex| self.get(*leg).is_none();
        let leg = LegIndex::all().find(is_free).ok_or(CommandError::Full)?;
        self.legs[leg.position()] = Some(Leg {
            node,
            phase: LegPhase::Preparing,
            last_heard: now,
            suspicion: None,
            has_diverged: false,
        });
        Ok(leg)
    }

    /// Returns all legs in order.
    pub fn iter(&self) -> impl Iterator<Item = (LegIndex, &Leg)> {
        LegIndex::all().filter_map(move |index| self.get(index).map(|leg| (index, leg)))
    }

    /// Returns the leg at a node.
    pub fn at_node(&self, node: NodeId) -> Option<LegIndex> {
        self.iter()
            .find(|(_, leg)| leg.node == node)
            .map(|(index, _)| index)
    }

    /// Returns the legs that the data plane knows.
    pub fn serving(&self) -> LegSet {
        self.iter()
            .filter(|(_, leg)| !matches!(leg.phase, LegPhase::Preparing))
            .map(|(index, _)| index)
            .collect()
    }

    /// Returns the roles for the data plane and the backup.
    pub fn roles(&self) -> ReplicationRoles {
        let serving = self.serving();
        let node = |index: usize| {
            let leg = LegIndex::new(index).filter(|leg| serving.contains(*leg))?;
            self.get(leg).map(|leg| leg.node)
        };
        ReplicationRoles {
            primary: self.primary,
            live: serving,
            nodes: std::array::from_fn(node),
        }
    }

    /// Returns the doubt about a leg, which decides on its promotion.
    pub fn doubt(&self, index: LegIndex, standing: &Standing) -> Doubt {
        let Some(leg) = self.get(index) else {
            return Doubt::Diverged;
        };
        if leg.has_diverged || standing.diverged.contains(index) {
            return Doubt::Diverged;
        }
        if standing.uncompared.contains(index) {
            return Doubt::Uncompared;
        }
        match leg.phase {
            LegPhase::CaughtUp if leg.suspicion.is_none() => Doubt::None,
            LegPhase::CaughtUp => Doubt::Suspected,
            LegPhase::CatchingUp { .. } | LegPhase::Preparing => Doubt::CatchingUp,
        }
    }

    /// Returns the leg with the least doubt, and among several the one that is furthest ahead.
    pub fn choose(&self, among: LegSet, standing: &Standing) -> Option<LegIndex> {
        among.iter().min_by_key(|leg| {
            let behind = standing.behind[leg.position()];
            (self.doubt(*leg, standing), behind, *leg)
        })
    }

    /// Returns the protection that the legs give when this number of replicas is wanted.
    pub fn protection(&self, wanted: usize) -> Protection {
        let serving = self.serving();
        if serving.is_empty() {
            return Protection::Dead;
        }
        let is_sound = |leg: &LegIndex| self.doubt(*leg, &Standing::default()) <= Doubt::Suspected;
        let sound = serving.without(self.primary).iter().filter(is_sound);
        match sound.count() {
            sound if sound >= wanted => Protection::Full,
            0 if serving.len() == 1 => Protection::Alone,
            sound => Protection::Reduced { sound },
        }
    }
}
