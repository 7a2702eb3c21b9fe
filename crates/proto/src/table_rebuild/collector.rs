//! The new holder's side: requests reports, and turns claims into records.

use super::statements::{RemovedFlows, Statements};
use super::{Admission, Claim, Command, DecidedFlow, Dispute, Event, TableRebuild};
use crate::flow_ownership::{CLAIMED_EPOCH_MAX, claimant};
use crate::view::View;
use core::time::Duration;
use holdfast_wire::flow_report_frames::FlowReportFrame;
use holdfast_wire::{ChangeKind, Flow, NodeId, OwnershipChange, OwnershipRecord, RecordState};
use std::collections::{BTreeMap, BTreeSet};

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
    statements: Statements,
    /// True from the end of a rebuild until the statements that only a rebuild needs are dropped.
    is_just_complete: bool,
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
            statements: Statements::default(),
            is_just_complete: false,
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

    pub(super) fn has_disputes(&self) -> bool {
        self.statements.has_disputes()
    }

    pub(super) fn disputed_flow_count(&self) -> usize {
        self.statements.disputed_flow_count()
    }

    pub(super) fn disputed_claims(&self) -> Vec<Claim> {
        self.statements.disputed_claims()
    }

    pub(super) fn first_dispute(&self) -> Option<(Flow, Vec<OwnershipRecord>)> {
        self.statements.first_dispute()
    }

    /// Returns true if a node wants a decision about a transit, and the other party has not reported, or a node to which
    /// the acceptor has given the flow since. A dispute about the flow may also end with such a report.
    fn is_awaited(&self, asker: NodeId, change: &OwnershipChange) -> bool {
        let (flow, statements) = (&change.flow, &self.statements);
        let leads_to_pending = |claim| {
            let mut path = statements.path_of(flow, claim);
            path.any(|node| self.pending.contains_key(&node))
        };
        if statements.is_disputed(flow) && statements.claims_to(flow).any(leads_to_pending) {
            return true;
        }
        let Some(said) = statements.get(flow, asker) else {
            return false;
        };
        match said.state {
            RecordState::Transit { donor, .. } if donor == asker => leads_to_pending(said),
            RecordState::Transit { donor, .. } => self.pending.contains_key(&donor),
            RecordState::Owned { .. } => false,
        }
    }

    /// Takes the claim of an acceptor that asks for a decision about the very transit. Returns the transit as the record for
    /// the decision if the donor is outside of the view and the acceptor wants to commit. Otherwise the donor may have
    /// taken the flow back, and there is no record but that of a granted commit.
    fn take_acceptor_claim(
        &mut self,
        view: &View,
        asker: NodeId,
        change: &OwnershipChange,
    ) -> Option<Claim> {
        let record = self.statements.get(&change.flow, asker)?;
        let RecordState::Transit { donor, acceptor } = record.state else {
            return None;
        };
        if acceptor != asker || record.epoch != change.epoch {
            return None;
        }
        // A report that is missing may tell how the flow came to the donor: then the donor's word shows where it went.
        match self.pending.is_empty() {
            true => self.statements.forget_decided(&change.flow),
            false if self.statements.is_disputed(&change.flow) => {}
            false => self.statements.settle_acceptor(&change.flow, asker),
        }
        let is_lost = change.kind != ChangeKind::Rollback && !view.contains(donor);
        is_lost.then_some((change.flow, record))
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
            statements: Statements::default(),
            is_just_complete: false,
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
        let left = collector.pending.keys().copied().filter(has_left);
        let left: Vec<NodeId> = left.collect();
        let disputed = match collector.has_disputes() {
            true => collector
                .statements
                .drop_disputants(|node| view.contains(node)),
            false => Vec::new(),
        };
        if !new.is_empty() {
            collector.request_wait = self.config.request_retry_min;
            collector.request_at = Some(now + collector.request_wait);
        }
        let unreported = |node: &NodeId| (*node, InboundReport::default());
        collector.pending.extend(new.iter().map(unreported));
        for peer in new {
            self.send(peer, FlowReportFrame::Request { term });
        }
        self.decide_disputed(disputed);
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
            // A repetition, whose claims may be older than what the holder has decided since.
            None if collector.reported.contains(&from) => (false, part.saturating_add(1)),
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
        let statements = &mut collector.statements;
        let mut records = Vec::with_capacity(claims.len());
        let mut disputed = Vec::new();
        let (mut foreign, mut excess) = (0_usize, 0_usize);
        for (flow, record) in claims {
            if collector.removed.has(&flow, (from, record), statements) {
                continue;
            }
            let is_own = match record.state {
                RecordState::Owned { owner } => owner == from,
                RecordState::Transit { donor, acceptor } => {
                    if donor == acceptor || (donor != from && acceptor != from) {
                        foreign += 1;
                        continue;
                    }
                    donor == from
                }
            };
            let is_plain = is_own && matches!(record.state, RecordState::Owned { .. });
            let is_disputed = statements.is_disputed(&flow);
            if is_plain {
                statements.remove(&flow, from);
            }
            let is_admitted = record.epoch <= CLAIMED_EPOCH_MAX
                && (is_plain || statements.add(flow, from, record));
            if !is_admitted {
                excess += 1;
            } else if is_disputed {
                statements.add_disputed(flow, from, record);
                disputed.push(flow);
            } else if is_own {
                records.push((flow, record));
            } else {
                let committed = statements.granted_commit(&flow, from);
                records.extend(committed.map(|record| (flow, record)));
            }
        }
        if !records.is_empty() {
            self.outputs.execute(Command::StoreNewer { records });
        }
        self.decide_disputed(disputed);
        if foreign > 0 {
            (self.outputs).report_ignored(from, "FlowReport", "claims about flows of other nodes");
        }
        if excess > 0 {
            (self.outputs).report_ignored(
                from,
                "FlowReport",
                "too many claims, or epochs too high",
            );
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
        if is_in_view {
            collector.reported.insert(node);
        }
        self.outputs.push_event(Event::NodeSettled { node });
        if was_pending && collector.pending.is_empty() {
            collector.request_at = None;
            collector.removed = RemovedFlows::default();
            collector.is_just_complete = true;
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
        let is_awaited = |change: &OwnershipChange| collector.is_awaited(asker, change);
        let is_complete = collector.is_complete();
        if !is_complete && changes.iter().filter(decides).any(is_awaited) {
            return Admission::Deferred;
        }
        // Until now the daemon may have had claims of the last report to judge.
        if is_complete && std::mem::take(&mut collector.is_just_complete) {
            collector.statements.keep_undecided();
        }
        if is_complete && collector.statements.is_empty() {
            return Admission::Admitted;
        }
        let (mut records, mut disputed) = (Vec::new(), Vec::new());
        for change in changes {
            match change.kind {
                ChangeKind::Remove => {
                    collector.statements.remove(&change.flow, asker);
                    if collector.statements.is_disputed(&change.flow) {
                        disputed.push(change.flow);
                    }
                    if !is_complete {
                        collector.removed.add(change.flow, asker, change.epoch);
                    }
                }
                // Without a record a commit or rollback is refused, and the acceptor gives the flow up.
                ChangeKind::Commit | ChangeKind::CommitAll { .. } | ChangeKind::Rollback => {
                    records.extend(collector.take_acceptor_claim(&self.view, asker, change));
                }
                // A divert that is refused misleads nobody: its asker has no flow that another node's claim leads to.
                ChangeKind::Divert { acceptor } if !is_complete => {
                    let to = (acceptor, change.epoch.saturating_add(1));
                    collector.statements.add_handover(change.flow, asker, to);
                }
                ChangeKind::Establish | ChangeKind::Divert { .. } => {}
            }
        }
        if !records.is_empty() {
            self.outputs.execute(Command::StoreMissing { records });
        }
        self.decide_disputed(disputed);
        Admission::Admitted
    }

    /// Registers claims that contradict the table's records, and returns the records that these flows get.
    pub(super) fn on_disputes(&mut self, disputes: Vec<Dispute>) -> Vec<DecidedFlow> {
        let (holder, view) = (self.config.node, &self.view);
        let Some(collector) = &mut self.collector else {
            return Vec::new();
        };
        let mut records = Vec::with_capacity(disputes.len());
        for dispute in disputes {
            let flow = dispute.flow;
            for claim in [dispute.recorded, dispute.claimed] {
                let node = match claim.state {
                    RecordState::Transit { donor, acceptor } if !view.contains(donor) => acceptor,
                    _ => claimant(claim),
                };
                collector.statements.add_disputed(flow, node, claim);
            }
            let is_in_view = |node| view.contains(node);
            let record = collector.statements.decide(&flow, holder, is_in_view);
            records.push((flow, record));
        }
        records
    }

    /// Decides about disputed flows again.
    fn decide_disputed(&mut self, flows: Vec<Flow>) {
        let (holder, view) = (self.config.node, &self.view);
        let Some(collector) = self.collector.as_mut().filter(|_| !flows.is_empty()) else {
            return;
        };
        let is_in_view = |node| view.contains(node);
        let decide = |flow| (flow, collector.statements.decide(&flow, holder, is_in_view));
        let records = flows.into_iter().map(decide).collect();
        self.outputs.execute(Command::SetRecords { records });
    }
}

fn nodes_of(view: &View) -> impl Iterator<Item = NodeId> {
    let backups = view.backups.iter().copied();
    let server_nodes = view.server_nodes.iter().copied();
    std::iter::once(view.contact_node)
        .chain(backups)
        .chain(server_nodes)
}
