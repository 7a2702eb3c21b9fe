//! Statements of nodes about flows that are not, or not yet, records of the steering table, and the decision about a flow
//! that several nodes claim.

use super::Claim;
use crate::flow_ownership::{claimant, disputed_record, names};
use holdfast_wire::{Epoch, Flow, NodeId, OwnershipRecord, RecordState};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::RangeInclusive;

/// Maximum number of statements of one node: more flows than a node can reasonably have in transit, or have had lately.
const STATEMENTS_MAX: usize = 1 << 18;

/// Maximum number of these that yield a flow. The rest is left for flows in transit, which have no record without their
/// statement.
const YIELDS_MAX: usize = STATEMENTS_MAX / 2;

/// Maximum number of remembered removals, and of remembered handovers.
const ACTS_MAX: usize = 1 << 16;

/// The keys of all nodes' statements about a flow.
fn keys_about(flow: Flow) -> RangeInclusive<(Flow, NodeId)> {
    (flow, NodeId(0))..=(flow, NodeId(u16::MAX))
}

/// Statements of nodes about flows, the last one of each node about each flow: transits of which the node is donor or
/// acceptor, flows that the node has yielded to another one, and claims to disputed flows.
#[derive(Debug, Default)]
pub(super) struct Statements {
    records: BTreeMap<(Flow, NodeId), OwnershipRecord>,
    counts: BTreeMap<NodeId, usize>,
    /// Flows that several nodes claim.
    disputed: BTreeSet<Flow>,
    /// The acceptors to which nodes have diverted flows since their reports, with the transits' epochs, or the donors of
    /// which the nodes were acceptors in their reports.
    handovers: RecentActs<(NodeId, Epoch)>,
}

impl Statements {
    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    pub(super) fn get(&self, flow: &Flow, node: NodeId) -> Option<OwnershipRecord> {
        self.records.get(&(*flow, node)).copied()
    }

    /// Returns all statements about a flow, with the nodes that make them.
    fn about(&self, flow: &Flow) -> impl Iterator<Item = (NodeId, OwnershipRecord)> {
        let about = self.records.range(keys_about(*flow));
        about.map(|((_, node), record)| (*node, *record))
    }

    /// Returns the acceptor's ownership if an acceptor claims a transit, and the donor has yielded the flow to the acceptor:
    /// the former holder has granted the commit, and the acceptor has no answer. `node` is one of the two.
    pub(super) fn granted_commit(&self, flow: &Flow, node: NodeId) -> Option<OwnershipRecord> {
        let acceptor = match self.get(flow, node)?.state {
            RecordState::Owned { owner } => owner,
            RecordState::Transit { acceptor, .. } => acceptor,
        };
        let transit = self.get(flow, acceptor)?;
        let committed = OwnershipRecord::owned(acceptor, transit.epoch.saturating_add(1));
        let is_yielded = matches!(transit.state, RecordState::Transit { donor, acceptor: to }
            if to == acceptor && self.get(flow, donor) == Some(committed));
        is_yielded.then_some(committed)
    }

    /// Adds a node's statement; returns false if the node makes too many.
    pub(super) fn add(&mut self, flow: Flow, node: NodeId, record: OwnershipRecord) -> bool {
        let is_yield = matches!(record.state, RecordState::Owned { owner } if owner != node);
        let max = if is_yield { YIELDS_MAX } else { STATEMENTS_MAX };
        let count = self.counts.get(&node).copied().unwrap_or(0);
        let is_added = count < max || self.records.contains_key(&(flow, node));
        if is_added {
            self.set(flow, node, record);
        }
        is_added
    }

    fn set(&mut self, flow: Flow, node: NodeId, record: OwnershipRecord) {
        if self.records.insert((flow, node), record).is_none() {
            *self.counts.entry(node).or_default() += 1;
        }
    }

    /// Removes a node's statement about a flow.
    pub(super) fn remove(&mut self, flow: &Flow, node: NodeId) {
        if self.records.remove(&(*flow, node)).is_some()
            && let Some(count) = self.counts.get_mut(&node)
        {
            *count -= 1;
        }
    }

    /// Notes that a node whose report is complete hands a flow over.
    pub(super) fn add_handover(&mut self, flow: Flow, donor: NodeId, to: (NodeId, Epoch)) {
        self.handovers.add(flow, donor, to);
    }

    /// Removes an acceptor's claim, about which the holder decides now. That the acceptor's donor had the flow before is
    /// kept: the claim of an earlier donor may lead to the acceptor, and on to that node.
    pub(super) fn settle_acceptor(&mut self, flow: &Flow, acceptor: NodeId) {
        if let Some(before) = self.next_of(flow, acceptor) {
            self.handovers.add(*flow, acceptor, before);
        }
        self.remove(flow, acceptor);
    }

