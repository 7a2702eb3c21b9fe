//! Encoded frames decode to the same value, in pieces of any size; any other input is an error that says how to react.

mod conductor_frames;
mod credentials;
mod drain_frames;
mod failures;
mod group_data;
mod health_frames;
mod membership_frames;
mod migration_frames;
mod replication_frames;

use bytes::Bytes;
use conductor_frames::conductor_frame;
use credentials::credential_frame;
use drain_frames::drain_frame;
use failures::failure;
use health_frames::health_frame;
use holdfast_wire::authenticated_datagram::DatagramAuthenticationKey;
use holdfast_wire::flow_report_frames::FlowReportFrame;
use holdfast_wire::frame::{
    AcceptorPhaseTimes, BatchId, ConfiguredService, FlowToPrepare, FrozenFlowState,
};
use holdfast_wire::greeting::{
    ConfiguredSettings, GREETING_TEXT_BYTES_MAX, GreetingRefusal, GroupMode, NodeFacts,
};
use holdfast_wire::group_data::ServiceProtocol;
use holdfast_wire::{
    ChangeKind, ChangeRefusal, Flow, Frame, FrameDecoder, FrameError, LENGTH_MAX, NodeId,
    OwnershipChange, OwnershipRecord, Protocol, encode,
};
use membership_frames::membership_frame;
use migration_frames::{migration_frame, move_id};
use proptest::collection::vec;
use proptest::prelude::*;
use replication_frames::replication_frame;
use std::net::{IpAddr, SocketAddr};

fn flow() -> impl Strategy<Value = Flow> {
    let v4 =
        (any::<[u8; 4]>(), any::<[u8; 4]>()).prop_map(|(a, b)| (IpAddr::from(a), IpAddr::from(b)));
    let v6 = (any::<[u8; 16]>(), any::<[u8; 16]>())
        .prop_map(|(a, b)| (IpAddr::from(a), IpAddr::from(b)));
    let protocol = prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)];
    let flow = (protocol, prop_oneof![v4, v6], any::<u16>(), any::<u16>()).prop_filter_map(
        "two families",
        |(protocol, (local, remote), from, to)| {
            let (local, remote) = (SocketAddr::new(local, from), SocketAddr::new(remote, to));
            Flow::new(protocol, local, remote).ok()
        },
    );
    prop_oneof![4 => flow, 1 => move_id().prop_map(Flow::process_key)]
}

fn node() -> impl Strategy<Value = NodeId> {
    any::<u16>().prop_map(NodeId)
}

fn batch() -> impl Strategy<Value = BatchId> {
    (node(), any::<u64>(), any::<u64>()).prop_map(|(donor, boot, seq)| BatchId { donor, boot, seq })
}

fn blob() -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..300).prop_map(Bytes::from)
}

fn record() -> impl Strategy<Value = OwnershipRecord> {
    prop_oneof![
        (node(), any::<u32>()).prop_map(|(owner, epoch)| OwnershipRecord::owned(owner, epoch)),
        (node(), node(), any::<u32>())
            .prop_map(|(donor, to, epoch)| OwnershipRecord::transit(donor, to, epoch)),
    ]
}

fn change() -> impl Strategy<Value = OwnershipChange> {
    use ChangeKind::{Commit, CommitAll, Divert, Establish, Remove, Rollback};
    let kind = prop_oneof![
        proptest::sample::select(vec![Establish, Commit, Rollback, Remove]),
        node().prop_map(|acceptor| Divert { acceptor }),
        any::<u32>().prop_map(|flows| CommitAll { flows }),
    ];
    (flow(), kind, any::<u32>()).prop_map(|(flow, kind, epoch)| OwnershipChange {
        flow,
        kind,
        epoch,
    })
}

fn refusal() -> impl Strategy<Value = ChangeRefusal> {
    proptest::option::of(record()).prop_map(|current| ChangeRefusal { current })
}

