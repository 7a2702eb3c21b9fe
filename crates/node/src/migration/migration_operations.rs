//! Migrations from this node, as shown by the control API.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_api::control::{
    MigrationOutcome, MigrationPhasesUs, MigrationStatus, MigrationStepUs, MigrationStepsUs,
    PostCopyMemory, RoundEntry,
};
use holdfast_proto::migration::{Event, MoveMeasurements, MoveOutcome};
use holdfast_wire::MoveId;
use holdfast_wire::move_frames::StepTime;

use crate::failure_conversion::blame_of;

/// Number of finished migrations that are remembered.
const FINISHED_MAX: usize = 64;

/// Migrations of the control API that the daemon remembers.
#[derive(Default)]
pub(super) struct MigrationOperations {
    by_number: BTreeMap<u64, MigrationStatus>,
    numbers: BTreeMap<MoveId, u64>,
    last_number: u64,
}

impl MigrationOperations {
    /// Adds a migration to the remembered ones. Returns its number.
    pub(super) fn begin(
        &mut self,
        id: MoveId,
        pid: i32,
        name: String,
        (to, clone): (String, bool),
    ) -> u64 {
        self.last_number += 1;
        let status = MigrationStatus {
            id: self.last_number,
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
            post_copy: None,
            phases_us: MigrationPhasesUs::default(),
            steps_us: MigrationStepsUs::default(),
        };
        self.by_number.insert(self.last_number, status);
        self.numbers.insert(id, self.last_number);
        self.remove_old();
        self.last_number
    }

    /// Handles an event of the migration machine.
    pub(super) fn on_event(&mut self, event: &Event) {
        match event {
            Event::RoundEnded {
                id,
                round,
                sent_bytes: copied,
                saved_bytes: saved,
                dirty_bytes: dirty,
                dirty_rate,
                send_rate: rate,
                predicted,
            } => {
                let Some(status) = self.running_status(*id) else {
                    return;
                };
                status.copied_bytes += copied;
                status.saved_bytes += saved;
                status.predicted_freeze_us = Some(micros(*predicted));
                status.round = Some(RoundEntry {
                    number: *round,
                    copied_bytes: *copied,
                    saved_bytes: *saved,
                    dirty_bytes: *dirty,
                    dirty_bytes_per_s: *dirty_rate,
                    rate_bytes_per_s: *rate,
                    predicted_freeze_us: micros(*predicted),
                });
            }
            Event::ConnectionsForwarded { id, connections } => {
                if let Some(status) = self.running_status(*id) {
                    let flows = connections.iter().map(ToString::to_string);
                    status.forwarded.extend(flows);
                }
            }
            Event::PostCopyStarted { id, bytes } => {
                let bytes = *bytes;
                self.update_postcopy(
                    *id,
                    PostCopyMemory {
                        bytes,
                        ..PostCopyMemory::default()
                    },
                );
            }
            Event::Outcome {
                id,
                outcome,
                summary,
            } => {
                if let Some(status) = self.running_status(*id) {
                    set_outcome(status, outcome, summary);
                }
                self.numbers.remove(id);
            }
            _ => {}
        }
    }

    /// Updates the progress of a migration's post-copy.
    pub(super) fn update_postcopy(&mut self, id: MoveId, memory: PostCopyMemory) {
        if let Some(status) = self.running_status(id) {
            status.post_copy = Some(memory);
        }
    }

    /// Returns the number of a running migration's connections that this node goes on forwarding.
    pub(super) fn forwarded(&self, id: MoveId) -> usize {
        let number = self.numbers.get(&id);
        let status = number.and_then(|number| self.by_number.get(number));
        status.map_or(0, |status| status.forwarded.len())
    }

    fn running_status(&mut self, id: MoveId) -> Option<&mut MigrationStatus> {
        self.by_number.get_mut(self.numbers.get(&id)?)
    }

    /// Returns the remembered migration with this number.
    pub(super) fn get(&self, number: u64) -> Option<&MigrationStatus> {
        self.by_number.get(&number)
    }

    /// Returns the move with this number, while it is in progress.
    pub(super) fn move_id(&self, number: u64) -> Option<MoveId> {
        let mut moves = self.numbers.iter();
        moves
            .find(|(_, number_of)| **number_of == number)
            .map(|(id, _)| *id)
    }

    /// Returns all migrations, the oldest first.
    pub(super) fn list(&self) -> Vec<MigrationStatus> {
        self.by_number.values().cloned().collect()
    }

    fn remove_old(&mut self) {
        let running = |number: &u64| {
            self.numbers
                .values()
                .any(|running_number| running_number == number)
        };
        let finished = self.by_number.keys().copied();
        let finished: Vec<u64> = finished.filter(|number| !running(number)).collect();
        let surplus = finished.len().saturating_sub(FINISHED_MAX);
        for number in &finished[..surplus] {
            self.by_number.remove(number);
        }
    }
}

fn set_outcome(status: &mut MigrationStatus, outcome: &MoveOutcome, summary: &MoveMeasurements) {
    status.outcome = match outcome {
        MoveOutcome::Moved => MigrationOutcome::Moved,
        MoveOutcome::Cloned => MigrationOutcome::Cloned,
        MoveOutcome::Kept { reason } => MigrationOutcome::Kept {
            reason: reason.to_string(),
            blame: blame_of(&reason.failure()),
        },
    };
    let phases = &summary.phases;
    status.freeze_us = match outcome {
        MoveOutcome::Moved => Some(micros(phases.freeze())),
        // The original resumed before the copy was restored.
        MoveOutcome::Cloned => Some(micros(phases.extract)),
        MoveOutcome::Kept { .. } => None,
    };
    if summary.post_copy {
        // The rounds predicted the freeze for sending all memory.
        status.predicted_freeze_us = Some(micros(summary.predicted));
    }
    status.freeze_bytes = summary.freeze_bytes;
    status.copied_bytes = summary.copied_bytes;
    status.saved_bytes = summary.saved_bytes;
    status.phases_us = MigrationPhasesUs {
        copy: micros(phases.copy),
        arm: micros(phases.arm),
        divert: micros(phases.divert),
        extract: micros(phases.extract),
        transfer: micros(phases.transfer),
        restore: micros(phases.restore),
        commit: micros(phases.commit),
    };
    let [donor, acceptor] = &*summary.steps;
    status.steps_us = MigrationStepsUs {
        donor: step_entries(donor),
        acceptor: step_entries(acceptor),
    };
}

fn step_entries(step_times: &[StepTime]) -> Vec<MigrationStepUs> {
    let step = |step_time: &StepTime| MigrationStepUs {
        step: step_time.name.clone(),
        duration_us: step_time.us,
    };
    step_times.iter().map(step).collect()
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}
