//! Process migration in the event loop; [`crate::migration`] has the rest.

use std::time::Instant;

use holdfast_api::control::{
    ErrorBody, MigrationAccepted, MigrationRequest, ProcessCheck, ProcessCheckQuery,
};
use holdfast_proto::migration::{
    Command, CommandToken, Completion, FlowEpoch, Migration, Results, RoundReport,
};
use holdfast_wire::failure::{Context, Failure};
use holdfast_wire::move_frames::DonorFlowEpoch;
use holdfast_wire::{Flow, Frame, MoveId, NodeId, OwnershipChange};

use super::Engine;
use super::deferred_requests::LocalHolderRequest;
use super::fault_injection::InjectionPoint;
use super::operator_view::error_body;
use super::process_flows::{flows_of_sockets, owned_flows};
use crate::control::ReplySender;
use crate::migration::{
    MigrationOutput, MoveInquiry, SocketEndpoint, WorkerEvent, name_of_command, name_of_results,
    token_of,
};

impl Engine {
    /// Returns true if a frame belongs to a migration rather than a handoff.
    pub(super) fn is_migration_frame(frame: &Frame) -> bool {
        match frame {
            Frame::Move { .. } => true,
            Frame::ChangeResponse { request, .. } | Frame::QueryResponse { request, .. } => {
                Migration::is_own_request(*request)
            }
            _ => false,
        }
    }

    /// Handles an event from a migration thread.
    pub(super) fn handle_worker_event(&mut self, event: WorkerEvent) {
        let Some(mut event) = self.handle_flow_request(event) else {
            return;
        };
        if let WorkerEvent::CheckDone { check, flows, .. } = &mut event
            && let Ok(check) = &mut **check
        {
            self.private_flows
                .add_to_check((&self.dataplane, &self.peers), check, flows);
        }
        let mut resumed_move = None;
        if let WorkerEvent::CommandDone {
            id,
            completion,
            effective_at: since,
        } = &mut event
        {
            let name = name_of_results(&completion.results);
            self.faults.inject_if_due(name, InjectionPoint::After, 0);
            if let Some(id) = *id {
                self.apply_results_to_flows(id, &mut completion.results, *since);
            }
            resumed_move = id.filter(|_| matches!(completion.results, Results::Resumed(Ok(_))));
        }
        let now = self.now();
        if let Some((to, frame)) = self.migrations.handle_worker_event(now, event) {
            self.send_migration_frame(to, &frame);
        }
        if let Some(id) = resumed_move {
            self.report_and_replay(id);
        }
    }

    /// Carries out a thread's request for a change of flows or of new clients' placement. Returns any other event. If a
    /// thread does not wait for its reply, the thread has ended.
    fn handle_flow_request(&mut self, event: WorkerEvent) -> Option<WorkerEvent> {
        match event {
            WorkerEvent::SetRedirect {
                id,
                redirect,
                reply,
            } => {
                let redirected = self
                    .process_flows
                    .set_redirect(&self.dataplane, id, redirect);
                let new_flows = || self.process_flows.new_datagram_flows(id);
                let _ = reply.send(redirected.map(|()| new_flows()));
            }
            WorkerEvent::RedirectNewClients {
                id,
                listeners,
                reply,
            } => {
                self.placement
                    .redirect_to_donor(&self.dataplane, id, &listeners);
                let _ = reply.send(());
            }
            WorkerEvent::OwnedFlows { flows, reply } => {
                if let Err(error) = self.create_private_entries(flows.iter().copied()) {
                    tracing::warn!(
                        %error,
                        "cannot create flow entries for a process's connections"
                    );
                }
                let _ = reply.send(owned_flows(&self.dataplane, flows));
            }
            WorkerEvent::RedirectToAcceptor {
                to,
                endpoints,
                reply,
            } => {
                self.redirect_clients(to, &endpoints);
                let _ = reply.send(());
            }
            WorkerEvent::HandshakesDrained { to, endpoints } => {
                self.placement
                    .on_handshakes_drained(&self.dataplane, to, &endpoints);
            }
            WorkerEvent::HasUnacceptedArrivals { listeners, reply } => {
                let _ = reply.send(self.arrivals.has_unaccepted_for(&listeners));
            }
            WorkerEvent::HandOffUnaccepted {
                flow_and_acceptor,
                socket,
                reply,
            } => self.hand_off_unaccepted(flow_and_acceptor, socket, reply),
            other => return Some(other),
        }
        None
    }

