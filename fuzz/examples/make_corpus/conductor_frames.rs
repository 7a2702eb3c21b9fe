//! Frames about the balance of loads.

use holdfast_fuzz::conductor::BOOT;
use holdfast_wire::conductor_frames::{
    ConductorFrame, DeclineReason, LoadReport, MovePurpose, NodeDemand, OfferEnd, OfferId,
    OfferedProcess, PastMove, ProcessKey, Utilization,
};
use holdfast_wire::{Frame, NodeId};

/// Returns one frame of each kind.
pub fn frames() -> Vec<Frame> {
    [
        loads(100),
        offer(1, 40),
        accept(1),
        decline(1),
        begin(1),
        ConductorFrame::Inquire { id: offer_id(1) },
        ended(1, OfferEnd::Moved),
    ]
    .map(Frame::Conductor)
    .into()
}

/// Writes streams for each load: a negotiation with the conductor as donor, and one as acceptor.
pub fn write_streams() -> std::io::Result<()> {
    for choice in [0, 1, 2, 3, 4 + 2, 64 + 3, 128 + 2, 192 + 4 + 3] {
        let mut stream = Vec::new();
        for seq in 1..=6 {
            let gossip = [loads(100), loads(300), loads(0)];
            let as_donor = [accept(seq), accept(seq), decline(seq)];
            let as_acceptor = [offer(seq, 40), begin(seq), ended(seq, OfferEnd::Moved)];
            stream.extend(gossip.into_iter().chain(as_donor).chain(as_acceptor));
        }
        let stream: Vec<Frame> = stream.into_iter().map(Frame::Conductor).collect();
        let name = format!("all-{choice}");
        crate::write_input("conductor", &name, &crate::stream(choice, &stream))?;
    }
    Ok(())
}

fn offer_id(seq: u64) -> OfferId {
    OfferId { boot: BOOT, seq }
}

fn loads(used: u32) -> ConductorFrame {
    let report = |node| LoadReport {
        node: NodeId(node),
        demand: NodeDemand {
            used,
            capacity: 1_000,
        },
        memory_free_kib: 1 << 20,
        is_open: true,
        age_ms: 300,
    };
    ConductorFrame::Loads {
        reports: [2, 3, 4].map(report).into(),
    }
}

fn offer(seq: u64, used: u32) -> ConductorFrame {
    ConductorFrame::Offer {
        id: offer_id(seq),
        purpose: MovePurpose::Balance,
        donor: NodeDemand {
            used: 900,
            capacity: 1_000,
        },
        process: OfferedProcess {
            key: ProcessKey(100 + seq),
            used,
            deviation: 3,
            memory_kib: 1 << 10,
            anti_affinity_label: Some(7),
            past_moves: vec![PastMove {
                from: NodeId(4),
                age_s: 700,
            }],
        },
    }
}

fn accept(seq: u64) -> ConductorFrame {
    ConductorFrame::Accept {
        id: offer_id(seq),
        acceptor: NodeDemand {
            used: 100,
            capacity: 1_000,
        },
    }
}

fn decline(seq: u64) -> ConductorFrame {
    ConductorFrame::Decline {
        id: offer_id(seq),
        reason: DeclineReason::TooLoaded {
            after: Utilization(7_000),
            limit: Utilization(5_000),
        },
    }
}

fn begin(seq: u64) -> ConductorFrame {
    ConductorFrame::Begin { id: offer_id(seq) }
}

fn ended(seq: u64, end: OfferEnd) -> ConductorFrame {
    ConductorFrame::Ended {
        id: offer_id(seq),
        end,
    }
}
