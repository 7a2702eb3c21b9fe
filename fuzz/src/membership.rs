//! The membership machine with arbitrary frames.

use crate::frame::decode;
use bytes::Bytes;
use holdfast_proto::membership::{Membership, MembershipConfig, Output};
use holdfast_wire::membership_frames::{
    GroupData, JoinNumber, JoinRole, Member, MembershipState, NodeName, SERVER_NODES_MAX, VotedView,
};
use holdfast_wire::{Frame, NodeId};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Most outputs that one input may cause: a whole list of server nodes is one frame.
const OUTPUTS_MAX: usize = 10_000;

/// Feeds a machine with the frames of the stream, in turn from the voters and a stranger, and saves its state at once.
/// The first byte chooses the machine's role (modulo 4) and the time between two frames in milliseconds. The machine
/// must not panic, must come to rest, and obeys only possible views whose epochs do not decrease.
pub fn run(data: &[u8]) -> bool {
    let Some((choice, rest)) = data.split_first() else {
        return false;
    };
    let mut now = Duration::from_secs(1);
    let mut machine = machine(now, *choice % 4);
    settle(&mut machine, now);
    let senders = [2, 3, 1, 9].map(node_name);
    let mut has_frames = false;
    let mut epoch = 0;
    for (index, frame) in decode(rest, 1 << 20).into_iter().enumerate() {
        let Frame::Membership(frame) = frame else {
            continue;
        };
        has_frames = true;
        now += Duration::from_millis(u64::from(*choice));
        let sender = &senders[(index + usize::from(*choice / 64)) % senders.len()];
        machine.handle_frame(now, sender, frame);
        settle(&mut machine, now);
        if machine.poll_timeout().is_some_and(|due| due <= now) {
            machine.handle_timeout(now);
            settle(&mut machine, now);
        }
        if let Some(view) = machine.voted_view() {
            assert!(view.is_valid() && view.epoch >= epoch);
            epoch = view.epoch;
        }
        assert!(machine.server_nodes().count() <= SERVER_NODES_MAX);
    }
    has_frames
}

/// Returns the name of the node with this number.
pub fn node_name(number: u16) -> NodeName {
    format!("n{number}").parse().expect("a short name")
}

/// Returns a voter that corpus and machine share.
pub fn member(number: u16) -> Member {
    Member {
        id: NodeId(number),
        name: node_name(number),
        address: SocketAddr::from((Ipv4Addr::new(10, 0, 0, number as u8), 7400)),
        join: JoinNumber(u64::from(number)),
    }
}

/// Returns the view that the machine has at first: contact node 1 with two backups.
pub fn view() -> VotedView {
    VotedView {
        epoch: 5,
        voters: [1, 2, 3].map(member).to_vec(),
        next_id: 40,
        group_data: GroupData {
            version: 1,
            bytes: Bytes::new(),
        },
    }
}

/// Returns the machine of a contact node (0), a backup (1), a server node (2), or a node that joins (3).
fn machine(now: Duration, role: u8) -> Membership {
    let (number, join_role) = match role {
        0 => (1, JoinRole::Backup),
        1 => (2, JoinRole::Backup),
        2 => (20, JoinRole::ServerNode),
        _ => (21, JoinRole::Backup),
    };
    let own = member(number);
    let mut config = MembershipConfig::new(own.name, own.address, join_role, 1);
    if role == 3 {
        config.seeds = vec![node_name(1)];
        return Membership::join(now, config);
    }
    let state = MembershipState {
        join: Some(own.join),
        requested_join: None,
        server_node_id: (role == 2).then_some(own.id),
        committed: Some(view()),
        promised: None,
        accepted: None,
    };
    // The promise of the life before has ended.
    Membership::restore(now - config.promise_duration, config, state)
}

fn settle(machine: &mut Membership, now: Duration) {
    let mut steps = 0;
    while let Some(output) = machine.poll_output() {
        steps += 1;
        assert!(steps < OUTPUTS_MAX, "it never comes to rest");
        if let Output::Save { token, .. } = output {
            machine.handle_saved(now, token, Ok(()));
        }
    }
}
