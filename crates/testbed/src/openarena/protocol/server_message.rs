//! Messages of the server.

use super::bits::BitReader;
use super::{COMMANDS_RETAINED, Malformed, connectionless};

const OP_GAMESTATE: u8 = 2;
const OP_SETTING: u8 = 3;
const OP_BASELINE: u8 = 4;
const OP_COMMAND: u8 = 5;
const OP_SNAPSHOT: u8 = 7;
const OP_NOTHING: u8 = 1;
const OP_END: u8 = 8;

/// Number of the setting that has the number of the map run.
const SYSTEM_SETTING: u16 = 1;
/// Most settings and baselines in a gamestate.
const SETTINGS_MAX: usize = 1024 + 1024;
/// Bits of an entity's number.
const ENTITY_BITS: u32 = 10;

/// Bits of each field of an entity, in the protocol's order; 0 stands for a floating-point number.
#[rustfmt::skip]
const ENTITY_FIELD_BITS: [u32; 51] = [
    32, 0, 0, 0, 0, 0, 0, 0, 0, 10, 0, 8, 8, 8, 8, 10, 8, 19, 10, 8, 8, 0, 32, 8, 0, 0, 0, 24, 16, 8, 10, 8, 8, 0, 0, 0, 8, 0,
    32, 32, 32, 0, 0, 0, 0, 32, 0, 0, 0, 32, 16,
];
/// Fields of a player.
const PLAYER_FIELDS: u8 = 48;
/// Width of a whole number sent in place of a floating-point one, and the bias added to it.
const INTEGER_BITS: u32 = 13;
const INTEGER_BIAS: f32 = 4096.0;

/// A message of the server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerMessage {
    /// Number of the client's last command that the server has executed.
    pub commands_done: i32,
    /// Commands to the client with their numbers; every message repeats the unacknowledged ones.
    pub commands: Vec<(i32, String)>,
    /// State that a client needs before it enters.
    pub gamestate: Option<GameState>,
    /// Current state of the world.
    pub snapshot: Option<GameSnapshot>,
}

/// State that a client needs before it enters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GameState {
    /// Number of the last command before the gamestate.
    pub commands_until: i32,
    /// Number of the map run.
    pub server_id: i32,
    /// Number of settings in the gamestate.
    pub settings: usize,
    /// Number of the client.
    pub client: i32,
    /// Part of the key of user commands.
    pub checksum_feed: i32,
}

/// The beginning of a snapshot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GameSnapshot {
    /// Clock of the server, milliseconds.
    pub server_time_ms: i32,
    /// Distance in messages back to the base of this difference; 0 for no base.
    pub base_distance: u8,
    /// Changes of the player.
    pub player: PlayerDelta,
}

/// Changes of a player since the base of the snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PlayerDelta {
    /// Server time of the newest user command that the game has executed.
    pub command_time_ms: Option<i32>,
    /// Position of the player, east and north.
    pub position: [Option<f32>; 2],
}

/// Reads the number of client commands that the server has executed: the beginning of a message, never scrambled.
///
/// # Errors
/// The message is too short.
pub fn parse_executed_commands(message: &[u8]) -> Result<i32, Malformed> {
    BitReader::new(message).read_i32()
}

/// Reads a message up to the part of a snapshot that no client here needs.
///
/// # Errors
/// The bytes are no message of a server.
pub fn parse(message: &[u8]) -> Result<ServerMessage, Malformed> {
    let mut reader = BitReader::new(message);
    let mut parsed = ServerMessage {
        commands_done: reader.read_i32()?,
        ..ServerMessage::default()
    };
    loop {
        match reader.read_byte()? {
            OP_NOTHING => (),
            OP_COMMAND if parsed.commands.len() < COMMANDS_RETAINED => {
                parsed
                    .commands
                    .push((reader.read_i32()?, reader.read_string()?));
            }
            OP_COMMAND => return Err(Malformed::TooLong),
            OP_GAMESTATE => parsed.gamestate = Some(parse_gamestate(&mut reader)?),
            OP_SNAPSHOT => {
                parsed.snapshot = Some(parse_snapshot(&mut reader)?);
                return Ok(parsed);
            }
            OP_END => return Ok(parsed),
            _ => return Err(Malformed::Unknown),
        }
    }
}