fn handoff_frame() -> impl Strategy<Value = Frame> {
    let prepare =
        (flow(), any::<u32>(), blob()).prop_map(|(flow, epoch, static_state)| FlowToPrepare {
            flow,
            epoch,
            static_state,
        });
    let state =
        (any::<u32>(), blob(), blob()).prop_map(|(index, dynamic, application)| FrozenFlowState {
            index,
            dynamic,
            application,
        });
    let times = (any::<u32>(), any::<u32>());
    let times = times.prop_map(|(restore_us, commit_us)| AcceptorPhaseTimes {
        restore_us,
        commit_us,
    });
    let results = vec(failures::result(), 0..9);
    let epochs = vec(proptest::result::maybe_ok(any::<u32>(), failure()), 0..9);
    prop_oneof![
        (batch(), vec(prepare, 0..9)).prop_map(|(batch, flows)| Frame::Prepare { batch, flows }),
        (batch(), results).prop_map(|(batch, results)| Frame::PrepareResponse { batch, results }),
        (batch(), vec(state, 0..9), any::<bool>()).prop_map(|(batch, flows, last)| Frame::State {
            batch,
            flows,
            last
        }),
        (batch(), epochs, times).prop_map(|(batch, results, times)| Frame::Done {
            batch,
            results,
            times
        }),
        (batch(), failure()).prop_map(|(batch, reason)| Frame::Abort { batch, reason }),
    ]
}

fn flow_report_frame() -> impl Strategy<Value = Frame> {
    let claims = vec((flow(), record()), 0..9);
    let report = (any::<[u64; 2]>(), any::<u32>(), claims, any::<bool>());
    prop_oneof![
        any::<u64>().prop_map(|term| FlowReportFrame::Request { term }),
        report.prop_map(
            |([term, report], part, claims, is_last)| FlowReportFrame::Report {
                term,
                report,
                part,
                claims,
                is_last
            }
        ),
        (any::<[u64; 2]>(), any::<u32>()).prop_map(|([term, report], next_part)| {
            FlowReportFrame::Ack {
                term,
                report,
                next_part,
            }
        }),
    ]
    .prop_map(Frame::FlowReport)
}

fn configured_service() -> impl Strategy<Value = ConfiguredService> {
    let protocol = proptest::sample::select(vec![ServiceProtocol::Tcp, ServiceProtocol::Udp]);
    (
        protocol,
        any::<([u8; 4], u16)>(),
        "[a-z]{1,9}",
        any::<u64>(),
    )
        .prop_map(|(protocol, address, name, digest)| ConfiguredService {
            protocol,
            address: SocketAddr::from(address),
            name: name.parse().expect("a name"),
            digest,
        })
}

/// Texts of a greeting; a character has up to 4 bytes.
const GREETING_TEXT: &str = ".{0,16}";

fn facts() -> impl Strategy<Value = NodeFacts> {
    let settings = (node(), any::<u64>(), any::<u64>());
    let configured = settings.prop_map(|(contact, reach, services)| {
        GroupMode::Configured(ConfiguredSettings {
            contact,
            reach,
            services,
        })
    });
    let mode = prop_oneof![configured, Just(GroupMode::SelfRunning)];
    let facts = (GREETING_TEXT, any::<u64>(), proptest::option::of(mode));
    facts.prop_map(|(release, clock_ms, mode)| NodeFacts {
        release,
        clock_ms,
        mode,
    })
}

fn greeting_refusal() -> impl Strategy<Value = GreetingRefusal> {
    use GreetingRefusal as R;
    prop_oneof![
        (GREETING_TEXT, GREETING_TEXT)
            .prop_map(|(listener, dialler)| R::Group { listener, dialler }),
        (node(), GREETING_TEXT).prop_map(|(claimed, certificate)| R::Number {
            claimed,
            certificate
        }),
        GREETING_TEXT.prop_map(|name| R::SameCertificate { name }),
        (node(), node()).prop_map(|(listener, dialler)| R::Contact { listener, dialler }),
        Just(R::Reach),
        Just(R::ConfiguredAndSelfRun),
    ]
}