    /// Handles the effects on flows of a step that a thread has completed.
    fn apply_results_to_flows(&mut self, id: MoveId, results: &mut Results, since: Instant) {
        match results {
            Results::Copied(result) => {
                if let Ok(report) = result
                    && let Err(why) = self.add_round_flows(id, report)
                {
                    *result = Err(why);
                }
            }
            Results::Frozen(Ok(report)) => report.stopped_for = since.elapsed(),
            Results::Resumed(Ok(went)) => {
                // Done before the donor redirects new clients to this node.
                let endpoints = self.migrations.take_listeners(id);
                self.placement
                    .begin_serving_new_clients(&self.dataplane, id, &endpoints);
                went.running_for = since.elapsed();
            }
            Results::Discarded => self.placement.restore_successors(&self.dataplane, id),
            Results::Thawed(Ok(())) | Results::Released(Ok(())) => {
                self.process_flows.forget_new_flows(id);
                self.private_flows.reserve_ports(&self.dataplane);
            }
            _ => {}
        }
    }

    /// Replays packets held for a process that has resumed. The resumption is reported first, so that the replay is not
    /// part of the freeze.
    fn report_and_replay(&mut self, id: MoveId) {
        self.run_migration_machine();
        self.replay_held_flows(id);
    }

    fn add_round_flows(&mut self, id: MoveId, report: &mut RoundReport) -> Result<(), Failure> {
        let endpoints = self.migrations.endpoints(id).to_vec();
        self.create_private_entries_of(&endpoints)?;
        report.flows = flows_of_sockets(&self.dataplane, &endpoints);
        let flows = report.flows.iter().map(|flow_at| flow_at.flow);
        let remote_ends = self
            .private_flows
            .remote_ends((&self.dataplane, &self.peers), flows)?;
        (report.peers, report.forwarded) = (remote_ends.peers, remote_ends.forwarded);
        self.process_flows.begin_round(id);
        Ok(())
    }

    /// Applies a command's effects on flows before its other parts. Returns the command's results if that fails.
    fn apply_command_to_flows(&mut self, command: &Command) -> Option<Results> {
        match command {
            Command::Arm { id, flows, .. } => {
                let failed = self.hold_flows(*id, flows).err()?;
                Some(Results::Armed(Err(failed)))
            }
            Command::Freeze { id, flows, .. } => {
                // The flows are diverted only when the process is stopped, because packets that it sends until then
                // must leave.
                let failed = self.add_outbound_flows(*id, flows).err()?;
                Some(Results::Frozen(Err(failed)))
            }
            Command::Restore { id, flows, .. } => {
                self.process_flows.announce(*id, flows);
                None
            }
            // The filters are set first, because packets that waking sockets send must pass.
            Command::Thaw { id, flows, .. } => {
                self.process_flows.end_outbound(&self.dataplane, *id);
                let failed = self.process_flows.keep(&self.dataplane, flows).err()?;
                Some(Results::Thawed(Err(failed)))
            }
            Command::Release {
                id,
                to,
                flows,
                kept,
                ..
            } => {
                let failed = self.release_flows((*id, *to), flows, kept).err()?;
                Some(Results::Released(Err(failed)))
            }
            Command::Resume {
                id,
                flows,
                lost_flows: lost,
                ..
            } => {
                let committed = self.migrations.record_commit(*id);
                let taken = committed.and_then(|()| self.take_ownership(*id, flows, lost));
                let failed = taken.err()?;
                Some(Results::Resumed(Err(failed)))
            }
            Command::Discard { id, .. } => {
                self.process_flows
                    .give_up_inbound(&self.dataplane, &mut self.hold, *id);
                None
            }
            Command::Translate {
                hops,
                step,
                to,
                connections,
                ..
            } => {
                let step = (*step, *to);
                let translated =
                    (self.private_flows).translate(&self.dataplane, *hops, step, connections);
                Some(Results::Translated(translated))
            }
            _ => None,
        }
    }

