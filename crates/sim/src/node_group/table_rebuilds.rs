//! The contact node changes, and the new one rebuilds the table of records from what the nodes report.
//!
//! The former contact node decides about nothing from the change on, as without a lease. Nodes hear of the new view
//! later, each at its own time. There is one table: the new holder's, empty at first.

use super::{GroupWorld, node_id, node_index};
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::flow_ownership::ClaimVerdict;
use holdfast_proto::table_rebuild::{
    Admission, Claim, Command, DecidedFlow, Dispute, Event, Output, TableRebuild,
    TableRebuildConfig,
};
use holdfast_proto::view::View;
use holdfast_wire::flow_report_frames::FlowReportFrame;
use holdfast_wire::{Flow, Frame, OwnershipChange, OwnershipRecord};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Longest time until a node hears of a new view, in microseconds.
const VIEW_DELAY_US: u64 = 20_000;

/// Wait until a deferred request is considered again.
pub(crate) const DEFERRED_RETRY: Time = Time::from_micros(1_000);

/// The machines that rebuild the table, and what the group knows about it.
#[derive(Debug)]
pub(crate) struct TableRebuilds {
    /// The newest view of the group.
    pub(crate) view: View,
    /// True if all nodes have reported to the contact node of the newest view.
    pub(crate) is_table_complete: bool,
    nodes: Vec<RebuildNode>,
    /// Requests that wait at the holder, by sender, in order.
    deferred: BTreeMap<usize, VecDeque<Frame>>,
}

#[derive(Debug, Default)]
struct RebuildNode {
    /// Epoch of the newest view that the daemon has heard of.
    view_epoch: u64,
    machine: Option<TableRebuild>,
    /// Time of the scheduled wake-up.
    due: Option<Time>,
}

impl TableRebuilds {
    pub(crate) fn new(nodes: usize, holder: usize) -> TableRebuilds {
        TableRebuilds {
            view: View::configured(node_id(holder), (0..nodes).map(node_id)),
            is_table_complete: true,
            nodes: (0..nodes).map(|_| RebuildNode::default()).collect(),
            deferred: BTreeMap::new(),
        }
    }

    /// Returns true if a node knows the newest view.
    pub(crate) fn has_heard(&self, node: usize) -> bool {
        self.nodes[node].view_epoch == self.view.epoch
    }

    /// Forgets the state of a daemon that dies.
    pub(crate) fn crash(&mut self, node: usize) {
        (self.nodes[node].machine, self.nodes[node].due) = (None, None);
        if self.view.contact_node == node_id(node) {
            self.deferred.clear();
        }
    }
}

/// A group whose contact node changes.
pub(crate) trait RebuildingWorld: GroupWorld {
    fn rebuilds(&mut self) -> &mut TableRebuilds;

    /// Returns the action by which a daemon hears of a view.
    fn view_action(view: View) -> Self::Event;

    /// Returns the action by which the machine of a daemon is woken.
    fn wake_action() -> Self::Event;

    /// Returns the action by which a holder considers the waiting requests of a node again.
    fn retry_action(from: usize) -> Self::Event;

    /// Returns true if the holder may handle a request now.
    fn admits_request(&mut self, from: usize, frame: &Frame) -> bool;

    /// Handles a request that the holder may handle.
    fn handle_request(&mut self, from: usize, to: usize, frame: Frame);

    /// Gives a view to a machine.
    fn give_view(machine: &mut Self::Machine, now: Duration, view: View);

    /// Forgets everything that depends on the records of the former holder.
    fn forget_records(&mut self);

    /// Returns the flows about which a node may have a claim.
    fn claimed_flows(&self, node: usize) -> Vec<Flow>;

    /// Judges a claim as the holder.
    fn judge_claim(
        &self,
        current: Option<OwnershipRecord>,
        claimed: OwnershipRecord,
    ) -> ClaimVerdict;

    /// Returns true if a node claims flows of other nodes.
    fn has_liar(&self) -> bool;

    /// Returns the claims of a node about flows.
    fn own_claims(&mut self, node: usize, flows: &[Flow]) -> Vec<Claim>;

