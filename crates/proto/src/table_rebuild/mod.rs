//! How a new holder rebuilds the steering table. Every node knows its own flows, so the new holder asks each node of the
//! view, and stores what the nodes claim.
//!
//! A node reports only to the contact node of the newest view that the node obeys. From then on the node ignores answers
//! of the former holder, so the report contains each decision of the former holder that can still take effect.
//!
//! | claim | by | at the holder |
//! | --- | --- | --- |
//! | owned, epoch e | the owner | record, in place of an older one of the owner or of a transit to the owner |
//! | in transit, epoch e | the donor | record, in place of an older one of the donor or of a transit to the donor |
//! | in transit, epoch e | the acceptor | kept aside: the acceptor makes its claim before the donor diverts. The acceptor's ownership becomes the record if the donor has yielded the flow; the transit becomes the record when the acceptor wants to commit and the donor is outside of the view |
//! | owned by another node | the former owner | yields the flow to that node |
//!
//! The former holder may have decided about a transit, and only one of donor and acceptor knows. Therefore the holder
//! decides about a transit only after both have reported, and each node to which the acceptor says it has given the flow.
//! A node outside of the view counts as having reported: the group has given the node up. A request of a node that has not
//! reported waits as well ([`TableRebuild::admit`]).
//!
//! A node may lie, and a higher epoch proves nothing. So a flow changes hands only by the word of the node that has it: its
//! claim names the acceptor, which may have yielded the flow to a third node, or divert it since its report, and so on. If two nodes of the view claim a
//! flow in any other way, the flow is *disputed*: neither gets its packets, and no change to its record is granted, until
//! one of the two removes the flow or leaves the view. The holder believes its own ownership. Claims count until the node's report is
//! complete; from then on the node changes records by requests alone.
//!
//! The holder serves when all nodes have reported, or after [`TableRebuildConfig::report_wait_max`]. A node that has not
//! reported by then is asked again until it does; its flows have no record, and their packets get no answer meanwhile.

mod collector;
mod reporter;
mod statements;
#[cfg(test)]
mod tests;

use self::collector::Collector;
use self::reporter::OutboundReport;
use crate::machine_output::{IgnoredInput, MachineOutput, OutputQueue};
use crate::view::View;
use core::time::Duration;
use holdfast_wire::flow_report_frames::{CLAIMS_MAX, FlowReportFrame};
use holdfast_wire::{Flow, Frame, NodeId, OwnershipChange, OwnershipRecord};

/// A statement of a node about a flow: [`OwnershipRecord`] as the holder of the steering table would have it.
pub type Claim = (Flow, OwnershipRecord);

/// A flow and the record that it gets; none if its record is to be removed.
pub type DecidedFlow = (Flow, Option<OwnershipRecord>);

/// A claim to a flow that another node claims as well ([`crate::flow_ownership::ClaimVerdict::Disputed`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dispute {
    /// Flow that two nodes claim.
    pub flow: Flow,
    /// Record of the flow in the steering table.
    pub recorded: OwnershipRecord,
    /// Claim that contradicts the record.
    pub claimed: OwnershipRecord,
}

/// Identifies a command, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandToken(pub u64);

/// A command of the table rebuild to the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Remove all records from the steering table: they are from an earlier time as holder.
    ClearTable,
    /// List the flows about which this node may have a claim, and then call [`TableRebuild::handle_flows`].
    ListFlows {
        /// Token for the answer.
        token: CommandToken,
    },
    /// Read this node's present claims about these flows, and then call [`TableRebuild::handle_claims`]. A flow about which
    /// there is no claim is left out.
    ReadClaims {
        /// Token for the answer.
        token: CommandToken,
        /// Flows whose claims are read.
        flows: Vec<Flow>,
    },
    /// Store each claim whose flow has no record, or an older one ([`crate::flow_ownership::judge_claim`]), and then call
    /// [`TableRebuild::handle_disputes`] with the disputed ones, if any.
    StoreNewer {
        /// Claims to store where they are newer.
        records: Vec<Claim>,
    },
    /// Store each record whose flow has none in the table. A claim that contradicts a record is dropped: the record
    /// stands.
    StoreMissing {
        /// Claims to store where there is no record.
        records: Vec<Claim>,
    },
    /// Store or remove each record, whatever the table has.
    SetRecords {
        /// Flows with the record that each gets; none removes the record.
        records: Vec<DecidedFlow>,
    },
}

