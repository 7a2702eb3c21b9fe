//! Messages of the server.

use super::bits::Reader;
use super::{COMMANDS_KEPT, Malformed, connectionless};

const GAMESTATE: u8 = 2;
const SETTING: u8 = 3;
const BASELINE: u8 = 4;
const COMMAND: u8 = 5;
const SNAPSHOT: u8 = 7;
const NOTHING: u8 = 1;
const END: u8 = 8;

/// Number of the setting that says which run of a map this is.
const SYSTEM: u16 = 1;
/// Settings and baselines in a gamestate, at most.
const SETTINGS_MAX: usize = 1024 + 1024;
/// Bits of an entity's number.
const ENTITY_BITS: u32 = 10;

/// Bits of each field of an entity, in the protocol's order; 0 is a number with a fraction.
#[rustfmt::skip]
const ENTITY: [u32; 51] = [
    32, 0, 0, 0, 0, 0, 0, 0, 0, 10, 0, 8, 8, 8, 8, 10, 8, 19, 10, 8, 8, 0, 32, 8, 0, 0, 0, 24, 16, 8, 10, 8, 8, 0, 0, 0, 8, 0,
    32, 32, 32, 0, 0, 0, 0, 32, 0, 0, 0, 32, 16,
];
/// Fields of a player.
const PLAYER_FIELDS: u8 = 48;
/// A whole number in the place of one with a fraction, and what is added to it.
const WHOLE_BITS: u32 = 13;
const WHOLE_BIAS: f32 = 4096.0;

/// A message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerMessage {
    /// Number of the client's last command that the server has carried out.
    pub commands_done: i32,
    /// Commands to the client with their numbers; those not yet acknowledged come with every message.
    pub commands: Vec<(i32, String)>,
    /// What a client must know before it enters.
    pub gamestate: Option<GameState>,
    /// The world now.
    pub snapshot: Option<Snapshot>,
}

/// What a client must know before it enters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GameState {
    /// Number of the last command before it.
    pub commands_until: i32,
    /// Which run of a map this is.
    pub server_id: i32,
    /// Settings that came with it.
    pub settings: usize,
    /// The client's number.
    pub client: i32,
    /// A part of the key of user commands.
    pub checksum_feed: i32,
}

/// The beginning of a snapshot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The server's clock, milliseconds.
    pub server_time_ms: i32,
    /// How many messages ago the one was from which this tells the differences; 0 for none.
    pub since: u8,
    /// What has changed of the player.
    pub player: Changes,
}

/// What has changed of a player since the message that the snapshot builds on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Changes {
    /// The server time of the newest user command that the game has carried out.
    pub command_time_ms: Option<i32>,
    /// Where the player is, east and north.
    pub place: [Option<f32>; 2],
}

/// Reads how many of the client's commands the server has carried out: the beginning of a message, never scrambled.
///
/// # Errors
/// The message is too short.
pub fn commands_done(message: &[u8]) -> Result<i32, Malformed> {
    Reader::new(message).long()
}

/// Reads a message, up to the snapshot's part that no client here needs.
///
/// # Errors
/// It is not one.
pub fn parse(message: &[u8]) -> Result<ServerMessage, Malformed> {
    let mut reader = Reader::new(message);
    let mut parsed = ServerMessage {
        commands_done: reader.long()?,
        ..ServerMessage::default()
    };
    loop {
        match reader.byte()? {
            NOTHING => (),
            COMMAND if parsed.commands.len() < COMMANDS_KEPT => {
                parsed.commands.push((reader.long()?, reader.text()?));
            }
            COMMAND => return Err(Malformed::TooLong),
            GAMESTATE => parsed.gamestate = Some(gamestate(&mut reader)?),
            SNAPSHOT => {
                parsed.snapshot = Some(snapshot(&mut reader)?);
                return Ok(parsed);
            }
            END => return Ok(parsed),
            _ => return Err(Malformed::Unknown),
        }
    }
}

fn gamestate(reader: &mut Reader<'_>) -> Result<GameState, Malformed> {
    let mut state = GameState {
        commands_until: reader.long()?,
        ..GameState::default()
    };
    for _ in 0..SETTINGS_MAX {
        match reader.byte()? {
            SETTING => {
                let number = reader.number(16)? as u16;
                let text = reader.text()?;
                state.settings += 1;
                if number == SYSTEM {
                    state.server_id = server_id(&text).ok_or(Malformed::Unknown)?;
                }
            }
            BASELINE => entity(reader)?,
            END => {
                state.client = reader.long()?;
                state.checksum_feed = reader.long()?;
                return Ok(state);
            }
            _ => return Err(Malformed::Unknown),
        }
    }
    Err(Malformed::TooLong)
}

/// Reads the number of a map's run from a system setting.
fn server_id(setting: &str) -> Option<i32> {
    let settings = connectionless::settings(setting);
    let found = settings.iter().find(|(name, _)| name == "sv_serverid");
    found?.1.parse().ok()
}

/// Reads a number of a map's run from a command that changes the system setting.
#[must_use]
pub fn new_server_id(command: &str) -> Option<i32> {
    let text = command.strip_prefix("cs ")?.strip_prefix("1 ")?;
    server_id(text.trim_matches('"'))
}

/// Passes over an entity, which is told as differences.
fn entity(reader: &mut Reader<'_>) -> Result<(), Malformed> {
    reader.number(ENTITY_BITS)?;
    let gone = reader.bit()?;
    if gone || !reader.bit()? {
        return Ok(());
    }
    let count = usize::from(reader.byte()?);
    for bits in ENTITY.get(..count).ok_or(Malformed::Unknown)? {
        // A bit that it has changed, then one that it is not zero.
        if !reader.bit()? || !reader.bit()? {
            continue;
        }
        match bits {
            0 => fraction(reader).map(drop)?,
            bits => reader.number(*bits).map(drop)?,
        }
    }
    Ok(())
}

/// A number with a fraction: as a whole one where it is, and small.
fn fraction(reader: &mut Reader<'_>) -> Result<f32, Malformed> {
    if reader.bit()? {
        return Ok(f32::from_bits(reader.number(32)?));
    }
    Ok(reader.number(WHOLE_BITS)? as f32 - WHOLE_BIAS)
}

fn snapshot(reader: &mut Reader<'_>) -> Result<Snapshot, Malformed> {
    let (server_time_ms, since) = (reader.long()?, reader.byte()?);
    let _flags = reader.byte()?;
    // Which parts of the map the player can see.
    for _ in 0..reader.byte()? {
        reader.byte()?;
    }
    Ok(Snapshot {
        server_time_ms,
        since,
        player: player(reader)?,
    })
}

/// Its first three fields are all that is read.
fn player(reader: &mut Reader<'_>) -> Result<Changes, Malformed> {
    let count = reader.byte()?;
    if count > PLAYER_FIELDS {
        return Err(Malformed::Unknown);
    }
    let mut changes = Changes::default();
    if count > 0 && reader.bit()? {
        changes.command_time_ms = Some(reader.long()?);
    }
    for (place, field) in changes.place.iter_mut().zip(2..) {
        if count >= field && reader.bit()? {
            *place = Some(fraction(reader)?);
        }
    }
    Ok(changes)
}
