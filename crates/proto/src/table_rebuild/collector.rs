//! The new holder's side: requests reports, and turns claims into records.

use super::{Admission, Claim, Command, Event, TableRebuild};
use crate::view::View;
use core::time::Duration;
use holdfast_wire::flow_report_frames::FlowReportFrame;
use holdfast_wire::{
    ChangeKind, Epoch, Flow, NodeId, OwnershipChange, OwnershipRecord, RecordState,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Maximum number of transits that acceptors claim and that have no record, and of flows that their donors have yielded:
/// as many flows as all nodes together can reasonably have in transit, or have had lately.
const ACCEPTOR_CLAIMS_MAX: usize = 1 << 18;

/// Maximum number of remembered removals.
const REMOVALS_MAX: usize = 1 << 16;

/// Flows that were removed while reports are missing. A donor that does not know the end of its handoff would bring a
/// flow back that has moved and was closed by the acceptor.
#[derive(Debug, Default)]
struct RemovedFlows {
    epochs: BTreeMap<Flow, Epoch>,
    /// The flows by age, oldest first.
    order: VecDeque<Flow>,
}

impl RemovedFlows {
    fn add(&mut self, flow: Flow, epoch: Epoch) {
        if self.epochs.insert(flow, epoch).is_none() {
            self.order.push_back(flow);
        }
        if self.order.len() > REMOVALS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.epochs.remove(&oldest);
        }
    }

    /// Returns true if the flow was removed at the record's epoch or a later one.
    fn has(&self, flow: &Flow, record: &OwnershipRecord) -> bool {
        let removed = self.epochs.get(flow);
        removed.is_some_and(|epoch| *epoch >= record.epoch)
    }
}

/// Progress of a node's report.
#[derive(Debug, Clone, Copy, Default)]
struct InboundReport {
    /// Number of the report; 0 before the first part.
    number: u64,
    next_part: u32,
}

/// State of the holder.
#[derive(Debug)]
pub(super) struct Collector {
    /// Epoch of the view with which the role began.
    term: u64,
    /// Nodes of the view whose report is incomplete.
    pending: BTreeMap<NodeId, InboundReport>,
    /// Nodes whose report is complete.
    reported: BTreeSet<NodeId>,
    /// Transits about which the holder decides only after the report of the given node, the other party.
    awaited: BTreeMap<NodeId, BTreeSet<Flow>>,
    /// Transits that only the acceptor claims.
    acceptor_claims: BTreeMap<Flow, OwnershipRecord>,
    /// Flows of which former owners say that another node has them: the last former owner, and the record.
    yielded: BTreeMap<Flow, (NodeId, OwnershipRecord)>,
    removed: RemovedFlows,
    /// Time at which the holder serves without the missing reports; none once the holder serves.
    ready_at: Option<Duration>,
    /// Time of the next requests to silent nodes.
    request_at: Option<Duration>,
    request_wait: Duration,
}

impl Collector {
    /// Returns the state of a holder with a complete table.
    pub(super) fn complete(view: &View) -> Collector {
        Collector {
            term: view.epoch,
            pending: BTreeMap::new(),
            reported: nodes_of(view).collect(),
            awaited: BTreeMap::new(),
            acceptor_claims: BTreeMap::new(),
            yielded: BTreeMap::new(),
            removed: RemovedFlows::default(),
            ready_at: None,
            request_at: None,
            request_wait: Duration::ZERO,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.ready_at.is_none()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.pending.is_empty()
    }

    pub(super) fn next_timeout(&self) -> Option<Duration> {
        self.ready_at.into_iter().chain(self.request_at).min()
    }

    fn is_awaited(&self, flow: &Flow) -> bool {
        self.awaited.values().any(|flows| flows.contains(flow))
    }

    /// Takes the claim of an acceptor that asks for a decision about the very transit, and returns the record for it: the
    /// commit, if the donor has yielded the flow to the acceptor; the transit, if the donor is outside of the view and the
    /// acceptor wants to commit. Otherwise the donor may have taken the flow back, and there is no record.
    fn take_acceptor_claim(
        &mut self,
        view: &View,
        asker: NodeId,
        change: &OwnershipChange,
    ) -> Option<Claim> {
        let record = *self.acceptor_claims.get(&change.flow)?;
        let RecordState::Transit { donor, acceptor } = record.state else {
            return None;
        };
        if acceptor != asker || record.epoch != change.epoch {
            return None;
        }
        let committed = OwnershipRecord::owned(acceptor, record.epoch.saturating_add(1));
        let is_yielded = self.yielded.get(&change.flow) == Some(&(donor, committed));
        let decided = match change.kind {
            _ if is_yielded => committed,
            ChangeKind::Rollback => return None,
            _ if view.contains(donor) => return None,
            _ => record,
        };
        self.acceptor_claims.remove(&change.flow);
        Some((change.flow, decided))
    }
}

impl TableRebuild {
    /// Begins to hold the steering table.
    pub(super) fn begin_term(&mut self, now: Duration) {
        let node = self.config.node;
        let term = self.view.epoch;
        let wait = self.config.request_retry_min;
        let pending = nodes_of(&self.view).map(|node| (node, InboundReport::default()));
        let pending: BTreeMap<NodeId, InboundReport> = pending.collect();
        self.collector = Some(Collector {
            term,
            reported: BTreeSet::new(),
            awaited: BTreeMap::new(),
            acceptor_claims: BTreeMap::new(),
            yielded: BTreeMap::new(),
            removed: RemovedFlows::default(),
            ready_at: Some(now + self.config.report_wait_max),
            request_at: Some(now + wait),
            request_wait: wait,
            pending: pending.clone(),
        });
        self.outputs.execute(Command::ClearTable);
        for peer in pending.into_keys().filter(|peer| *peer != node) {
            self.send(peer, FlowReportFrame::Request { term });
        }
        self.start_report(node, term);
    }

