//! Actions of a daemon for its state machine, in steps, between which the daemon may die.

use super::host::{MoveRecord, RunningCommand};
use super::world::{MigrationDaemonAction, MigrationWorld};
use crate::time::Time;
use holdfast_proto::migration::{Command, CommandToken, RecoveredMoveRole, Results};
use holdfast_wire::failure::OperatorFault;
use holdfast_wire::move_frames::TranslationStep;
use holdfast_wire::{Flow, MoveId};

impl MigrationWorld {
    pub(super) fn begin_command(&mut self, node: usize, command: Command) {
        let (token, _, id) = command_info(&command);
        // The daemon stores that the process is committed before frames tell others.
        if let Command::Resume { id, .. } = &command
            && let Some(written) = self.hosts[node].move_records.get_mut(id)
            && let RecoveredMoveRole::Acceptor { committed, .. } = &mut written.role
        {
            *committed = true;
        }
        let of_holder = matches!(command, Command::Arbitrate { .. } | Command::Lookup { .. });
        let running = RunningCommand { command, step: 0 };
        self.hosts[node].running.insert(token, running);
        if !of_holder {
            return self.schedule_next_step(node, token, id);
        }
        let at = self.core.now + self.core.micros(1, 60);
        self.holder_busy_until = at.max(self.holder_busy_until);
        self.core.schedule_action(
            node,
            self.holder_busy_until,
            MigrationDaemonAction::Effect { token },
        );
    }

    /// Schedules the next step. The steps of one move run in sequence, in the order of the commands.
    fn schedule_next_step(&mut self, node: usize, token: CommandToken, id: Option<MoveId>) {
        let mut at = self.core.now + self.core.command_duration(150);
        if let Some(id) = id {
            let host = &mut self.hosts[node];
            let busy = host.busy_until.entry(id).or_default();
            at = at.max(*busy + Time(1));
            // Leave time for the command's other steps before the next command's.
            *busy = at + Time::from_micros(3);
        }
        self.core
            .schedule_action(node, at, MigrationDaemonAction::Effect { token });
    }

    pub(super) fn execute_effect(&mut self, node: usize, token: CommandToken) {
        let running = self.hosts[node].running.remove(&token);
        let running = running.and_then(|running| self.defer_own_request(node, token, running));
        let Some(mut running) = running else {
            return;
        };
        let (_, steps, _) = command_info(&running.command);
        let step = running.step;
        running.step += 1;
        let last = running.step == steps;
        match self.execute_step(node, &running.command, step, last) {
            Some(results) => {
                let at = self.core.now + self.core.micros(0, 100);
                self.core.schedule_action(
                    node,
                    at,
                    MigrationDaemonAction::Complete { token, results },
                );
            }
            None => {
                let follows = match &running.command {
                    Command::Release { id, .. } => self.postcopy_moves.contains(id),
                    _ => false,
                };
                self.hosts[node].running.insert(token, running);
                // The original stays until all its memory is at the acceptor; its daemon may die meanwhile.
                let more = match follows {
                    true => self.core.micros(1_000, 100_000),
                    false => Time::from_micros(1),
                };
                let at = self.core.now + more;
                self.core
                    .schedule_action(node, at, MigrationDaemonAction::Effect { token });
            }
        }
    }

    /// Executes one step; returns the results after the last step, or early on failure.
    fn execute_step(
        &mut self,
        node: usize,
        command: &Command,
        step: usize,
        last: bool,
    ) -> Option<Results> {
        let fails = last && self.core.command_fails();
        match command {
            Command::Check { .. }
            | Command::CopyRound { .. }
            | Command::SaveFlows { .. }
            | Command::Freeze { .. }
            | Command::Thaw { .. }
            | Command::Release { .. } => {
                self.execute_donor_step(node, command, (step, last), fails)
            }
            Command::Examine { .. }
            | Command::Build { .. }
            | Command::Arm { .. }
            | Command::Restore { .. }
            | Command::Resume { .. }
            | Command::Discard { .. } => {
                self.execute_acceptor_step(node, command, (step, last), fails)
            }
            Command::Forget { id, .. } => {
                self.hosts[node].move_records.remove(id);
                Some(Results::Forgotten)
            }
            Command::Translate { .. } => Some(self.translate(node, command)),
            Command::Arbitrate { asker, changes, .. } => {
                let results = self.arbitrate(*asker, changes);
                Some(Results::Arbitrated(results))
            }
            Command::Lookup { flows, .. } => {
                let records = flows
                    .iter()
                    .map(|flow| self.core.steering.get(flow).copied());
                Some(Results::LookedUp(records.collect()))
            }
        }
    }

    fn translate(&mut self, node: usize, command: &Command) -> Results {
        let Command::Translate {
            id,
            hops,
            step,
            to,
            connections,
            ..
        } = command
        else {
            unreachable!("{command:?} as a translation");
        };
        let (hops, to) = (*hops, *to);
        let host = &mut self.hosts[node];
        match step {
            TranslationStep::Prepare => {
                let connections = connections.clone();
                let role = RecoveredMoveRole::Peer { to, connections };
                let is_known = host.processes.values().any(|process| {
                    let mut ends = process.image.connections.iter();
                    ends.any(|end| has_connection(command, &end.flow))
                });
                if !is_known {
                    return Results::Translated(Err(OperatorFault::UnknownFlow.into()));
                }
                host.peer_translations
                    .insert(*id, MoveRecord { hops, role });
            }
            TranslationStep::Switch | TranslationStep::Undo => {
                host.peer_translations.remove(id);
            }
        }
        for process in host.processes.values_mut() {
            for end in &mut process.image.connections {
                let applies = hops >= end.hops;
                if connections.contains(&end.flow.mirrored())
                    && *step == TranslationStep::Switch
                    && applies
                {
                    (end.peer, end.hops) = (to, hops + 1);
                }
            }
        }
        self.core.count(&format!("translate {step:?}"));
        Results::Translated(Ok(()))
    }
}

fn has_connection(command: &Command, end: &Flow) -> bool {
    match command {
        Command::Translate { connections, .. } => connections.contains(&end.mirrored()),
        _ => false,
    }
}

/// Returns the token of a command, its number of steps, and its move.
fn command_info(command: &Command) -> (CommandToken, usize, Option<MoveId>) {
    match command {
        Command::Check { token, .. } => (*token, 1, None),
        Command::CopyRound { token, id, .. } => (*token, 1, Some(*id)),
        Command::SaveFlows { token, id, .. } => (*token, 1, Some(*id)),
        Command::Freeze { token, id, .. } => (*token, 2, Some(*id)),
        Command::Thaw { token, id, .. } => (*token, 2, Some(*id)),
        Command::Release { token, id, .. } => (*token, 2, Some(*id)),
        Command::Examine { token, id, .. } => (*token, 1, Some(*id)),
        Command::Build { token, id, .. } => (*token, 1, Some(*id)),
        Command::Arm { token, id, .. } => (*token, 1, Some(*id)),
        Command::Restore { token, id, .. } => (*token, 2, Some(*id)),
        Command::Resume { token, id, .. } => (*token, 3, Some(*id)),
        Command::Discard { token, id } | Command::Forget { token, id } => (*token, 1, Some(*id)),
        Command::Translate { token, id, .. } => (*token, 1, Some(*id)),
        Command::Arbitrate { token, .. } | Command::Lookup { token, .. } => (*token, 1, None),
    }
}
