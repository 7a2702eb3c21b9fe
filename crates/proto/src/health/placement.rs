//! Shares of a service's new clients, by the contact node: only nodes whose servers are well have one.

use super::config::JudgedService;
use super::event::Exclusion;
use core::time::Duration;
use holdfast_wire::NodeId;
use std::collections::{BTreeMap, BTreeSet};

/// Shares of one service's new clients.
#[derive(Debug, Default)]
pub(super) struct Placement {
    /// Nodes with a share in force, and their shares.
    pub placed: BTreeMap<NodeId, u32>,
    /// Time at which announced shares come into force.
    pub pending_at: Option<Duration>,
    /// Nodes that are to get no new clients.
    pub excluded: BTreeMap<NodeId, Exclusion>,
    /// Nodes of whose server nothing is known, as of one that has just joined.
    pub unknown: BTreeSet<NodeId>,
    /// Nodes to which the former contact node gave a share, and that have not reported since: they serve presumably.
    pub inherited: BTreeSet<NodeId>,
    /// True if no node with a share by the operator's wish could serve.
    pub is_unserved: bool,
}

/// A decision on the shares of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PlacementDecision {
    /// The shares stay as they are.
    Keep,
    /// Tell all nodes the shares, which come into force at `pending_at`.
    Announce(BTreeMap<NodeId, u32>),
    /// Bring the shares into force at once, and tell all nodes.
    Place(BTreeMap<NodeId, u32>),
}

impl Placement {
    /// Returns the placement of a service whose shares are in force as the operator wishes.
    pub fn configured(settings: &JudgedService) -> Placement {
        Placement {
            placed: positive(&settings.weights),
            ..Placement::default()
        }
    }

    /// Takes a change of the contact node; `is_contact` is true if this node has the role now.
    pub fn on_contact_node(&mut self, is_contact: bool) {
        self.pending_at = None;
        self.inherited = match is_contact {
            true => self.placed.keys().copied().collect(),
            false => BTreeSet::new(),
        };
    }

    /// Returns the shares that the present exclusions leave. A node of whose server nothing is known has a share only if no
    /// node is known to serve. If the exclusions leave none, drained nodes whose servers are well have
    /// shares; else nodes that might serve nevertheless; else nodes whose server has just moved away, since they forward new
    /// clients to it; and if there is no such node, the wish of the operator holds.
    pub fn shares(&self, settings: &JudgedService) -> BTreeMap<NodeId, u32> {
        let wished = positive(&settings.weights);
        let is_serving =
            |node: &NodeId| !self.excluded.contains_key(node) && !self.unknown.contains(node);
        let mut serving = wished.clone();
        serving.retain(|node, _| is_serving(node));
        if !serving.is_empty() {
            return serving;
        }
        let with = |is_eligible: &dyn Fn(Option<&Exclusion>) -> bool| {
            let mut shares = wished.clone();
            shares.retain(|node, _| is_eligible(self.excluded.get(node)));
            (!shares.is_empty()).then_some(shares)
        };
        with(&|reason| reason.is_none())
            .or_else(|| with(&|reason| reason == Some(&Exclusion::Draining)))
            .or_else(|| with(&|reason| reason.is_none_or(|reason| !reason.is_certain())))
            .or_else(|| {
                let has_left = |node: &NodeId| {
                    let is_absent = self.excluded.get(node) == Some(&Exclusion::NoServer);
                    is_absent && self.placed.contains_key(node)
                };
                let mut shares = wished.clone();
                shares.retain(|node, _| has_left(node));
                (!shares.is_empty()).then_some(shares)
            })
            .unwrap_or(wished.clone())
    }

    /// Decides on shares. Shares that only grow wait for `lead`, unless `at_once` is set.
    pub fn decide(
        &mut self,
        now: Duration,
        shares: BTreeMap<NodeId, u32>,
        lead: Duration,
        at_once: bool,
    ) -> PlacementDecision {
        if shares == self.placed {
            self.pending_at = None;
            return PlacementDecision::Keep;
        }
        let mut present = self.placed.keys();
        let is_urgent = at_once || present.any(|node| !shares.contains_key(node));
        match self.pending_at {
            _ if is_urgent => {}
            Some(at) if now >= at => {}
            Some(_) => return PlacementDecision::Keep,
            None => {
                self.pending_at = Some(now + lead);
                return PlacementDecision::Announce(shares);
            }
        }
        self.pending_at = None;
        self.placed.clone_from(&shares);
        PlacementDecision::Place(shares)
    }
}

fn positive(weights: &BTreeMap<NodeId, u32>) -> BTreeMap<NodeId, u32> {
    let mut shares = weights.clone();
    shares.retain(|_, weight| *weight > 0);
    shares
}