    /// Adjusts to a view in which this node is still the contact node.
    pub(super) fn adjust_to_view(&mut self, now: Duration) {
        let Some(collector) = &mut self.collector else {
            return;
        };
        let term = collector.term;
        let known = |node: &NodeId| {
            collector.reported.contains(node) || collector.pending.contains_key(node)
        };
        let new: Vec<NodeId> = nodes_of(&self.view).filter(|node| !known(node)).collect();
        let view = &self.view;
        collector.reported.retain(|node| view.contains(*node));
        let has_left = |node: &NodeId| !view.contains(*node);
        let left: BTreeSet<NodeId> = (collector.pending.keys().chain(collector.awaited.keys()))
            .copied()
            .filter(has_left)
            .collect();
        if !new.is_empty() {
            collector.request_wait = self.config.request_retry_min;
            collector.request_at = Some(now + collector.request_wait);
        }
        let unreported = |node: &NodeId| (*node, InboundReport::default());
        collector.pending.extend(new.iter().map(unreported));
        for peer in new {
            self.send(peer, FlowReportFrame::Request { term });
        }
        for node in left {
            self.settle(node);
        }
    }

    pub(super) fn on_report(
        &mut self,
        now: Duration,
        from: NodeId,
        (term, number): (u64, u64),
        (part, is_last): (u32, bool),
        claims: Vec<Claim>,
    ) {
        let Some(collector) = self.collector.as_mut().filter(|held| held.term == term) else {
            return (self.outputs).report_ignored(from, "FlowReport", "not requested by this node");
        };
        let (is_expected, next_part) = match collector.pending.get_mut(&from) {
            Some(report) => {
                // A node that reports is not silent.
                let silence = self.config.report_wait_max;
                collector.request_at = collector.request_at.map(|at| at.max(now + silence));
                if part == 0 && report.number != number {
                    *report = InboundReport {
                        number,
                        next_part: 0,
                    };
                }
                match report.number == number {
                    true if report.next_part == part => {
                        report.next_part += 1;
                        (true, report.next_part)
                    }
                    true => (false, report.next_part),
                    false => (false, 0),
                }
            }
            // A repetition: claims may be repeated without harm.
            None if collector.reported.contains(&from) => (true, part.saturating_add(1)),
            None => {
                return (self.outputs).report_ignored(
                    from,
                    "FlowReport",
                    "the sender is not in the view",
                );
            }
        };
        let answer = FlowReportFrame::Ack {
            term,
            report: number,
            next_part,
        };
        self.send(from, answer);
        if is_expected {
            self.add_report(from, claims, is_last);
        }
    }

    /// Adds the claims of one part of a node's report.
    pub(super) fn add_report(&mut self, from: NodeId, claims: Vec<Claim>, is_last: bool) {
        let Some(collector) = &mut self.collector else {
            return;
        };
        let mut records = Vec::with_capacity(claims.len());
        let mut foreign = 0_usize;
        for (flow, record) in claims {
            if collector.removed.has(&flow, &record) {
                continue;
            }
            let other = match record.state {
                RecordState::Owned { owner } if owner == from => {
                    records.push((flow, record));
                    continue;
                }
                RecordState::Owned { .. } => {
                    let known = collector.yielded.get(&flow);
                    let is_newer = known.is_none_or(|(_, known)| known.epoch < record.epoch);
                    if is_newer && collector.yielded.len() < ACCEPTOR_CLAIMS_MAX {
                        collector.yielded.insert(flow, (from, record));
                    }
                    continue;
                }
                RecordState::Transit { donor, acceptor } if donor == from => {
                    records.push((flow, record));
                    acceptor
                }
                RecordState::Transit { donor, acceptor } if acceptor == from => {
                    if collector.acceptor_claims.len() < ACCEPTOR_CLAIMS_MAX {
                        collector.acceptor_claims.insert(flow, record);
                    }
                    donor
                }
                RecordState::Transit { .. } => {
                    foreign += 1;
                    continue;
                }
            };
            if self.view.contains(other) && !collector.reported.contains(&other) {
                collector.awaited.entry(other).or_default().insert(flow);
            }
        }
        if !records.is_empty() {
            self.outputs.execute(Command::StoreNewer { records });
        }
        if foreign > 0 {
            (self.outputs).report_ignored(from, "FlowReport", "claims about flows of other nodes");
        }
        if is_last {
            self.settle(from);
        }
    }

