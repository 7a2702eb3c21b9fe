//! Frames about the connections of replicated services.

use crate::{stream, write_input};
use holdfast_fuzz::replication::service;
use holdfast_wire::replication_frames::{
    ConnectionChange, ConnectionRecord, LEGS_MAX, LegIndex, LegSet, LegTranslation,
    ReplicationFrame, ReplicationRoles,
};
use holdfast_wire::{Frame, NodeId};
use std::net::SocketAddr;

fn record(port: u16) -> ConnectionRecord {
    let leg = LegTranslation {
        sequence_offset: 0xffff_0000,
        timestamp_offset: 17,
        mss: 1460,
        window_scale: 7,
    };
    ConnectionRecord {
        client: SocketAddr::from(([10, 0, 1, 2], port)),
        client_isn: 1,
        service_isn: 2,
        mss: 1460,
        client_window_scale: 7,
        service_window_scale: 8,
        has_timestamps: true,
        live: LegIndex::all().take(3).collect(),
        legs: [Some(leg), Some(leg), Some(leg), None],
    }
}

fn roles() -> ReplicationRoles {
    let nodes: [Option<NodeId>; LEGS_MAX] =
        [3, 4, 5, 0].map(|node| (node > 0).then_some(NodeId(node)));
    ReplicationRoles {
        primary: LegIndex::FIRST,
        live: LegIndex::all().take(3).collect::<LegSet>(),
        nodes,
    }
}

/// Returns one frame of each kind.
pub fn frames() -> Vec<Frame> {
    let (term, service) = (1, service());
    let client = record(4242).client;
    let leg = LegIndex::FIRST;
    [
        ReplicationFrame::Snapshot {
            term,
            service,
            sequence: 1,
            roles: roles(),
            records: vec![record(4242), record(4243)],
            is_first: true,
            is_last: true,
        },
        ReplicationFrame::Delta {
            term,
            service,
            sequence: 2,
            roles: Some(roles()),
            changes: vec![
                ConnectionChange::Opened(record(4244)),
                ConnectionChange::LegLeft { client, leg },
                ConnectionChange::Closed { client },
            ],
        },
        ReplicationFrame::Ack {
            term,
            service,
            sequence: 1,
        },
        ReplicationFrame::SnapshotRequest { term, service },
    ]
    .map(Frame::Replication)
    .into()
}

/// Writes streams for the target `replication`.
pub fn write_streams() -> std::io::Result<()> {
    let frames = frames();
    for wait in [0, 20, 250] {
        let name = format!("all-{wait}");
        write_input("replication", &name, &stream(wait, &frames))?;
    }
    write_input("replication", "snapshot", &stream(1, &frames[..1]))
}
