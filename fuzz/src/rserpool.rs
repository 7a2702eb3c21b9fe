//! Messages of Reliable Server Pooling.

use bytes::{Bytes, BytesMut};
use holdfast_wire::rserpool::{
    DecodeError, EncodeError, ParsedMessage, asap, enrp, message_length, message_subject,
};
use std::fmt::Debug;

/// Parses any bytes to an ASAP message or an error; a message survives writing and reading.
pub fn asap(data: &[u8]) -> bool {
    message_subject::asap_subject(data);
    run_parser(data, asap::Message::parse, asap::Message::encode)
}

/// Parses any bytes to an ENRP message or an error; a message survives writing and reading.
pub fn enrp(data: &[u8]) -> bool {
    message_subject::enrp_subject(data);
    run_parser(data, enrp::Message::parse, enrp::Message::encode)
}

fn run_parser<M: PartialEq + Debug>(
    data: &[u8],
    parse: fn(&Bytes) -> Result<ParsedMessage<M>, DecodeError>,
    encode: fn(&M, &mut BytesMut) -> Result<(), EncodeError>,
) -> bool {
    let reports = match parse(&Bytes::copy_from_slice(data)) {
        Ok(parsed) => {
            assert_round_trip(&parsed.message, parse, encode);
            parsed.reports
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert_reports_encode(error.reports);
            return false;
        }
    };
    assert_reports_encode(reports);
    true
}

/// A message that was read can be written as one message. The result may be longer if the original lacked padding.
fn assert_round_trip<M: PartialEq + Debug>(
    message: &M,
    parse: fn(&Bytes) -> Result<ParsedMessage<M>, DecodeError>,
    encode: fn(&M, &mut BytesMut) -> Result<(), EncodeError>,
) {
    let mut buffer = BytesMut::new();
    encode(message, &mut buffer).expect("it came in one message");
    assert_eq!(message_length(&buffer), Ok(Some(buffer.len())));
    let parsed = parse(&buffer.freeze()).expect("what is written can be read");
    assert_eq!(parsed.message, *message);
    assert!(parsed.reports.is_empty());
}

/// All causes to be reported fit into one error message.
fn assert_reports_encode(causes: Vec<holdfast_wire::rserpool::ErrorCause>) {
    let mut buffer = BytesMut::new();
    let error = asap::Message::Error(causes);
    error.encode(&mut buffer).expect("reports are limited");
}
