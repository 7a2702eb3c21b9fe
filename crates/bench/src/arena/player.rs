//! Actions of a player: walking, turning, jumping, shooting and talking.

use super::protocol::from_client::UserCommand;

/// Full deflection of a control stick.
const FULL: i8 = 127;
/// User commands between two lines of speech.
const SPEECH: u64 = 120;

/// Returns the actions of `player` in its user command `turn`; players differ.
pub fn command(player: u16, turn: u64, server_time_ms: i32) -> UserCommand {
    let phase = turn + u64::from(player) * 37;
    // One full circle takes about 4 s; left and right turns alternate.
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
        // The trigger also brings a killed player back.
        buttons: u16::from(phase % 40 < 3),
        weapon: 2,
    }
}

/// Returns the player's line of speech at this turn, if there is one.
pub fn speech(player: u16, turn: u64) -> Option<String> {
    let phase = turn + u64::from(player) * 5;
    phase
        .is_multiple_of(SPEECH)
        .then(|| format!("say player {player} at turn {turn}"))
}
