//! OpenArena's dedicated server goes round while players play: paper 002, section VI B.

mod report;
mod screen;

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::moves::game::{GameMove, GameSpec, Playing};

pub use report::MigrateReport;
pub use screen::MigrateScreen;

/// What is to be shown.
#[derive(Clone, Debug, Serialize)]
pub struct MigrateDemoSpec {
    /// What is played.
    pub game: GameSpec,
    /// How often the server moves.
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

/// What happens, as it happens.
#[derive(Clone, Debug)]
pub enum MigrateEvent {
    /// A step begins.
    Step(String),
    /// The server has moved; so many play then.
    Moved(GameMove, usize),
    /// All is done.
    Ended,
}

/// Who is told.
pub type Watch<'a> = &'a (dyn Fn(&MigrateEvent) + Sync);

/// Runs the demonstration.
///
/// # Errors
/// Something kept it from coming to a result: no game, no lab, a move that was not made. A result that is not as promised is no
/// error: [`field@MigrateReport::problems`] tells.
pub fn run(spec: &MigrateDemoSpec, watch: Watch<'_>) -> Result<MigrateReport> {
    let started = Instant::now();
    let players = spec.game.players;
    watch(&MigrateEvent::Step(format!(
        "starting 3 nodes, OpenArena's server at n2, and {players} players"
    )));
    let mut game = Playing::begin(&spec.game)?;
    watch(&MigrateEvent::Step(format!(
        "{players} play; the server moves {} times",
        spec.moves
    )));
    let mut moves = Vec::new();
    for _ in 0..spec.moves {
        let moved = game.next_move()?;
        watch(&MigrateEvent::Moved(moved.clone(), game.playing()));
        moves.push(moved);
    }
    let (_, losses) = game.end()?;
    watch(&MigrateEvent::Ended);
    Ok(MigrateReport::new(spec, moves, losses, started.elapsed()))
}
