//! Properties that hold for any bytes and for any message.

use crate::codec::Message;
use crate::strategies::message;
use bytes::{Bytes, BytesMut};
use holdfast_wire::rserpool::asap::ResolutionResponseEncoder;
use holdfast_wire::rserpool::enrp::{EnrpBody, HandleTableEncoder};
use holdfast_wire::rserpool::{
    Addresses, CauseCode, DecodeErrorKind, ElementId, EncodeError, ErrorCause, LENGTH_MAX, Policy,
    PolicyKind, PoolElement, PoolHandle, RegistrarId, SctpTransport, Transport, TransportUse, asap,
    enrp, message_length,
};
use proptest::collection::vec;
use proptest::prelude::*;
use std::net::Ipv4Addr;

proptest! {
    #[test]
    fn any_bytes_give_message_or_error(bytes in vec(any::<u8>(), 0..200)) {
        let bytes = Bytes::from(bytes);
        for ppid in [asap::PPID, enrp::PPID] {
            let _ = Message::parse(ppid, &bytes);
        }
    }

    #[test]
    fn any_body_with_valid_header_gives_message_or_error(
        ppid in 11u32..13, number in prop_oneof![0u8..0x10, 0x3du8..0x3f], flags: u8, body in vec(0u8..0x14, 0..40)
    ) {
        let length = u16::try_from(body.len() + 4).expect("short").to_be_bytes();
        let bytes = Bytes::from([&[number, flags][..], &length, &body].concat());
        if let Ok(parsed) = Message::parse(ppid, &bytes) {
            let again = parsed.message.encode().expect("no longer than the input");
            prop_assert_eq!(Message::parse(ppid, &again).expect("ours").message, parsed.message);
        }
    }

    #[test]
    fn damaged_message_gives_message_or_error(
        message in message(), at: prop::sample::Index, bits in 1u8.., cut: prop::sample::Index
    ) {
        let mut bytes = message.encode().expect("small").to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= bits;
        bytes.truncate(bytes.len() - cut.index(bytes.len()) / 4);
        let _ = Message::parse(message.ppid(), &bytes.into());
    }

    #[test]
    fn message_round_trips(message in message()) {
        let bytes = message.encode().expect("small");
        prop_assert_eq!(bytes.len() % 4, 0);
        prop_assert_eq!(message_length(&bytes[..4]), Ok(Some(bytes.len())));
        let parsed = Message::parse(message.ppid(), &bytes).expect("ours");
        prop_assert_eq!(&parsed.message, &message);
        prop_assert_eq!(parsed.reports, []);
    }

    #[test]
    fn truncated_message_is_error(message in message(), cut: prop::sample::Index) {
        let bytes = message.encode().expect("small");
        let piece = bytes.slice(..cut.index(bytes.len()));
        let error = Message::parse(message.ppid(), &piece).expect_err("too short");
        prop_assert_eq!(error.kind, DecodeErrorKind::Truncated);
    }
}

fn element(id: u32, policy: Policy) -> PoolElement {
    let sctp = SctpTransport {
        port: 4242,
        usage: TransportUse::DataOnly,
        addresses: Addresses::from_iter([Ipv4Addr::new(10, 0, 0, 1).into()]),
    };
    PoolElement {
        id: ElementId(id),
        home: RegistrarId(7),
        registration_life: 30,
        user_transport: Transport::Sctp(sctp.clone()),
        policy,
        asap_transport: Some(sctp),
    }
}

/// RFC 5354 section 4: the length does not cover the padding, and the receiver ignores that.
#[test]
fn padding_may_be_counted_or_missing_with_any_content() {
    let forms: [&[u8]; 4] = [
        b"\x0b\0\0\x0c\0\x0d\0\x05c\0\0\0",
        b"\x0b\0\0\x0c\0\x0d\0\x05cxyz",
        b"\x0b\0\0\x09\0\x0d\0\x05c\0\0\0",
        b"\x0b\0\0\x09\0\x0d\0\x05c",
    ];
    for form in forms {
        let parsed = asap::Message::parse(&Bytes::from_static(form)).expect("a cookie");
        assert_eq!(
            parsed.message,
            asap::Message::Cookie(Bytes::from_static(b"c"))
        );
    }
    let two = Bytes::from_static(b"\x0b\0\0\x09\0\x0d\0\x05c\0\0\0\x0b\0\0\x09");
    let error = asap::Message::parse(&two).expect_err("two messages");
    assert_eq!(error.kind, DecodeErrorKind::Trailing(7));
}