fn frame() -> impl Strategy<Value = Frame> {
    let results = vec(
        proptest::result::maybe_ok(proptest::option::of(record()), refusal()),
        0..9,
    );
    prop_oneof![
        handoff_frame(),
        migration_frame(),
        membership_frame(),
        health_frame(),
        conductor_frame(),
        drain_frame(),
        replication_frame(),
        any::<u32>().prop_map(|load| Frame::NodeLoad { load }),
        (any::<u64>(), any::<[u8; 32]>()).prop_map(|(boot, key)| {
            Frame::DatagramAuthenticationKey {
                boot,
                key: DatagramAuthenticationKey(key),
            }
        }),
        flow_report_frame(),
        vec(configured_service(), 0..5).prop_map(|services| Frame::ConfiguredServices { services }),
        credential_frame(),
        (node(), any::<u64>(), GREETING_TEXT, facts()).prop_map(|(node, boot, group, facts)| {
            Frame::Hello {
                node,
                boot,
                group,
                facts,
            }
        }),
        greeting_refusal().prop_map(|reason| Frame::Refused { reason }),
        (any::<u64>(), vec(change(), 0..9))
            .prop_map(|(request, changes)| Frame::ChangeRequest { request, changes }),
        (any::<u64>(), results)
            .prop_map(|(request, results)| Frame::ChangeResponse { request, results }),
        (any::<u64>(), vec(flow(), 0..9))
            .prop_map(|(request, flows)| Frame::Query { request, flows }),
        (any::<u64>(), vec(proptest::option::of(record()), 0..9))
            .prop_map(|(request, records)| Frame::QueryResponse { request, records }),
        any::<u64>().prop_map(|token| Frame::Ping { token }),
        any::<u64>().prop_map(|token| Frame::Pong { token }),
    ]
}

/// Decodes all frames of `bytes`, fed in pieces of `sizes` (in turn); returns them and the decoder's final result.
fn decode_all(bytes: &[u8], sizes: &[usize]) -> (Vec<Frame>, Result<(), FrameError>) {
    let mut decoder = FrameDecoder::new();
    let mut frames = Vec::new();
    let mut remaining = bytes;
    let mut sizes = sizes.iter().cycle();
    while !remaining.is_empty() {
        let size = sizes.next().copied().unwrap_or(1).clamp(1, remaining.len());
        let (piece, after) = remaining.split_at(size);
        decoder.feed(piece);
        remaining = after;
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Err(error)),
            }
        }
    }
    (frames, decoder.check_complete())
}

