//! Tests of the frames about a group's membership, and of the state that nodes keep on their disks.

use crate::group_data::strategies::{any_change, any_refusal};
use crate::{blob, decode_all, node};
use bytes::Bytes;
use holdfast_wire::group_data::GroupChangeId;
use holdfast_wire::membership_frames::{
    AcceptedView, Ballot, EPOCH_MAX, GROUP_DATA_BYTES_MAX, GroupData, Heartbeat, JoinNumber,
    JoinRefusal, JoinRole, Member, MembershipFrame, MembershipState, NODE_NAME_BYTES_MAX, NodeName,
    SERVER_NODES_MAX, ServerListVersion, ServerNodeChange, VOTERS_MAX, VotedView,
};
use holdfast_wire::{Frame, FrameError, NodeId, encode};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::result::maybe_ok as result;
use std::net::SocketAddr;

fn name() -> impl Strategy<Value = NodeName> {
    "[a-zé.-]{1,20}".prop_map(|text| text.parse().expect("at most 40 bytes"))
}

fn address() -> impl Strategy<Value = SocketAddr> {
    let v4 = any::<([u8; 4], u16)>().prop_map(SocketAddr::from);
    prop_oneof![v4, any::<([u8; 16], u16)>().prop_map(SocketAddr::from)]
}

fn join() -> impl Strategy<Value = JoinNumber> {
    any::<u64>().prop_map(JoinNumber)
}

fn member() -> impl Strategy<Value = Member> {
    (node(), name(), address(), join()).prop_map(|(id, name, address, join)| Member {
        id,
        name,
        address,
        join,
    })
}

fn ballot() -> impl Strategy<Value = Ballot> {
    (any::<u32>(), node()).prop_map(|(round, proposer)| Ballot { round, proposer })
}

fn view() -> impl Strategy<Value = VotedView> {
    let data = (any::<u64>(), blob()).prop_map(|(version, bytes)| GroupData { version, bytes });
    let fields = (
        any::<u64>(),
        vec(member(), 0..=VOTERS_MAX),
        any::<u32>(),
        data,
    );
    fields.prop_map(|(epoch, voters, next_id, group_data)| VotedView {
        epoch,
        voters,
        next_id,
        group_data,
    })
}

fn accepted() -> impl Strategy<Value = AcceptedView> {
    (ballot(), view()).prop_map(|(ballot, view)| AcceptedView { ballot, view })
}

fn version() -> impl Strategy<Value = ServerListVersion> {
    any::<(u64, u64)>().prop_map(|(term, changes)| ServerListVersion { term, changes })
}

fn change() -> impl Strategy<Value = ServerNodeChange> {
    prop_oneof![
        member().prop_map(ServerNodeChange::Added),
        node().prop_map(ServerNodeChange::Removed)
    ]
}

fn role() -> impl Strategy<Value = JoinRole> {
    prop_oneof![Just(JoinRole::Backup), Just(JoinRole::ServerNode)]
}

fn refusal() -> impl Strategy<Value = JoinRefusal> {
    use JoinRefusal::{Busy, NodeIdsExhausted, ServerNodesFull, TooOften, VotersFull};
    proptest::sample::select(vec![
        VotersFull,
        ServerNodesFull,
        NodeIdsExhausted,
        Busy,
        TooOften,
    ])
}

fn vote_frame() -> impl Strategy<Value = MembershipFrame> {
    use MembershipFrame as F;
    prop_oneof![
        (any::<u64>(), ballot()).prop_map(|(epoch, ballot)| F::Prepare { epoch, ballot }),
        (any::<u64>(), ballot(), option::of(accepted())).prop_map(|(epoch, ballot, accepted)| {
            F::Promise {
                epoch,
                ballot,
                accepted,
            }
        }),
        (ballot(), view()).prop_map(|(ballot, view)| F::Propose { ballot, view }),
        (any::<u64>(), ballot()).prop_map(|(epoch, ballot)| F::Accept { epoch, ballot }),
        (any::<u64>(), ballot(), any::<u32>()).prop_map(|(epoch, ballot, promised_round)| {
            F::Reject {
                epoch,
                ballot,
                promised_round,
            }
        }),
        view().prop_map(|view| F::Commit { view }),
        (view(), any::<bool>()).prop_map(|(view, rejoin)| F::Removed {
            view: view.summary(),
            rejoin
        }),
        (any::<[u64; 3]>(), any::<bool>(), version()).prop_map(
            |(numbers, has_lease, server_list)| {
                let [epoch, boot, sequence] = numbers;
                F::Heartbeat(Heartbeat {
                    epoch,
                    boot,
                    sequence,
                    has_lease,
                    server_list,
                })
            }
        ),
        (any::<[u64; 3]>(), join()).prop_map(|([epoch, boot, sequence], join)| F::LeaseGrant {
            epoch,
            boot,
            sequence,
            join
        }),
    ]
}