    /// Starts holding packets of these flows here.
    fn hold_flows(&mut self, id: MoveId, flows: &[DonorFlowEpoch]) -> Result<(), Failure> {
        if let Some(why) = flows.iter().find_map(|flow_at| {
            self.private_flows
                .refuse_arrival(&self.dataplane, &flow_at.flow)
        }) {
            return Err(why);
        }
        for flow_at in flows {
            self.refuse_owned_flow(&flow_at.flow)
                .map_err(|why| why.within(Context::Flow(flow_at.flow)))?;
        }
        self.process_flows
            .hold(&self.dataplane, &mut self.hold, id, flows)
    }

    /// Prepares flows of a process that is about to stop. Their packets are still delivered here.
    fn add_outbound_flows(&mut self, id: MoveId, flows: &[FlowEpoch]) -> Result<(), Failure> {
        let to = self.migrations.acceptor_of(id).unwrap_or(NodeId(0));
        self.process_flows
            .add_outbound(&self.dataplane, id, to, flows)
    }

    /// Gives up the flows of a process that runs at node `to`. The `kept` flows stay here.
    fn release_flows(
        &mut self,
        (id, to): (MoveId, NodeId),
        flows: &[FlowEpoch],
        kept: &[FlowEpoch],
    ) -> Result<(), Failure> {
        let endpoints = self.migrations.endpoints(id).to_vec();
        self.redirect_clients(to, &endpoints);
        let moved = self.mark_moved(to, flows);
        self.process_flows.end_outbound(&self.dataplane, id);
        let kept = self.process_flows.keep(&self.dataplane, kept);
        moved.and(kept)
    }

    /// Redirects new clients of these sockets' services to the node where their process runs.
    fn redirect_clients(&mut self, to: NodeId, endpoints: &[SocketEndpoint]) {
        self.placement
            .redirect_to_acceptor(&self.dataplane, to, endpoints);
        for service in self.placement.received_services(endpoints) {
            let now = self.started.elapsed();
            self.health.machine().handle_departure(now, &service);
        }
    }

    /// Marks the flows as moved to another node, to which stragglers are forwarded for a while.
    fn mark_moved(&mut self, to: NodeId, flows: &[FlowEpoch]) -> Result<(), Failure> {
        self.process_flows.mark_moved(&self.dataplane, to, flows)?;
        for flow_epoch in flows {
            let flow = flow_epoch.flow;
            // A private flow is forwarded as long as it lives.
            if !self.private_flows.is_private(&flow) {
                self.flow_history.add_tombstone(flow, flow_epoch.epoch);
            }
            self.flow_history.on_end(&flow);
        }
        Ok(())
    }

    /// Takes ownership of the flows; their packets are held until the process runs. The `lost` flows did not arrive.
    fn take_ownership(
        &mut self,
        id: MoveId,
        flows: &[FlowEpoch],
        lost: &[Flow],
    ) -> Result<(), Failure> {
        for flow in lost {
            self.process_flows
                .release(&self.dataplane, &mut self.hold, flow);
        }
        self.process_flows
            .take_ownership(&self.dataplane, id, flows)?;
        for packet in self.migrations.take_packets(id) {
            self.hold.device().inject(&packet);
        }
        Ok(())
    }

    /// Replays held packets in order, after the process has resumed.
    fn replay_held_flows(&mut self, id: MoveId) {
        let Some(inbound) = self.process_flows.take_inbound(id) else {
            return;
        };
        self.read_hold();
        self.process_flows
            .replay(&self.dataplane, &self.hold, &inbound);
        self.read_hold();
        let remaining = self.process_flows.mark_owned(&self.dataplane, &inbound);
        // Packets can enter the hold between the last read and the state change.
        self.read_hold();
        for flow_epoch in &remaining {
            self.flow_history.on_taken(flow_epoch.flow);
        }
        self.process_flows
            .end_hold_after_replay(&self.dataplane, &mut self.hold, id, &inbound);
        self.query_private_flows();
    }

    fn send_migration_frame(&mut self, to: NodeId, frame: &Frame) {
        if let Err(error) = self.peers.send(to, frame) {
            tracing::debug!(%to, frame = frame.name(), %error, "a frame was dropped");
            let now = self.now();
            self.migrations.handle_peer_lost(now, to);
        }
    }

