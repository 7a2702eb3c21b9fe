//! Programs that move between the nodes of a group while they serve: common code of demonstrations, benchmarks and
//! experiments with moves.

pub mod migrating_zone;
mod move_request;
pub mod openarena_game;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use holdfast_api::control::{
    ClientError, MigrationOutcome, MigrationRequest, MigrationStatus, SocketStrategy,
};

use crate::cluster::{Cluster, ClusterService, ClusterSpec, STALLS_MAX, is_node_stall};
use crate::detached_program::{output_path, start_detached};
pub use move_request::move_process;

/// Nodes that the programs move between; the holder is a third one, so that every frame takes its full way.
pub const SERVER_NODES: [&str; 2] = ["n2", "n3"];

/// Time limit for a move or a start; the machine may be very busy.
const MOVE_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A group of nodes that migrate processes.
pub struct NodeGroup {
    cluster: Cluster,
    /// Post-copy settings; `None` forbids post-copy.
    pub post_copy: Option<PostCopyCondition>,
}

/// Condition for post-copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PostCopyCondition {
    /// Predicted freeze above which memory follows the process, microseconds; without it, the daemon's default.
    pub max_freeze_us: Option<u64>,
}

/// Outcome of a requested move.
#[derive(Clone, Debug)]
pub enum MoveAttemptOutcome {
    /// The process runs at its new node.
    Moved(Box<CompletedMove>),
    /// The process stayed at its node, for this reason.
    Kept(String),
}

/// A successful move.
#[derive(Clone, Debug)]
pub struct CompletedMove {
    /// Donor.
    pub from: &'static str,
    /// Acceptor.
    pub to: &'static str,
    /// PID of the process at the acceptor.
    pub pid: i32,
    /// The donor's status of the move.
    pub status: MigrationStatus,
    /// Times of the request and of the detected end.
    pub span: (Instant, Instant),
}

impl NodeGroup {
    /// Brings a group up; new flows of its services go to the first of [`SERVER_NODES`].
    ///
    /// # Errors
    /// As [`Cluster::up`].
    pub fn up(mut spec: ClusterSpec) -> Result<NodeGroup> {
        spec.migration = true;
        for service in &mut spec.services {
            direct_to_first_node(service);
        }
        let cluster = Cluster::up(spec)?;
        Ok(NodeGroup {
            cluster,
            post_copy: None,
        })
    }

    /// Returns the cluster of the group.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Starts a program at the first of [`SERVER_NODES`], as [`start_detached`] does; returns its PID there.
    ///
    /// # Errors
    /// The shell does not start.
    pub fn start_program(&self, folder: &Path, words: &[String]) -> Result<i32> {
        start_detached(self.cluster.lab(), SERVER_NODES[0], folder, words)
    }

    /// Moves a process and waits until it runs at the acceptor. Repeats the request, with a message, if the move failed
    /// because a node was late.
    ///
    /// # Errors
    /// The move failed, for the reason in the text, or does not end.
    pub fn migrate(
        &self,
        pid: i32,
        number: usize,
        sockets: SocketStrategy,
    ) -> Result<CompletedMove> {
        for _ in 0..STALLS_MAX {
            match self.migrate_once(pid, number, sockets) {
                Err(error) if is_node_stall(&error.to_string()) => {
                    eprintln!("{error}; repeating the request");
                }
                outcome => return outcome,
            }
        }
        self.migrate_once(pid, number, sockets)
    }

    fn migrate_once(
        &self,
        pid: i32,
        number: usize,
        sockets: SocketStrategy,
    ) -> Result<CompletedMove> {
        match self.request_move(pid, number, sockets)? {
            MoveAttemptOutcome::Moved(moved) => Ok(*moved),
            MoveAttemptOutcome::Kept(reason) => {
                bail!(
                    "the process stayed at {}: {reason}",
                    SERVER_NODES[number % 2]
                )
            }
        }
    }

    /// Requests one move of a process.
    ///
    /// # Errors
    /// The daemon does not answer, or the move does not end.
    pub fn request_move(
        &self,
        pid: i32,
        number: usize,
        sockets: SocketStrategy,
    ) -> Result<MoveAttemptOutcome> {
        let (from, to) = (SERVER_NODES[number % 2], SERVER_NODES[(number + 1) % 2]);
        let donor = self.cluster.blocking_control_client(from)?;
        let request = MigrationRequest {
            pid,
            to: to.to_owned(),
            sockets,
            clone: false,
            max_freeze_us: self.post_copy.and_then(|how| how.max_freeze_us),
            post_copy: self.post_copy.is_some(),
            verify: false,
        };
        let requested_at = Instant::now();
        let accepted = match donor.run(async |client| client.migrate(&request).await) {
            Err(ClientError::Refused { body, .. }) => {
                return Ok(MoveAttemptOutcome::Kept(format!(
                    "the daemon refused the request: {}",
                    body.error
                )));
            }
            other => other?,
        };
        let status = self.wait_for("the move ends", || {
            match donor.run(async |client| client.migration(accepted.id).await) {
                Ok(status) if status.outcome == MigrationOutcome::Running => None,
                // A daemon that has restarted does not know the move.
                Err(ClientError::Refused { body, .. }) => Some(Err(body)),
                status => status.ok().map(Ok),
            }
        })?;
        let status = status.map_err(|body| anyhow::anyhow!("{from}: {}", body.error))?;
        let span = (requested_at, Instant::now());
        if let MigrationOutcome::Kept { reason, .. } = &status.outcome {
            return Ok(MoveAttemptOutcome::Kept(reason.clone()));
        }
        let acceptor = self.cluster.blocking_control_client(to)?;
        let pid = self.wait_for("the process is at its new node", || {
            let acceptor_status = acceptor.run(async |client| client.status().await).ok()?;
            match acceptor_status.residents.as_slice() {
                [resident] => Some(resident.pid),
                _ => None,
            }
        })?;
        Ok(MoveAttemptOutcome::Moved(Box::new(CompletedMove {
            from,
            to,
            pid,
            status,
            span,
        })))
    }

    /// Waits until `condition` returns a value.
    ///
    /// # Errors
    /// The wait takes longer than two minutes; the text contains the logs.
    pub fn wait_for<T>(&self, what: &str, condition: impl Fn() -> Option<T>) -> Result<T> {
        let since = Instant::now();
        loop {
            if let Some(found) = condition() {
                return Ok(found);
            }
            if since.elapsed() > MOVE_TIMEOUT {
                let error = anyhow::anyhow!("exceeded time: waited {MOVE_TIMEOUT:?} until {what}");
                return Err(self.cluster.with_logs(error));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Adds the end of a program's output to an error, behind its reason: summaries show the beginning alone.
    ///
    /// # Errors
    /// Returns the error of `result` with the output.
    pub fn add_program_output<T>(&self, result: Result<T>, folder: &Path) -> Result<T> {
        result.map_err(|error| {
            let log = std::fs::read_to_string(output_path(folder)).unwrap_or_default();
            anyhow!(
                "{error:#}\noutput of the program:\n{log}\n{}",
                self.cluster.log_tails()
            )
        })
    }
}

/// Directs new clients of a service to the first of [`SERVER_NODES`].
fn direct_to_first_node(service: &mut ClusterService) {
    let nodes = ["n1", SERVER_NODES[0], SERVER_NODES[1]]
        .into_iter()
        .zip([0, 1, 0]);
    service.weights = nodes
        .map(|(node, weight)| (node.to_owned(), weight))
        .collect();
}
