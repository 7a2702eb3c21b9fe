//! Frames about the drain of another node.

use holdfast_wire::drain_frames::{
    DrainAnswer, DrainFrame, DrainOrder, DrainReportJson, REPORT_BYTES_MAX,
};
use holdfast_wire::{Frame, FrameDecoder, FrameError, encode};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

/// Any frame about the drain of another node.
pub fn drain_frame() -> impl Strategy<Value = Frame> {
    let order = prop_oneof![
        option::of(any::<u64>()).prop_map(|deadline_s| DrainOrder::Begin { deadline_s }),
        Just(DrainOrder::Report),
        Just(DrainOrder::End),
    ];
    let report = vec(any::<u8>(), 0..100)
        .prop_map(|json| DrainAnswer::Report(DrainReportJson::new(json).expect("short")));
    let refusal = (".{0,40}", ".{0,40}").prop_map(|(error, what_to_do)| DrainAnswer::Refused {
        error: error.into(),
        what_to_do: what_to_do.into(),
    });
    prop_oneof![
        (any::<u64>(), order).prop_map(|(request, order)| DrainFrame::Order { request, order }),
        (any::<u64>(), prop_oneof![report, refusal])
            .prop_map(|(request, answer)| DrainFrame::Answer { request, answer }),
    ]
    .prop_map(Frame::Drain)
}

#[test]
fn too_long_report_is_malformed() {
    assert!(DrainReportJson::new(vec![0; REPORT_BYTES_MAX + 1]).is_none());
    let longest = DrainReportJson::new(vec![0; REPORT_BYTES_MAX]).expect("fits");
    let mut bytes = Vec::new();
    let frame = Frame::Drain(DrainFrame::Answer {
        request: 1,
        answer: DrainAnswer::Report(longest),
    });
    encode(&frame, &mut bytes).expect("small");
    let decode = |bytes: &[u8]| {
        let mut decoder = FrameDecoder::new();
        decoder.feed(bytes);
        decoder.next_frame()
    };
    assert_eq!(decode(&bytes).expect("well-formed"), Some(frame));
    // One byte more, and lengths that say so: of the frame, and of the list (a varint).
    let list = bytes.len() - REPORT_BYTES_MAX - 3;
    assert_eq!(bytes[list..list + 3], [0x80, 0x80, 0x02]);
    bytes[list] = 0x81;
    bytes.push(0);
    let frame_bytes = u32::from_be_bytes(bytes[..4].try_into().expect("4 bytes")) + 1;
    bytes[..4].copy_from_slice(&frame_bytes.to_be_bytes());
    assert!(matches!(decode(&bytes), Err(FrameError::Malformed { .. })));
}
