//! Tests of the frames about moving a process, and of its record's key.

use crate::failures::{failure, result};
use crate::{blob, flow, node};
use holdfast_wire::frame::AcceptorPhaseTimes;
use holdfast_wire::move_frames::{
    DonorFlowEpoch, MoveFrame, MoveId, MoveOffer, PageRange, PageRequest, PeerConnections,
    SocketStrategy, StepTime, TranslationStep,
};
use holdfast_wire::{Flow, Frame, NodeId, Protocol, encode, encode_in_parts};
use proptest::collection::vec;
use proptest::prelude::*;

pub fn move_id() -> impl Strategy<Value = MoveId> {
    // Include halves that look like the end of a mapped IPv4 address.
    let half = prop_oneof![any::<u64>(), Just(0xffff_0a00_0001), Just(0)];
    (node(), half.clone(), half).prop_map(|(donor, boot, seq)| MoveId { donor, boot, seq })
}

pub fn migration_frame() -> impl Strategy<Value = Frame> {
    let frame = prop_oneof![pre_freeze_frame(), freeze_or_later_frame()];
    (move_id(), frame).prop_map(|(id, frame)| Frame::Move { id, frame })
}

fn flows() -> impl Strategy<Value = Vec<DonorFlowEpoch>> {
    let one = (flow(), any::<u32>()).prop_map(|(flow, epoch)| DonorFlowEpoch { flow, epoch });
    vec(one, 0..9)
}

fn connections() -> impl Strategy<Value = Vec<Flow>> {
    vec(flow(), 0..5)
}

fn step() -> impl Strategy<Value = TranslationStep> {
    prop_oneof![
        Just(TranslationStep::Prepare),
        Just(TranslationStep::Switch),
        Just(TranslationStep::Undo)
    ]
}

fn offer() -> impl Strategy<Value = MoveFrame> {
    let sockets = prop_oneof![
        Just(SocketStrategy::Iterative),
        Just(SocketStrategy::Collective),
        Just(SocketStrategy::Incremental)
    ];
    let fields = (
        any::<[bool; 2]>(),
        sockets,
        any::<[u32; 2]>(),
        any::<u64>(),
        blob(),
    );
    fields.prop_map(
        |([clone, post_copy], sockets, [hops, flows], memory, description)| {
            MoveFrame::Offer(MoveOffer {
                clone,
                sockets,
                post_copy,
                hops,
                memory_bytes: memory,
                flow_count: flows,
                description,
            })
        },
    )
}

fn pre_freeze_frame() -> impl Strategy<Value = MoveFrame> {
    prop_oneof![
        offer(),
        vec(failure(), 0..4).prop_map(|refusals| MoveFrame::OfferResponse { refusals }),
        result().prop_map(MoveFrame::Ready),
        (any::<u32>(), flows()).prop_map(|(part, flows)| MoveFrame::Arm { part, flows }),
        (any::<u32>(), result()).prop_map(|(part, result)| MoveFrame::ArmResponse { part, result }),
    ]
}

fn steps() -> impl Strategy<Value = Vec<StepTime>> {
    vec(
        (".*", any::<u32>()).prop_map(|(name, us)| StepTime { name, us }),
        0..4,
    )
}

