//! The contact node changes at run time: a new one rebuilds the steering table and takes the service addresses, a former
//! one gives them up.
//!
//! A former contact node goes on forwarding by its table for a while, because clients learn the new link address later.
//! The table ages without harm: an owner enforces its ownership itself, and forwards the packets of a flow that it has
//! handed off.

use std::time::Duration;

use holdfast_bpf::shared_with_c::{FlowState, ROLE_FORMER_HOLDER, ROLE_HOLDER, ROLE_NONE};
use holdfast_bpf::{LEASE_WITHOUT_END, Lease};
use holdfast_proto::table_rebuild::{
    Admission, Claim, Command, DecidedFlow, Event, Output, TableRebuild, TableRebuildConfig,
};
use holdfast_proto::view::View;
use holdfast_proto::{handoff, migration};
use holdfast_wire::membership_frames::Member;
use holdfast_wire::{ChangeRefusal, Flow, Frame, NodeId, OwnershipChange, OwnershipRecord};

use super::deferred_requests::LocalHolderRequest;
use super::holder::Holder;
use super::{Engine, network_setup};
use crate::dataplane::boot_time_ns;
use crate::membership::{GroupEvent, LeaseWriter};
use crate::reach::reach_of;

/// Time for which a former contact node forwards by its table.
const FORMER_HOLDER_TIME: Duration = Duration::from_secs(60);

impl Engine {
    /// Handles an event of the group.
    pub fn handle_group_event(&mut self, event: GroupEvent) {
        match event {
            GroupEvent::View { view, members, .. } => self.on_view(view, members),
            GroupEvent::Lease { .. } => self.serve_with_lease(),
            GroupEvent::Settings { version, settings } => {
                tracing::info!(version, "the group has new settings");
                self.apply_group_settings(version, settings);
            }
            GroupEvent::Joined { id } => tracing::info!(%id, "this node is in the group"),
            GroupEvent::Removed { cause, contact } => {
                tracing::warn!(?cause, "this node is outside the group");
                let was_contact = self.group.is_contact();
                // Clients that still send to a former contact node must reach the next one, and no server here.
                self.dataplane.programs.lease.set_contact(contact.0);
                self.group.leave();
                let (now, contact) = (self.now(), self.group.contact());
                self.machine.handle_removal(now);
                self.migrations.machine().handle_removal(now);
                self.conductor.handle_removal(now);
                self.table_rebuild.handle_removal();
                self.health.machine().handle_contact_node(now, contact);
                self.publish_servers();
                self.leave_credentials_group();
                if was_contact {
                    self.end_holding();
                }
                self.update_replication();
            }
        }
    }

    /// Returns true if the event gives this node another number than the engine's parts have.
    pub(super) fn is_renumbered_by(&self, event: &GroupEvent) -> bool {
        let own = match event {
            GroupEvent::View { own, .. } => *own,
            GroupEvent::Joined { id } => *id,
            GroupEvent::Settings { .. } | GroupEvent::Lease { .. } | GroupEvent::Removed { .. } => {
                return false;
            }
        };
        own != self.group.own()
    }

    /// Returns a function that tells the kernel the end of the lease, from any thread.
    pub(super) fn lease_writer(&self) -> LeaseWriter {
        let writer = self.dataplane.programs.lease.writer();
        Box::new(move |lease| writer.set_until_ns(lease.until_ns))
    }

