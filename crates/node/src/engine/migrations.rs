//! Process migration in the event loop; [`crate::migration`] has the rest.

use std::time::Instant;

use holdfast_api::control::{
    CheckQuery, ErrorBody, MigrationAccepted, MigrationRequest, ProcessCheck,
};
use holdfast_proto::migration::{Command, Completion, Migration, Results, RoundReport};
use holdfast_wire::{Frame, MoveId, NodeId};

use super::Engine;
use super::fault_injection::InjectionPoint;
use super::operator_view::error_body;
use crate::control::ReplySender;
use crate::migration::{
    MachineOutput, MoveInquiry, WorkerEvent, name_of_command, name_of_results, token_of,
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
        let mut event = match event {
            WorkerEvent::SetRedirect {
                id,
                redirect: turn,
                reply,
            } => {
                // If the thread does not wait for the reply, it has ended.
                let redirected = self.set_redirect(id, turn);
                let new_flows = || {
                    self.new_datagram_flows
                        .get(&id)
                        .cloned()
                        .unwrap_or_default()
                };
                let _ = reply.send(redirected.map(|()| new_flows()));
                return;
            }
            WorkerEvent::RedirectNewClients {
                id,
                listeners: servers,
                reply,
            } => {
                self.redirect_clients_to_donor(id, &servers);
                // If the thread does not wait for the reply, it has ended.
                let _ = reply.send(());
                return;
            }
            WorkerEvent::OwnedFlows { flows, reply } => {
                if let Err(error) = self.create_private_entries(flows.iter().copied()) {
                    tracing::warn!(
                        error,
                        "cannot create flow entries for a process's connections"
                    );
                }
                let _ = reply.send(self.owned_flows(flows));
                return;
            }
            WorkerEvent::HandshakesDrained {
                to,
                endpoints: places,
            } => return self.on_handshakes_drained(to, &places),
            WorkerEvent::HandOffUnaccepted {
                flow_and_acceptor: of,
                socket,
                reply,
            } => {
                return self.hand_off_unaccepted(of, socket, reply);
            }
            other => other,
        };
        if let WorkerEvent::CheckDone { check, flows, .. } = &mut event
            && let Ok(check) = &mut **check
        {
            self.check_private_flows(check, flows);
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
                self.begin_serving_clients(id);
                went.running_for = since.elapsed();
            }
            Results::Discarded => self.restore_successors(id),
            Results::Thawed(Ok(())) | Results::Released(Ok(())) => {
                self.new_datagram_flows.remove(&id);
                self.reserve_ports();
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

    fn add_round_flows(&mut self, id: MoveId, report: &mut RoundReport) -> Result<(), String> {
        let endpoints = self.migrations.endpoints(id).to_vec();
        self.create_private_entries_of(&endpoints)?;
        report.flows = self.flows_of_sockets(&endpoints);
        let remote_ends = self.remote_ends(report.flows.iter().map(|flow_at| flow_at.flow))?;
        (report.peers, report.forwarded) = (remote_ends.peers, remote_ends.forwarded);
        self.new_datagram_flows.insert(id, Vec::new());
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
                let to = self.migrations.acceptor_of(*id).unwrap_or(NodeId(0));
                let failed = self.add_outbound_flows(*id, to, flows).err()?;
                Some(Results::Frozen(Err(failed)))
            }
            Command::Restore { id, flows, .. } => {
                self.announce_flows(*id, flows);
                None
            }
            // The filters are set first, because packets that waking sockets send must pass.
            Command::Thaw { id, flows, .. } => {
                self.end_outbound(*id);
                let failed = self.keep_flows(flows).err()?;
                Some(Results::Thawed(Err(failed)))
            }
            Command::Release {
                id,
                to,
                flows,
                kept,
                ..
            } => {
                self.redirect_clients_to_acceptor(*id, *to);
                let moved = self.mark_moved(*to, flows);
                self.end_outbound(*id);
                let kept = self.keep_flows(kept);
                Some(Results::Released(Err(moved.and(kept).err()?)))
            }
            Command::Resume {
                id,
                flows,
                lost_flows: lost,
                ..
            } => {
                let failed = self.take_ownership(*id, flows, lost).err()?;
                Some(Results::Resumed(Err(failed)))
            }
            Command::Discard { id, .. } => {
                self.release_held_flows(*id);
                None
            }
            Command::Translate {
                hops,
                step,
                to,
                connections,
                ..
            } => {
                let translated = self.update_translations(*hops, (*step, *to), connections);
                Some(Results::Translated(translated))
            }
            _ => None,
        }
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
                MachineOutput::Send(to, frame) => self.send_migration_frame(to, &frame),
                MachineOutput::Execute(command) => self.execute_migration_command(*command),
                MachineOutput::Report(changes) => {
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
            Command::Arbitrate {
                token,
                asker,
                changes,
            } => {
                let results = Results::Arbitrated(self.decide_ownership_changes(asker, &changes));
                Some(Completion { token, results })
            }
            Command::Lookup { token, flows } => {
                let results = Results::LookedUp(self.records_of(&flows));
                Some(Completion { token, results })
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
                (Some(id), Results::Discarded) => self.restore_successors(id),
                _ => {}
            }
            let now = self.now();
            self.migrations.on_completion(now, completion);
        }
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
        query: CheckQuery,
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
        let id = self.config.id_of(name).ok_or_else(|| {
            error_body(
                format!("there is no node {name} in this group"),
                "`holdfast status` shows those there are",
            )
        })?;
        if id != self.config.node.id && !self.peers.is_up(id) {
            return Err(error_body(
                format!("this node has no connection to {name}"),
                "check that its holdfastd runs; `holdfast status` shows the problem",
            ));
        }
        Ok(id)
    }
}