fn freeze_or_later_frame() -> impl Strategy<Value = MoveFrame> {
    let peers = (node(), connections());
    let peers = peers.prop_map(|(node, connections)| PeerConnections { node, connections });
    let final_fields = (flows(), vec(peers, 0..4), connections(), any::<u64>());
    let done = (
        proptest::result::maybe_ok(any::<u32>(), failure()),
        any::<[u32; 3]>(),
    );
    prop_oneof![
        final_fields.prop_map(|(flows, peers, forwarded, bytes)| MoveFrame::Final {
            flows,
            peers,
            forwarded,
            bytes
        }),
        (done, steps()).prop_map(
            |((result, [restore_us, commit_us, since_resume_us]), steps)| {
                let times = AcceptorPhaseTimes {
                    restore_us,
                    commit_us,
                };
                MoveFrame::Done {
                    result,
                    times,
                    since_resume_us,
                    steps,
                }
            }
        ),
        Just(MoveFrame::Released),
        failure().prop_map(|reason| MoveFrame::Abort { reason }),
        (any::<u32>(), step(), node(), connections()).prop_map(|(hops, step, to, connections)| {
            MoveFrame::Translate {
                hops,
                step,
                to,
                connections,
            }
        }),
        (step(), result()).prop_map(|(step, result)| MoveFrame::TranslateResponse { step, result }),
        (any::<u8>(), any::<bool>(), blob()).prop_map(|(kind, more, bytes)| MoveFrame::Piece {
            kind,
            more,
            bytes
        }),
        (any::<u64>(), any::<u64>(), proptest::option::of(failure())).prop_map(
            |(bytes, busy_us, problem)| MoveFrame::PiecesProcessed {
                bytes,
                busy_us,
                problem,
            }
        ),
        page_request().prop_map(MoveFrame::PageRequest),
        vec(failure(), 0..9).prop_map(|refusals| MoveFrame::CheckResult { refusals }),
        blob().prop_map(|bytes| MoveFrame::LockHandover { bytes }),
    ]
}

fn page_request() -> impl Strategy<Value = PageRequest> {
    let range = any::<(u32, u64, u64)>().prop_map(|(process, start, end)| PageRange {
        process,
        start,
        end,
    });
    let fields = (
        any::<bool>(),
        vec(range, 0..9),
        proptest::option::of(failure()),
    );
    fields.prop_map(|(is_complete, ranges, problem)| PageRequest {
        is_complete,
        ranges,
        problem,
    })
}

#[test]
fn process_record_and_flow_are_distinct() {
    let id = MoveId {
        donor: NodeId(2),
        boot: 0x5f3a,
        seq: 7,
    };
    let record = Flow::process_key(id);
    assert_eq!(record.to_string(), "process:2.5f3a.7");
    assert_eq!("process:2.5f3a.7".parse(), Ok(record));
    assert_eq!((record.move_id(), record.is_process()), (Some(id), true));
    // A map returns this form, with a possibly mapped address.
    let Flow { local, remote, .. } = record;
    assert_eq!(Flow::new(Protocol::Process, local, remote), Ok(record));
    let (local, remote) = (record.remote, record.local);
    assert!(Flow::new(Protocol::Process, local, remote).is_err());
    let flow: Flow = "tcp:[fd00::1]:2-[fd00::7]:0".parse().expect("a flow");
    assert_eq!((flow.move_id(), flow.is_process()), (None, false));
}

#[test]
fn migration_frame_format_is_stable() {
    let id = MoveId {
        donor: NodeId(2),
        boot: 3,
        seq: 4,
    };
    let frame = MoveFrame::Arm {
        part: 1,
        flows: vec![DonorFlowEpoch {
            flow: "tcp:10.0.0.1:80-10.0.1.2:4242".parse().expect("a flow"),
            epoch: 7,
        }],
    };
    let mut bytes = Vec::new();
    encode(&Frame::Move { id, frame }, &mut bytes).expect("small");
    let expected = [
        0, 0, 0, 23, 1, 12, 2, 3, 4, 3, 1, 1, 0, 0, 10, 0, 0, 1, 80, 0, 10, 0, 1, 2, 0x92, 0x21, 7,
    ];
    assert_eq!(bytes[..], expected[..]);
}

proptest! {
    #[test]
    fn frame_in_parts_has_same_bytes(frame in migration_frame()) {
        let mut whole = Vec::new();
        encode(&frame, &mut whole).expect("small");
        let (mut front, rest) = encode_in_parts(&frame).expect("small");
        front.extend(rest);
        prop_assert_eq!(front, whole);
    }
}
