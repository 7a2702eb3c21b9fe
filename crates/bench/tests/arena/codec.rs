//! Tests of the protocol's encoding, and of a client against a minimal server, without sockets.

use std::time::Duration;

use holdfast_testbed::openarena::protocol::bits::{BitReader, BitWriter};
use holdfast_testbed::openarena::protocol::client_message::{
    GameClientMessage, KeyInputs, MessageHead, SnapshotBase, UserCommand, scramble_message,
};
use holdfast_testbed::openarena::protocol::netchan::{FRAGMENT_BYTES, Reassembly};
use holdfast_testbed::openarena::protocol::{Malformed, connectionless, server_message};
use holdfast_testbed::openarena::{ClientPhase, ClientSettings, GameClient};
use proptest::prelude::*;

/// Splits a message into the datagrams that a server sends.
fn datagrams(sequence: u32, message: &[u8]) -> Vec<Vec<u8>> {
    if message.len() < FRAGMENT_BYTES {
        return vec![[&sequence.to_le_bytes(), message].concat()];
    }
    let mut datagrams = Vec::new();
    for start in (0..=message.len()).step_by(FRAGMENT_BYTES) {
        let piece = &message[start..message.len().min(start + FRAGMENT_BYTES)];
        let mut datagram = (sequence | 1 << 31).to_le_bytes().to_vec();
        datagram.extend((start as u16).to_le_bytes());
        datagram.extend((piece.len() as u16).to_le_bytes());
        datagram.extend(piece);
        datagrams.push(datagram);
    }
    datagrams
}

fn user_command() -> impl Strategy<Value = UserCommand> {
    let parts = (
        0..1_000_000,
        any::<[u16; 3]>(),
        any::<[i8; 3]>(),
        any::<(u16, u8)>(),
    );
    parts.prop_map(
        |(server_time_ms, angles, steps, (buttons, weapon))| UserCommand {
            server_time_ms,
            angles,
            steps,
            buttons,
            weapon,
        },
    )
}

proptest! {
    #[test]
    fn numbers_round_trip(numbers in prop::collection::vec((any::<u32>(), 1u32..=32), 0..50), text in "[ -$&-~]{0,40}") {
        let mut writer = BitWriter::default();
        for (value, bits) in &numbers {
            writer.write_bits(*value, *bits);
        }
        writer.write_string(&text);
        let bytes = writer.into_bytes();
        let mut reader = BitReader::new(&bytes);
        for (value, bits) in numbers {
            prop_assert_eq!(reader.read_bits(bits), Ok(value & (u32::MAX >> (32 - bits))));
        }
        prop_assert_eq!(reader.read_string(), Ok(text));
    }

    #[test]
    fn client_message_round_trips(
        head in any::<[i32; 3]>(),
        challenge: i32,
        checksum_feed: i32,
        command in "[ -$&-~]{0,40}",
        commands in prop::collection::vec((any::<i32>(), "[ -$&-~]{0,20}"), 0..5),
        moves in prop::option::of(prop::collection::vec(user_command(), 0..5)),
    ) {
        let head = MessageHead { server_id: head[0], message: head[1], command: head[2] };
        let message = GameClientMessage { head, commands, moves: moves.map(|moves| (SnapshotBase::None, moves)) };
        let secret = KeyInputs { checksum_feed, command: &command };
        let mut bytes = message.write(secret);
        scramble_message(&mut bytes, challenge, head, &command);
        scramble_message(&mut bytes, challenge, head, &command);
        prop_assert_eq!(GameClientMessage::parse(&bytes, secret), Ok(message));
    }

    #[test]
    fn messages_reassemble_and_losses_are_counted(
        sizes in prop::collection::vec(4usize..6000, 1..12),
        losses in prop::collection::vec(any::<bool>(), 60),
    ) {
        let mut incoming = Reassembly::default();
        let (mut expected, mut complete, mut last) = (0, 0u32, 0);
        let mut losses = losses.into_iter().cycle();
        for (sequence, size) in (1u32..).zip(&sizes) {
            let message = vec![sequence as u8; *size];
            let pieces = datagrams(sequence, &message);
            let lost: Vec<bool> = pieces.iter().map(|_| losses.next().unwrap()).collect();
            for (piece, lost) in pieces.iter().zip(&lost) {
                if *lost {
                    continue;
                }
                if let Some((number, bytes)) = incoming.handle(piece).unwrap() {
                    prop_assert_eq!((number, &bytes), (sequence, &message));
                    complete += 1;
                    last = sequence;
                }
            }
            expected += u32::from(!lost.contains(&true));
        }
        prop_assert_eq!(complete, expected);
        prop_assert_eq!(incoming.lost, u64::from(last - complete));
    }

    #[test]
    fn parsers_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), command in ".{0,20}") {
        let _ = connectionless::parse(&bytes);
        let _ = server_message::parse(&bytes);
        let _ = GameClientMessage::parse(&bytes, KeyInputs { checksum_feed: 7, command: &command });
        let _ = Reassembly::default().handle(&bytes);
    }
}

