//! Unknown parameters at any position are treated by their two top bits (RFC 5354 section 3).

use crate::codec::Message;
use crate::strategies::message;
use bytes::Bytes;
use holdfast_wire::rserpool::{CauseCode, DecodeErrorKind, ErrorCause, REPORTS_MAX, asap};
use proptest::collection::vec;
use proptest::prelude::*;

/// A position for a parameter, and the start of each parameter that encloses it.
struct ParameterPosition {
    offset: usize,
    enclosing: Vec<usize>,
}

/// Bytes before the first parameter.
fn fixed_header_length(message: &Message, number: u8) -> usize {
    match (message, number) {
        (Message::Asap(_), 0x07 | 0x0a) => 8,
        (Message::Asap(_), _) => 4,
        (Message::Enrp(_), 0x04 | 0x07..=0x09) => 16,
        (Message::Enrp(_), _) => 12,
    }
}

/// Collects the positions in a range of parameters, inside the parameters that begin at `inside`.
fn collect_positions(
    bytes: &[u8],
    mut offset: usize,
    end: usize,
    inside: &[usize],
    positions: &mut Vec<ParameterPosition>,
) {
    loop {
        positions.push(ParameterPosition {
            offset,
            enclosing: inside.to_vec(),
        });
        if offset >= end {
            return;
        }
        let word = |at| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let length = usize::from(word(offset + 2));
        let header = match word(offset) {
            0x03 => Some(12),
            0x04..=0x07 | 0x0b => Some(8),
            0x0a => Some(16),
            _ => None,
        };
        if let Some(header) = header {
            let inside = [inside, &[offset]].concat();
            collect_positions(bytes, offset + header, offset + length, &inside, positions);
        }
        offset += length.next_multiple_of(4);
    }
}

/// An unknown parameter with nonzero padding.
fn unknown_parameter() -> impl Strategy<Value = (u16, Vec<u8>)> {
    let kind = any::<u16>().prop_filter(
        "known",
        |kind| !matches!(kind, 0x01..=0x10 | 0x803e..=0x803f),
    );
    (kind, vec(any::<u8>(), 0..12))
}

fn tlv(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).expect("short");
    [&kind.to_be_bytes()[..], &length.to_be_bytes(), value].concat()
}

fn insert_parameter(bytes: &[u8], position: &ParameterPosition, parameter: &[u8]) -> Bytes {
    let mut padded = parameter.to_vec();
    padded.resize(parameter.len().next_multiple_of(4), 0xff);
    let mut bytes = bytes.to_vec();
    for start in std::iter::once(&0).chain(&position.enclosing) {
        let length = u16::from_be_bytes([bytes[start + 2], bytes[start + 3]]) + padded.len() as u16;
        bytes[start + 2..start + 4].copy_from_slice(&length.to_be_bytes());
    }
    bytes.splice(position.offset..position.offset, padded);
    bytes.into()
}

proptest! {
    #[test]
    fn unknown_parameter_is_treated_by_top_bits(
        message in message(), (kind, value) in unknown_parameter(), index: prop::sample::Index
    ) {
        let bytes = message.encode().expect("small");
        let mut all = Vec::new();
        collect_positions(&bytes, fixed_header_length(&message, bytes[0]), bytes.len(), &[], &mut all);
        let parameter = tlv(kind, &value);
        let changed = insert_parameter(&bytes, index.get(&all), &parameter);
        let report = ErrorCause {
            code: CauseCode::UNRECOGNIZED_PARAMETER,
            data: parameter.into(),
        };
        let reports = if kind & 0x4000 == 0 { vec![] } else { vec![report] };
        match Message::parse(message.ppid(), &changed) {
            Ok(parsed) => {
                prop_assert!(kind & 0x8000 != 0);
                prop_assert_eq!(parsed.message, message);
                prop_assert_eq!(parsed.reports, reports);
            }
            Err(error) => {
                prop_assert!(kind & 0x8000 == 0);
                prop_assert_eq!(error.kind, DecodeErrorKind::UnexpectedParameter(kind));
                prop_assert_eq!(error.reports, reports);
            }
        }
    }
}

#[test]
fn small_message_causes_limited_reports() {
    let mut bytes = vec![0x05, 0, 0, 0, 0, 9, 0, 4];
    for _ in 0..1000 {
        bytes.extend(tlv(0xc001, &[]));
    }
    let length = u16::try_from(bytes.len()).expect("short").to_be_bytes();
    bytes[2..4].copy_from_slice(&length);
    let parsed = asap::Message::parse(&bytes.into()).expect("all are skipped");
    assert_eq!(parsed.reports.len(), REPORTS_MAX);
}

/// All reports of a message fit into one error message.
#[test]
fn reports_fit_into_one_error_message() {
    let mut bytes = vec![0x05, 0, 0, 0, 0, 9, 0, 4];
    bytes.extend(tlv(0xc001, &vec![1; 65_000]));
    let length = u16::try_from(bytes.len()).expect("short").to_be_bytes();
    bytes[2..4].copy_from_slice(&length);
    let parsed = asap::Message::parse(&bytes.into()).expect("it is skipped");
    let error = Message::Asap(asap::Message::Error(parsed.reports));
    assert!(error.encode().is_ok());
}

/// A parameter of the RFC in a message that does not allow it: its top bits say stop.
#[test]
fn known_parameter_in_wrong_message_is_error() {
    let bytes = Bytes::from_static(b"\x05\0\0\x10\0\x09\0\x04\0\x0e\0\x08\0\0\0\x01");
    let error = asap::Message::parse(&bytes).expect_err("an element's number");
    assert_eq!(error.kind, DecodeErrorKind::UnexpectedParameter(0x0e));
    assert_eq!(error.reports, []);
    let bytes = Bytes::from_static(b"\x01\0\0\x08\0\x09\0\x04");
    let error = asap::Message::parse(&bytes).expect_err("no element");
    assert_eq!(error.kind, DecodeErrorKind::MissingParameter(0x0a));
}
