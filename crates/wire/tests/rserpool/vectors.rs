//! Tests against 833 messages of rsplib, captured from the wire and from its encoder, including some of a probe that
//! tries odd messages.

use crate::codec::Message;
use bytes::Bytes;
use holdfast_wire::rserpool::enrp::{self, Body, UpdateAction};
use holdfast_wire::rserpool::{
    CauseCode, ElementId, ErrorKind, PeChecksum, PoolHandle, RegistrarId, asap, peek,
};
use serde::Deserialize;
use std::collections::{HashMap, HashSet};

#[derive(Deserialize)]
struct Vector {
    ppid: u32,
    r#type: u8,
    flags: u8,
    hex: String,
}

/// Messages that must be discarded, the reason, and whether the sender gets a report.
const DISCARDED: [(&str, ErrorKind, usize); 3] = [
    // The length field says 16, there are 12 bytes.
    ("05000010000900065252506f", ErrorKind::Truncated, 0),
    // An unknown parameter: stop.
    (
        "050000180009000a5252506f6f6c00003f03000812345678",
        ErrorKind::UnexpectedParameter(0x3f03),
        0,
    ),
    // An unknown parameter: stop and report.
    (
        "050000180009000a5252506f6f6c00007f03000812345678",
        ErrorKind::UnexpectedParameter(0x7f03),
        1,
    ),
];

/// Messages that are decoded but encode differently, and how many reports they cause: each has an unknown
/// parameter that is skipped.
const SKIPPING: [(&str, usize); 2] = [
    ("050000180009000a5252506f6f6c0000bf03000812345678", 0),
    ("050000180009000a5252506f6f6c0000ff03000812345678", 1),
];

fn vectors() -> impl Iterator<Item = Vector> {
    include_str!("../vectors/rserpool.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line of the fixture"))
}

fn bytes(hex: &str) -> Bytes {
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal digits");
    (0..hex.len()).step_by(2).map(byte).collect()
}

#[test]
fn every_vector_is_read_and_written_again_as_it_was() {
    let mut seen = 0;
    for Vector { ppid, hex, .. } in vectors() {
        seen += 1;
        let input = bytes(&hex);
        let parsed = match Message::parse(ppid, &input) {
            Ok(parsed) => parsed,
            Err(error) => {
                let expected = DISCARDED.iter().find(|(discarded, ..)| *discarded == hex);
                let (_, kind, reports) = expected.unwrap_or_else(|| panic!("{hex}: {error}"));
                assert_eq!(
                    (error.kind, error.reports.len()),
                    (*kind, *reports),
                    "{hex}"
                );
                continue;
            }
        };
        let again = parsed.message.encode().expect("it came in one message");
        match SKIPPING.iter().find(|(skipping, _)| *skipping == hex) {
            Some((_, reports)) => assert_eq!(parsed.reports.len(), *reports, "{hex}"),
            None => {
                assert_eq!(again, input, "{:?}", parsed.message);
                assert!(parsed.reports.is_empty(), "{hex}: {:?}", parsed.reports);
            }
        }
    }
    assert_eq!(seen, 833);
}

