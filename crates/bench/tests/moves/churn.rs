//! Clients connect and disconnect while their server moves.

use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_bench::churn::{ChurnPlan, find_server_program, measure};

/// Moves a stock server with two kinds of processes; its clients notice only that some answers arrive later. A
/// move that does not succeed at once succeeds when requested again.
pub fn migrate_during_churn() -> Result<()> {
    let row = measure(ChurnPlan {
        program: find_server_program("nginx")?,
        long_connections: 16,
        new_per_s: 40,
        moves: 4,
        duration_after_last_move: Duration::from_secs(1),
    })?;
    ensure!(row.errors == 0 && row.bytes_wrong == 0, "{row}");
    // Connections that the program closes must be closed at every node.
    ensure!(row.held_elsewhere == 0, "{row}");
    let first_try_moves = row.moved;
    ensure!(
        first_try_moves + 1 >= row.moves,
        "{first_try_moves} of {} moves succeeded at the first request: {row}",
        row.moves
    );
    Ok(())
}
