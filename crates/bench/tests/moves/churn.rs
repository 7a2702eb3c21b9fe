//! Clients come and go while their server moves.

use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_bench::churn::{Plan, measure, program};

/// A stock server with two kinds of processes, whose clients see nothing of its moves but that some answers come later. A move that
/// is not made at once is made when it is asked for again.
pub fn moves() -> Result<()> {
    let row = measure(Plan {
        program: program("nginx")?,
        stay: 16,
        new_per_s: 40,
        moves: 4,
        after: Duration::from_secs(1),
    })?;
    ensure!(row.errors == 0 && row.bytes_wrong == 0, "{row}");
    // What the program closes is to be closed.
    ensure!(row.held_elsewhere == 0, "{row}");
    let at_once = row.moved;
    ensure!(
        at_once + 1 >= row.moves,
        "{at_once} of {} moves at once: {row}",
        row.moves
    );
    Ok(())
}