/// RFC 5354 section 4: of the unknown types, only the 01 types are reported, with the whole message.
#[test]
fn unknown_type_is_treated_by_top_bits() {
    for number in [0x00, 0x0f, 0x3f, 0x40, 0x7f, 0x80, 0xbf, 0xc0, 0xff] {
        let bytes = Bytes::from(vec![number, 0, 0, 8, 1, 2, 3, 4]);
        for ppid in [asap::PPID, enrp::PPID] {
            let error = Message::parse(ppid, &bytes).expect_err("unknown");
            assert_eq!(error.kind, DecodeErrorKind::UnknownMessage(number));
            let reports = match number {
                0x40..0x80 => vec![ErrorCause {
                    code: CauseCode::UNRECOGNIZED_MESSAGE,
                    data: bytes.clone(),
                }],
                _ => vec![],
            };
            assert_eq!(error.reports, reports);
        }
    }
}

#[test]
fn invalid_value_is_reported_with_parameter() {
    let message = asap::Message::Registration {
        handle: "pool".into(),
        element: element(1, Policy::Random),
    };
    let mut buffer = BytesMut::new();
    message.encode(&mut buffer).expect("small");
    // The policy parameter's type, length and number (RAND); the 99 below is no policy's number.
    let policy = [0, 8, 0, 8, 0, 0, 0, 3];
    let at = buffer.windows(8).position(|window| window == policy);
    buffer[at.expect("RAND") + 7] = 99;
    let error = asap::Message::parse(&buffer.freeze()).expect_err("no policy");
    assert_eq!(error.kind, DecodeErrorKind::InvalidParameter(8));
    let report = ErrorCause {
        code: CauseCode::INVALID_VALUES,
        data: Bytes::from_static(&[0, 8, 0, 8, 0, 0, 0, 99]),
    };
    assert_eq!(error.reports, [report]);
}

/// A transport of 12 bytes with an address that claims 8 bytes where 4 are left: the others belong to another
/// parameter.
#[test]
fn parameter_stays_within_enclosing_parameter() {
    let announce = |length| {
        let mut bytes = vec![0x0a, 0, 0, 28, 0, 0, 0, 1];
        bytes.extend([0, 6, 0, length, 0, 1, 0, 0, 0, 1, 0, 8]);
        bytes.extend([0x80, 0, 0, 4, 0x80, 0, 0, 4]);
        asap::Message::parse(&bytes.into())
    };
    assert!(announce(16).is_ok());
    let error = announce(12).expect_err("an address of 0 bytes");
    assert_eq!(error.kind, DecodeErrorKind::InvalidParameter(6));
}

#[test]
fn mapped_address_is_encoded_as_ipv4() {
    let v4 = Ipv4Addr::new(10, 0, 0, 1);
    let of = |address| asap::Message::ServerAnnounce {
        registrar: RegistrarId(1),
        transports: vec![Transport::Udp { port: 1, address }],
    };
    let mut buffer = BytesMut::new();
    of(v4.to_ipv6_mapped().into())
        .encode(&mut buffer)
        .expect("small");
    let parsed = asap::Message::parse(&buffer.freeze()).expect("ours");
    assert_eq!(parsed.message, of(v4.into()));
    let mut mapped = vec![
        0x0a, 0, 0, 36, 0, 0, 0, 1, 0, 6, 0, 28, 0, 1, 0, 0, 0, 2, 0, 20,
    ];
    mapped.extend(v4.to_ipv6_mapped().octets());
    let parsed = asap::Message::parse(&mapped.into()).expect("a mapped address");
    assert_eq!(parsed.message, of(v4.into()));
}

#[test]
fn failed_encoding_leaves_buffer_unchanged() {
    let mut buffer = BytesMut::from(&b"before"[..]);
    let fits = asap::Message::Cookie(vec![1; LENGTH_MAX - 8].into());
    fits.encode(&mut buffer).expect("just");
    assert_eq!(buffer.len(), 6 + LENGTH_MAX);
    let back = asap::Message::parse(&buffer.split_off(6).freeze()).expect("ours");
    assert_eq!(back.message, fits);

    let long = asap::Message::Cookie(vec![1; LENGTH_MAX - 7].into());
    assert_eq!(
        long.encode(&mut buffer),
        Err(EncodeError::TooLong(LENGTH_MAX + 4))
    );
    let mut without_address = element(1, Policy::Random);
    without_address.asap_transport = Some(SctpTransport {
        port: 1,
        usage: TransportUse::DataOnly,
        addresses: Addresses::new(),
    });
    let nowhere = asap::Message::Registration {
        handle: "pool".into(),
        element: without_address,
    };
    assert_eq!(nowhere.encode(&mut buffer), Err(EncodeError::NoAddress));
    assert_eq!(buffer, b"before"[..]);
}

