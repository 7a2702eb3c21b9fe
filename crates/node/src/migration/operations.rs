//! Migrations from this node, as shown by the control API.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_api::control::{
    FollowedMemory, MigrationOutcome, MigrationPhasesUs, MigrationStatus, MigrationStepUs,
    MigrationStepsUs, RoundEntry,
};
use holdfast_proto::migration::{Event, Outcome, Summary};
use holdfast_wire::MoveId;
use holdfast_wire::migration::StepTime;

/// Number of finished migrations that are remembered.
const REMEMBERED: usize = 64;

/// All remembered migrations.
#[derive(Default)]
pub(super) struct Operations {
    by_number: BTreeMap<u64, MigrationStatus>,
    numbers: BTreeMap<MoveId, u64>,
    last: u64,
}

impl Operations {
    /// Adds a migration. Returns its number.
    pub(super) fn begin(
        &mut self,
        id: MoveId,
        pid: i32,
        name: String,
        (to, clone): (String, bool),
    ) -> u64 {
        self.last += 1;
        let status = MigrationStatus {
            id: self.last,
            pid,
            name,
            to,
            clone,
            outcome: MigrationOutcome::Running,
            round: None,
            copied_bytes: 0,
            saved_bytes: 0,
            freeze_bytes: 0,
            predicted_freeze_us: None,
            freeze_us: None,
            forwarded: Vec::new(),
            followed: None,
            phases_us: MigrationPhasesUs::default(),
            steps_us: MigrationStepsUs::default(),
        };
        self.by_number.insert(self.last, status);
        self.numbers.insert(id, self.last);
        self.forget_old();
        self.last
    }

    /// Handles an event of the machine.
    pub(super) fn event(&mut self, event: &Event) {
        match event {
            Event::Round {
                id,
                round,
                copied,
                saved,
                dirty,
                dirty_rate,
                rate,
                predicted,
            } => {
                let Some(status) = self.status(*id) else {
                    return;
                };
                status.copied_bytes += copied;
                status.saved_bytes += saved;
                status.predicted_freeze_us = Some(us(*predicted));
                status.round = Some(RoundEntry {
                    number: *round,
                    copied_bytes: *copied,
                    saved_bytes: *saved,
                    dirty_bytes: *dirty,
                    dirty_bytes_per_s: *dirty_rate,
                    rate_bytes_per_s: *rate,
                    predicted_freeze_us: us(*predicted),
                });
            }
            Event::Forwarded { id, connections } => {
                if let Some(status) = self.status(*id) {
                    let flows = connections.iter().map(ToString::to_string);
                    status.forwarded.extend(flows);
                }
            }
            Event::Follows { id, bytes } => {
                let bytes = *bytes;
                self.followed(
                    *id,
                    FollowedMemory {
                        bytes,
                        ..FollowedMemory::default()
                    },
                );
            }
            Event::Outcome {
                id,
                outcome,
                summary,
            } => {
                if let Some(status) = self.status(*id) {
                    end(status, outcome, summary);
                }
                self.numbers.remove(id);
            }
            _ => {}
        }
    }

    /// Updates the progress of a migration's post-copy.
    pub(super) fn followed(&mut self, id: MoveId, memory: FollowedMemory) {
        if let Some(status) = self.status(id) {
            status.followed = Some(memory);
        }
    }

    fn status(&mut self, id: MoveId) -> Option<&mut MigrationStatus> {
        self.by_number.get_mut(self.numbers.get(&id)?)
    }

    /// Returns one migration.
    pub(super) fn get(&self, number: u64) -> Option<&MigrationStatus> {
        self.by_number.get(&number)
    }

    /// Returns the move with this number, while it is in progress.
    pub(super) fn move_of(&self, number: u64) -> Option<MoveId> {
        let mut moves = self.numbers.iter();
        moves.find(|(_, of)| **of == number).map(|(id, _)| *id)
    }

    /// Returns all migrations, the oldest first.
    pub(super) fn list(&self) -> Vec<MigrationStatus> {
        self.by_number.values().cloned().collect()
    }

    fn forget_old(&mut self) {
        let running = |number: &u64| self.numbers.values().any(|of| of == number);
        let finished = self.by_number.keys().copied();
        let finished: Vec<u64> = finished.filter(|number| !running(number)).collect();
        let surplus = finished.len().saturating_sub(REMEMBERED);
        for number in &finished[..surplus] {
            self.by_number.remove(number);
        }
    }
}

fn end(status: &mut MigrationStatus, outcome: &Outcome, summary: &Summary) {
    status.outcome = match outcome {
        Outcome::Moved => MigrationOutcome::Moved,
        Outcome::Cloned => MigrationOutcome::Cloned,
        Outcome::Kept { reason } => MigrationOutcome::Kept {
            reason: reason.to_string(),
        },
    };
    let phases = &summary.phases;
    status.freeze_us = match outcome {
        Outcome::Moved => Some(us(phases.freeze())),
        // The original resumed before the copy was restored.
        Outcome::Cloned => Some(us(phases.extract)),
        Outcome::Kept { .. } => None,
    };
    if summary.post_copy {
        // The rounds predicted the freeze for sending all memory.
        status.predicted_freeze_us = Some(us(summary.predicted));
    }
    status.freeze_bytes = summary.bytes;
    status.copied_bytes = summary.copied;
    status.saved_bytes = summary.saved;
    status.phases_us = MigrationPhasesUs {
        copy: us(phases.copy),
        arm: us(phases.arm),
        divert: us(phases.divert),
        extract: us(phases.extract),
        transfer: us(phases.transfer),
        restore: us(phases.restore),
        commit: us(phases.commit),
    };
    let [donor, acceptor] = &*summary.steps;
    status.steps_us = MigrationStepsUs {
        donor: steps(donor),
        acceptor: steps(acceptor),
    };
}

fn steps(of: &[StepTime]) -> Vec<MigrationStepUs> {
    let step = |of: &StepTime| MigrationStepUs {
        step: of.name.clone(),
        us: of.us,
    };
    of.iter().map(step).collect()
}

fn us(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}
