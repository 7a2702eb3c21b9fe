//! Parsers of the client of OpenArena's server, and the client's reassembly of messages.

#[path = "../../crates/testbed/src/openarena/protocol/mod.rs"]
#[allow(dead_code, reason = "clients write more than is read here")]
mod protocol;

use protocol::bits::BitWriter;
use protocol::client_message::{
    GameClientMessage, KeyInputs, MessageHead, SnapshotBase, UserCommand,
};
use protocol::netchan::Reassembly;
use protocol::{connectionless, server_message};

/// Reads datagrams with two bytes of length before each, a message of the server, or a message of a client; the first
/// byte selects the kind.
pub fn run(data: &[u8]) -> bool {
    let Some((&choice, rest)) = data.split_first() else {
        return false;
    };
    match choice % 3 {
        0 => run_datagrams(rest),
        1 => server_message::parse(rest).is_ok(),
        _ => run_client_message(rest),
    }
}

/// Returns named inputs for the corpus.
#[must_use]
pub fn examples() -> Vec<(&'static str, Vec<u8>)> {
    let (gamestate, snapshot, client) = (gamestate(), snapshot(), client_message());
    let plain = [&1u32.to_le_bytes()[..], &snapshot].concat();
    let length = (gamestate.len() as u16).to_le_bytes();
    let number = (2 | 1u32 << 31).to_le_bytes();
    let fragment = [&number[..], &[0, 0], &length, &gamestate].concat();
    let mut datagrams = vec![0];
    for datagram in [plain, fragment] {
        datagrams.extend((datagram.len() as u16).to_le_bytes());
        datagrams.extend(datagram);
    }
    vec![
        ("datagrams", datagrams),
        ("gamestate", [&[1], &gamestate[..]].concat()),
        ("snapshot", [&[1], &snapshot[..]].concat()),
        ("client", [&[2], &client[..]].concat()),
    ]
}

/// Returns a game state: one setting, and an entity that differs in its first field.
fn gamestate() -> Vec<u8> {
    let mut writer = BitWriter::default();
    writer.write_i32(0);
    writer.write_byte(2);
    writer.write_i32(3);
    writer.write_byte(3);
    writer.write_bits(1, 16);
    writer.write_string("\\sv_serverid\\9");
    writer.write_byte(4);
    writer.write_bits(5, 10);
    writer.write_bits(0b10, 2);
    writer.write_byte(1);
    writer.write_bits(0b11, 2);
    writer.write_i32(1234);
    writer.write_byte(8);
    writer.write_i32(0);
    writer.write_i32(55);
    writer.write_byte(8);
    writer.into_bytes()
}

/// Returns a command, and a snapshot with two fields of the player: a time and a whole number.
fn snapshot() -> Vec<u8> {
    let mut writer = BitWriter::default();
    writer.write_i32(1);
    writer.write_byte(5);
    writer.write_i32(1);
    writer.write_string("print \"hello\"");
    writer.write_byte(7);
    writer.write_i32(1000);
    // Not relative to another snapshot, no flags, one area.
    for byte in [0, 0, 1, 9, 2] {
        writer.write_byte(byte);
    }
    writer.write_bits(1, 1);
    writer.write_i32(990);
    writer.write_bits(0b01, 2);
    writer.write_bits(4196, 13);
    writer.into_bytes()
}

fn client_message() -> Vec<u8> {
    let step = |server_time_ms| UserCommand {
        server_time_ms,
        steps: [127, 0, 0],
        ..UserCommand::default()
    };
    let message = GameClientMessage {
        head: MessageHead::default(),
        commands: vec![(1, "say hello".into())],
        moves: Some((SnapshotBase::Acknowledged, vec![step(400), step(425)])),
    };
    message.write(KeyInputs {
        checksum_feed: 99,
        command: "cs 1",
    })
}

/// Returns true if a message was complete. No message exceeds the protocol's length limit, and numbers only grow.
fn run_datagrams(mut rest: &[u8]) -> bool {
    let mut incoming = Reassembly::default();
    let mut newest = 0;
    while let Some((length, behind)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes(*length)).min(behind.len());
        let (datagram, behind) = behind.split_at(length);
        rest = behind;
        let _ = connectionless::parse(datagram);
        let Ok(Some((number, message))) = incoming.handle(datagram) else {
            continue;
        };
        assert!(number > newest && message.len() <= 65536);
        assert_eq!(incoming.sequence(), number);
        newest = number;
        let _ = server_message::parse(&message);
    }
    newest > 0
}

/// A client's message survives writing and reading.
fn run_client_message(bytes: &[u8]) -> bool {
    let secret = KeyInputs {
        checksum_feed: 99,
        command: "cs 1",
    };
    let Ok(message) = GameClientMessage::parse(bytes, secret) else {
        return false;
    };
    let again = GameClientMessage::parse(&message.write(secret), secret);
    assert_eq!(again.as_ref(), Ok(&message));
    true
}