/// An event of the table rebuild for the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The table is good enough to serve new flows.
    Ready {
        /// Nodes that have not reported yet.
        missing: Vec<NodeId>,
    },
    /// A node's report is complete, or the node has left the view: requests that waited may be admitted.
    NodeSettled {
        /// Node whose report is complete, or that has left the view.
        node: NodeId,
    },
    /// All nodes have reported their claims.
    Complete,
    /// A frame was ignored.
    Ignored(IgnoredInput),
}

impl From<IgnoredInput> for Event {
    fn from(ignored: IgnoredInput) -> Event {
        Event::Ignored(ignored)
    }
}

/// An action that the table rebuild asks of the daemon.
pub type Output = MachineOutput<Command, Event>;

/// Result of [`TableRebuild::admit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// The request may be decided.
    Admitted,
    /// The request must wait for reports; the daemon asks again after each [`Event::NodeSettled`].
    Deferred,
}

/// Timing and bounds of a rebuild of the steering table.
#[derive(Debug, Clone)]
pub struct TableRebuildConfig {
    /// Number of this node.
    pub node: NodeId,
    /// Number of this daemon start, greater than any earlier one of this node (for example nanoseconds since 1970).
    pub boot: u64,
    /// Number of flows in one part of a report, at most [`CLAIMS_MAX`] (4,096).
    pub flows_per_part: usize,
    /// Time after which the holder serves without the reports that are missing (100 ms).
    pub report_wait_max: Duration,
    /// Time until the holder first repeats its request to a silent node (20 ms); the wait doubles each time.
    pub request_retry_min: Duration,
    /// Longest wait between two repetitions (1 s).
    pub request_retry_max: Duration,
}

impl TableRebuildConfig {
    /// Returns the defaults for `node`, for a daemon that started at `boot`.
    pub fn new(node: NodeId, boot: u64) -> TableRebuildConfig {
        TableRebuildConfig {
            node,
            boot,
            flows_per_part: CLAIMS_MAX,
            report_wait_max: Duration::from_millis(100),
            request_retry_min: Duration::from_millis(20),
            request_retry_max: Duration::from_secs(1),
        }
    }
}

/// The machine: reports this node's flows to a new holder, and collects the reports as the new holder.
#[derive(Debug)]
pub struct TableRebuild {
    config: TableRebuildConfig,
    view: View,
    outputs: OutputQueue<Command, Event>,
    last_token: u64,
    /// The report of this node that is under way.
    report: Option<OutboundReport>,
    /// Request of a contact node whose view this node has not heard of yet.
    early_request: Option<(NodeId, u64)>,
    /// State of the holder; none at other nodes.
    collector: Option<Collector>,
}

impl TableRebuild {
    /// Returns the machine of a node that starts with this view. If the node is the contact node, `is_table_complete` says
    /// that the table of an earlier daemon has all flows.
    pub fn new(
        now: Duration,
        config: TableRebuildConfig,
        view: View,
        is_table_complete: bool,
    ) -> TableRebuild {
        let is_holder = view.contact_node == config.node;
        let mut machine = TableRebuild {
            config,
            view,
            outputs: OutputQueue::new(),
            last_token: 0,
            report: None,
            early_request: None,
            collector: None,
        };
        match is_holder {
            true if is_table_complete => {
                machine.collector = Some(Collector::complete(&machine.view));
            }
            true => machine.begin_term(now),
            false => {}
        }
        machine
    }

    /// Handles a new view of the group; an older one is ignored. The daemon gives the view to the machines of handoff and
    /// migration first.
    pub fn handle_view(&mut self, now: Duration, view: View) {
        if !view.is_newer_than(&self.view) {
            return;
        }
        let node = self.config.node;
        let was_holder = self.view.contact_node == node;
        // The contact node makes each view of its term. A gap may hide another contact node.
        let is_next = view.epoch <= self.view.epoch.saturating_add(1);
        self.view = view;
        let holder = self.view.contact_node;
        if (self.report.as_ref()).is_some_and(|report| report.holder != holder) {
            self.report = None;
        }
        match holder == node {
            true if was_holder && is_next => self.adjust_to_view(now),
            true => self.begin_term(now),
            false => self.collector = None,
        }
        if let Some((from, term)) = self.early_request
            && term <= self.view.epoch
        {
            self.early_request = None;
            self.on_request(from, term);
        }
    }