const CHALLENGE: i32 = 77;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn connected_client() -> GameClient {
    let settings = ClientSettings {
        name: "p".into(),
        number: 1,
        interval: ms(25),
        snapshots: 20,
        server_timeout: ms(1000),
    };
    let mut client = GameClient::new(settings, ms(0));
    client.handle_timeout(ms(0));
    assert!(client.poll_transmit().unwrap().ends_with(b"getchallenge"));
    // A lost request is repeated.
    client.handle_timeout(ms(500));
    assert!(client.poll_transmit().unwrap().ends_with(b"getchallenge"));
    client.handle_datagram(ms(501), b"\xff\xff\xff\xffchallengeResponse 77 0 71");
    client.handle_timeout(ms(501));
    assert!(
        client
            .poll_transmit()
            .unwrap()
            .starts_with(b"\xff\xff\xff\xffconnect ")
    );
    client.handle_datagram(ms(502), b"\xff\xff\xff\xffconnectResponse 77");
    client
}

/// Builds a message with a body written by `body`. The client has sent nothing yet, so only the challenge scrambles the
/// message.
fn server_message(sequence: u32, body: impl Fn(&mut BitWriter)) -> Vec<u8> {
    let mut writer = BitWriter::default();
    writer.write_i32(0);
    body(&mut writer);
    writer.write_byte(8);
    let mut bytes = writer.into_bytes();
    let key = (CHALLENGE ^ sequence as i32) as u8;
    bytes.iter_mut().skip(4).for_each(|byte| *byte ^= key);
    datagrams(sequence, &bytes).remove(0)
}

fn snapshot_message(sequence: u32, server_time_ms: i32) -> Vec<u8> {
    server_message(sequence, |writer| {
        writer.write_byte(7);
        writer.write_i32(server_time_ms);
        // Not relative to another snapshot, no flags, no areas, no field of the player.
        (0..4).for_each(|_| writer.write_byte(0));
    })
}

#[test]
fn client_counts_losses_and_detects_silence() {
    let mut client = connected_client();
    for (sequence, time_ms) in [(1, 600), (2, 650), (4, 750), (4, 751), (5, 820)] {
        client.handle_datagram(ms(time_ms), &snapshot_message(sequence, time_ms as i32));
    }
    assert_eq!(client.phase(), ClientPhase::Playing);
    let trace = client.trace();
    assert_eq!(
        (trace.lost_messages, trace.late_datagrams, trace.malformed),
        (1, 1, 0)
    );
    assert_eq!(trace.added_delay(ms(0)..=ms(9000), ms(50)), Some(ms(50)));
    client.handle_timeout(ms(1821));
    assert!(
        matches!(client.phase(), ClientPhase::Disconnected(why) if why.contains("within the time limit"))
    );
    assert_eq!(client.poll_timeout(), None);
}

#[test]
fn client_reports_disconnect_reason() {
    let mut client = connected_client();
    let kick_message = server_message(1, |writer| {
        writer.write_byte(5);
        writer.write_i32(1);
        writer.write_string("disconnect \"kicked\"");
    });
    client.handle_datagram(ms(600), &kick_message);
    assert!(matches!(client.phase(), ClientPhase::Disconnected(why) if why.contains("kicked")));

    let mut client = connected_client();
    let message_with_gap = server_message(1, |writer| {
        writer.write_byte(5);
        writer.write_i32(2);
        writer.write_string("print");
    });
    client.handle_datagram(ms(600), &message_with_gap);
    assert!(matches!(client.phase(), ClientPhase::Disconnected(why) if why.contains("command 1")));
}

#[test]
fn overlong_text_is_error() {
    let mut writer = BitWriter::default();
    for _ in 0..9000 {
        writer.write_byte(b'a');
    }
    assert_eq!(
        BitReader::new(&writer.into_bytes()).read_string(),
        Err(Malformed::TooLong)
    );
}