    fn on_view(&mut self, view: View, members: Vec<Member>) {
        if !view.is_newer_than(self.group.view()) {
            return;
        }
        let now = self.now();
        let is_first = !self.group.has_view();
        let was_contact = self.group.is_contact();
        tracing::info!(epoch = view.epoch, contact = %view.contact_node, nodes = members.len(), "a new view of the group");
        self.group.set_view(view.clone(), members);
        let names = self.group.nodes();
        let names = names.map(|(id, node)| (id, node.name.clone())).collect();
        self.migrations.set_node_names(names);
        self.follow_group_nodes();
        self.machine.handle_view(now, view.clone());
        self.migrations.machine().handle_view(now, view.clone());
        self.conductor.handle_view(now, view.clone());
        let contact = view.contact_node;
        self.health.machine().handle_contact_node(now, contact);
        self.publish_servers();
        match is_first {
            true => self.adopt_role(view),
            false => self.table_rebuild.handle_view(now, view),
        }
        network_setup::refresh_routes(&self.group, &self.dataplane);
        // A former contact node tells by this number which packets the contact node has steered already.
        let contact = self.group.contact().0;
        self.dataplane.programs.lease.set_contact(contact);
        self.set_credential_view();
        if self.group.is_contact() {
            // Records of the view before stay valid, since the same node made both views.
            self.note_complete_table();
        } else if was_contact {
            self.end_holding();
        }
        self.run_table_rebuild();
        if is_first && let Some(membership) = &self.membership {
            // From now on this engine tells the kernel whether the steering table serves.
            membership.set_lease_writer(self.lease_writer());
        }
    }

    /// Takes the role in the first view after the start. The table of an earlier daemon is good if no view has come in
    /// between.
    fn adopt_role(&mut self, view: View) {
        let lease = &self.dataplane.programs.lease;
        let is_adopted = self.group.is_contact() && lease.has_table_for(view.epoch);
        let now = self.now();
        let config = TableRebuildConfig::new(self.group.own(), self.boot);
        self.table_rebuild = TableRebuild::new(now, config, view, is_adopted);
        if is_adopted {
            self.holder = Some(Holder::new(
                &self.dataplane.programs,
                &self.config,
                self.epoch_floor,
            ));
            self.set_steering_role(ROLE_HOLDER);
            self.dataplane.programs.lease.set_table_ready(true);
            self.serve_with_lease();
        } else if !self.group.is_contact() && self.steering_role() != ROLE_NONE {
            // An earlier daemon of this node was contact node.
            self.end_holding();
        }
    }

    /// Carries out the outputs of the machine that rebuilds the steering table.
    pub(super) fn run_table_rebuild(&mut self) {
        while let Some(output) = self.table_rebuild.poll_output() {
            match output {
                Output::Send { to, frame } => {
                    // The machine repeats a frame that was lost.
                    if let Err(error) = self.peers.send(to, &frame) {
                        tracing::debug!(%to, frame = frame.name(), %error, "a frame was dropped");
                    }
                }
                Output::Execute(command) => self.execute_rebuild_command(command),
                Output::Event(event) => self.on_rebuild_event(event),
            }
        }
        let disputed = self.table_rebuild.disputed_flow_count();
        self.statistics.metrics().set_flows_disputed(disputed);
    }

    fn execute_rebuild_command(&mut self, command: Command) {
        match command {
            Command::ClearTable => self.begin_holding(),
            Command::ListFlows { token } => {
                let flows = self.claimed_flows();
                self.table_rebuild.handle_flows(token, flows);
            }
            Command::ReadClaims { token, flows } => {
                let claims = self.own_claims(&flows);
                self.table_rebuild.handle_claims(token, claims);
            }
            Command::StoreNewer { records } => self.store_claims(&records, false),
            Command::StoreMissing { records } => self.store_claims(&records, true),
            Command::SetRecords { records } => self.set_records(&records),
        }
    }

    fn on_rebuild_event(&mut self, event: Event) {
        match event {
            Event::Ready { missing } => {
                if !missing.is_empty() {
                    tracing::warn!(
                        ?missing,
                        "serving without the flows of nodes that do not report"
                    );
                }
                self.dataplane.programs.lease.set_table_ready(true);
                self.serve_with_lease();
            }
            Event::Complete => {
                tracing::info!("all nodes have reported their flows");
                if let Some((flow, claims)) = self.table_rebuild.first_dispute() {
                    let count = self.table_rebuild.disputed_flow_count();
                    let claims: Vec<String> = claims.iter().map(ToString::to_string).collect();
                    tracing::error!(
                        count, %flow, ?claims,
                        "two nodes claim the same flow: neither gets its packets until one of them closes it or leaves the group"
                    );
                }
                self.note_complete_table();
                self.retry_deferred();
            }
            Event::NodeSettled { .. } => self.retry_deferred(),
            Event::Ignored(ignored) => {
                tracing::debug!(from = %ignored.from, what = ignored.frame, why = ignored.reason, "ignored a frame");
            }
        }
    }

