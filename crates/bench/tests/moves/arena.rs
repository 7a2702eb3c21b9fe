//! Migration of OpenArena's dedicated server while 24 players play: paper 002, section VI-B.

use anyhow::{Result, ensure};
use holdfast_testbed::openarena::ClientPhase;
use holdfast_testbed::process_moves::openarena_game::{GameSpec, PlayerLosses, RunningGame};

const MOVES: usize = 10;

/// Moves the server ten times; no player is disconnected, and nothing is lost in either direction.
pub fn migrate_openarena_ten_times() -> Result<()> {
    let spec = GameSpec {
        name: format!("m-arena-{}", std::process::id()),
        ..GameSpec::default()
    };
    let mut game = RunningGame::start(&spec)?;
    for _ in 0..MOVES {
        let moved = game.move_server()?;
        eprintln!("{moved:?}");
        ensure!(
            game.players_playing() == usize::from(spec.players),
            "{moved:?}"
        );
    }
    let (reports, losses) = game.end()?;
    for (report, number) in reports.iter().zip(1..) {
        ensure!(
            report.phase == ClientPhase::Playing,
            "player {number}: {:?}",
            report.phase
        );
    }
    ensure!(losses == PlayerLosses::default(), "{losses:?}");
    Ok(())
}
