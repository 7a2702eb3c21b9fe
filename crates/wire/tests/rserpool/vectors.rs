//! Tests against 833 messages of rsplib, captured from the wire and from its encoder, including some of a probe that
//! tries odd messages.

use crate::codec::Message;
use bytes::Bytes;
use holdfast_wire::rserpool::enrp::{self, EnrpBody, UpdateAction};
use holdfast_wire::rserpool::{
    CauseCode, DecodeErrorKind, ElementId, PeChecksum, PoolHandle, RegistrarId, asap,
    message_subject,
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
const DISCARDED: [(&str, DecodeErrorKind, usize); 3] = [
    // The length field says 16, there are 12 bytes.
    ("05000010000900065252506f", DecodeErrorKind::Truncated, 0),
    // An unknown parameter: stop.
    (
        "050000180009000a5252506f6f6c00003f03000812345678",
        DecodeErrorKind::UnexpectedParameter(0x3f03),
        0,
    ),
    // An unknown parameter: stop and report.
    (
        "050000180009000a5252506f6f6c00007f03000812345678",
        DecodeErrorKind::UnexpectedParameter(0x7f03),
        1,
    ),
];

/// Messages that are decoded but encode differently, and how many reports they cause: each has an unknown
/// parameter that is skipped.
const WITH_SKIPPED_PARAMETERS: [(&str, usize); 2] = [
    ("050000180009000a5252506f6f6c0000bf03000812345678", 0),
    ("050000180009000a5252506f6f6c0000ff03000812345678", 1),
];

fn vectors() -> impl Iterator<Item = Vector> {
    include_str!("../vectors/rserpool.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line of the fixture"))
}

fn from_hex(hex: &str) -> Bytes {
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal digits");
    (0..hex.len()).step_by(2).map(byte).collect()
}

#[test]
fn every_vector_round_trips() {
    let mut vector_count = 0;
    for Vector { ppid, hex, .. } in vectors() {
        vector_count += 1;
        let input = from_hex(&hex);
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
        let reencoded = parsed
            .message
            .encode()
            .expect("a parsed message fits into a message");
        match WITH_SKIPPED_PARAMETERS
            .iter()
            .find(|(skipping, _)| *skipping == hex)
        {
            Some((_, reports)) => assert_eq!(parsed.reports.len(), *reports, "{hex}"),
            None => {
                assert_eq!(reencoded, input, "{:?}", parsed.message);
                assert!(parsed.reports.is_empty(), "{hex}: {:?}", parsed.reports);
            }
        }
    }
    assert_eq!(vector_count, 833);
}

#[test]
fn vectors_cover_every_type() {
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
fn peek_returns_subject() {
    let mut subject_count = 0;
    for Vector { ppid, hex, .. } in vectors() {
        let input = from_hex(&hex);
        let peek = if ppid == asap::PPID {
            message_subject::asap_subject
        } else {
            message_subject::enrp_subject
        };
        for end in 0..input.len() {
            peek(&input[..end]);
        }
        let Ok(parsed) = Message::parse(ppid, &input) else {
            continue;
        };
        let expected = expected_subject(&parsed.message);
        subject_count += u32::from(expected.is_some());
        let peeked = peek(&input);
        let peeked = peeked.map(|seen| {
            let handle = PoolHandle(Bytes::copy_from_slice(seen.handle));
            (handle, seen.id, seen.is_removal)
        });
        assert_eq!(peeked, expected, "{hex}");
    }
    assert!(
        subject_count > 100,
        "only {subject_count} vectors have a subject"
    );
}

fn expected_subject(message: &Message) -> Option<(PoolHandle, Option<ElementId>, bool)> {
    use asap::Message::*;
    let is_removal = match message {
        Message::Asap(Deregistration { .. }) => true,
        Message::Enrp(enrp) => matches!(
            enrp.body,
            EnrpBody::HandleUpdate {
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
            EnrpBody::HandleUpdate {
                handle, element, ..
            } => (handle, Some(element.id)),
            _ => return None,
        },
        _ => return None,
    };
    Some((handle.clone(), id, is_removal))
}

#[test]
fn type_and_flags_match_dissection() {
    for vector in vectors() {
        assert_eq!(from_hex(&vector.hex)[..2], [vector.r#type, vector.flags]);
    }
}

#[test]
fn report_contains_complete_parameter() {
    let reported = [DISCARDED[2].0, WITH_SKIPPED_PARAMETERS[1].0].map(|hex| {
        let input = from_hex(hex);
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
        assert_eq!(causes[0].data, from_hex(data));
    }
}

/// The sender of the encoder's messages, which have invented checksums.
const ENCODER_ID: RegistrarId = RegistrarId(0x1234_5678);

/// Each handle table that a registrar sent, with the checksum that it announced for its own elements.
#[test]
fn checksums_match_rsplib() {
    let messages = vectors()
        .filter(|vector| vector.ppid == enrp::PPID)
        .filter_map(|vector| enrp::Message::parse(&from_hex(&vector.hex)).ok())
        .map(|parsed| parsed.message)
        .filter(|message| message.sender != ENCODER_ID);
    let mut announced = HashSet::new();
    let mut tables = Vec::new();
    let mut unfinished: HashMap<_, PeChecksum> = HashMap::new();
    for message in messages {
        let sender = message.sender;
        match message.body {
            EnrpBody::Presence { checksum, .. } => {
                announced.extend(checksum.map(|checksum| (sender, checksum)));
            }
            EnrpBody::HandleTableResponse { more, entries, .. } => {
                let checksum = unfinished.entry(sender).or_default();
                for entry in &entries {
                    let own_elements = entry
                        .elements
                        .iter()
                        .filter(|element| element.home == sender);
                    own_elements.for_each(|element| checksum.add(&entry.handle, element.id));
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