proptest! {
    #[test]
    fn frames_round_trip_in_pieces_of_any_size(frames in vec(frame(), 1..6), sizes in vec(1_usize..400, 1..8)) {
        let mut bytes = Vec::new();
        for frame in &frames {
            encode(frame, &mut bytes).expect("small");
        }
        let (decoded, end) = decode_all(&bytes, &sizes);
        prop_assert_eq!(decoded, frames);
        prop_assert_eq!(end, Ok(()));
    }

    #[test]
    fn any_bytes_give_frames_or_error(bytes in vec(any::<u8>(), 0..600)) {
        let _ = decode_all(&bytes, &[7, 64]);
    }

    /// Arbitrary bodies in a valid envelope reach deep into the reader: no panic, and a decoded frame encodes
    /// identically.
    #[test]
    fn any_body_gives_frame_or_malformed(body in vec(any::<u8>(), 1..600), variant in 0_u8..15) {
        let mut bytes = ((body.len() + 1) as u32).to_be_bytes().to_vec();
        bytes.push(holdfast_wire::VERSION);
        bytes.extend(&body);
        bytes[5] = variant;
        match decode_all(&bytes, &[bytes.len()]) {
            (frames, Ok(())) => {
                let mut again = Vec::new();
                encode(&frames[0], &mut again).expect("a decoded frame fits");
                prop_assert_eq!(&decode_all(&again, &[1_000]).0, &frames);
            }
            (_, Err(error)) => prop_assert!(matches!(error, FrameError::Malformed { .. }), "{}", error),
        }
    }

    #[test]
    fn changed_byte_causes_no_panic(frame in frame(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = Vec::new();
        encode(&frame, &mut bytes).expect("small");
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = decode_all(&bytes, &[50]);
    }

    #[test]
    fn every_cut_is_reported_truncated(frame in frame(), at in any::<prop::sample::Index>()) {
        let mut bytes = Vec::new();
        encode(&frame, &mut bytes).expect("small");
        let have = at.index(bytes.len());
        let (frames, end) = decode_all(&bytes[..have], &[bytes.len()]);
        prop_assert!(frames.is_empty());
        let expected = if have == 0 { Ok(()) } else { Err(FrameError::Truncated { have }) };
        prop_assert_eq!(end, expected);
    }

    #[test]
    fn flows_round_trip_as_text_and_json(flow in flow()) {
        let text = flow.to_string();
        prop_assert_eq!(text.parse::<Flow>(), Ok(flow));
        let json = serde_json::to_string(&flow).expect("json");
        prop_assert_eq!(&json, &format!("\"{text}\""));
        prop_assert_eq!(serde_json::from_str::<Flow>(&json).expect("json"), flow);
    }

    #[test]
    fn any_text_gives_flow_or_error(text in "(tcp|udp|process)?:?[0-9a-f.:\\[\\]-]{0,60}|.{0,40}") {
        if let Ok(flow) = text.parse::<Flow>() {
            prop_assert_eq!(flow.to_string().parse::<Flow>(), Ok(flow));
        }
    }
}

fn envelope(length: u32, version: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.push(version);
    bytes.extend(body);
    bytes
}

#[test]
fn each_error_is_distinct_and_names_remedy() {
    let cases = [
        (envelope(2, 2, &[10]), "run the same release"),
        (envelope(u32::MAX, 1, &[]), "longer than"),
        (envelope(LENGTH_MAX as u32 + 1, 1, &[]), "longer than"),
        (envelope(2, 1, &[99]), "close the channel"),
        (envelope(4, 1, &[10, 1, 1]), "1 bytes follow"),
        (envelope(0, 1, &[]), "the frame is empty"),
        (envelope(9, 1, &[10]), "connect again"),
    ];
    for (bytes, expected) in cases {
        let (frames, end) = decode_all(&bytes, &[3]);
        let text = end.expect_err("not a frame").to_string();
        assert!(frames.is_empty() && text.contains(expected), "{text}");
    }
}

#[test]
fn frame_format_is_stable() {
    let mut bytes = Vec::new();
    encode(&Frame::Ping { token: 300 }, &mut bytes).expect("small");
    assert_eq!(bytes, [0, 0, 0, 4, 1, 10, 0xac, 0x02]);
    let flow: Flow = "tcp:10.0.0.1:80-10.0.1.2:4242".parse().expect("a flow");
    let changes = vec![OwnershipChange {
        flow,
        kind: ChangeKind::Commit,
        epoch: 7,
    }];
    bytes.clear();
    encode(
        &Frame::ChangeRequest {
            request: 1,
            changes,
        },
        &mut bytes,
    )
    .expect("small");
    let expected = [
        0, 0, 0, 20, 1, 3, 1, 1, 0, 0, 10, 0, 0, 1, 80, 0, 10, 0, 1, 2, 0x92, 0x21, 2, 7,
    ];
    assert_eq!(bytes[..], expected[..]);
}

#[test]
fn blobs_share_receive_buffer() {
    let batch = BatchId {
        donor: NodeId(1),
        boot: 2,
        seq: 3,
    };
    let flows = (0..2_000).map(|index| FrozenFlowState {
        index,
        dynamic: Bytes::from(vec![index as u8; 150]),
        application: Bytes::from_static(b"offset 17"),
    });
    let frame = Frame::State {
        batch,
        flows: flows.collect(),
        last: true,
    };
    let mut bytes = Vec::new();
    encode(&frame, &mut bytes).expect("300 kB");
    let mut decoder = FrameDecoder::new();
    decoder.feed(&bytes);
    let decoded = decoder.next_frame().expect("sound").expect("whole");
    assert_eq!(decoded, frame);
    let Frame::State { flows, .. } = decoded else {
        panic!("another frame");
    };
    let first = flows[0].dynamic.as_ptr() as usize;
    for flow in &flows {
        let distance = (flow.dynamic.as_ptr() as usize).wrapping_sub(first);
        assert!(
            distance < bytes.len(),
            "a blob was copied out of the receive buffer"
        );
    }
}

#[test]
fn overlong_frame_leaves_output_unchanged() {
    let batch = BatchId {
        donor: NodeId(1),
        boot: 2,
        seq: 3,
    };
    let dynamic = Bytes::from(vec![0; LENGTH_MAX]);
    let flows = vec![FrozenFlowState {
        index: 0,
        dynamic,
        application: Bytes::new(),
    }];
    let mut bytes = vec![1, 2, 3];
    let error = encode(
        &Frame::State {
            batch,
            flows,
            last: true,
        },
        &mut bytes,
    )
    .expect_err("too long");
    assert!(matches!(error, FrameError::TooLong(_)));
    assert_eq!(bytes, [1, 2, 3]);
}

#[test]
fn length_field_alone_allocates_nothing() {
    // A list that claims 2^60 entries, and a text that claims as many bytes.
    for variant in [2, 3, 7, 9] {
        let mut body = vec![variant, 1, 1, 1];
        body.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f]);
        let bytes = envelope(body.len() as u32 + 1, 1, &body);
        assert!(decode_all(&bytes, &[1_000]).1.is_err());
    }
}