    /// Keeps the statements that `is_kept` returns true for.
    fn retain(&mut self, is_kept: impl Fn(&Flow, NodeId, OwnershipRecord) -> bool) {
        let counts = &mut self.counts;
        self.records.retain(|(flow, node), record| {
            let is_kept = is_kept(flow, *node, *record);
            if !is_kept && let Some(count) = counts.get_mut(node) {
                *count -= 1;
            }
            is_kept
        });
        self.counts.retain(|_, count| *count > 0);
    }

    /// Removes all statements that can no longer matter once all nodes have reported. Statements about disputed flows, and
    /// about flows that an acceptor claims, stay.
    pub(super) fn keep_undecided(&mut self) {
        let is_acceptor_claim = |node: NodeId, record: OwnershipRecord| matches!(record.state, RecordState::Transit { acceptor, .. } if acceptor == node);
        let claimed = self.records.iter();
        let claimed = claimed.filter(|((_, node), record)| is_acceptor_claim(*node, **record));
        let mut kept: BTreeSet<Flow> = claimed.map(|((flow, _), _)| *flow).collect();
        kept.extend(&self.disputed);
        self.handovers = RecentActs::default();
        self.retain(|flow, _, _| kept.contains(flow));
    }

    /// Removes all statements about a flow, unless the flow is disputed.
    pub(super) fn forget_decided(&mut self, flow: &Flow) {
        if self.is_disputed(flow) {
            return;
        }
        let nodes: Vec<NodeId> = self.about(flow).map(|(node, _)| node).collect();
        for node in nodes {
            self.remove(flow, node);
        }
    }

    /// Returns the node to which a node has given a flow, with the epoch, as the node says: in its report, or by a divert
    /// since then. An acceptor knows that its donor has the flow, and no longer how: by the acceptor itself, if the flow
    /// comes back.
    fn next_of(&self, flow: &Flow, node: NodeId) -> Option<(NodeId, Epoch)> {
        let stated = self.get(flow, node).map(|record| match record.state {
            RecordState::Owned { owner } => (owner, record.epoch),
            RecordState::Transit { donor, acceptor } if acceptor == node => {
                (donor, record.epoch.saturating_sub(1))
            }
            RecordState::Transit { acceptor, .. } => (acceptor, record.epoch),
        });
        let handed_over = self.handovers.get(flow, node);
        stated
            .into_iter()
            .chain(handed_over)
            .max_by_key(|(_, epoch)| *epoch)
    }

    /// Returns the nodes that a flow has come to by a claim, if it is a transit: the acceptor, and the nodes to which the
    /// acceptor has given the flow in turn, as the nodes in between say.
    pub(super) fn path_of(
        &self,
        flow: &Flow,
        claim: OwnershipRecord,
    ) -> impl Iterator<Item = NodeId> {
        let first = match claim.state {
            RecordState::Transit { acceptor, .. } => Some((acceptor, claim.epoch)),
            RecordState::Owned { .. } => None,
        };
        // Each step has a higher epoch, so the path ends.
        let steps = std::iter::successors(first, move |(node, epoch)| {
            let next = self.next_of(flow, *node);
            next.filter(|(to, next_epoch)| to != node && next_epoch > epoch)
        });
        steps.map(|(node, _)| node)
    }

    /// Returns true if a claim is a transit by which the flow has come to `node`.
    fn leads_to(&self, flow: &Flow, claim: OwnershipRecord, node: NodeId) -> bool {
        self.path_of(flow, claim).any(|other| other == node)
    }

    pub(super) fn is_disputed(&self, flow: &Flow) -> bool {
        self.disputed.contains(flow)
    }

    pub(super) fn has_disputes(&self) -> bool {
        !self.disputed.is_empty()
    }

    pub(super) fn disputed_flow_count(&self) -> usize {
        self.disputed.len()
    }

    /// Returns the first disputed flow, with the claims of nodes to it.
    pub(super) fn first_dispute(&self) -> Option<(Flow, Vec<OwnershipRecord>)> {
        let flow = *self.disputed.first()?;
        Some((flow, self.claims_to(&flow).collect()))
    }

    /// Returns the claims of nodes to disputed flows.
    pub(super) fn disputed_claims(&self) -> Vec<Claim> {
        let claims_to = |flow| self.claims_to(flow).map(move |record| (*flow, record));
        self.disputed.iter().flat_map(claims_to).collect()
    }

    /// Returns the claims of nodes to a flow.
    pub(super) fn claims_to(&self, flow: &Flow) -> impl Iterator<Item = OwnershipRecord> {
        let said = self.about(flow);
        let own = said.filter(|(node, record)| claimant(*record) == *node);
        own.map(|(_, record)| record)
    }

    /// Adds a node's claim to a flow that is disputed from now on, unless the node has said anything newer. The claims count
    /// for no node's maximum: there are at most as many disputed flows as records.
    pub(super) fn add_disputed(&mut self, flow: Flow, node: NodeId, claim: OwnershipRecord) {
        self.disputed.insert(flow);
        if self
            .get(&flow, node)
            .is_none_or(|last| last.epoch < claim.epoch)
        {
            self.set(flow, node, claim);
        }
    }

