//! Processes that move, as far as the event loop has to do with them: [`crate::migration`] has the rest.

use holdfast_api::control::{ErrorBody, MigrationAccepted, MigrationRequest};
use holdfast_proto::migration::{Command, Completion, Migration, Results};
use holdfast_wire::{Frame, NodeId};

use super::Engine;
use super::faults::Moment;
use super::query::error;
use crate::migration::{Next, Told, name_of_command, name_of_results};

impl Engine {
    /// Whether a frame is about a move and not about a handoff.
    pub(super) fn is_of_a_move(frame: &Frame) -> bool {
        match frame {
            Frame::Move { .. } => true,
            Frame::Answer { request, .. } | Frame::QueryAnswer { request, .. } => {
                Migration::is_answer(*request)
            }
            _ => false,
        }
    }

    /// Takes what a thread tells.
    pub(super) fn handle_told(&mut self, told: Told) {
        if let Told::Done { completion, .. } = &told {
            let name = name_of_results(&completion.results);
            self.faults.at(name, Moment::After, 0);
        }
        let now = self.now();
        if let Some((to, frame)) = self.moves.handle_told(now, told) {
            self.send_of_a_move(to, &frame);
        }
    }

    fn send_of_a_move(&mut self, to: NodeId, frame: &Frame) {
        if let Err(error) = self.peers.send(to, frame) {
            tracing::debug!(%to, frame = frame.name(), %error, "a frame was dropped");
            let now = self.now();
            self.moves.handle_peer_lost(now, to);
        }
    }

    /// Carries out everything the machine of moves asks for; whether there was anything.
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
            command => self.moves.execute(command),
        };
        if let Some(completion) = completion {
            self.faults.at(name, Moment::After, 0);
            let now = self.now();
            self.moves.done(now, completion);
        }
    }

    pub(super) fn start_migration(
        &mut self,
        request: &MigrationRequest,
    ) -> Result<MigrationAccepted, ErrorBody> {
        let to = self.config.id_of(&request.to).ok_or_else(|| {
            error(
                format!("there is no node {} in this group", request.to),
                "`holdfast status` shows those there are",
            )
        })?;
        if to != self.config.node.id && !self.peers.is_up(to) {
            return Err(error(
                format!("this node has no connection to {}", request.to),
                "look whether its holdfastd runs; `holdfast status` says why there is none",
            ));
        }
        let now = self.now();
        self.moves.begin(now, request, to)
    }
}
