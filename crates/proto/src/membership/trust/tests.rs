//! Tests of frames of nodes that are no voters: hosts with a certificate of the group, which never were members or are no
//! members any more.

use super::super::test_group::{TestGroup, member, ms, name};
use super::super::{Event, RemovalCause, Standing};
use super::EPOCH_STEP_MAX;
use holdfast_wire::NodeId;
use holdfast_wire::group_data::{GroupChange, GroupChangeId, GroupService, ServiceProtocol};
use holdfast_wire::membership_frames::{
    Ballot, EPOCH_MAX, Heartbeat, JoinNumber, JoinRefusal, JoinRole, MembershipFrame,
    ServerListVersion, VotedView,
};

/// Number in the name of a host that has a certificate and is no member.
const GUEST: u16 = 9;

fn view_of(group: &TestGroup, node: u16) -> VotedView {
    let view = group.machines[&node].voted_view();
    view.expect("a member").clone()
}

/// Hands a frame to a node at once.
fn hand(group: &mut TestGroup, node: u16, from: u16, frame: MembershipFrame) {
    group.deliver(from, node, frame);
    group.settle();
}

/// Lets a host ask to be a backup, and answer the heartbeats that it gets for a while. Returns true if node 1 obeys a view
/// with the host as a voter.
fn becomes_voter(group: &mut TestGroup, node: u16) -> bool {
    let join = MembershipFrame::Join {
        role: JoinRole::Backup,
        address: member(node).address,
        join: member(node).join,
    };
    let mut before = group.sent.len();
    hand(group, 1, node, join);
    for _ in 0..100 {
        group.run(ms(5));
        let heartbeats = sent(group, before, 1, node);
        before = group.sent.len();
        for frame in heartbeats {
            if let MembershipFrame::Heartbeat(heartbeat) = frame {
                let grant = MembershipFrame::LeaseGrant {
                    epoch: heartbeat.epoch,
                    boot: heartbeat.boot,
                    sequence: heartbeat.sequence,
                    join: member(node).join,
                };
                hand(group, 1, node, grant);
            }
        }
    }
    group.voters(1).contains(&node)
}

/// The guest's first step to the place of the contact node would be a vote.
#[test]
fn host_becomes_a_voter_only_if_its_certificate_says_so() {
    for certified in [Some(JoinRole::ServerNode), None] {
        let mut group = TestGroup::with_voters(3);
        group.certified.insert(GUEST, certified);
        assert!(!becomes_voter(&mut group, GUEST), "{certified:?}");
        let refusals = sent(&group, 0, 1, GUEST).into_iter();
        let is_refusal = |frame: &MembershipFrame| {
            let reason = JoinRefusal::NotAdmittedAsBackup;
            matches!(frame, MembershipFrame::JoinRefused { reason: given, .. } if *given == reason)
        };
        assert_eq!(refusals.filter(is_refusal).count(), 1);
        let before = view_of(&group, 2);
        for frame in forged_frames(&before, before.epoch + 1) {
            hand(&mut group, 2, GUEST, frame);
        }
        assert_eq!(view_of(&group, 2), before);
        // As a server node the host is welcome.
        let join = MembershipFrame::Join {
            role: JoinRole::ServerNode,
            address: member(GUEST).address,
            join: JoinNumber(1),
        };
        hand(&mut group, 1, GUEST, join);
        group.run(ms(200));
        assert_eq!(group.machine(1).server_nodes().count(), 1);
    }
    let mut group = TestGroup::with_voters(3);
    assert!(becomes_voter(&mut group, GUEST));
}