    /// Removes what nodes outside of the view have said about disputed flows, and returns these flows.
    pub(super) fn drop_disputants(&mut self, is_in_view: impl Fn(NodeId) -> bool) -> Vec<Flow> {
        let disputed = std::mem::take(&mut self.disputed);
        self.retain(|flow, node, _| is_in_view(node) || !disputed.contains(flow));
        self.disputed = disputed;
        self.disputed.iter().copied().collect()
    }

    /// Returns the record of a disputed flow, none if no node claims the flow any more: the only claim that is not
    /// followed by another one, or else the holder's ownership. Any other flow stays disputed.
    pub(super) fn decide(
        &mut self,
        flow: &Flow,
        holder: NodeId,
        is_in_view: impl Fn(NodeId) -> bool,
    ) -> Option<OwnershipRecord> {
        let claim_of = |(node, record): (NodeId, OwnershipRecord)| match record.state {
            _ if claimant(record) == node => Some((node, record)),
            // Nobody else can have taken the flow of a lost donor back.
            RecordState::Transit { donor, .. } if !is_in_view(donor) => Some((node, record)),
            _ => Some((node, self.granted_commit(flow, node)?))
                .filter(|(node, record)| claimant(*record) == *node),
        };
        let about = self.about(flow).filter(|(node, _)| is_in_view(*node));
        let claims: Vec<(NodeId, OwnershipRecord)> = about.filter_map(claim_of).collect();
        let is_followed = |claim: OwnershipRecord| {
            claims
                .iter()
                .any(|(node, later)| later.epoch > claim.epoch && self.leads_to(flow, claim, *node))
        };
        let last = claims.iter().filter(|(_, claim)| !is_followed(*claim));
        let last: Vec<(NodeId, OwnershipRecord)> = last.copied().collect();
        let own = (last.iter()).find(|(node, claim)| *node == holder && claim.is_owned_by(holder));
        let decided = match (own, &last[..]) {
            (None, [_, _, ..]) => return Some(disputed_record(holder)),
            (Some((_, claim)), _) | (None, [(_, claim)]) => Some(*claim),
            (None, []) => None,
        };
        self.end_dispute(flow);
        decided
    }

    /// Ends the dispute about a flow. Ownership is a statement during a dispute only: later the owner changes the record, and
    /// the statement would be wrong.
    fn end_dispute(&mut self, flow: &Flow) {
        self.disputed.remove(flow);
        let owners = self.about(flow);
        let owners = owners.filter(|(node, record)| record.is_owned_by(*node));
        let owners: Vec<NodeId> = owners.map(|(node, _)| node).collect();
        for node in owners {
            self.remove(flow, node);
        }
    }
}

/// The last act of each node with each flow while reports are missing. The oldest acts are forgotten beyond [`ACTS_MAX`].
#[derive(Debug)]
struct RecentActs<T> {
    acts: BTreeMap<(Flow, NodeId), T>,
    /// Flows and nodes by the age of the first act, oldest first.
    order: VecDeque<(Flow, NodeId)>,
}

impl<T> Default for RecentActs<T> {
    fn default() -> Self {
        Self {
            acts: BTreeMap::new(),
            order: VecDeque::new(),
        }
    }
}

impl<T: Copy> RecentActs<T> {
    fn add(&mut self, flow: Flow, node: NodeId, act: T) {
        if self.acts.insert((flow, node), act).is_none() {
            self.order.push_back((flow, node));
        }
        if self.order.len() > ACTS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.acts.remove(&oldest);
        }
    }

    fn get(&self, flow: &Flow, node: NodeId) -> Option<T> {
        self.acts.get(&(*flow, node)).copied()
    }
}

/// Flows that were removed while reports are missing, and the nodes that have removed them. A donor that does not know
/// the end of its handoff would bring a flow back that has moved and was closed by the acceptor.
#[derive(Debug, Default)]
pub(super) struct RemovedFlows {
    removals: RecentActs<Epoch>,
}

impl RemovedFlows {
    pub(super) fn add(&mut self, flow: Flow, node: NodeId, epoch: Epoch) {
        self.removals.add(flow, node, epoch);
    }

    /// Returns true if the flow of `node`'s claim was removed at the epoch of the claim or a later one, by a node to which
    /// the claim leads. Any other node's removal says nothing about the flow.
    pub(super) fn has(
        &self,
        flow: &Flow,
        (node, claim): (NodeId, OwnershipRecord),
        statements: &Statements,
    ) -> bool {
        let mut removals = self.removals.acts.range(keys_about(*flow));
        removals.any(|((_, remover), epoch)| {
            let concerns = *remover == node
                || names(claim, |named| named == *remover)
                || statements.leads_to(flow, claim, *remover);
            *epoch >= claim.epoch && concerns
        })
    }
}
