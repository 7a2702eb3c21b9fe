//! Messages of Reliable Server Pooling.

use bytes::{Bytes, BytesMut};
use holdfast_wire::rserpool::{EncodeError, Error, Parsed, asap, enrp, message_length, peek};
use std::fmt::Debug;

/// Any bytes are an ASAP message or an error; a message is written and read again as the same.
pub fn asap(data: &[u8]) -> bool {
    peek::asap(data);
    run(data, asap::Message::parse, asap::Message::encode)
}

/// The same for ENRP.
pub fn enrp(data: &[u8]) -> bool {
    peek::enrp(data);
    run(data, enrp::Message::parse, enrp::Message::encode)
}

fn run<M: PartialEq + Debug>(
    data: &[u8],
    parse: fn(&Bytes) -> Result<Parsed<M>, Error>,
    encode: fn(&M, &mut BytesMut) -> Result<(), EncodeError>,
) -> bool {
    let reports = match parse(&Bytes::copy_from_slice(data)) {
        Ok(parsed) => {
            again(&parsed.message, parse, encode);
            parsed.reports
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            report(error.reports);
            return false;
        }
    };
    report(reports);
    true
}

/// What was read in one message is written in one; it may be longer than it was where padding was left out.
fn again<M: PartialEq + Debug>(
    message: &M,
    parse: fn(&Bytes) -> Result<Parsed<M>, Error>,
    encode: fn(&M, &mut BytesMut) -> Result<(), EncodeError>,
) {
    let mut buffer = BytesMut::new();
    encode(message, &mut buffer).expect("it came in one message");
    assert_eq!(message_length(&buffer), Ok(Some(buffer.len())));
    let parsed = parse(&buffer.freeze()).expect("what is written can be read");
    assert_eq!(parsed.message, *message);
    assert!(parsed.reports.is_empty());
}

/// What is to be reported fits into one error message.
fn report(causes: Vec<holdfast_wire::rserpool::Cause>) {
    let mut buffer = BytesMut::new();
    let error = asap::Message::Error(causes);
    error.encode(&mut buffer).expect("reports are limited");
}