fn other_frame() -> impl Strategy<Value = MembershipFrame> {
    use MembershipFrame as F;
    prop_oneof![
        any::<u64>().prop_map(|epoch| F::ViewRequest { epoch }),
        Just(F::WhoIsContact),
        (view(), any::<bool>(), version()).prop_map(|(view, is_registered, server_list)| {
            F::Contact {
                view: view.summary(),
                is_registered,
                server_list,
            }
        }),
        view().prop_map(|view| F::NotContact {
            view: view.summary()
        }),
        (role(), address(), join()).prop_map(|(role, address, join)| F::Join {
            role,
            address,
            join
        }),
        (node(), join(), view()).prop_map(|(id, join, view)| F::Joined { id, join, view }),
        (join(), refusal()).prop_map(|(join, reason)| F::JoinRefused { join, reason }),
        (node(), address(), join()).prop_map(|(id, address, join)| F::Register {
            id,
            address,
            join
        }),
        join().prop_map(|join| F::Leave { join }),
        (version(), option::of(version()), vec(change(), 0..9)).prop_map(
            |(version, base, changes)| F::ServerNodes {
                version,
                base,
                changes
            }
        ),
        version().prop_map(|known| F::ServerNodesRequest { known }),
        (any::<u64>(), any_change(), option::of(any::<u32>())).prop_map(|(id, change, uid)| {
            let id = GroupChangeId(id);
            F::GroupChangeRequest { id, change, uid }
        }),
        (any::<u64>(), result(any::<u64>(), any_refusal())).prop_map(|(id, result)| {
            let id = GroupChangeId(id);
            F::GroupChangeResponse { id, result }
        }),
    ]
}

pub fn membership_frame() -> impl Strategy<Value = Frame> {
    prop_oneof![vote_frame(), other_frame()].prop_map(Frame::Membership)
}

fn example_member(number: u16) -> Member {
    Member {
        id: NodeId(number),
        name: format!("n{number}").parse().expect("a short name"),
        address: SocketAddr::from(([10, 0, 0, 1], 7400)),
        join: JoinNumber(5),
    }
}

fn example_view(voters: u16) -> VotedView {
    VotedView {
        epoch: 3,
        voters: (1..=voters).map(example_member).collect(),
        next_id: 300,
        group_data: GroupData {
            version: 2,
            bytes: Bytes::from_static(b"ab"),
        },
    }
}

fn decoded(frame: MembershipFrame) -> Result<Frame, FrameError> {
    let mut bytes = Vec::new();
    encode(&Frame::Membership(frame), &mut bytes)?;
    let (mut frames, end) = decode_all(&bytes, &[bytes.len()]);
    end.map(|()| frames.remove(0))
}

#[test]
fn membership_frame_format_is_stable() {
    let ballot = Ballot {
        round: 1,
        proposer: NodeId(2),
    };
    let view = example_view(1);
    let mut bytes = Vec::new();
    let frame = MembershipFrame::Propose { ballot, view };
    encode(&Frame::Membership(frame), &mut bytes).expect("small");
    let expected = [
        0, 0, 0, 26, 1, 13, 2, 1, 2, 3, 1, 1, 2, b'n', b'1', 0, 10, 0, 0, 1, 0xe8, 0x39, 5, 0xac,
        2, 2, 2, b'a', b'b',
    ];
    assert_eq!(bytes[4..], expected[4..]);
    assert_eq!(usize::from(bytes[3]), expected.len() - 4);
}

