//! Process migration in the event loop; [`crate::migration`] has the rest.

use std::time::Instant;

use holdfast_api::control::{
    CheckQuery, ErrorBody, MigrationAccepted, MigrationRequest, ProcessCheck,
};
use holdfast_proto::migration::{Command, Completion, Migration, Results, RoundReport};
use holdfast_wire::{Frame, MoveId, NodeId};

use super::Engine;
use super::faults::Moment;
use super::query::error;
use crate::control::Reply;
use crate::migration::{Inquiry, Next, Told, name_of_command, name_of_results, token_of};

impl Engine {
    /// Returns true if a frame belongs to a migration rather than a handoff.
    pub(super) fn is_of_a_move(frame: &Frame) -> bool {
        match frame {
            Frame::Move { .. } => true,
            Frame::Answer { request, .. } | Frame::QueryAnswer { request, .. } => {
                Migration::is_answer(*request)
            }
            _ => false,
        }
    }

    /// Handles an event from a migration thread.
    pub(super) fn handle_told(&mut self, told: Told) {
        let mut told = match told {
            Told::Turns { id, turn, reply } => {
                // If the thread does not wait for the reply, it has ended.
                let turned = self.turn_flows(id, turn);
                let newcomers = || self.newcomers.get(&id).cloned().unwrap_or_default();
                let _ = reply.send(turned.map(|()| newcomers()));
                return;
            }
            Told::Expected { id, servers, reply } => {
                self.servers_expected(id, &servers);
                // If the thread does not wait for the reply, it has ended.
                let _ = reply.send(());
                return;
            }
            Told::Late { flows, reply } => {
                if let Err(error) = self.begin_private(flows.iter().copied()) {
                    tracing::warn!(error, "connections of a process have no entries");
                }
                let _ = reply.send(self.owned(flows));
                return;
            }
            Told::Drained { to, places } => return self.servers_drained(to, &places),
            Told::Unaccepted { of, socket, reply } => {
                return self.give_unaccepted(of, socket, reply);
            }
            other => other,
        };
        if let Told::Inspected { check, flows, .. } = &mut told
            && let Ok(check) = &mut **check
        {
            self.judge_private(check, flows);
        }
        let mut went = None;
        if let Told::Done {
            id,
            completion,
            since,
        } = &mut told
        {
            let name = name_of_results(&completion.results);
            self.faults.at(name, Moment::After, 0);
            if let Some(id) = *id {
                self.finish_of_a_move(id, &mut completion.results, *since);
            }
            went = id.filter(|_| matches!(completion.results, Results::Gone(Ok(_))));
        }
        let now = self.now();
        if let Some((to, frame)) = self.moves.handle_told(now, told) {
            self.send_of_a_move(to, &frame);
        }
        if let Some(id) = went {
            self.flush_of_a_move(id);
        }
    }

    /// Handles the effects on flows of a step that a thread has completed.
    fn finish_of_a_move(&mut self, id: MoveId, results: &mut Results, since: Instant) {
        match results {
            Results::Copied(result) => {
                if let Ok(report) = result
                    && let Err(why) = self.flows_of_a_round(id, report)
                {
                    *result = Err(why);
                }
            }
            Results::Frozen(Ok(report)) => report.stands = since.elapsed(),
            Results::Gone(Ok(went)) => {
                // Done before the donor redirects new clients to this node.
                self.servers_came(id);
                went.ago = since.elapsed();
            }
            Results::Discarded => self.servers_stay(id),
            Results::Thawed(Ok(())) | Results::Released(Ok(())) => {
                self.newcomers.remove(&id);
                self.reserve_ports();
            }
            _ => {}
        }
    }

    /// Replays packets held for a process that has resumed. The resumption is reported first, so that the replay is not
    /// part of the freeze.
    fn flush_of_a_move(&mut self, id: MoveId) {
        self.pump_moves();
        self.flush_fences(id);
    }

    fn flows_of_a_round(&mut self, id: MoveId, report: &mut RoundReport) -> Result<(), String> {
        let places = self.moves.places(id).to_vec();
        self.begin_private_at(&places)?;
        report.flows = self.flows_of(&places);
        let ends = self.other_ends(report.flows.iter().map(|of| of.flow))?;
        (report.peers, report.forwarded) = (ends.peers, ends.forwarded);
        self.newcomers.insert(id, Vec::new());
        Ok(())
    }

