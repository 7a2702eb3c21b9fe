//! Requests to move one process, as an operator makes them.

use std::thread::sleep;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use holdfast_api::control::{
    ClientError, MigrationOutcome, MigrationRequest, MigrationStatus, SocketStrategy,
};

use super::{MOVE_TIMEOUT, POLL_INTERVAL};
use crate::cluster::{Cluster, STALLS_MAX, is_node_stall};

/// Moves a process from node to node, and waits for the end of the move. A move that failed because a node was late is
/// requested again a few times. `pid` is the PID at the node `from`.
///
/// # Errors
/// The move failed, for the reason in the text, or does not end.
pub fn move_process(cluster: &Cluster, pid: i32, from: &str, to: &str) -> Result<MigrationStatus> {
    let mut stalls = 0;
    loop {
        let status = request_move(cluster, pid, from, to)?;
        match &status.outcome {
            MigrationOutcome::Moved => return Ok(status),
            MigrationOutcome::Kept { reason, .. }
                if is_node_stall(reason) && stalls < STALLS_MAX =>
            {
                stalls += 1;
            }
            other => bail!("move from {from} to {to}: {other:?}"),
        }
    }
}

fn request_move(cluster: &Cluster, pid: i32, from: &str, to: &str) -> Result<MigrationStatus> {
    let control = cluster.blocking_control_client(from)?;
    let request = MigrationRequest {
        pid,
        to: to.to_owned(),
        sockets: SocketStrategy::default(),
        clone: false,
        max_freeze_us: None,
        post_copy: false,
        verify: false,
    };
    let id = match control.run(async |client| client.migrate(&request).await) {
        Err(ClientError::Refused { body, .. }) => {
            bail!("move from {from} to {to}: {}", body.error)
        }
        accepted => accepted?.id,
    };
    let deadline = Instant::now() + MOVE_TIMEOUT;
    loop {
        let status = control.run(async |client| client.migration(id).await);
        let status = status.context("ask for the state of a move")?;
        if status.outcome != MigrationOutcome::Running {
            return Ok(status);
        }
        ensure!(
            Instant::now() < deadline,
            "exceeded time: the move from {from} to {to} does not end"
        );
        sleep(POLL_INTERVAL);
    }
}