#[test]
fn handle_table_is_split_into_blocks() {
    let pools = ["one", "seven", "seventeen"].map(PoolHandle::from);
    let all: Vec<_> = (0..90)
        .map(|id| (&pools[id as usize / 30], element(id, Policy::Random)))
        .collect();
    let (mut remaining, mut decoded, mut blocks) = (&all[..], Vec::new(), 0);
    while !remaining.is_empty() {
        let mut buffer = BytesMut::new();
        let mut block = HandleTableEncoder::new(&mut buffer, RegistrarId(1), RegistrarId(2), 1400);
        let taken = remaining
            .iter()
            .take_while(|(handle, element)| block.push(handle, element))
            .count();
        remaining = &remaining[taken..];
        block
            .finish(!remaining.is_empty())
            .expect("elements with addresses");
        assert!(buffer.len() <= 1400 && (remaining.is_empty() || buffer.len() > 1300));
        let parsed = enrp::Message::parse(&buffer.freeze()).expect("ours");
        let EnrpBody::HandleTableResponse {
            rejected,
            more,
            entries,
        } = parsed.message.body
        else {
            panic!("not a handle table");
        };
        assert_eq!((rejected, more), (false, !remaining.is_empty()));
        blocks += 1;
        for entry in entries {
            decoded.extend(
                entry
                    .elements
                    .into_iter()
                    .map(|element| (entry.handle.clone(), element)),
            );
        }
    }
    assert!(blocks > 1);
    let all: Vec<_> = all
        .into_iter()
        .map(|(handle, element)| (handle.clone(), element))
        .collect();
    assert_eq!(decoded, all);
}

/// Answers to users are written element by element, most of them from encoded elements.
#[test]
fn response_is_same_in_both_encodings() {
    let (handle, policy) = (PoolHandle::from("seventeen"), Policy::Random);
    let mut long = element(3, policy);
    long.user_transport = Transport::Opaque(Bytes::from_static(b"somewhere"));
    let elements = vec![element(1, policy), long, element(2, policy)];
    for updates in [false, true] {
        let mut buffer = BytesMut::from(&b"before"[..]);
        let mut answer = ResolutionResponseEncoder::new(&mut buffer, updates, &handle, &policy);
        answer.push(&elements[0]);
        answer.push_encoded(&elements[1].to_encoded());
        answer.push_encoded(&elements[2].to_encoded());
        answer.finish().expect("elements with addresses");
        let full_message = asap::Message::HandleResolutionResponse {
            updates,
            handle: handle.clone(),
            policy: Some(policy),
            elements: elements.clone(),
            causes: Vec::new(),
        };
        let mut expected = BytesMut::from(&b"before"[..]);
        full_message.encode(&mut expected).expect("the same");
        assert_eq!(buffer, expected);
    }
    let without_address = PoolElement {
        asap_transport: Some(SctpTransport {
            port: 1,
            usage: TransportUse::DataOnly,
            addresses: Addresses::new(),
        }),
        ..element(1, policy)
    };
    let mut huge = element(1, policy);
    huge.user_transport = Transport::Opaque(Bytes::from(vec![0; LENGTH_MAX]));
    for (element, is_too_long) in [(without_address, false), (huge, true)] {
        let mut buffer = BytesMut::from(&b"before"[..]);
        let mut answer = ResolutionResponseEncoder::new(&mut buffer, false, &handle, &policy);
        answer.push_encoded(&element.to_encoded());
        let error = answer.finish().expect_err("an element without an encoding");
        assert_eq!(matches!(error, EncodeError::TooLong(_)), is_too_long);
        assert_eq!(buffer, b"before"[..]);
    }
}

#[test]
fn policies_have_number_and_name() {
    for &kind in PolicyKind::ALL {
        assert_eq!(PolicyKind::from_number(kind.number()), Some(kind));
        assert_eq!(kind.to_string().to_lowercase().parse(), Ok(kind));
        assert_eq!(kind.zeroed().kind(), kind);
    }
    assert_eq!(PolicyKind::from_number(0), None);
    assert!("".parse::<PolicyKind>().is_err());
}