    /// Notes for the next daemon that the table has the flows of all nodes. A table with disputed flows is to be rebuilt,
    /// because only this daemon knows the claims.
    fn note_complete_table(&self) {
        if self.table_rebuild.is_complete() {
            let epoch = match self.table_rebuild.has_disputes() {
                true => 0,
                false => self.group.view().epoch,
            };
            self.dataplane.programs.lease.set_table_epoch(epoch);
        }
    }

    /// Begins to hold the steering table, which is empty at first. Packets of recorded flows are forwarded from now on;
    /// new flows wait for the reports and the lease.
    fn begin_holding(&mut self) {
        let programs = &self.dataplane.programs;
        programs.lease.set_table_ready(false);
        programs.lease.set_table_epoch(0);
        if let Err(error) = programs.steering.clear() {
            tracing::error!(%error, "cannot clear the steering table");
        }
        self.holder = Some(Holder::new(programs, &self.config, self.epoch_floor));
        self.former_holder_until = None;
        self.set_steering_role(ROLE_HOLDER);
    }

    /// Ends this node's role as contact node.
    fn end_holding(&mut self) {
        let lease = &self.dataplane.programs.lease;
        lease.set_table_ready(false);
        lease.set_table_epoch(0);
        self.holder = None;
        match reach_of(self.config.group.reach).has_contact_node() {
            true => {
                self.set_steering_role(ROLE_FORMER_HOLDER);
                self.former_holder_until = Some(self.now() + FORMER_HOLDER_TIME);
            }
            false => self.forget_table(),
        }
        self.contact_service.end();
        self.steer_waiting_clients();
        self.deferred.take_frames();
        // The machines have asked the new holder, and ignore these answers.
        for request in self.deferred.take_local_requests() {
            self.refuse_local_request(request);
        }
    }

    /// Ends the forwarding by the former table if it is time.
    pub(super) fn poll_former_holder(&mut self) {
        if self.former_holder_until.is_some_and(|at| at <= self.now()) {
            self.former_holder_until = None;
            self.forget_table();
        }
    }

    fn forget_table(&self) {
        self.set_steering_role(ROLE_NONE);
        if let Err(error) = self.dataplane.programs.steering.clear() {
            tracing::warn!(%error, "cannot clear the former steering table");
        }
    }

    pub(super) fn steering_role(&self) -> u8 {
        let config = self.dataplane.programs.config();
        config.map_or(ROLE_NONE, |config| config.role)
    }

    fn set_steering_role(&self, role: u8) {
        let programs = &self.dataplane.programs;
        let set = programs.config().and_then(|mut config| {
            config.role = role;
            programs.set_config(&config)
        });
        if let Err(error) = set {
            tracing::error!(role, %error, "cannot set the role of this node in the filters");
        }
    }

    /// Returns true if this node may decide about flows now.
    pub(super) fn has_lease(&self) -> bool {
        match self.dataplane.programs.lease.until_ns() {
            0 => false,
            LEASE_WITHOUT_END => true,
            until_ns => boot_time_ns() < until_ns,
        }
    }

    /// Takes the service addresses once the table is ready and the lease has begun.
    fn serve_with_lease(&mut self) {
        if !self.group.is_contact() || !self.has_lease() {
            return;
        }
        if self.table_rebuild.is_ready() {
            self.contact_service.begin();
            self.steer_waiting_clients();
        }
        self.retry_deferred();
    }