    /// Carries out all commands of the migration machine. Returns true if there were any.
    pub(super) fn run_migration_machine(&mut self) -> bool {
        let mut had_output = false;
        while let Some(next) = self.migrations.next_output() {
            had_output = true;
            match next {
                MigrationOutput::Send(to, frame) => self.send_migration_frame(to, &frame),
                MigrationOutput::Execute(command) => self.execute_migration_command(*command),
                MigrationOutput::Report(changes) => {
                    let now = self.now();
                    self.machine.handle_changes(now, changes);
                }
            }
        }
        had_output
    }

    fn execute_migration_command(&mut self, command: Command) {
        let name = name_of_command(&command);
        let id = match &command {
            Command::Resume { id, .. } | Command::Discard { id, .. } => Some(*id),
            _ => None,
        };
        self.faults.inject_if_due(name, InjectionPoint::Before, 0);
        let completion = match command {
            Command::Arbitrate { token, changes, .. } => {
                self.decide_migration_changes(token, changes);
                None
            }
            Command::Lookup { token, flows } => {
                self.answer_migration_query(token, flows);
                None
            }
            command => match self.apply_command_to_flows(&command) {
                None => self.migrations.execute(command),
                Some(results) => Some(Completion {
                    token: token_of(&command),
                    results,
                }),
            },
        };
        if let Some(completion) = completion {
            self.faults.inject_if_due(name, InjectionPoint::After, 0);
            // The command was completed at once from an earlier daemon's state. Its flows have no held packets to
            // replay later.
            match (id, &completion.results) {
                (Some(id), Results::Resumed(Ok(_))) => self.replay_held_flows(id),
                (Some(id), Results::Discarded) => {
                    self.placement.restore_successors(&self.dataplane, id);
                }
                _ => {}
            }
            let now = self.now();
            self.migrations.on_completion(now, completion);
        }
    }

    /// Decides about changes that the migration machine of this node, the holder, wants, or lets them wait.
    pub(super) fn decide_migration_changes(
        &mut self,
        token: CommandToken,
        changes: Vec<OwnershipChange>,
    ) {
        if !self.admits_own_changes(&changes) {
            return (self.deferred)
                .add_local_request(LocalHolderRequest::MigrationChanges(token, changes));
        }
        let asker = self.group.own();
        let results = Results::Arbitrated(self.decide_ownership_changes(asker, &changes));
        self.faults
            .inject_if_due("move-arbitrate", InjectionPoint::After, 0);
        let now = self.now();
        self.migrations
            .on_completion(now, Completion { token, results });
    }

    /// Answers a query of the migration machine of this node, the holder, or lets it wait.
    pub(super) fn answer_migration_query(&mut self, token: CommandToken, flows: Vec<Flow>) {
        if !self.admits_own_query() {
            return (self.deferred)
                .add_local_request(LocalHolderRequest::MigrationQuery(token, flows));
        }
        let results = Results::LookedUp(self.records_of(&flows));
        let now = self.now();
        self.migrations
            .on_completion(now, Completion { token, results });
    }

    pub(super) fn start_migration(
        &mut self,
        request: &MigrationRequest,
    ) -> Result<MigrationAccepted, ErrorBody> {
        let to = self.acceptor_named(&request.to)?;
        let now = self.now();
        self.migrations.start(now, request, to)
    }

    /// Checks a process, and asks the named acceptor, if any, for its view.
    pub(super) fn check_process(
        &self,
        pid: i32,
        query: ProcessCheckQuery,
        reply: ReplySender<ProcessCheck>,
    ) {
        let named = |name: String| self.acceptor_named(&name).map(|id| (name, id));
        match query.to.map(named).transpose() {
            Ok(to) => self.migrations.check(pid, MoveInquiry { to, reply }),
            Err(refusal) => drop(reply.send(Err(refusal))),
        }
    }

    /// Returns the id of the node with this name, if it is connected.
    fn acceptor_named(&self, name: &str) -> Result<NodeId, ErrorBody> {
        let id = self.group.id_of(name).ok_or_else(|| {
            error_body(
                format!("there is no node {name} in this group"),
                "`holdfast status` shows those there are",
            )
        })?;
        if id != self.group.own() && !self.peers.is_up(id) {
            return Err(error_body(
                format!("this node has no connection to {name}"),
                "check that its holdfastd runs; `holdfast status` shows the problem",
            ));
        }
        Ok(id)
    }
}