    /// Stops to wait for a node's report.
    fn settle(&mut self, node: NodeId) {
        let is_in_view = self.view.contains(node);
        let Some(collector) = &mut self.collector else {
            return;
        };
        let was_pending = collector.pending.remove(&node).is_some();
        collector.awaited.remove(&node);
        if is_in_view {
            collector.reported.insert(node);
        }
        self.outputs.push_event(Event::NodeSettled { node });
        if was_pending && collector.pending.is_empty() {
            collector.request_at = None;
            collector.removed = RemovedFlows::default();
            self.report_ready();
            self.outputs.push_event(Event::Complete);
        }
    }

    fn report_ready(&mut self) {
        if let Some(collector) = &mut self.collector
            && collector.ready_at.take().is_some()
        {
            let missing = collector.pending.keys().copied().collect();
            self.outputs.push_event(Event::Ready { missing });
        }
    }

    pub(super) fn on_collector_timeout(&mut self, now: Duration) {
        let Some(collector) = &mut self.collector else {
            return;
        };
        if collector.ready_at.is_some_and(|at| at <= now) {
            self.report_ready();
        }
        let Some(collector) = &mut self.collector else {
            return;
        };
        if collector.request_at.is_some_and(|at| at <= now) {
            collector.request_wait =
                (collector.request_wait * 2).min(self.config.request_retry_max);
            collector.request_at = Some(now + collector.request_wait);
            let silent: Vec<NodeId> = collector.pending.keys().copied().collect();
            for peer in silent {
                self.repeat_request(peer);
            }
        }
    }

    /// Requests a missing report again.
    pub(super) fn repeat_request(&mut self, peer: NodeId) {
        let Some(collector) = &self.collector else {
            return;
        };
        if peer != self.config.node && collector.pending.contains_key(&peer) {
            let term = collector.term;
            self.send(peer, FlowReportFrame::Request { term });
        }
    }

    pub(super) fn admit_changes(
        &mut self,
        asker: NodeId,
        changes: &[OwnershipChange],
    ) -> Admission {
        let Some(collector) = &mut self.collector else {
            return Admission::Admitted;
        };
        if collector.pending.contains_key(&asker) {
            return Admission::Deferred;
        }
        let decides = |change: &&OwnershipChange| {
            matches!(
                change.kind,
                ChangeKind::Commit | ChangeKind::CommitAll { .. } | ChangeKind::Rollback
            )
        };
        let is_awaited = |change: &OwnershipChange| collector.is_awaited(&change.flow);
        if !collector.awaited.is_empty() && changes.iter().filter(decides).any(is_awaited) {
            return Admission::Deferred;
        }
        let is_complete = collector.is_complete();
        if is_complete && collector.acceptor_claims.is_empty() {
            return Admission::Admitted;
        }
        let mut records = Vec::new();
        for change in changes {
            match change.kind {
                ChangeKind::Remove => {
                    collector.acceptor_claims.remove(&change.flow);
                    if !is_complete {
                        collector.removed.add(change.flow, change.epoch);
                    }
                }
                // Without a record a commit or rollback is refused, and the acceptor gives the flow up.
                ChangeKind::Commit | ChangeKind::CommitAll { .. } | ChangeKind::Rollback => {
                    records.extend(collector.take_acceptor_claim(&self.view, asker, change));
                }
                ChangeKind::Establish | ChangeKind::Divert { .. } => {}
            }
        }
        if !records.is_empty() {
            self.outputs.execute(Command::StoreMissing { records });
        }
        Admission::Admitted
    }
}

fn nodes_of(view: &View) -> impl Iterator<Item = NodeId> {
    let backups = view.backups.iter().copied();
    let server_nodes = view.server_nodes.iter().copied();
    std::iter::once(view.contact_node)
        .chain(backups)
        .chain(server_nodes)
}
