//! The operator's requests about migrations.

use std::time::Duration;

use holdfast_api::control::{
    ErrorBody, MigrationAccepted, MigrationList, MigrationRequest, MigrationStatus, ProcessCheck,
    SocketStrategy as RequestedStrategy, UnitEntry,
};
use holdfast_proto::migration::{
    FreezeLoad, MoveRequest, MoveRequestOptions, ProcessId, ProcessTree,
};
use holdfast_wire::NodeId;
use holdfast_wire::move_frames::SocketStrategy;

use super::admission_policy::process_name;
use super::rehearsals::MoveInquiry;
use super::systemd_units::SystemdUnits;
use super::{Migrations, process_check};
use crate::conductor::MoveResult;

impl Migrations {
    /// Returns the process of a systemd unit.
    pub(crate) fn unit(&self, name: &str) -> Result<UnitEntry, ErrorBody> {
        self.units().find(name)
    }

    /// Returns the units of this node.
    pub(super) fn units(&self) -> SystemdUnits {
        SystemdUnits {
            cgroups: self.settings.cgroups.clone(),
            restorer_pids: self.arrived_processes.restorers(),
        }
    }

    /// Starts the check of a process.
    pub(crate) fn check(&self, pid: i32, inquiry: MoveInquiry) {
        if self.settings.enabled {
            return process_check::start_operator_check(
                pid,
                self.settings.addresses.clone(),
                inquiry,
                self.events.clone(),
            );
        }
        let _ = inquiry.reply.send(Err(migration_disabled()));
    }

    pub(super) fn with_prediction(
        &self,
        check: Result<ProcessCheck, ErrorBody>,
    ) -> Result<ProcessCheck, ErrorBody> {
        let check = check?;
        Ok(ProcessCheck {
            predicted_freeze_us: self.predicted(&check),
            ..check
        })
    }

    /// Returns the predicted freeze of a process in µs, from its check.
    pub(crate) fn predicted(&self, check: &ProcessCheck) -> f64 {
        let count = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let load = FreezeLoad {
            dirty_bytes: 0,
            sockets: count(check.sockets),
            tree: ProcessTree {
                processes: count(check.processes.len() as u64),
                threads: count(check.threads),
                mappings: count(check.mappings),
                shared_bytes: 0,
            },
        };
        let predicted = self.machine.predict(SocketStrategy::default(), load);
        predicted.as_secs_f64() * 1e6
    }

    /// Starts a migration to node `to`.
    pub(crate) fn start(
        &mut self,
        now: Duration,
        request: &MigrationRequest,
        to: NodeId,
    ) -> Result<MigrationAccepted, ErrorBody> {
        if !self.settings.enabled {
            return Err(migration_disabled());
        }
        let process = u64::try_from(request.pid).map_err(|_| ErrorBody {
            error: format!("{} is not a PID", request.pid),
            what_to_do: "use the PID of a process on this node".to_owned(),
        })?;
        let sockets = match request.sockets {
            RequestedStrategy::Iterative => SocketStrategy::Iterative,
            RequestedStrategy::Collective => SocketStrategy::Collective,
            RequestedStrategy::Incremental => SocketStrategy::Incremental,
        };
        let proto_request = MoveRequest {
            process: ProcessId(process),
            to,
            options: MoveRequestOptions {
                clone: request.clone,
                sockets,
                max_freeze: request.max_freeze_us.map(Duration::from_micros),
                post_copy: request.post_copy,
                verify: request.verify,
                rehearsal: false,
            },
        };
        let id = (self.machine.handle_request(now, proto_request)).map_err(|error| ErrorBody {
            error: error.to_string(),
            what_to_do: "`holdfast status` shows nodes and moving processes".to_owned(),
        })?;
        let (pid, name) = (request.pid, process_name(request.pid));
        let to = (request.to.clone(), request.clone);
        let id = self.operations.begin(id, pid, name, to);
        Ok(MigrationAccepted { id })
    }

    /// Starts a migration that the conductor requests. [`Migrations::take_conductor_move_end`] returns its end.
    pub(crate) fn start_for_conductor(
        &mut self,
        now: Duration,
        request: &MigrationRequest,
        to: NodeId,
    ) -> Result<MigrationAccepted, ErrorBody> {
        let accepted = self.start(now, request, to)?;
        self.conductor_move = self.operations.move_id(accepted.id).map(|id| (id, None));
        Ok(accepted)
    }

    /// Takes the end of the move that the conductor requested, once the move has ended.
    pub(crate) fn take_conductor_move_end(&mut self) -> Option<MoveResult> {
        let (_, result) = (self.conductor_move).take_if(|(_, result)| result.is_some())?;
        result
    }

    /// Cancels a migration if that is still possible.
    pub(crate) fn cancel(
        &mut self,
        now: Duration,
        number: u64,
    ) -> Result<MigrationStatus, ErrorBody> {
        if let Some(id) = self.operations.move_id(number) {
            self.machine.handle_cancel(now, id);
        }
        self.status(number)
    }

    /// Returns the status of one migration.
    pub(crate) fn status(&self, number: u64) -> Result<MigrationStatus, ErrorBody> {
        self.operations
            .get(number)
            .cloned()
            .ok_or_else(|| ErrorBody {
                error: format!("there is no migration {number}"),
                what_to_do: "finished migrations are kept for a limited time; list the migrations to see them"
                    .to_owned(),
            })
    }

    /// Returns all remembered migrations.
    pub(crate) fn list(&self) -> MigrationList {
        MigrationList {
            migrations: self.operations.list(),
        }
    }
}

fn migration_disabled() -> ErrorBody {
    ErrorBody {
        error: "migration is disabled on this node".to_owned(),
        what_to_do:
            "set enabled = true in [migration] of its configuration, and restart its daemon"
                .to_owned(),
    }
}
