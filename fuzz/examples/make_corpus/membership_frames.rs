//! Frames of a group's membership.

use holdfast_fuzz::membership::{member, view};
use holdfast_wire::membership_frames::{
    AcceptedView, Ballot, Heartbeat, JoinNumber, JoinRefusal, JoinRole, MembershipFrame,
    ServerListVersion, ServerNodeChange, VotedView,
};
use holdfast_wire::{Frame, NodeId};

/// Returns one frame of each kind, as the nodes of the fuzz target's group send them.
pub fn frames() -> Vec<Frame> {
    let frames = vote_frames().into_iter().chain(list_frames());
    let frames = frames.chain(view_frames());
    let frames = frames.chain(crate::group_settings::frames());
    frames.map(Frame::Membership).collect()
}

fn ballot() -> Ballot {
    Ballot {
        round: 1,
        proposer: NodeId(2),
    }
}

/// Returns the view in which the first backup has taken over.
fn next_view() -> VotedView {
    VotedView {
        epoch: view().epoch + 1,
        voters: [2, 1, 3].map(member).to_vec(),
        ..view()
    }
}

fn version() -> ServerListVersion {
    ServerListVersion {
        term: 1,
        changes: 1,
    }
}

fn vote_frames() -> Vec<MembershipFrame> {
    use MembershipFrame as F;
    let (ballot, next) = (ballot(), next_view());
    let epoch = next.epoch;
    let accepted = AcceptedView {
        ballot,
        view: next.clone(),
    };
    vec![
        F::Heartbeat(Heartbeat {
            epoch: view().epoch,
            boot: 1,
            sequence: 1,
            has_lease: true,
            server_list: version(),
        }),
        F::LeaseGrant {
            epoch: view().epoch,
            boot: 1,
            sequence: 1,
            join: member(2).join,
        },
        F::Prepare { epoch, ballot },
        F::Promise {
            epoch,
            ballot,
            accepted: Some(accepted),
        },
        F::Propose { ballot, view: next },
        F::Accept { epoch, ballot },
        F::Reject {
            epoch,
            ballot,
            promised_round: 2,
        },
    ]
}

fn list_frames() -> Vec<MembershipFrame> {
    use MembershipFrame as F;
    let (address, join) = (member(30).address, JoinNumber(30));
    let join_as = |role| F::Join {
        role,
        address,
        join,
    };
    vec![
        join_as(JoinRole::Backup),
        join_as(JoinRole::ServerNode),
        F::Register {
            id: NodeId(30),
            address,
            join,
        },
        F::ServerNodesRequest {
            known: ServerListVersion::default(),
        },
        F::ServerNodesRequest { known: version() },
        F::ServerNodes {
            version: version(),
            base: None,
            changes: vec![
                ServerNodeChange::Added(member(31)),
                ServerNodeChange::Removed(NodeId(20)),
            ],
        },
        F::ServerNodes {
            version: ServerListVersion {
                term: 1,
                changes: 2,
            },
            base: Some(version()),
            changes: vec![ServerNodeChange::Added(member(32))],
        },
    ]
}

fn view_frames() -> Vec<MembershipFrame> {
    use MembershipFrame as F;
    let next = next_view();
    let without_most = VotedView {
        epoch: next.epoch + 1,
        voters: vec![member(3)],
        ..view()
    };
    vec![
        F::ViewRequest { epoch: 4 },
        F::WhoIsContact,
        F::Contact {
            view: next.summary(),
            is_registered: true,
            server_list: version(),
        },
        F::NotContact {
            view: next.summary(),
        },
        F::JoinRefused {
            join: JoinNumber(21),
            reason: JoinRefusal::Busy,
        },
        F::Joined {
            id: NodeId(21),
            join: JoinNumber(21),
            view: next.clone(),
        },
        F::Leave {
            join: member(3).join,
        },
        F::Commit { view: next },
        F::Removed {
            view: without_most.summary(),
            rejoin: true,
        },
    ]
}

/// Writes streams for each role and sender.
pub fn write_streams() -> std::io::Result<()> {
    for choice in [0, 1, 2, 3, 4 + 64, 5 + 128, 6 + 192, 7 + 64] {
        let stream = crate::stream(choice, &frames());
        crate::write_input("membership", &format!("all-{choice}"), &stream)?;
    }
    Ok(())
}