    /// Handles another node's request to the holder, or lets it wait.
    pub(super) fn on_holder_request(&mut self, from: NodeId, frame: Frame) {
        let admission = match &frame {
            _ if !self.group.is_contact() => Admission::Admitted,
            _ if self.deferred.has_frame_of(from) || !self.has_lease() => Admission::Deferred,
            Frame::ChangeRequest { changes, .. } => self.admit_changes(from, changes),
            _ => self.table_rebuild.admit_query(),
        };
        match admission {
            Admission::Admitted => {
                let now = self.now();
                self.machine.handle_frame(now, from, frame);
            }
            Admission::Deferred => self.deferred.add_frame(from, frame),
        }
    }

    /// Returns true if the holder may decide about this node's own changes now.
    pub(super) fn admits_own_changes(&mut self, changes: &[OwnershipChange]) -> bool {
        let own = self.group.own();
        !self.group.is_contact()
            || (!self.deferred.has_local_request()
                && self.has_lease()
                && self.admit_changes(own, changes) == Admission::Admitted)
    }

    /// Returns true if the holder may answer this node's own query now.
    pub(super) fn admits_own_query(&self) -> bool {
        !self.group.is_contact()
            || (self.has_lease() && self.table_rebuild.admit_query() == Admission::Admitted)
    }

    fn admit_changes(&mut self, asker: NodeId, changes: &[OwnershipChange]) -> Admission {
        let admission = self.table_rebuild.admit(asker, changes);
        // Claims that the request makes records must be stored before the request is decided.
        if admission == Admission::Admitted {
            self.run_table_rebuild();
        }
        admission
    }

    /// Handles the holder's deferred requests again.
    fn retry_deferred(&mut self) {
        if self.deferred.is_empty() {
            return;
        }
        for (from, frame) in self.deferred.take_frames() {
            self.on_holder_request(from, frame);
        }
        for request in self.deferred.take_local_requests() {
            match request {
                LocalHolderRequest::Handoff(token, changes) => {
                    let own = self.group.own();
                    self.arbitrate(token, own, changes);
                }
                LocalHolderRequest::MigrationChanges(token, changes) => {
                    self.decide_migration_changes(token, changes);
                }
                LocalHolderRequest::MigrationQuery(token, flows) => {
                    self.answer_migration_query(token, flows);
                }
            }
        }
    }

    fn refuse_local_request(&mut self, request: LocalHolderRequest) {
        let now = self.now();
        let refusals = |changes: Vec<OwnershipChange>| {
            let refusal = |_| Err(ChangeRefusal { current: None });
            changes.iter().map(refusal).collect()
        };
        match request {
            LocalHolderRequest::Handoff(token, changes) => {
                let results = handoff::Results::Arbitrated(refusals(changes));
                let completion = handoff::Completion { token, results };
                self.machine.handle_completion(now, completion);
            }
            LocalHolderRequest::MigrationChanges(token, changes) => {
                let results = migration::Results::Arbitrated(refusals(changes));
                let completion = migration::Completion { token, results };
                self.migrations.on_completion(now, completion);
            }
            LocalHolderRequest::MigrationQuery(token, flows) => {
                let results = migration::Results::LookedUp(vec![None; flows.len()]);
                let completion = migration::Completion { token, results };
                self.migrations.on_completion(now, completion);
            }
        }
    }

    fn store_claims(&mut self, records: &[Claim], only_missing: bool) {
        let Some(holder) = &mut self.holder else {
            return;
        };
        let view = self.group.view();
        let is_in_view = |node| view.contains(node);
        let programs = &self.dataplane.programs;
        let disputes = holder.store_claims(programs, records, only_missing, is_in_view);
        if !disputes.is_empty() {
            let records = self.table_rebuild.handle_disputes(disputes);
            self.set_records(&records);
        }
    }

