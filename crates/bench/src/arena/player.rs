//! What a player does: walks, turns, jumps, shoots and talks.

use super::protocol::from_client::UserCommand;

/// How far a stick goes.
const FULL: i8 = 127;
/// User commands from one thing that a player says to the next.
const SPEECH: u64 = 120;

/// What player `player` does in its user command `turn`; players differ.
pub fn command(player: u16, turn: u64, server_time_ms: i32) -> UserCommand {
    let phase = turn + u64::from(player) * 37;
    // A full circle in some four seconds, now left, now right.
    let turned = (phase * 272) as u16;
    let yaw = if (phase / 300).is_multiple_of(2) {
        turned
    } else {
        turned.wrapping_neg()
    };
    UserCommand {
        server_time_ms,
        angles: [0, yaw, 0],
        steps: [
            FULL,
            if (phase / 90).is_multiple_of(3) {
                FULL
            } else {
                0
            },
            if phase % 75 < 5 { FULL } else { 0 },
        ],
        // Whoever was killed comes back by the trigger.
        buttons: u16::from(phase % 40 < 3),
        weapon: 2,
    }
}

/// What it says then, if anything.
pub fn speech(player: u16, turn: u64) -> Option<String> {
    let phase = turn + u64::from(player) * 5;
    phase
        .is_multiple_of(SPEECH)
        .then(|| format!("say player {player} at turn {turn}"))
}