#[test]
fn voter_with_a_certificate_of_an_earlier_release_joins_again() {
    let mut group = TestGroup::with_voters(3);
    group.certified.insert(3, None);
    group.isolated.insert(3);
    group.run(ms(600));
    assert_eq!(group.voters(1), [1, 2]);
    group.isolated.clear();
    group.run(ms(2_000));
    assert_eq!(group.voters(1), [1, 2, 3]);
    // The backups remember the name too.
    group.isolated.insert(3);
    group.run(ms(600));
    let (now, own) = (group.now, group.id(2));
    assert_eq!(group.machine(1).handle_promote(now, own), Ok(()));
    group.run(ms(600));
    assert_eq!((group.voters(2).len(), group.serving()), (2, vec![2]));
    group.isolated.clear();
    group.run(ms(2_000));
    assert!(group.voters(2).contains(&3));
}

/// Returns the frames that a node has sent to another one since the first `before` frames of all.
fn sent(group: &TestGroup, before: usize, from: u16, to: u16) -> Vec<MembershipFrame> {
    let sent = group.sent[before..].iter();
    let of_pair = sent.filter(|(sender, receiver, _)| (*sender, *receiver) == (from, to));
    of_pair.map(|(_, _, frame)| frame.clone()).collect()
}

/// Returns the frames by which a guest would become contact node, or remove nodes.
fn forged_frames(view: &VotedView, epoch: u64) -> Vec<MembershipFrame> {
    let mut forged = view.clone();
    forged.epoch = epoch;
    forged.next_id = forged.next_id.max(u32::from(GUEST) + 1);
    forged.group_data.version += 1;
    forged.voters.insert(0, member(GUEST));
    let mut alone = forged.summary();
    alone.voters.truncate(1);
    let heartbeat = Heartbeat {
        epoch,
        boot: u64::MAX,
        sequence: u64::MAX,
        has_lease: true,
        server_list: ServerListVersion::default(),
    };
    let ballot = Ballot {
        round: 7,
        proposer: NodeId(GUEST),
    };
    let removal = |rejoin| MembershipFrame::Removed {
        view: alone.clone(),
        rejoin,
    };
    vec![
        MembershipFrame::Commit {
            view: forged.clone(),
        },
        removal(false),
        removal(true),
        MembershipFrame::NotContact {
            view: alone.clone(),
        },
        MembershipFrame::Contact {
            view: forged.summary(),
            is_registered: true,
            server_list: ServerListVersion::default(),
        },
        MembershipFrame::Heartbeat(heartbeat),
        MembershipFrame::Prepare { epoch, ballot },
        MembershipFrame::Propose {
            ballot,
            view: forged,
        },
    ]
}

#[test]
fn guest_moves_no_node_to_another_view() {
    let mut group = TestGroup::with_voters(3);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(1_000));
    let view = view_of(&group, 1);
    let before = group.sent.len();
    for epoch in [view.epoch, view.epoch + 1, view.epoch + 9, u64::MAX] {
        for frame in forged_frames(&view, epoch) {
            for node in [1, 2, 3, 8] {
                hand(&mut group, node, GUEST, frame.clone());
            }
        }
    }
    group.run(ms(1_000));
    for node in [1, 2, 3, 8] {
        assert_eq!(view_of(&group, node), view, "n{node}");
        assert!(!group.has_event(node, |event| matches!(event, Event::Removed { .. })));
    }
    assert_eq!(group.serving(), [1]);
    // A newer epoch makes a node ask the voters that it knows, once in a while.
    let request = MembershipFrame::ViewRequest { epoch: view.epoch };
    let requests = |to| {
        let frames = sent(&group, before, 2, to).into_iter();
        frames.filter(|frame| *frame == request).count()
    };
    assert_eq!([1, 3, GUEST].map(requests), [1, 1, 0]);
}

#[test]
fn node_that_missed_views_follows_when_a_known_voter_confirms() {
    let mut group = TestGroup::with_voters(3);
    let former = group.disks[&3].clone();
    group.start(4, JoinRole::Backup);
    group.run(ms(300));
    // Node 3 has the view from before node 4 joined.
    group.crash(3);
    group.disks.insert(3, former);
    group.isolated.insert(3);
    group.restart(3);
    group.isolated.clear();
    let view = view_of(&group, 1);
    assert!(group.epoch(3) < view.epoch);
    hand(
        &mut group,
        3,
        4,
        MembershipFrame::Commit { view: view.clone() },
    );
    assert_eq!(view_of(&group, 3), view);
}

