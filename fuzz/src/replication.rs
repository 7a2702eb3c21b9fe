//! The copy of a replicator's connections at a backup, and the replication machine, with arbitrary frames.

use crate::frame::decode;
use holdfast_proto::replication::{
    BackupCopy, DataPlaneEvent, Output, ReplicatedServiceConfig, Replication,
};
use holdfast_proto::view::View;
use holdfast_wire::health_frames::ServiceEndpoint;
use holdfast_wire::replication_frames::{ConnectionChange, ConnectionRecord, ReplicationFrame};
use holdfast_wire::{Frame, NodeId, Protocol};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

const CONTACT: NodeId = NodeId(1);
const BACKUP: NodeId = NodeId(2);
/// Nodes with legs.
const LEGS: [NodeId; 3] = [NodeId(3), NodeId(4), NodeId(5)];
/// Largest number of connections in a copy.
const CONNECTIONS_MAX: usize = 50;
/// Most outputs that one input may cause: a few for each connection.
const OUTPUTS_MAX: usize = 10_000;

/// Feeds a copy and a contact node's machine with the frames of the stream. Records of the frames also arrive as new
/// connections of the machine. The first byte is the time between two frames in milliseconds. Neither may panic; the copy keeps
/// its limit, and a successor adopts no other connections than the copy's.
pub fn run(data: &[u8]) -> bool {
    let Some((wait, rest)) = data.split_first() else {
        return false;
    };
    let mut now = Duration::from_secs(1);
    let mut copy = BackupCopy::new(service(), CONNECTIONS_MAX);
    let mut machine =
        Replication::new(now, config(CONTACT), &LEGS, &view(CONTACT, 1)).expect("three legs");
    settle(&mut machine);
    let mut has_frames = false;
    for frame in decode(rest, 1 << 20) {
        let Frame::Replication(frame) = frame else {
            continue;
        };
        has_frames = true;
        now += Duration::from_millis(u64::from(*wait));
        machine.handle_frame(now, BACKUP, &frame);
        settle(&mut machine);
        for record in records(&frame) {
            machine.handle_data_plane(now, DataPlaneEvent::Opened { record });
            settle(&mut machine);
        }
        if machine.poll_timeout().is_some_and(|due| due <= now) {
            machine.handle_timeout(now);
            settle(&mut machine);
        }
        assert!(machine.connection_count() <= CONNECTIONS_MAX);
        let _ = copy.handle_frame(frame);
        check_successor(now, &copy);
    }
    has_frames
}

fn check_successor(now: Duration, copy: &BackupCopy) {
    let connections = copy.connections().count();
    assert!(connections <= CONNECTIONS_MAX);
    let Ok(mut successor) = Replication::succeed(now, config(BACKUP), copy, &view(BACKUP, 2))
    else {
        assert_eq!(connections, 0);
        return;
    };
    let adopted = settle(&mut successor);
    // Connections of legs at unknown nodes are reset.
    assert!(adopted <= connections);
}

/// Takes all outputs, and returns the number of adopted connections.
fn settle(machine: &mut Replication) -> usize {
    let mut adopted = 0;
    for _ in 0..OUTPUTS_MAX {
        match machine.poll_output() {
            Some(Output::Adopt(_)) => adopted += 1,
            Some(_) => {}
            None => return adopted,
        }
    }
    panic!("more than {OUTPUTS_MAX} outputs");
}

fn records(frame: &ReplicationFrame) -> Vec<ConnectionRecord> {
    match frame {
        ReplicationFrame::Snapshot { records, .. } => records.clone(),
        ReplicationFrame::Delta { changes, .. } => {
            let opened = |change: &ConnectionChange| match change {
                ConnectionChange::Opened(record) => Some(*record),
                _ => None,
            };
            changes.iter().filter_map(opened).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the service that corpus and machine share.
pub fn service() -> ServiceEndpoint {
    ServiceEndpoint {
        protocol: Protocol::Tcp,
        address: SocketAddr::from((Ipv4Addr::new(10, 0, 0, 1), 80)),
    }
}

fn config(node: NodeId) -> ReplicatedServiceConfig {
    ReplicatedServiceConfig {
        connections_max: CONNECTIONS_MAX,
        ..ReplicatedServiceConfig::new(node, service())
    }
}

fn view(contact: NodeId, epoch: u64) -> View {
    let backups = match contact {
        CONTACT => vec![BACKUP],
        _ => Vec::new(),
    };
    View {
        epoch,
        backups,
        ..View::configured(contact, LEGS)
    }
}