    /// Applies a command's effects on flows before its other parts. Returns the command's results if that fails.
    fn begin_of_a_move(&mut self, command: &Command) -> Option<Results> {
        match command {
            Command::Arm { id, flows, .. } => {
                let failed = self.fence(*id, flows).err()?;
                Some(Results::Armed(Err(failed)))
            }
            Command::Freeze { id, flows, .. } => {
                // The flows are diverted only when the process is stopped, because packets that it sends until then
                // must leave.
                let to = self.moves.acceptor_of(*id).unwrap_or(NodeId(0));
                let failed = self.about_to_leave(*id, to, flows).err()?;
                Some(Results::Frozen(Err(failed)))
            }
            Command::Restore { id, flows, .. } => {
                self.expect_flows(*id, flows);
                None
            }
            // The filters are set first, because packets that waking sockets send must pass.
            Command::Thaw { id, flows, .. } => {
                self.no_longer_leaving(*id);
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
                self.servers_left(*id, *to);
                let moved = self.moved_away(*to, flows);
                self.no_longer_leaving(*id);
                let kept = self.keep_flows(kept);
                Some(Results::Released(Err(moved.and(kept).err()?)))
            }
            Command::Go {
                id, flows, lost, ..
            } => {
                let failed = self.take_flows(*id, flows, lost).err()?;
                Some(Results::Gone(Err(failed)))
            }
            Command::Discard { id, .. } => {
                self.discard_fences(*id);
                None
            }
            Command::Translate {
                hops,
                step,
                to,
                connections,
                ..
            } => {
                let translated = self.translate(*hops, (*step, *to), connections);
                Some(Results::Translated(translated))
            }
            _ => None,
        }
    }

    fn send_of_a_move(&mut self, to: NodeId, frame: &Frame) {
        if let Err(error) = self.peers.send(to, frame) {
            tracing::debug!(%to, frame = frame.name(), %error, "a frame was dropped");
            let now = self.now();
            self.moves.handle_peer_lost(now, to);
        }
    }

    /// Carries out all commands of the migration machine. Returns true if there were any.
    pub(super) fn pump_moves(&mut self) -> bool {
        let mut any = false;
        while let Some(next) = self.moves.next() {
            any = true;
            match next {
                Next::Send(to, frame) => self.send_of_a_move(to, &frame),
                Next::Do(command) => self.carry_out_of_a_move(*command),
                Next::Report(changes) => {
                    let now = self.now();
                    self.machine.handle_changes(now, changes);
                }
            }
        }
        any
    }

    fn carry_out_of_a_move(&mut self, command: Command) {
        let name = name_of_command(&command);
        let id = match &command {
            Command::Go { id, .. } | Command::Discard { id, .. } => Some(*id),
            _ => None,
        };
        self.faults.at(name, Moment::Before, 0);
        let completion = match command {
            Command::Arbitrate {
                token,
                asker,
                changes,
            } => {
                let results = Results::Arbitrated(self.decide(asker, &changes));
                Some(Completion { token, results })
            }
            Command::Lookup { token, flows } => {
                let results = Results::LookedUp(self.records_of(&flows));
                Some(Completion { token, results })
            }
            command => match self.begin_of_a_move(&command) {
                None => self.moves.execute(command),
                Some(results) => Some(Completion {
                    token: token_of(&command),
                    results,
                }),
            },
        };
        if let Some(completion) = completion {
            self.faults.at(name, Moment::After, 0);
            // The command was completed at once from an earlier daemon's state. Its flows have no held packets to
            // replay later.
            match (id, &completion.results) {
                (Some(id), Results::Gone(Ok(_))) => self.flush_fences(id),
                (Some(id), Results::Discarded) => self.servers_stay(id),
                _ => {}
            }
            let now = self.now();
            self.moves.done(now, completion);
        }
    }

    pub(super) fn start_migration(
        &mut self,
        request: &MigrationRequest,
    ) -> Result<MigrationAccepted, ErrorBody> {
        let to = self.acceptor_named(&request.to)?;
        let now = self.now();
        self.moves.begin(now, request, to)
    }

    /// Checks a process, and asks the named acceptor, if any, for its view.
    pub(super) fn check_process(&self, pid: i32, query: CheckQuery, reply: Reply<ProcessCheck>) {
        let named = |name: String| self.acceptor_named(&name).map(|id| (name, id));
        match query.to.map(named).transpose() {
            Ok(to) => self.moves.check(pid, Inquiry { to, reply }),
            Err(refusal) => drop(reply.send(Err(refusal))),
        }
    }

    /// Returns the id of the node with this name, if it is connected.
    fn acceptor_named(&self, name: &str) -> Result<NodeId, ErrorBody> {
        let id = self.config.id_of(name).ok_or_else(|| {
            error(
                format!("there is no node {name} in this group"),
                "`holdfast status` shows those there are",
            )
        })?;
        if id != self.config.node.id && !self.peers.is_up(id) {
            return Err(error(
                format!("this node has no connection to {name}"),
                "look whether its holdfastd runs; `holdfast status` says why there is none",
            ));
        }
        Ok(id)
    }
}