#[test]
fn epochs_grow_in_bounded_steps_only() {
    let mut group = TestGroup::with_voters(3);
    group.isolated = [1, 2, 3].into();
    let view = view_of(&group, 2);
    let known = view.epoch;
    for epoch in [u64::MAX, EPOCH_MAX + 1, EPOCH_MAX, known + EPOCH_STEP_MAX] {
        let view = VotedView {
            epoch,
            ..view.clone()
        };
        hand(&mut group, 2, 1, MembershipFrame::Commit { view });
        assert_eq!(group.epoch(2), known, "{epoch}");
    }
    let view = VotedView {
        epoch: known + EPOCH_STEP_MAX - 1,
        ..view
    };
    hand(&mut group, 2, 1, MembershipFrame::Commit { view });
    assert_eq!(group.epoch(2), known + EPOCH_STEP_MAX - 1);
}

#[test]
fn views_that_wait_for_the_disk_are_bounded() {
    let mut group = TestGroup::with_voters(3);
    group.slow_disks.insert(2);
    let view = view_of(&group, 2);
    for step in 1..=200 {
        let view = VotedView {
            epoch: view.epoch + step,
            ..view.clone()
        };
        hand(&mut group, 2, 1, MembershipFrame::Commit { view });
    }
    let is_refused = |(node, event): &&(u16, Event)| {
        let reason = "the view cannot be saved";
        *node == 2 && matches!(event, Event::Ignored { reason: given, .. } if *given == reason)
    };
    let refused = group.events.iter().filter(is_refused).count();
    assert!((136..=140).contains(&refused), "{refused}");
}

#[test]
fn joining_node_asks_only_nodes_that_its_seeds_lead_to() {
    let mut group = TestGroup::with_voters(3);
    let view = view_of(&group, 1);
    group.isolated.insert(5);
    group.start(5, JoinRole::Backup);
    group.run(ms(10));
    for frame in forged_frames(&view, view.epoch + 1) {
        hand(&mut group, 5, GUEST, frame);
    }
    let join = group.disks[&5].requested_join.expect("a join");
    let mut forged = view.clone();
    forged.epoch += 1;
    forged.next_id = 100;
    let as_voters = [GUEST, 5].map(member);
    forged.voters = as_voters.to_vec();
    forged.voters[1].join = join;
    hand(
        &mut group,
        5,
        GUEST,
        MembershipFrame::Commit { view: forged },
    );
    group.run(ms(5_000));
    assert_eq!(group.standing(5), Standing::Outside);
    let frames = sent(&group, 0, 5, GUEST);
    assert_eq!(frames, [], "nothing goes to the guest");
    group.isolated.clear();
    group.run(ms(4_000));
    assert_eq!(group.standing(5), Standing::Backup);
}

#[test]
fn only_members_are_told_the_groups_secrets() {
    let mut group = TestGroup::with_voters(2);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(1_000));
    let view = view_of(&group, 1);
    for (node, is_member) in [(2, true), (8, true), (GUEST, false)] {
        let before = group.sent.len();
        hand(
            &mut group,
            1,
            node,
            MembershipFrame::ViewRequest { epoch: 0 },
        );
        let answer = sent(&group, before, 1, node);
        let expected = match is_member {
            true => MembershipFrame::Commit { view: view.clone() },
            false => MembershipFrame::NotContact {
                view: view.summary(),
            },
        };
        assert_eq!(answer, [expected], "n{node}");
    }
}

