//! A program that counts moves.

use anyhow::{Context, Result, ensure};

use crate::faults::{ACCEPTOR, DONOR, PAUSE_MS};
use crate::world::World;

/// From node to node, and what each says of it.
pub fn there_and_back(world: &World) -> Result<()> {
    let counter = world.start("n2")?;
    for (from, to) in [("n2", "n3"), ("n3", "n2"), ("n2", "n1"), ("n1", "n3")] {
        let status = world.migrate(&counter, from, to)?;
        eprintln!(
            "{from} to {to}: {:?} us, {:?}",
            status.freeze_us, status.phases_us
        );
        world.wait("it is left", || Ok(world.runs_on(from)? == 0))?;
        // It has ended before its daemon has heard of that.
        let is_listed = || Ok(world.residents(from)?.is_empty());
        world.wait("it is still listed", is_listed)?;
    }
    let residents = world.residents("n3")?;
    ensure!(
        residents.len() == 1 && residents[0].moves == 4,
        "{residents:?}"
    );
    ensure!(residents[0].from == "n1", "{residents:?}");
    world.end(&counter)
}

/// What passes before it stands still, and behind its first instruction, is not its freeze.
pub fn freezes(world: &World) -> Result<()> {
    let counter = world.start(DONOR)?;
    // It runs still, or already.
    let places = [(DONOR, ACCEPTOR, DONOR), (ACCEPTOR, DONOR, DONOR)];
    let commands = ["move-freeze before", "move-go after"];
    for ((from, to, daemon), command) in places.into_iter().zip(commands) {
        let file = world.cluster.run_file(daemon, "fault")?;
        std::fs::write(&file, format!("{command} pause {}", PAUSE_MS))?;
        let status = world.migrate(&counter, from, to)?;
        ensure!(!file.exists(), "its daemon did not wait");
        let freeze_us = status.freeze_us.context("no freeze")?;
        let waited_us = f64::from(PAUSE_MS) * 1e3;
        ensure!(freeze_us < waited_us, "{command}: {freeze_us} us");
    }
    world.end(&counter)
}