    /// Makes another live node the contact node.
    fn change_contact_node(&mut self, random: &mut Random) {
        let nodes = self.core().nodes();
        let to = random.below(nodes);
        if to == self.core().holder || !self.core().is_alive(to) {
            return;
        }
        self.core().count("contact changed");
        self.core().holder = to;
        let rebuilds = self.rebuilds();
        rebuilds.view = View {
            epoch: rebuilds.view.epoch + 1,
            ..View::configured(node_id(to), (0..nodes).map(node_id))
        };
        rebuilds.is_table_complete = false;
        rebuilds.deferred.clear();
        let view = rebuilds.view.clone();
        self.core().steering.clear();
        self.forget_records();
        for node in 0..nodes {
            let core = self.core();
            let delay = match node == to {
                true => Time::ZERO,
                false => core.micros(0, VIEW_DELAY_US),
            };
            let at = core.now + delay;
            core.schedule_action(node, at, Self::view_action(view.clone()));
        }
    }

    fn hear_view(&mut self, node: usize, view: View) {
        let now = Duration::from(self.core().now);
        let known = &mut self.rebuilds().nodes[node];
        if view.epoch <= known.view_epoch {
            return;
        }
        known.view_epoch = view.epoch;
        let heard = view.clone();
        self.drive_machine(node, |machine, now| Self::give_view(machine, now, heard));
        if let Some(machine) = &mut self.rebuilds().nodes[node].machine {
            machine.handle_view(now, view);
        }
        self.drive_rebuild(node);
    }

    /// Starts the machine of a daemon, which knows the newest view.
    fn start_rebuild(&mut self, node: usize) {
        let now = Duration::from(self.core().now);
        let boot = self.core().boot(node);
        let config = TableRebuildConfig {
            flows_per_part: 2,
            ..TableRebuildConfig::new(node_id(node), boot)
        };
        let rebuilds = self.rebuilds();
        let (view, is_complete) = (rebuilds.view.clone(), rebuilds.is_table_complete);
        rebuilds.nodes[node].view_epoch = view.epoch;
        rebuilds.nodes[node].machine = Some(TableRebuild::new(now, config, view, is_complete));
        self.drive_rebuild(node);
    }

    fn wake_rebuild(&mut self, node: usize) {
        let now = Duration::from(self.core().now);
        if let Some(machine) = &mut self.rebuilds().nodes[node].machine {
            machine.handle_timeout(now);
        }
        self.drive_rebuild(node);
    }

    fn deliver_report(&mut self, from: usize, to: usize, frame: FlowReportFrame) {
        let now = Duration::from(self.core().now);
        if let Some(machine) = &mut self.rebuilds().nodes[to].machine {
            machine.handle_frame(now, node_id(from), frame);
        }
        self.drive_rebuild(to);
    }

    /// Returns true if the holder may decide about changes that `asker` wants now.
    fn is_admitted(&mut self, asker: usize, changes: &[OwnershipChange]) -> bool {
        let holder = self.core().holder;
        let Some(machine) = &mut self.rebuilds().nodes[holder].machine else {
            return true;
        };
        let is_admitted = machine.admit(node_id(asker), changes) == Admission::Admitted;
        self.drive_rebuild(holder);
        is_admitted
    }

    /// Returns true if the holder may answer a query now.
    fn is_query_admitted(&mut self) -> bool {
        let holder = self.core().holder;
        let machine = self.rebuilds().nodes[holder].machine.as_ref();
        machine.is_none_or(|machine| machine.admit_query() == Admission::Admitted)
    }

    /// Lets a request wait at the holder if the holder may not handle the request yet, or an earlier one of the sender
    /// waits. Returns the request if it need not wait.
    fn defer_request(&mut self, from: usize, frame: Frame) -> Option<Frame> {
        let waiting = self.rebuilds().deferred.get(&from);
        let is_behind = waiting.is_some_and(|waiting| !waiting.is_empty());
        if !is_behind && self.admits_request(from, &frame) {
            return Some(frame);
        }
        self.core().count("request deferred");
        let number = request_number(&frame);
        let waiting = self.rebuilds().deferred.entry(from).or_default();
        if waiting.iter().all(|other| request_number(other) != number) {
            waiting.push_back(frame);
        }
        if !is_behind {
            self.schedule_retry(from);
        }
        None
    }

    fn schedule_retry(&mut self, from: usize) {
        let core = self.core();
        let (holder, at) = (core.holder, core.now + DEFERRED_RETRY);
        core.schedule_action(holder, at, Self::retry_action(from));
    }