#[test]
fn server_node_that_is_not_in_the_list_registers_before_it_gets_new_settings() {
    let mut group = TestGroup::with_voters(2);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(1_000));
    let (now, id) = (group.now, group.id(8));
    let name = "web".parse().expect("a name");
    let addresses = vec![[10, 9, 0, 1].into()];
    let service = GroupService::new(name, ServiceProtocol::Tcp, 80, addresses);
    let change = GroupChange::AddService(Box::new(service.clone()));
    let requested = (group.machine(1)).handle_group_change(now, GroupChangeId(1), change, None);
    assert_eq!(requested, Ok(()));
    group.run(ms(55));
    assert_eq!(group.machine(1).handle_server_node_failed(now, id), Ok(()));
    group.run(ms(2_000));
    let settings = group.machine(8).settings().expect("settings");
    assert_eq!(settings.services(), [service]);
    assert_eq!(group.machine(1).server_nodes().count(), 1);
}

#[test]
fn removed_voter_that_asks_for_a_view_joins_again() {
    let mut group = TestGroup::with_voters(3);
    group.isolated.insert(3);
    group.run(ms(600));
    assert_eq!(group.voters(1), [1, 2]);
    group.isolated.clear();
    let epoch = group.epoch(3);
    hand(&mut group, 2, 3, MembershipFrame::ViewRequest { epoch });
    assert!(group.has_event(3, |event| *event
        == Event::Removed {
            cause: RemovalCause::Suspected
        }));
    group.run(ms(1_000));
    assert_eq!(group.voters(3), [1, 2, 3]);
}

#[test]
fn host_that_joins_all_the_time_uses_up_few_numbers() {
    let mut group = TestGroup::with_voters(2);
    group.run(ms(100));
    let join = |role, number| MembershipFrame::Join {
        role,
        address: member(GUEST).address,
        join: JoinNumber(number),
    };
    for number in 0..2_000 {
        hand(&mut group, 1, GUEST, join(JoinRole::ServerNode, number));
        group.run(ms(1));
    }
    // A server node gets its former number again.
    let next_id = view_of(&group, 1).next_id;
    assert!(next_id <= 3 + 16, "{next_id}");
    let before = group.sent.len();
    for number in 10_000..11_000 {
        hand(&mut group, 1, 10, join(JoinRole::Backup, number));
    }
    let refusals = sent(&group, before, 1, 10).into_iter();
    let is_too_often = |frame: &MembershipFrame| {
        let reason = JoinRefusal::TooOften;
        matches!(frame, MembershipFrame::JoinRefused { reason: given, .. } if *given == reason)
    };
    assert_eq!(refusals.filter(is_too_often).count(), 1_000 - 33);
}

#[test]
fn hosts_that_change_their_role_join_no_more_at_once_than_others() {
    let mut group = TestGroup::with_voters(2);
    group.run(ms(100));
    // No vote succeeds, so all hosts wait.
    group.isolated.insert(2);
    let hosts = 100..140;
    for role in [JoinRole::ServerNode, JoinRole::Backup] {
        for host in hosts.clone() {
            let join = MembershipFrame::Join {
                role,
                address: member(host).address,
                join: member(host).join,
            };
            hand(&mut group, 1, host, join);
        }
    }
    let is_busy = |(_, _, frame): &&(u16, u16, MembershipFrame)| {
        let reason = JoinRefusal::Busy;
        matches!(frame, MembershipFrame::JoinRefused { reason: given, .. } if *given == reason)
    };
    let refused = group.sent.iter().filter(is_busy).count();
    assert_eq!(refused, hosts.len() - 16);
}

#[test]
fn number_of_a_server_node_that_is_away_stays_its_own() {
    let mut group = TestGroup::with_voters(2);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(1_000));
    let (id, own) = (group.id(8), group.id(2));
    group.isolated.insert(8);
    let now = group.now;
    assert_eq!(group.machine(1).handle_server_node_failed(now, id), Ok(()));
    group.run(ms(100));
    // The backups remember the name too.
    let now = group.now;
    let promoted = group.machine(1).handle_promote(now, own);
    assert_eq!(promoted, Ok(()));
    group.run(ms(300));
    assert_eq!(group.serving(), [2]);
    let register = |number| MembershipFrame::Register {
        id,
        address: member(number).address,
        join: JoinNumber(7),
    };
    hand(&mut group, 2, GUEST, register(GUEST));
    assert_eq!(group.machine(2).server_nodes().count(), 0);
    group.isolated.clear();
    group.run(ms(12_000));
    assert_eq!(group.id(8), id);
    assert_eq!(group.machine(2).server_nodes().count(), 1);
}