#[test]
fn every_type_is_among_the_vectors() {
    let mut types: Vec<_> = vectors()
        .map(|vector| (vector.ppid, vector.r#type))
        .collect();
    types.sort_unstable();
    types.dedup();
    let asap = (0x01..=0x0e).map(|number| (11, number));
    let enrp = (0x01..=0x0a).map(|number| (12, number));
    assert_eq!(types, asap.chain(enrp).collect::<Vec<_>>());
}

/// A peek returns the same subject as the decoded message; a peek at a truncated message returns no more than the bytes
/// tell.
#[test]
fn a_peek_sees_the_subject() {
    let mut seen = 0;
    for Vector { ppid, hex, .. } in vectors() {
        let input = bytes(&hex);
        let peek = if ppid == asap::PPID {
            peek::asap
        } else {
            peek::enrp
        };
        for end in 0..input.len() {
            peek(&input[..end]);
        }
        let Ok(parsed) = Message::parse(ppid, &input) else {
            continue;
        };
        let expected = subject(&parsed.message);
        seen += u32::from(expected.is_some());
        let peeked = peek(&input);
        let peeked = peeked.map(|seen| {
            let handle = PoolHandle(Bytes::copy_from_slice(seen.handle));
            (handle, seen.id, seen.leaves)
        });
        assert_eq!(peeked, expected, "{hex}");
    }
    assert!(seen > 100, "{seen} of them have a subject");
}

fn subject(message: &Message) -> Option<(PoolHandle, Option<ElementId>, bool)> {
    use asap::Message::*;
    let leaves = match message {
        Message::Asap(Deregistration { .. }) => true,
        Message::Enrp(enrp) => matches!(
            enrp.body,
            Body::HandleUpdate {
                action: UpdateAction::Delete,
                ..
            }
        ),
        _ => false,
    };
    let (handle, id) = match message {
        Message::Asap(Registration { handle, element }) => (handle, Some(element.id)),
        Message::Asap(HandleResolution { handle, .. }) => (handle, None),
        Message::Asap(
            Deregistration { handle, id }
            | EndpointKeepAliveAck { handle, id }
            | EndpointUnreachable { handle, id },
        ) => (handle, Some(*id)),
        Message::Enrp(enrp) => match &enrp.body {
            Body::HandleUpdate {
                handle, element, ..
            } => (handle, Some(element.id)),
            _ => return None,
        },
        _ => return None,
    };
    Some((handle.clone(), id, leaves))
}

#[test]
fn type_and_flags_are_where_the_dissection_has_them() {
    for vector in vectors() {
        assert_eq!(bytes(&vector.hex)[..2], [vector.r#type, vector.flags]);
    }
}

#[test]
fn a_report_carries_the_whole_parameter() {
    let reported = [DISCARDED[2].0, SKIPPING[1].0].map(|hex| {
        let input = bytes(hex);
        match Message::parse(11, &input) {
            Ok(parsed) => parsed.reports,
            Err(error) => error.reports,
        }
    });
    for (causes, data) in reported
        .iter()
        .zip(["7f03000812345678", "ff03000812345678"])
    {
        assert_eq!(causes[0].code, CauseCode::UNRECOGNIZED_PARAMETER);
        assert_eq!(causes[0].data, bytes(data));
    }
}

/// The sender of the encoder's messages, which have invented checksums.
const ENCODER: RegistrarId = RegistrarId(0x1234_5678);

/// Each handle table that a registrar sent, with the checksum that it announced for its own elements.
#[test]
fn checksums_are_those_that_rsplib_announces() {
    let messages = vectors()
        .filter(|vector| vector.ppid == enrp::PPID)
        .filter_map(|vector| enrp::Message::parse(&bytes(&vector.hex)).ok())
        .map(|parsed| parsed.message)
        .filter(|message| message.sender != ENCODER);
    let mut announced = HashSet::new();
    let mut tables = Vec::new();
    let mut unfinished: HashMap<_, PeChecksum> = HashMap::new();
    for message in messages {
        let sender = message.sender;
        match message.body {
            Body::Presence { checksum, .. } => {
                announced.extend(checksum.map(|checksum| (sender, checksum)));
            }
            Body::HandleTableResponse { more, entries, .. } => {
                let checksum = unfinished.entry(sender).or_default();
                for entry in &entries {
                    let own = entry
                        .elements
                        .iter()
                        .filter(|element| element.home == sender);
                    own.for_each(|element| checksum.add(&entry.handle, element.id));
                }
                if !more {
                    tables.extend(unfinished.remove_entry(&sender));
                }
            }
            _ => {}
        }
    }
    assert_eq!(tables.len(), 16);
    for (sender, checksum) in tables {
        assert!(
            announced.contains(&(sender, checksum.value())),
            "{sender} {checksum:?}"
        );
    }
}
