//! Messages of a client.

use super::bits::{BitReader, BitWriter, sanitize};
use super::scramble::{CLIENT_CLEAR_BYTES, scramble};
use super::{COMMANDS_RETAINED, Malformed};

const OP_MOVE: u8 = 2;
const OP_MOVE_WITHOUT_BASE: u8 = 3;
const OP_COMMAND: u8 = 4;
const OP_END: u8 = 5;

/// Most user commands in a message.
const USER_COMMANDS_MAX: u8 = 32;

/// Head of every message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MessageHead {
    /// Number of the map run that the client is in.
    pub server_id: i32,
    /// Number of the server's newest message received.
    pub message: i32,
    /// Number of the server's newest command received.
    pub command: i32,
}

/// Actions of a player in a few milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserCommand {
    /// The client's estimate of the server clock, milliseconds.
    pub server_time_ms: i32,
    /// Direction of view: pitch, yaw, roll; a full circle is 65,536.
    pub angles: [u16; 3],
    /// Forward, right and up, at most 127.
    pub steps: [i8; 3],
    /// Buttons: 1 is the trigger.
    pub buttons: u16,
    /// Weapon.
    pub weapon: u8,
}

/// States if a snapshot may build on the acknowledged one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotBase {
    /// A snapshot may build on the acknowledged one.
    Acknowledged,
    /// The client has no snapshot to build on.
    None,
}

/// A message of a game client to the OpenArena server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GameClientMessage {
    /// Head of the message.
    pub head: MessageHead,
    /// Commands that the server has not acknowledged yet, with their numbers.
    pub commands: Vec<(i32, String)>,
    /// Actions of the player, oldest first.
    pub moves: Option<(SnapshotBase, Vec<UserCommand>)>,
}

/// Data that the key of user commands is made from.
#[derive(Clone, Copy, Debug)]
pub struct KeyInputs<'a> {
    /// Number from the gamestate.
    pub checksum_feed: i32,
    /// The server's command with the number in the head.
    pub command: &'a str,
}

impl GameClientMessage {
    /// Returns the message's bytes before scrambling.
    #[must_use]
    pub fn write(&self, secret: KeyInputs<'_>) -> Vec<u8> {
        let mut writer = BitWriter::default();
        for value in [self.head.server_id, self.head.message, self.head.command] {
            writer.write_i32(value);
        }
        for (number, text) in &self.commands {
            writer.write_byte(OP_COMMAND);
            writer.write_i32(*number);
            writer.write_string(text);
        }
        if let Some((base, moves)) = &self.moves {
            writer.write_byte(match base {
                SnapshotBase::Acknowledged => OP_MOVE,
                SnapshotBase::None => OP_MOVE_WITHOUT_BASE,
            });
            let moves = &moves[..moves.len().min(usize::from(USER_COMMANDS_MAX))];
            writer.write_byte(moves.len() as u8);
            let key = command_key(self.head, secret);
            let mut before = UserCommand::default();
            for each in moves {
                each.write(&before, key, &mut writer);
                before = *each;
            }
        }
        writer.write_byte(OP_END);
        writer.into_bytes()
    }

    /// Reads a message, as a server does.
    ///
    /// # Errors
    /// The bytes are no message of a client.
    pub fn parse(message: &[u8], secret: KeyInputs<'_>) -> Result<Self, Malformed> {
        let mut reader = BitReader::new(message);
        let mut parsed = Self {
            head: MessageHead {
                server_id: reader.read_i32()?,
                message: reader.read_i32()?,
                command: reader.read_i32()?,
            },
            commands: Vec::new(),
            moves: None,
        };
        loop {
            let base = match reader.read_byte()? {
                OP_COMMAND if parsed.commands.len() < COMMANDS_RETAINED => {
                    parsed
                        .commands
                        .push((reader.read_i32()?, reader.read_string()?));
                    continue;
                }
                OP_COMMAND => return Err(Malformed::TooLong),
                OP_MOVE => SnapshotBase::Acknowledged,
                OP_MOVE_WITHOUT_BASE => SnapshotBase::None,
                OP_END => return Ok(parsed),
                _ => return Err(Malformed::Unknown),
            };
            let count = reader.read_byte()?;
            if count > USER_COMMANDS_MAX {
                return Err(Malformed::TooLong);
            }
            let key = command_key(parsed.head, secret);
            let mut moves = Vec::new();
            let mut before = UserCommand::default();
            for _ in 0..count {
                before = UserCommand::read(&before, key, &mut reader)?;
                moves.push(before);
            }
            parsed.moves = Some((base, moves));
        }
    }
}