#[test]
fn lists_and_names_are_bounded() {
    let with_voters = |voters| {
        let view = example_view(voters);
        decoded(MembershipFrame::Commit { view })
    };
    assert!(with_voters(VOTERS_MAX as u16).is_ok());
    assert!(matches!(
        with_voters(VOTERS_MAX as u16 + 1),
        Err(FrameError::Malformed { .. })
    ));
    let with_changes = |count: usize| {
        decoded(MembershipFrame::ServerNodes {
            version: ServerListVersion::default(),
            base: None,
            changes: vec![ServerNodeChange::Removed(NodeId(1)); count],
        })
    };
    assert!(with_changes(SERVER_NODES_MAX).is_ok());
    assert!(matches!(
        with_changes(SERVER_NODES_MAX + 1),
        Err(FrameError::Malformed { .. })
    ));
    assert!("n".repeat(NODE_NAME_BYTES_MAX).parse::<NodeName>().is_ok());
    for wrong in [String::new(), "n".repeat(NODE_NAME_BYTES_MAX + 1)] {
        let error = wrong.parse::<NodeName>().expect_err("no name").to_string();
        assert!(error.contains("choose another name"), "{error}");
    }
}

#[test]
fn impossible_views_are_recognised() {
    let view = example_view(3);
    assert!(view.is_valid());
    let with = |change: fn(&mut VotedView)| {
        let mut changed = view.clone();
        change(&mut changed);
        changed.is_valid()
    };
    assert!(!with(|view| view.voters.clear()));
    assert!(!with(|view| view.voters[2].id = NodeId(1)));
    assert!(!with(
        |view| view.voters[2].name = view.voters[0].name.clone()
    ));
    assert!(!with(|view| view.voters[2].id = NodeId(0)));
    assert!(!with(|view| view.next_id = 3));
    assert!(!with(|view| view.next_id = 65_537));
    assert!(!with(
        |view| view.group_data.bytes = vec![0; GROUP_DATA_BYTES_MAX + 1].into()
    ));
    assert!(with(|view| view.next_id = 65_536));
    // The number after the last epoch must not overflow.
    assert!(with(|view| view.epoch = EPOCH_MAX));
    assert!(!with(|view| view.epoch = EPOCH_MAX + 1));
    assert!(!with(|view| view.group_data.version = u64::MAX));
    assert!(view.summary().is_valid());
    let mut summary = view.summary();
    summary.epoch = u64::MAX;
    assert!(!summary.is_valid());
}

#[test]
fn saved_state_round_trips_and_rejects_other_bytes() {
    let state = MembershipState {
        join: Some(JoinNumber(7)),
        requested_join: Some(JoinNumber(8)),
        server_node_id: Some(NodeId(40)),
        committed: Some(example_view(3)),
        promised: Some(Ballot {
            round: 4,
            proposer: NodeId(2),
        }),
        accepted: Some(AcceptedView {
            ballot: Ballot {
                round: 4,
                proposer: NodeId(2),
            },
            view: example_view(2),
        }),
    };
    let bytes = state.encode().expect("small");
    assert_eq!(MembershipState::decode(&bytes), Ok(state.clone()));
    let mut impossible = state;
    impossible.committed = Some(example_view(0));
    let wrong = [
        Vec::new(),
        vec![9],
        bytes[..bytes.len() - 1].to_vec(),
        [&bytes[..], &[0]].concat(),
        impossible.encode().expect("small"),
    ];
    for bytes in wrong {
        let error = MembershipState::decode(&bytes)
            .expect_err("no state")
            .to_string();
        assert!(error.contains("joins the group anew"), "{error}");
    }
}

proptest! {
    #[test]
    fn any_bytes_give_state_or_error(bytes in vec(any::<u8>(), 0..400)) {
        let with_version = [&[1], &bytes[..]].concat();
        let _ = MembershipState::decode(&bytes);
        if let Ok(state) = MembershipState::decode(&with_version) {
            let again = state.encode().expect("small");
            prop_assert_eq!(MembershipState::decode(&again), Ok(state));
        }
    }
}