fn parse_gamestate(reader: &mut BitReader<'_>) -> Result<GameState, Malformed> {
    let mut state = GameState {
        commands_until: reader.read_i32()?,
        ..GameState::default()
    };
    for _ in 0..SETTINGS_MAX {
        match reader.read_byte()? {
            OP_SETTING => {
                let number = reader.read_bits(16)? as u16;
                let text = reader.read_string()?;
                state.settings += 1;
                if number == SYSTEM_SETTING {
                    state.server_id = parse_server_id(&text).ok_or(Malformed::Unknown)?;
                }
            }
            OP_BASELINE => skip_entity(reader)?,
            OP_END => {
                state.client = reader.read_i32()?;
                state.checksum_feed = reader.read_i32()?;
                return Ok(state);
            }
            _ => return Err(Malformed::Unknown),
        }
    }
    Err(Malformed::TooLong)
}

/// Reads the number of a map run from a system setting.
fn parse_server_id(setting: &str) -> Option<i32> {
    let settings = connectionless::parse_settings(setting);
    let found = settings.iter().find(|(name, _)| name == "sv_serverid");
    found?.1.parse().ok()
}

/// Reads the number of a map run from a command that changes the system setting.
#[must_use]
pub fn changed_server_id(command: &str) -> Option<i32> {
    let text = command.strip_prefix("cs ")?.strip_prefix("1 ")?;
    parse_server_id(text.trim_matches('"'))
}

/// Skips an entity, which is sent as differences.
fn skip_entity(reader: &mut BitReader<'_>) -> Result<(), Malformed> {
    reader.read_bits(ENTITY_BITS)?;
    let removed = reader.read_bit()?;
    if removed || !reader.read_bit()? {
        return Ok(());
    }
    let count = usize::from(reader.read_byte()?);
    for bits in ENTITY_FIELD_BITS.get(..count).ok_or(Malformed::Unknown)? {
        // The first bit says that the field has changed, the second that its value is not zero.
        if !reader.read_bit()? || !reader.read_bit()? {
            continue;
        }
        match bits {
            0 => read_float(reader).map(drop)?,
            bits => reader.read_bits(*bits).map(drop)?,
        }
    }
    Ok(())
}

/// Reads a floating-point number; small whole numbers are sent as such.
fn read_float(reader: &mut BitReader<'_>) -> Result<f32, Malformed> {
    if reader.read_bit()? {
        return Ok(f32::from_bits(reader.read_bits(32)?));
    }
    Ok(reader.read_bits(INTEGER_BITS)? as f32 - INTEGER_BIAS)
}

fn parse_snapshot(reader: &mut BitReader<'_>) -> Result<GameSnapshot, Malformed> {
    let (server_time_ms, since) = (reader.read_i32()?, reader.read_byte()?);
    let _flags = reader.read_byte()?;
    // One byte for each part of the map visible to the player.
    for _ in 0..reader.read_byte()? {
        reader.read_byte()?;
    }
    Ok(GameSnapshot {
        server_time_ms,
        base_distance: since,
        player: parse_player(reader)?,
    })
}

/// Reads the first three fields of a player and leaves the rest.
fn parse_player(reader: &mut BitReader<'_>) -> Result<PlayerDelta, Malformed> {
    let count = reader.read_byte()?;
    if count > PLAYER_FIELDS {
        return Err(Malformed::Unknown);
    }
    let mut changes = PlayerDelta::default();
    if count > 0 && reader.read_bit()? {
        changes.command_time_ms = Some(reader.read_i32()?);
    }
    for (place, field) in changes.position.iter_mut().zip(2..) {
        if count >= field && reader.read_bit()? {
            *place = Some(read_float(reader)?);
        }
    }
    Ok(changes)
}