    fn set_records(&mut self, records: &[DecidedFlow]) {
        if let Some(holder) = &mut self.holder {
            holder.set_records(&self.dataplane.programs, records);
        }
    }

    /// Returns the flows and processes about which this node may have a claim.
    fn claimed_flows(&mut self) -> Vec<Flow> {
        let moving = self.migrations.machine().ownership_claims();
        let processes = moving.iter().map(|(flow, _)| *flow);
        let processes = processes.filter(Flow::is_process);
        let flows = self.dataplane.flows().into_iter().map(|(flow, ..)| flow);
        processes.chain(flows).collect()
    }

    /// Returns this node's claims about flows.
    fn own_claims(&mut self, flows: &[Flow]) -> Vec<Claim> {
        let moving = self.migrations.machine().ownership_claims().into_iter();
        let decided: std::collections::BTreeMap<Flow, Option<OwnershipRecord>> =
            moving.chain(self.machine.ownership_claims()).collect();
        let own = self.group.own();
        let claim = |flow: &Flow| {
            if let Some(record) = decided.get(flow) {
                return record.map(|record| (*flow, record));
            }
            if flow.is_process() {
                return None;
            }
            let (state, value) = self.dataplane.flow(flow)?;
            Some((
                *flow,
                claim_of_entry(own, state, NodeId(value.peer), value.epoch)?,
            ))
        };
        flows.iter().filter_map(claim).collect()
    }
}

/// Returns a function that renews the lease of an earlier daemon's programs, as long as their steering table serves for the
/// view of the lease. The function ends the lease in any view.
pub(super) fn pinned_lease_writer(pinned: Lease) -> LeaseWriter {
    let writer = pinned.writer();
    Box::new(move |lease| {
        if lease.until_ns == 0 || pinned.has_table_for(lease.epoch) {
            writer.set_until_ns(lease.until_ns);
        }
    })
}

/// Returns the claim that an entry of the flow table stands for; none for one that names no node. A former owner names the
/// node that has the flow. A closed connection is not claimed: its client may have a new connection from the same port at
/// another node, whose claim would be disputed, and nobody would get the packets of a disputed flow. The server sends
/// nothing more on a closed connection; a client that has yet to end its stream repeats the end in vain.
fn claim_of_entry(
    own: NodeId,
    state: FlowState,
    peer: NodeId,
    epoch: u32,
) -> Option<OwnershipRecord> {
    match state {
        FlowState::Moved | FlowState::TransitOut | FlowState::TransitIn if peer == NodeId(0) => {
            None
        }
        FlowState::Closing => None,
        FlowState::Owned
        | FlowState::Prepared
        | FlowState::Flushing
        | FlowState::RedirectingData => Some(OwnershipRecord::owned(own, epoch)),
        FlowState::TransitOut => Some(OwnershipRecord::transit(own, peer, epoch)),
        FlowState::TransitIn => Some(OwnershipRecord::transit(peer, own, epoch)),
        FlowState::Moved => Some(OwnershipRecord::owned(peer, epoch)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn former_owner_names_the_new_one() {
        let (own, peer) = (NodeId(1), NodeId(2));
        let moved = claim_of_entry(own, FlowState::Moved, peer, 5);
        assert_eq!(moved, Some(OwnershipRecord::owned(peer, 5)));
        assert_eq!(claim_of_entry(own, FlowState::Moved, NodeId(0), 5), None);
        let donor = claim_of_entry(own, FlowState::TransitOut, peer, 5);
        assert_eq!(donor, Some(OwnershipRecord::transit(own, peer, 5)));
        let acceptor = claim_of_entry(own, FlowState::TransitIn, peer, 5);
        assert_eq!(acceptor, Some(OwnershipRecord::transit(peer, own, 5)));
    }

    #[test]
    fn closed_connection_disputes_no_new_one_of_its_port() {
        let (own, peer) = (NodeId(1), NodeId(2));
        assert_eq!(claim_of_entry(own, FlowState::Closing, peer, 5), None);
    }
}