    /// Handles the removal of this node from the group: it neither holds the table nor reports to a holder.
    pub fn handle_removal(&mut self) {
        self.view = self.view.without_nodes();
        (self.report, self.early_request, self.collector) = (None, None, None);
    }

    /// Handles a frame from a node (as named by the channel's certificate).
    pub fn handle_frame(&mut self, now: Duration, from: NodeId, frame: FlowReportFrame) {
        match frame {
            FlowReportFrame::Request { term } => self.on_request(from, term),
            FlowReportFrame::Report {
                term,
                report,
                part,
                claims,
                is_last,
            } => self.on_report(now, from, (term, report), (part, is_last), claims),
            FlowReportFrame::Ack {
                term,
                report,
                next_part,
            } => self.on_ack(from, (term, report), next_part),
        }
    }

    /// Handles the answer to [`Command::ListFlows`].
    pub fn handle_flows(&mut self, token: CommandToken, flows: Vec<Flow>) {
        self.on_flows_listed(token, flows);
    }

    /// Handles the answer to [`Command::ReadClaims`].
    pub fn handle_claims(&mut self, token: CommandToken, claims: Vec<Claim>) {
        self.on_claims_read(token, claims);
    }

    /// Handles claims that contradict the table. Returns the records of their flows, which the daemon stores at once.
    #[must_use]
    pub fn handle_disputes(&mut self, disputes: Vec<Dispute>) -> Vec<DecidedFlow> {
        self.on_disputes(disputes)
    }

    /// Handles a new channel to `peer`: a missing report is requested at once.
    pub fn handle_peer_connected(&mut self, peer: NodeId) {
        self.repeat_request(peer);
    }

    /// Handles all timers due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.on_collector_timeout(now);
    }

    /// Returns the next output, none if there is none left.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop()
    }

    /// Returns the time at which to call `handle_timeout`, none for never. The time may be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.collector.as_ref().and_then(Collector::next_timeout)
    }

    /// Returns true if this node is the holder and its table is good enough to serve.
    pub fn is_ready(&self) -> bool {
        self.collector.as_ref().is_some_and(Collector::is_ready)
    }

    /// Returns true if this node is the holder and all nodes have reported.
    pub fn is_complete(&self) -> bool {
        self.collector.as_ref().is_some_and(Collector::is_complete)
    }

    /// Returns true if several nodes claim a flow. The claims are not in the table, so a later daemon must not adopt the
    /// table.
    pub fn has_disputes(&self) -> bool {
        self.collector.as_ref().is_some_and(Collector::has_disputes)
    }

    /// Returns the number of disputed flows.
    pub fn disputed_flow_count(&self) -> usize {
        let collector = self.collector.as_ref();
        collector.map_or(0, Collector::disputed_flow_count)
    }

    /// Returns the first disputed flow, with the claims to it; none if there is no dispute. A dispute before
    /// [`Event::Complete`] may end with the report of a node through which the flow has passed.
    pub fn first_dispute(&self) -> Option<(Flow, Vec<OwnershipRecord>)> {
        self.collector.as_ref()?.first_dispute()
    }

    /// Returns the claims to disputed flows, in the order of the flows.
    pub fn disputed_claims(&self) -> Vec<Claim> {
        let collector = self.collector.as_ref();
        collector.map_or_else(Vec::new, Collector::disputed_claims)
    }

    /// Decides whether the holder may handle a request of `asker` (a node, or this node) to change records. Transits that
    /// only the acceptor has claimed become records if need be: the daemon carries out all outputs before it passes the
    /// request on.
    pub fn admit(&mut self, asker: NodeId, changes: &[OwnershipChange]) -> Admission {
        self.admit_changes(asker, changes)
    }

    /// Decides whether the holder may answer a query. A flow that no node has reported yet is not known to be absent.
    pub fn admit_query(&self) -> Admission {
        match &self.collector {
            Some(collector) if !collector.is_complete() => Admission::Deferred,
            _ => Admission::Admitted,
        }
    }

    fn next_token(&mut self) -> CommandToken {
        self.last_token += 1;
        CommandToken(self.last_token)
    }

    fn send(&mut self, to: NodeId, frame: FlowReportFrame) {
        self.outputs.send(to, Frame::FlowReport(frame));
    }
}
