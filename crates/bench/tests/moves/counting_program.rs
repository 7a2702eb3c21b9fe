//! Migrations of a program that counts.

use anyhow::{Context, Result, ensure};

use crate::faults::{ACCEPTOR, DONOR, PAUSE_MS};
use crate::world::MigrationGroup;

/// Moves the program from node to node, and checks each node's list of residents.
pub fn migrate_there_and_back(world: &MigrationGroup) -> Result<()> {
    let counter = world.start("n2")?;
    for (from, to) in [("n2", "n3"), ("n3", "n2"), ("n2", "n1"), ("n1", "n3")] {
        let status = world.migrate_counter(&counter, from, to)?;
        eprintln!(
            "{from} to {to}: {:?} us, {:?}",
            status.freeze_us, status.phases_us
        );
        world.wait("the process is left at the donor", || {
            Ok(world.count_running(from)? == 0)
        })?;
        // The process may have ended before the daemon learns of its exit.
        let is_unlisted = || Ok(world.residents(from)?.is_empty());
        world.wait("the donor still lists the process", is_unlisted)?;
    }
    let residents = world.residents("n3")?;
    ensure!(
        residents.len() == 1 && residents[0].moves == 4,
        "{residents:?}"
    );
    ensure!(residents[0].from == "n1", "{residents:?}");
    world.end(&counter)
}

/// Time that passes before the process is stopped, or after its first instruction at the acceptor, is not part of the
/// freeze.
pub fn freeze_excludes_waits(world: &MigrationGroup) -> Result<()> {
    let counter = world.start(DONOR)?;
    // The process still runs at the first step, and runs again at the second.
    let moves = [(DONOR, ACCEPTOR, DONOR), (ACCEPTOR, DONOR, DONOR)];
    let commands = ["move-freeze before", "move-go after"];
    for ((from, to, daemon), command) in moves.into_iter().zip(commands) {
        let file = world.cluster.run_path(daemon, "fault")?;
        std::fs::write(&file, format!("{command} pause {}", PAUSE_MS))?;
        let status = world.migrate_counter(&counter, from, to)?;
        ensure!(
            !file.exists(),
            "the daemon did not pause at the fault point"
        );
        let freeze_us = status.freeze_us.context("no freeze")?;
        let waited_us = f64::from(PAUSE_MS) * 1e3;
        ensure!(freeze_us < waited_us, "{command}: {freeze_us} us");
    }
    world.end(&counter)
}
