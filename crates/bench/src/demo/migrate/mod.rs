//! OpenArena's dedicated server moves between nodes while players play: paper 002, section VI B.

mod display;
mod report;

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use holdfast_testbed::process_moves::openarena_game::{GameServerMove, GameSpec, RunningGame};

pub use display::MigrateDisplay;
pub use report::MigrateReport;

/// Parameters of the demonstration.
#[derive(Clone, Debug, Serialize)]
pub struct MigrateDemoSpec {
    /// Parameters of the game.
    pub game: GameSpec,
    /// Number of moves of the server.
    pub moves: usize,
}

impl Default for MigrateDemoSpec {
    fn default() -> Self {
        MigrateDemoSpec {
            game: GameSpec {
                name: format!("demo-{}", std::process::id()),
                realtime: true,
                ..GameSpec::default()
            },
            moves: 10,
        }
    }
}

/// An event of the running demonstration.
#[derive(Clone, Debug)]
pub enum MigrateEvent {
    /// A step of the demonstration begins, with this text.
    Step(String),
    /// The server has moved; the number is the players that play afterwards.
    Moved(GameServerMove, usize),
    /// The demonstration has ended.
    Ended,
}

/// A function that receives the events.
pub type EventHandler<'a> = &'a (dyn Fn(&MigrateEvent) + Sync);

/// Runs `holdfast demo migrate`, and passes each event to `watch`.
///
/// # Errors
/// The demonstration came to no result: no game, no lab, or a failed move. A result that breaks a promise is no error:
/// [`field@MigrateReport::problems`] lists it.
pub fn run(spec: &MigrateDemoSpec, watch: EventHandler<'_>) -> Result<MigrateReport> {
    let started = Instant::now();
    let players = spec.game.players;
    watch(&MigrateEvent::Step(format!(
        "starting 3 nodes, OpenArena's server at n2, and {players} players"
    )));
    let mut running_game = RunningGame::start(&spec.game)?;
    watch(&MigrateEvent::Step(format!(
        "{players} players are in the game; moving the server {} times",
        spec.moves
    )));
    let mut moves = Vec::new();
    for _ in 0..spec.moves {
        let moved = running_game.move_server()?;
        watch(&MigrateEvent::Moved(
            moved.clone(),
            running_game.players_playing(),
        ));
        moves.push(moved);
    }
    let (_, losses) = running_game.end()?;
    watch(&MigrateEvent::Ended);
    Ok(MigrateReport::new(spec, moves, losses, started.elapsed()))
}