#[test]
fn list_with_too_many_entries_is_malformed() {
    let results = vec![Ok(()); holdfast_wire::frame::ENTRIES_MAX + 1];
    let batch = BatchId {
        donor: NodeId(1),
        boot: 2,
        seq: 3,
    };
    let mut bytes = Vec::new();
    encode(&Frame::PrepareResponse { batch, results }, &mut bytes).expect("64 KiB");
    let (_, end) = decode_all(&bytes, &[bytes.len()]);
    assert!(matches!(end, Err(FrameError::Malformed { .. })), "{end:?}");
}

#[test]
fn long_texts_of_a_greeting_are_malformed() {
    let hello = |group: usize, release: usize| Frame::Hello {
        node: NodeId(1),
        boot: 2,
        group: "x".repeat(group),
        facts: NodeFacts {
            release: "x".repeat(release),
            ..NodeFacts::default()
        },
    };
    let refused = |certificate: usize| Frame::Refused {
        reason: GreetingRefusal::Number {
            claimed: NodeId(1),
            certificate: "x".repeat(certificate),
        },
    };
    let max = GREETING_TEXT_BYTES_MAX;
    let cases = [
        (hello(max, max), true),
        (hello(max + 1, 0), false),
        (hello(0, max + 1), false),
        (refused(max), true),
        (refused(max + 1), false),
    ];
    for (frame, is_accepted) in cases {
        let mut bytes = Vec::new();
        encode(&frame, &mut bytes).expect("small");
        let (frames, end) = decode_all(&bytes, &[bytes.len()]);
        assert_eq!((frames.len() == 1, end.is_ok()), (is_accepted, is_accepted));
    }
}

#[test]
fn flow_text_is_canonical() {
    let mapped = "tcp:[::ffff:10.0.0.1]:80-[::ffff:10.0.1.2]:4242".parse::<Flow>();
    assert_eq!(
        mapped.expect("a flow").to_string(),
        "tcp:10.0.0.1:80-10.0.1.2:4242"
    );
    let scoped = "udp:[fe80::1%3]:53-[fd00::2]:4242".parse::<Flow>();
    assert_eq!(
        scoped.expect("a flow").to_string(),
        "udp:[fe80::1]:53-[fd00::2]:4242"
    );
    let wrong = [
        ("", "is not a flow"),
        ("tcp", "is not a flow"),
        ("sctp:10.0.0.1:80-10.0.1.2:4242", "use tcp or udp"),
        ("tcp:10.0.0.1:80", "is not a flow"),
        ("tcp:10.0.0.1-10.0.1.2:4242", "is not a flow"),
        ("tcp:10.0.0.1:80-[fd00::2]:4242", "two families"),
        ("tcp:10.0.0.1:99999-10.0.1.2:1", "is not a flow"),
    ];
    for (text, expected) in wrong {
        let error = text.parse::<Flow>().expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let wrong = [
        "process:",
        "process:1",
        "process:1.2",
        "process:1.g.3",
        "process:70000.1.2",
        "process:1.2.3.4",
        "process:+1.2.3",
        "process:1.2.-3",
        "process:10.0.0.1:80-10.0.1.2:4242",
    ];
    for text in wrong {
        let error = text.parse::<Flow>().expect_err(text).to_string();
        assert!(error.contains("write DONOR.BOOT.SEQ"), "{text}: {error}");
    }
    assert_eq!("7".parse::<NodeId>(), Ok(NodeId(7)));
    assert!("0".parse::<NodeId>().is_err());
}