/// Scrambles a message's bytes, or makes them readable again.
pub fn scramble_message(message: &mut [u8], challenge: i32, head: MessageHead, command: &str) {
    let key = challenge ^ head.server_id ^ head.message;
    scramble(message, CLIENT_CLEAR_BYTES, key, command);
}

fn command_key(head: MessageHead, secret: KeyInputs<'_>) -> u32 {
    (secret.checksum_feed ^ head.message) as u32 ^ command_hash(secret.command)
}

/// Returns a hash of the first 32 letters of a text.
fn command_hash(text: &str) -> u32 {
    let letters = text.bytes().take(32).map(sanitize).zip(119u32..);
    let sum = letters.fold(0u32, |sum, (letter, weight)| {
        sum.wrapping_add(u32::from(letter) * weight)
    });
    sum ^ (sum >> 10) ^ (sum >> 20)
}

impl UserCommand {
    fn write(&self, before: &Self, key: u32, writer: &mut BitWriter) {
        let passed = self.server_time_ms.wrapping_sub(before.server_time_ms);
        match u8::try_from(passed) {
            Ok(passed) => {
                writer.write_bits(1, 1);
                writer.write_bits(u32::from(passed), 8);
            }
            Err(_) => {
                writer.write_bits(0, 1);
                writer.write_i32(self.server_time_ms);
            }
        }
        let (new, old) = (self.fields_and_widths(), before.fields_and_widths());
        writer.write_bits(u32::from(new != old), 1);
        if new == old {
            return;
        }
        let key = key ^ self.server_time_ms as u32;
        for ((value, bits), (before, _)) in new.into_iter().zip(old) {
            writer.write_bits(u32::from(value != before), 1);
            if value != before {
                writer.write_bits(value ^ key, bits);
            }
        }
    }

    fn read(before: &Self, key: u32, reader: &mut BitReader<'_>) -> Result<Self, Malformed> {
        let mut read = *before;
        read.server_time_ms = if reader.read_bit()? {
            before
                .server_time_ms
                .wrapping_add(reader.read_bits(8)? as i32)
        } else {
            reader.read_i32()?
        };
        if !reader.read_bit()? {
            return Ok(read);
        }
        let key = key ^ read.server_time_ms as u32;
        let mut fields = before.fields_and_widths();
        for (value, bits) in &mut fields {
            if reader.read_bit()? {
                *value = (reader.read_bits(*bits)? ^ key) & (u32::MAX >> (32 - *bits));
            }
        }
        let [pitch, yaw, roll, forward, right, up, buttons, weapon] = fields.map(|field| field.0);
        read.angles = [pitch, yaw, roll].map(|angle| angle as u16);
        read.steps = [forward, right, up].map(|step| step as i8);
        read.buttons = buttons as u16;
        read.weapon = weapon as u8;
        Ok(read)
    }

    /// Returns the values and bit widths of all fields but the time, in the protocol's order.
    fn fields_and_widths(&self) -> [(u32, u32); 8] {
        let angles = self.angles.map(|angle| (u32::from(angle), 16));
        let steps = self.steps.map(|step| (u32::from(step as u8), 8));
        let rest = [(u32::from(self.buttons), 16), (u32::from(self.weapon), 8)];
        [
            angles[0], angles[1], angles[2], steps[0], steps[1], steps[2], rest[0], rest[1],
        ]
    }
}