    /// Considers the waiting requests of a node again.
    fn retry_deferred(&mut self, to: usize, from: usize) {
        if to != self.core().holder {
            return;
        }
        let next = |world: &mut Self| world.rebuilds().deferred.get_mut(&from)?.pop_front();
        while let Some(frame) = next(self) {
            if !self.admits_request(from, &frame) {
                let waiting = self.rebuilds().deferred.entry(from).or_default();
                waiting.push_front(frame);
                return self.schedule_retry(from);
            }
            self.handle_request(from, to, frame);
        }
    }

    /// Carries out the outputs of a node's machine.
    fn drive_rebuild(&mut self, node: usize) {
        let next_output =
            |world: &mut Self| world.rebuilds().nodes[node].machine.as_mut()?.poll_output();
        while let Some(output) = next_output(self) {
            self.core()
                .add_to_trace(|| format!("node {}: {output:?}", node_id(node)));
            match output {
                Output::Send { to, frame } => self.core().transmit(node, node_index(to), &frame),
                Output::Execute(command) => self.execute_rebuild_command(node, command),
                Output::Event(Event::Complete) => {
                    self.core().count("table complete");
                    let is_holder = node == self.core().holder;
                    let machine = self.rebuilds().nodes[node].machine.as_ref();
                    let claims = machine.map_or_else(Vec::new, TableRebuild::disputed_claims);
                    if !claims.is_empty() && !self.has_liar() && !self.core().was_hostile {
                        let text = format!("honest nodes claim the same flow: {claims:?}");
                        self.core().set_violation(text);
                    }
                    let rebuilds = self.rebuilds();
                    rebuilds.is_table_complete |= is_holder && rebuilds.has_heard(node);
                }
                Output::Event(_) => {}
            }
        }
        let known = &mut self.rebuilds().nodes[node];
        let due = known.machine.as_ref().and_then(TableRebuild::poll_timeout);
        let due = due.map(Time::from);
        if std::mem::replace(&mut known.due, due) != due
            && let Some(at) = due
        {
            self.core().schedule_action(node, at, Self::wake_action());
        }
    }

    fn execute_rebuild_command(&mut self, node: usize, command: Command) {
        match command {
            Command::ClearTable if node == self.core().holder => {
                self.core().steering.clear();
                self.forget_records();
            }
            Command::ClearTable => {}
            Command::ListFlows { token } => {
                let flows = self.claimed_flows(node);
                if let Some(machine) = &mut self.rebuilds().nodes[node].machine {
                    machine.handle_flows(token, flows);
                }
            }
            Command::ReadClaims { token, flows } => {
                let claims = self.own_claims(node, &flows);
                if let Some(machine) = &mut self.rebuilds().nodes[node].machine {
                    machine.handle_claims(token, claims);
                }
            }
            Command::StoreNewer { records } => self.store_claims(node, records, false),
            Command::StoreMissing { records } => self.store_claims(node, records, true),
            Command::SetRecords { records } => self.set_records(node, records),
        }
    }

    fn store_claims(&mut self, node: usize, records: Vec<Claim>, only_missing: bool) {
        // A former holder that has not heard of the view yet has a table of its own, which decides about nothing.
        if node != self.core().holder {
            return;
        }
        let mut disputes = Vec::new();
        for (flow, claimed) in records {
            let current = self.core().steering.get(&flow).copied();
            match (self.judge_claim(current, claimed), current) {
                (ClaimVerdict::Disputed, Some(_)) if only_missing => {}
                (ClaimVerdict::Disputed, Some(recorded)) => disputes.push(Dispute {
                    flow,
                    recorded,
                    claimed,
                }),
                (ClaimVerdict::Stored, Some(_)) if only_missing => {}
                (ClaimVerdict::Stored, _) => self.core().record_result(flow, &Ok(Some(claimed))),
                _ => {}
            }
        }
        if disputes.is_empty() {
            return;
        }
        self.core().count("claims disputed");
        if let Some(machine) = &mut self.rebuilds().nodes[node].machine {
            let records = machine.handle_disputes(disputes);
            self.set_records(node, records);
        }
    }

    fn set_records(&mut self, node: usize, records: Vec<DecidedFlow>) {
        let core = self.core();
        if node == core.holder {
            for (flow, record) in records {
                core.record_result(flow, &Ok(record));
            }
        }
    }
}

/// Returns the number of a request to the holder.
fn request_number(frame: &Frame) -> Option<u64> {
    match frame {
        Frame::ChangeRequest { request, .. } | Frame::Query { request, .. } => Some(*request),
        _ => None,
    }
}
