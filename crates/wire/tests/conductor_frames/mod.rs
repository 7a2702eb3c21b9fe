//! Frames about the balance of loads.

use crate::node;
use holdfast_wire::conductor_frames::{
    ConductorFrame, DeclineReason, LoadReport, MovePurpose, NodeDemand, OfferEnd, OfferId,
    OfferedProcess, PAST_MOVES_MAX, PastMove, ProcessKey, REPORTS_MAX, Utilization,
};
use holdfast_wire::{Frame, FrameDecoder, FrameError, NodeId, encode};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

fn demand() -> impl Strategy<Value = NodeDemand> {
    any::<(u32, u32)>().prop_map(|(used, capacity)| NodeDemand { used, capacity })
}

fn report() -> impl Strategy<Value = LoadReport> {
    let fields = (node(), demand(), any::<u64>(), any::<bool>(), any::<u32>());
    fields.prop_map(
        |(node, demand, memory_free_kib, is_open, age_ms)| LoadReport {
            node,
            demand,
            memory_free_kib,
            is_open,
            age_ms,
        },
    )
}

fn id() -> impl Strategy<Value = OfferId> {
    any::<(u64, u64)>().prop_map(|(boot, seq)| OfferId { boot, seq })
}

fn process() -> impl Strategy<Value = OfferedProcess> {
    let past = (node(), any::<u32>()).prop_map(|(from, age_s)| PastMove { from, age_s });
    let fields = (
        any::<u64>().prop_map(ProcessKey),
        any::<(u32, u32, u64)>(),
        option::of(any::<u64>()),
        vec(past, 0..=PAST_MOVES_MAX),
    );
    fields.prop_map(
        |(key, (used, deviation, memory_kib), anti_affinity_label, past_moves)| OfferedProcess {
            key,
            used,
            deviation,
            memory_kib,
            anti_affinity_label,
            past_moves,
        },
    )
}

fn reason() -> impl Strategy<Value = DeclineReason> {
    use DeclineReason as R;
    let simple = vec![
        R::Busy,
        R::CalmingDown,
        R::Starting,
        R::RateLimit,
        R::BalancingOff,
        R::Draining,
        R::LoadUnknown,
        R::AntiAffinity,
    ];
    let loaded = any::<(u32, u32)>().prop_map(|(after, limit)| R::TooLoaded {
        after: Utilization(after),
        limit: Utilization(limit),
    });
    prop_oneof![
        select(simple),
        any::<u64>().prop_map(|free_kib| R::NoMemory { free_kib }),
        loaded,
    ]
}

/// Any frame about the balance of loads.
pub fn conductor_frame() -> impl Strategy<Value = Frame> {
    use ConductorFrame as F;
    let purpose = select(vec![MovePurpose::Balance, MovePurpose::Drain]);
    let end = select(vec![
        OfferEnd::Moved,
        OfferEnd::Kept,
        OfferEnd::Withdrawn,
        OfferEnd::Unknown,
    ]);
    prop_oneof![
        vec(report(), 0..=REPORTS_MAX).prop_map(|reports| F::Loads { reports }),
        (id(), purpose, demand(), process()).prop_map(|(id, purpose, donor, process)| F::Offer {
            id,
            purpose,
            donor,
            process,
        }),
        (id(), demand()).prop_map(|(id, acceptor)| F::Accept { id, acceptor }),
        (id(), reason()).prop_map(|(id, reason)| F::Decline { id, reason }),
        id().prop_map(|id| F::Begin { id }),
        id().prop_map(|id| F::Inquire { id }),
        (id(), end).prop_map(|(id, end)| F::Ended { id, end }),
    ]
    .prop_map(Frame::Conductor)
}

fn decoded(frame: ConductorFrame) -> Result<Option<Frame>, FrameError> {
    let mut bytes = Vec::new();
    encode(&Frame::Conductor(frame), &mut bytes).expect("small");
    let mut decoder = FrameDecoder::new();
    decoder.feed(&bytes);
    decoder.next_frame()
}

#[test]
fn too_many_reports_are_malformed() {
    let report = LoadReport {
        node: NodeId(1),
        demand: NodeDemand {
            used: 1,
            capacity: 2,
        },
        memory_free_kib: 3,
        is_open: true,
        age_ms: 4,
    };
    let loads = |count| ConductorFrame::Loads {
        reports: vec![report; count],
    };
    assert!(matches!(decoded(loads(REPORTS_MAX)), Ok(Some(_))));
    let error = decoded(loads(REPORTS_MAX + 1));
    assert!(matches!(error, Err(FrameError::Malformed { .. })));
}

#[test]
fn too_many_past_moves_are_malformed() {
    let past = PastMove {
        from: NodeId(1),
        age_s: 2,
    };
    let offer = |count| ConductorFrame::Offer {
        id: OfferId { boot: 1, seq: 2 },
        purpose: MovePurpose::Balance,
        donor: NodeDemand::default(),
        process: OfferedProcess {
            key: ProcessKey(1),
            used: 1,
            deviation: 0,
            memory_kib: 1,
            anti_affinity_label: None,
            past_moves: vec![past; count],
        },
    };
    assert!(matches!(decoded(offer(PAST_MOVES_MAX)), Ok(Some(_))));
    let error = decoded(offer(PAST_MOVES_MAX + 1));
    assert!(matches!(error, Err(FrameError::Malformed { .. })));
}

#[test]
fn utilization_of_any_numbers_is_a_share() {
    assert_eq!(Utilization::of(500.0, 2_000.0), Utilization(2_500));
    assert_eq!(Utilization::of(500.0, 0.0), Utilization(u32::MAX));
    assert_eq!(Utilization::of(f64::MAX, 1.0), Utilization(u32::MAX));
    assert_eq!(Utilization(1_234).to_string(), "12.3 %");
}

proptest! {
    #[test]
    fn every_reason_has_words(reason in reason()) {
        prop_assert!(reason.to_string().len() > 20);
    }
}
