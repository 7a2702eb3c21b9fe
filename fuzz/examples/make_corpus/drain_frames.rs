//! Frames about the drain of another node.

use holdfast_wire::Frame;
use holdfast_wire::drain_frames::{DrainAnswer, DrainFrame, DrainOrder, DrainReportJson};

/// Returns one frame of each kind.
pub fn frames() -> Vec<Frame> {
    let report = DrainReportJson::new(b"{}".to_vec()).expect("short");
    [
        DrainFrame::Order {
            request: 1,
            order: DrainOrder::Begin {
                deadline_s: Some(60),
            },
        },
        DrainFrame::Answer {
            request: 1,
            answer: DrainAnswer::Report(report),
        },
    ]
    .map(Frame::Drain)
    .into()
}
