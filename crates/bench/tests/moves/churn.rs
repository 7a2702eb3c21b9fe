//! Clients connect and disconnect while their server moves.

use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_bench::churn::{Plan, measure, program};

/// Moves a stock server with two kinds of processes; its clients notice only that some answers arrive later. A
/// move that does not succeed at once succeeds when requested again.
pub fn moves() -> Result<()> {
    let row = measure(Plan {
        program: program("nginx")?,
        stay: 16,
        new_per_s: 40,
        moves: 4,
        after: Duration::from_secs(1),
    })?;
    ensure!(row.errors == 0 && row.bytes_wrong == 0, "{row}");
    // Connections that the program closes must be closed at every node.
    ensure!(row.held_elsewhere == 0, "{row}");
    let at_once = row.moved;
    ensure!(
        at_once + 1 >= row.moves,
        "{at_once} of {} moves at once: {row}",
        row.moves
    );
    Ok(())
}
