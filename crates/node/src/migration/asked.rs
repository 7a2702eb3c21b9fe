//! The operator's requests about migrations.

use std::time::Duration;

use holdfast_api::control::{
    ErrorBody, MigrationAccepted, MigrationList, MigrationRequest, MigrationStatus, ProcessCheck,
    SocketsWay, UnitEntry,
};
use holdfast_proto::migration::{Load, Options, ProcessId, Request, Shape};
use holdfast_wire::NodeId;
use holdfast_wire::migration::SocketStrategy;

use super::policy::name_of;
use super::rehearsals::Inquiry;
use super::units::Units;
use super::{Moves, check};

impl Moves {
    /// Returns the process of a systemd unit.
    pub(crate) fn unit(&self, name: &str) -> Result<UnitEntry, ErrorBody> {
        self.units().find(name)
    }

    /// Returns the units of this node.
    pub(super) fn units(&self) -> Units {
        Units {
            groups: self.groups.clone(),
            restorers: self.residents.restorers(),
        }
    }

    /// Starts the check of a process.
    pub(crate) fn check(&self, pid: i32, inquiry: Inquiry) {
        if self.enabled {
            return check::for_operator(pid, self.addresses.clone(), inquiry, self.teller.clone());
        }
        let _ = inquiry.reply.send(Err(off()));
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
    pub(super) fn predicted(&self, check: &ProcessCheck) -> f64 {
        let count = |of: u64| u32::try_from(of).unwrap_or(u32::MAX);
        let load = Load {
            dirty: 0,
            sockets: count(check.sockets),
            shape: Shape {
                processes: count(check.processes.len() as u64),
                threads: count(check.threads),
                mappings: count(check.mappings),
                shared: 0,
            },
        };
        let predicted = self.machine.predict(SocketStrategy::default(), load);
        predicted.as_secs_f64() * 1e6
    }

    /// Starts a migration to node `to`.
    pub(crate) fn begin(
        &mut self,
        now: Duration,
        request: &MigrationRequest,
        to: NodeId,
    ) -> Result<MigrationAccepted, ErrorBody> {
        if !self.enabled {
            return Err(off());
        }
        let process = u64::try_from(request.pid).map_err(|_| ErrorBody {
            error: format!("{} is no PID", request.pid),
            what_to_do: "name a process of this node, by its PID here".to_owned(),
        })?;
        let sockets = match request.sockets {
            SocketsWay::Iterative => SocketStrategy::Iterative,
            SocketsWay::Collective => SocketStrategy::Collective,
            SocketsWay::Incremental => SocketStrategy::Incremental,
        };
        let begun = Request {
            process: ProcessId(process),
            to,
            options: Options {
                clone: request.clone,
                sockets,
                max_freeze: request.max_freeze_us.map(Duration::from_micros),
                post_copy: request.post_copy,
                verify: request.verify,
                rehearsal: false,
            },
        };
        let id = (self.machine.handle_request(now, begun)).map_err(|error| ErrorBody {
            error: error.to_string(),
            what_to_do: "`holdfast status` shows nodes and processes that move".to_owned(),
        })?;
        let (pid, name) = (request.pid, name_of(request.pid));
        let to = (request.to.clone(), request.clone);
        let id = self.operations.begin(id, pid, name, to);
        Ok(MigrationAccepted { id })
    }

    /// Cancels a migration if that is still possible.
    pub(crate) fn cancel(
        &mut self,
        now: Duration,
        number: u64,
    ) -> Result<MigrationStatus, ErrorBody> {
        if let Some(id) = self.operations.move_of(number) {
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
                what_to_do: "finished migrations are remembered for a while only; list them"
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

fn off() -> ErrorBody {
    ErrorBody {
        error: "this node moves no processes".to_owned(),
        what_to_do:
            "set enabled = true in [migration] of its configuration, and restart its daemon"
                .to_owned(),
    }
}
