//! Actions of a player: walking, turning, jumping, shooting and talking.

use super::protocol::client_message::UserCommand;

/// Full deflection of a control stick.
const FULL_DEFLECTION: i8 = 127;
/// User commands between two lines of speech.
const COMMANDS_PER_CHAT_LINE: u64 = 120;

/// Returns the actions of `player` in its user command `turn`; players differ.
pub fn player_command(player: u16, command_number: u64, server_time_ms: i32) -> UserCommand {
    let phase = command_number + u64::from(player) * 37;
    // One full circle takes about 4 s; left and right turns alternate.
    let angle = (phase * 272) as u16;
    let yaw = if (phase / 300).is_multiple_of(2) {
        angle
    } else {
        angle.wrapping_neg()
    };
    UserCommand {
        server_time_ms,
        angles: [0, yaw, 0],
        steps: [
            FULL_DEFLECTION,
            if (phase / 90).is_multiple_of(3) {
                FULL_DEFLECTION
            } else {
                0
            },
            if phase % 75 < 5 { FULL_DEFLECTION } else { 0 },
        ],
        // The trigger also brings a killed player back.
        buttons: u16::from(phase % 40 < 3),
        weapon: 2,
    }
}

/// Returns the player's line of speech at this turn, if there is one.
pub fn chat_line(player: u16, command_number: u64) -> Option<String> {
    let phase = command_number + u64::from(player) * 5;
    phase
        .is_multiple_of(COMMANDS_PER_CHAT_LINE)
        .then(|| format!("say player {player} at turn {command_number}"))
}