#[test]
fn voter_that_names_the_last_round_does_not_end_the_vote() {
    let mut group = TestGroup::with_voters(3);
    group.isolated.insert(1);
    group.isolated.insert(3);
    group.run(ms(700));
    let epoch = group.epoch(2) + 1;
    for _ in 0..20 {
        let ballot = Ballot {
            round: 1,
            proposer: group.id(2),
        };
        let reject = MembershipFrame::Reject {
            epoch,
            ballot,
            promised_round: u32::MAX,
        };
        hand(&mut group, 2, 1, reject);
        group.run(ms(100));
    }
    let round = group.disks[&2].promised.map(|promised| promised.round);
    assert!(round.is_some_and(|round| round < 1 << 24), "{round:?}");
    group.isolated.remove(&3);
    group.run(ms(4_000));
    assert_eq!(group.serving().len(), 1);
}

/// All voters that a node knows have left while the node was off.
fn group_with_other_voters(returning: JoinRole) -> TestGroup {
    let mut group = TestGroup::with_voters(2);
    group.start(8, returning);
    group.run(ms(1_000));
    group.crash(8);
    for node in [4, 5, 6] {
        group.start(node, JoinRole::Backup);
        group.run(ms(600));
    }
    for node in [1, 2] {
        let now = group.now;
        assert_eq!(group.machine(node).handle_leave(now), Ok(()));
        group.run(ms(1_000));
        group.crash(node);
    }
    assert_eq!(group.voters(4), [4, 5, 6]);
    group
}

#[test]
fn node_whose_voters_were_all_replaced_finds_the_group_by_its_seeds() {
    for role in [JoinRole::Backup, JoinRole::ServerNode] {
        let mut group = group_with_other_voters(role);
        // A stranger cannot use the opportunity.
        group.restart(8);
        let view = view_of(&group, 8);
        for _ in 0..14 {
            for frame in forged_frames(&view, view.epoch + 50) {
                hand(&mut group, 8, GUEST, frame);
            }
            group.run(ms(1_000));
        }
        assert_eq!(group.epoch(8), view.epoch);
        group.run(ms(20_000));
        assert_eq!(group.epoch(8), group.epoch(4));
        assert_eq!(
            group.standing(8),
            match role {
                JoinRole::Backup => Standing::Backup,
                JoinRole::ServerNode => Standing::ServerNode,
            }
        );
    }
}

#[test]
fn node_that_finds_no_voter_says_so_once() {
    let mut group = group_with_other_voters(JoinRole::Backup);
    group.restart(8);
    group.isolated.insert(8);
    group.run(ms(60_000));
    let is_report = |(node, event): &&(u16, Event)| *node == 8 && *event == Event::VotersSilent;
    assert_eq!(group.events.iter().filter(is_report).count(), 1);
}

#[test]
fn member_that_hears_its_voters_believes_no_seed() {
    let mut group = TestGroup::with_voters(3);
    group.machine(2).handle_seed(&name(GUEST));
    let key = GroupChange::SetWeights(Vec::new());
    let now = group.now;
    let requested = group
        .machine(1)
        .handle_group_change(now, GroupChangeId(1), key, None);
    assert_eq!(requested, Ok(()));
    group.run(ms(20_000));
    let view = view_of(&group, 2);
    for frame in forged_frames(&view, view.epoch + 1) {
        hand(&mut group, 2, GUEST, frame);
    }
    assert_eq!(view_of(&group, 2), view);
}
