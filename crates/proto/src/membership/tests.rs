//! Tests of each rule of the membership machine, with machines whose frames arrive at once.

use super::test_group::{TestGroup, member, ms, name};
use super::{Event, OperatorError, RemovalCause, Standing};
use bytes::Bytes;
use holdfast_wire::NodeId;
use holdfast_wire::group_data::{GroupChange, GroupChangeId};
use holdfast_wire::membership_frames::{
    Ballot, Heartbeat, JoinNumber, JoinRole, MembershipFrame, ServerListVersion, VotedView,
};
use std::collections::BTreeSet;

#[test]
fn nodes_join_in_their_roles_with_growing_numbers() {
    let mut group = TestGroup::with_voters(3);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(500));
    assert_eq!([1, 2, 3].map(|node| group.id(node)), [1, 2, 3].map(NodeId));
    assert_eq!(group.standing(1), Standing::ContactNode);
    assert_eq!(
        [2, 3].map(|node| group.standing(node)),
        [Standing::Backup; 2]
    );
    assert_eq!(group.standing(8), Standing::ServerNode);
    assert_eq!(group.serving(), [1]);
    let view = group.machine(1).current_view().expect("a member");
    assert_eq!(
        (view.contact_node, view.backups.clone()),
        (NodeId(1), vec![NodeId(2), NodeId(3)])
    );
    assert_eq!(view.server_nodes, [group.id(8)].into());
    let copy = group.machine(3).current_view().expect("a member");
    assert_eq!(copy.server_nodes, view.server_nodes);
    let own = group.machine(8).current_view().expect("a member");
    assert_eq!((own.epoch, own.contact_node), (view.epoch, NodeId(1)));
    assert_eq!(
        group.machine(3).address_of(&name(2)),
        Some(member(2).address)
    );
}

#[test]
fn backup_replaces_silent_contact_node_which_joins_again() {
    let mut group = TestGroup::with_voters(3);
    let former_id = group.id(1);
    group.crash(1);
    group.run(ms(450));
    assert_eq!((group.voters(2), group.voters(3)), (vec![2, 3], vec![2, 3]));
    assert_eq!(group.serving(), [2]);
    group.restart(1);
    group.run(ms(1_500));
    assert!(group.has_event(1, |event| *event
        == Event::Removed {
            cause: RemovalCause::Suspected
        }));
    assert_eq!(group.voters(1), [2, 3, 1]);
    assert_ne!(group.id(1), former_id);
    assert_eq!(group.serving(), [2]);
}

#[test]
fn next_backup_takes_over_when_the_first_one_is_silent_too() {
    let mut group = TestGroup::with_voters(5);
    group.crash(1);
    group.crash(2);
    group.run(ms(1_500));
    assert_eq!(
        group.voters(4),
        [3, 4, 5],
        "the silent backup is removed later"
    );
    assert_eq!(group.serving(), [3]);
}

#[test]
fn contact_node_removes_silent_backup_and_tells_it() {
    let mut group = TestGroup::with_voters(3);
    group.isolated.insert(2);
    group.run(ms(600));
    assert_eq!(group.voters(1), [1, 3]);
    assert!(group.has_event(1, |event| *event
        == Event::BackupSilent { backup: NodeId(2) }));
    assert_eq!(group.serving(), [1]);
    group.isolated.clear();
    group.run(ms(2_000));
    assert!(group.has_event(2, |event| *event
        == Event::Removed {
            cause: RemovalCause::Suspected
        }));
    assert_eq!(group.voters(2), [1, 3, 2]);
}

#[test]
fn backup_of_two_voters_takes_over_only_by_force() {
    let mut group = TestGroup::with_voters(2);
    let now = group.now;
    assert_eq!(
        group.machine(2).handle_force_takeover(now),
        Err(OperatorError::ContactAlive)
    );
    group.isolated.insert(1);
    group.run(ms(2_000));
    assert!(group.serving().is_empty());
    let is_silent = |event: &&(u16, Event)| matches!(event, (2, Event::ContactSilent { .. }));
    assert_eq!(group.events.iter().filter(is_silent).count(), 1);
    let now = group.now;
    assert_eq!(group.machine(2).handle_force_takeover(now), Ok(()));
    group.run(ms(100));
    assert_eq!((group.serving(), group.voters(2)), (vec![2], vec![2]));
    assert!(group.epoch(2) > 1 << 32);
    group.isolated.clear();
    group.run(ms(3_000));
    assert_eq!((group.serving(), group.voters(1)), (vec![2], vec![2, 1]));
}

#[test]
fn lease_ends_without_a_majority_and_returns_with_it() {
    let mut group = TestGroup::with_voters(2);
    group.isolated.insert(2);
    group.run(ms(180));
    assert_eq!(group.serving(), [1], "the last grant is good for 240 ms");
    group.run(ms(80));
    assert!(group.serving().is_empty());
    let now = group.now;
    assert_eq!(
        group.machine(1).handle_remove(now, NodeId(2)),
        Err(OperatorError::NoLease)
    );
    group.isolated.clear();
    group.run(ms(100));
    assert_eq!(group.serving(), [1]);
}

#[test]
fn single_voter_renews_alone_and_joining_backup_interrupts_nothing() {
    let mut group = TestGroup::with_voters(1);
    group.run(ms(1_000));
    assert_eq!(group.serving(), [1]);
    group.start(2, JoinRole::Backup);
    for _ in 0..300 {
        group.run(ms(1));
        assert_eq!(group.serving(), [1]);
    }
    assert_eq!(group.voters(2), [1, 2]);
}

#[test]
fn short_stops_change_no_view_and_long_sleep_accuses_nobody() {
    let mut group = TestGroup::with_voters(3);
    let epoch = group.epoch(1);
    for node in [1, 2, 3, 1, 2, 3] {
        group.stopped.insert(node);
        group.run(ms(100));
        group.stopped.clear();
        group.run(ms(100));
    }
    // A backup and then all daemons sleep for long: whoever wakes up first hears the others before accusing them.
    group.stopped = [1, 2, 3].into();
    group.run(ms(700));
    group.stopped.clear();
    group.run(ms(500));
    assert_eq!((group.epoch(1), group.serving()), (epoch, vec![1]));
}

#[test]
fn no_vote_leaves_a_node_before_the_disk_has_it() {
    let mut group = TestGroup::with_voters(3);
    group.slow_disks = [2].into();
    let votes = |group: &TestGroup| {
        let is_vote = |frame: &MembershipFrame| {
            matches!(
                frame,
                MembershipFrame::Accept { .. } | MembershipFrame::Promise { .. }
            )
        };
        let sent = group.sent.iter();
        sent.filter(|(from, _, frame)| *from == 2 && is_vote(frame))
            .count()
    };
    let before = votes(&group);
    let now = group.now;
    let change = GroupChange::SetWeights(Vec::new());
    let requested = (group.machine(1)).handle_group_change(now, GroupChangeId(1), change, None);
    assert_eq!(requested, Ok(()));
    group.run(ms(30));
    assert_eq!(votes(&group), before);
    assert_eq!(group.voters(3), [1, 2, 3], "a majority of two has decided");
    let view = group.machine(3).voted_view().expect("a member").clone();
    assert_eq!(view.group_data.version, 1);
    let settings = group.machine(3).settings();
    assert!(settings.is_some_and(|settings| settings.has_change(GroupChangeId(1))));
    assert_ne!(group.epoch(2), view.epoch);
    group.slow_disks.clear();
    group.finish_save(2);
    group.run(ms(100));
    assert_eq!(group.epoch(2), view.epoch);
}

#[test]
fn failed_save_stops_votes_until_a_later_one_succeeds() {
    let mut group = TestGroup::with_voters(3);
    group.slow_disks = [2].into();
    let now = group.now;
    let change = GroupChange::SetWeights(Vec::new());
    let requested = (group.machine(1)).handle_group_change(now, GroupChangeId(1), change, None);
    assert_eq!(requested, Ok(()));
    group.run(ms(5));
    group.fail_save(2);
    group.run(ms(100));
    assert!(group.has_event(2, |event| matches!(event, Event::SaveFailed { .. })));
    group.slow_disks.clear();
    group.run(ms(1_500));
    assert_eq!(group.epoch(2), group.epoch(1));
}

#[test]
fn restarted_voter_abstains_for_one_promise() {
    let mut group = TestGroup::with_voters(3);
    group.crash(2);
    group.restart(2);
    let epoch = group.epoch(1) + 1;
    let ballot = Ballot {
        round: 9,
        proposer: NodeId(3),
    };
    let prepare = MembershipFrame::Prepare { epoch, ballot };
    let has_promised = |group: &TestGroup| {
        let is_promise = |frame: &MembershipFrame| matches!(frame, MembershipFrame::Promise { .. });
        group
            .sent
            .iter()
            .any(|(from, _, frame)| *from == 2 && is_promise(frame))
    };
    group.isolated.insert(1);
    let now = group.now;
    group
        .machine(2)
        .handle_frame(now, &name(3), prepare.clone());
    group.settle();
    assert!(!has_promised(&group));
    group.isolated.insert(3);
    group.run(ms(251));
    let now = group.now;
    group.machine(2).handle_frame(now, &name(3), prepare);
    group.settle();
    assert!(has_promised(&group));
}

#[test]
fn voter_with_a_promise_to_the_contact_node_rejects_other_proposers() {
    let mut group = TestGroup::with_voters(3);
    group.run(ms(60));
    let epoch = group.epoch(1) + 1;
    let ballot = Ballot {
        round: 1,
        proposer: NodeId(3),
    };
    let now = group.now;
    let prepare = MembershipFrame::Prepare { epoch, ballot };
    group.machine(2).handle_frame(now, &name(3), prepare);
    let mut view = group.machine(2).voted_view().expect("a member").clone();
    view.epoch += 1;
    view.voters.remove(0);
    let propose = MembershipFrame::Propose { ballot, view };
    group.machine(2).handle_frame(now, &name(3), propose);
    group.settle();
    let is_reject = |frame: &MembershipFrame| matches!(frame, MembershipFrame::Reject { .. });
    let rejects = group
        .sent
        .iter()
        .filter(|(from, _, frame)| *from == 2 && is_reject(frame));
    assert_eq!(rejects.count(), 2);
}

/// The first backup and the contact node die after one voter has accepted a view: the next one must adopt it.
#[test]
fn successor_adopts_the_view_that_a_voter_has_accepted() {
    let mut group = TestGroup::with_voters(3);
    group.run(ms(60));
    let mut view = group.machine(1).voted_view().expect("a member").clone();
    view.epoch += 1;
    view.group_data.version += 1;
    view.group_data.bytes = Bytes::from_static(b"decided");
    let ballot = Ballot {
        round: 0,
        proposer: NodeId(1),
    };
    group.crash(1);
    let now = group.now;
    let propose = MembershipFrame::Propose {
        ballot,
        view: view.clone(),
    };
    group.machine(3).handle_frame(now, &name(1), propose);
    group.settle();
    group.run(ms(2_000));
    assert_eq!(group.voters(2)[0], group.serving()[0]);
    let committed = group.machine(2).voted_view().expect("a member");
    assert_eq!(committed.group_data, view.group_data);
    assert!(committed.epoch > view.epoch && committed.voter(&name(1)).is_none());
}

#[test]
fn leaving_contact_node_hands_its_role_over() {
    let mut group = TestGroup::with_voters(3);
    let now = group.now;
    assert_eq!(group.machine(1).handle_leave(now), Ok(()));
    group.run(ms(200));
    assert!(group.has_event(1, |event| *event
        == Event::Removed {
            cause: RemovalCause::Left
        }));
    assert_eq!(group.standing(1), Standing::Outside);
    assert_eq!((group.voters(2), group.serving()), (vec![2, 3], vec![2]));
    group.run(ms(2_000));
    assert_eq!(group.voters(2), [2, 3], "the node does not come back");
    let now = group.now;
    assert_eq!(group.machine(3).handle_leave(now), Ok(()));
    group.run(ms(300));
    assert_eq!(group.voters(2), [2]);
    let now = group.now;
    assert_eq!(
        group.machine(2).handle_leave(now),
        Err(OperatorError::LastVoter)
    );
}

#[test]
fn server_node_learns_the_new_voters_from_a_voter_that_has_left() {
    let mut group = TestGroup::with_voters(1);
    group.start(4, JoinRole::ServerNode);
    group.run(ms(200));
    assert_eq!(group.voters(4), [1]);
    // The server node misses all views with another voter than the one that leaves.
    group.deaf = [4].into();
    group.start(2, JoinRole::Backup);
    group.run(ms(200));
    let now = group.now;
    assert_eq!(group.machine(1).handle_leave(now), Ok(()));
    group.run(ms(300));
    assert_eq!((group.voters(2), group.voters(4)), (vec![2], vec![1]));
    group.deaf.clear();
    // Sooner than the node believes whoever answers at the addresses that an operator named.
    group.run(ms(9_000));
    assert_eq!(group.voters(4), [2]);
}

#[test]
fn each_view_has_a_voter_of_the_view_before() {
    let mut group = TestGroup::with_store(2);
    // A backup that leaves has to replace the contact node first.
    group.crash(1);
    let now = group.now;
    assert_eq!(group.machine(2).handle_leave(now), Ok(()));
    group.run(ms(2_000));
    assert_eq!(group.voters(2), [2]);
    group.events.clear();
    group.start(3, JoinRole::Backup);
    group.run(ms(1_000));
    assert_eq!(
        (group.standing(2), group.voters(3)),
        (Standing::Outside, vec![3])
    );
    let views = group.events.iter().filter_map(|event| match event {
        (3, Event::View(view)) => Some(1 + view.backups.len()),
        _ => None,
    });
    let voters: BTreeSet<usize> = views.collect();
    assert_eq!(voters, [1, 2].into());
}

#[test]
fn promoted_backup_becomes_contact_node_and_keeps_its_number() {
    let mut group = TestGroup::with_voters(3);
    let id = group.id(3);
    let now = group.now;
    let elsewhere = Err(OperatorError::NotContactNode(Some(name(1))));
    assert_eq!(group.machine(2).handle_promote(now, id), elsewhere);
    assert_eq!(
        group.machine(1).handle_promote(now, NodeId(99)),
        Err(OperatorError::UnknownNode(NodeId(99)))
    );
    assert_eq!(group.machine(1).handle_promote(now, id), Ok(()));
    group.settle();
    assert!(group.serving().len() <= 1);
    group.run(ms(200));
    assert_eq!((group.voters(1), group.serving()), (vec![3, 2, 1], vec![3]));
    assert_eq!(group.id(3), id);
}

#[test]
fn promotion_is_decided_also_if_saves_are_slow() {
    for save_ms in [50, 200, 400, 700] {
        let mut group = TestGroup::with_voters(3);
        group.save_duration = ms(save_ms);
        let (now, id) = (group.now, group.id(2));
        group
            .machine(1)
            .handle_promote(now, id)
            .expect("has a lease");
        group.run(ms(8_000));
        assert_eq!(group.serving().len(), 1, "{save_ms} ms");
        assert!(group.epoch(1) > 3, "{save_ms} ms");
    }
}

#[test]
fn voters_that_save_an_acceptance_do_not_refuse_it() {
    let mut group = TestGroup::with_voters(3);
    group.slow_disks.extend([2, 3]);
    let (now, id) = (group.now, group.id(2));
    group
        .machine(1)
        .handle_promote(now, id)
        .expect("has a lease");
    group.settle();
    group.sent.clear();
    group.run(ms(150));
    let is_reject = |frame: &MembershipFrame| matches!(frame, MembershipFrame::Reject { .. });
    assert!(!group.sent.iter().any(|(_, _, frame)| is_reject(frame)));
    group.slow_disks.clear();
    for node in [2, 3] {
        group.finish_save(node);
    }
    group.settle();
    assert_eq!(group.voters(1), [2, 3, 1]);
}

#[test]
fn removed_node_stays_outside() {
    let mut group = TestGroup::with_voters(3);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(500));
    let (server_node, now) = (group.id(8), group.now);
    for id in [server_node, NodeId(3)] {
        assert_eq!(group.machine(1).handle_remove(now, id), Ok(()));
    }
    assert_eq!(
        group.machine(1).handle_remove(now, NodeId(1)),
        Err(OperatorError::IsContactNode(NodeId(1)))
    );
    group.run(ms(3_000));
    for node in [3, 8] {
        assert!(group.has_event(node, |event| *event
            == Event::Removed {
                cause: RemovalCause::Operator
            }));
        assert_eq!(group.standing(node), Standing::Outside);
    }
    assert_eq!(group.voters(1), [1, 2]);
    assert_eq!(group.machine(1).server_nodes().count(), 0);
}

#[test]
fn voter_that_lost_its_disk_gets_a_new_number() {
    let mut group = TestGroup::with_voters(3);
    group.crash(2);
    group.disks.remove(&2);
    group.restart(2);
    group.run(ms(1_000));
    assert_eq!(group.voters(1), [1, 3, 2]);
    assert_eq!(group.id(2), NodeId(4));
}

/// A late repetition of a request must not make a voter of a number that the node has given up: the contact node of two voters
/// could neither serve nor remove that one.
#[test]
fn removed_node_answers_to_the_number_that_a_late_request_admits_it_by() {
    let mut group = TestGroup::with_voters(3);
    let join = group.disks[&2].join.expect("a voter");
    group.stopped.insert(2);
    group.run(ms(600));
    let now = group.now;
    assert_eq!(group.machine(1).handle_remove(now, NodeId(3)), Ok(()));
    group.run(ms(100));
    assert_eq!(group.voters(1), [1]);
    let (role, address) = (JoinRole::Backup, member(2).address);
    let request = MembershipFrame::Join {
        role,
        address,
        join,
    };
    group.deliver(2, 1, request);
    // The node answers a heartbeat, then hears of its removal, and then of the view with it.
    group.stopped.clear();
    group.run(ms(2_000));
    assert!(group.has_event(2, |event| *event
        == Event::Removed {
            cause: RemovalCause::Suspected
        }));
    assert_eq!((group.serving(), group.voters(2)), (vec![1], vec![1, 2]));
    assert_eq!(group.id(2), NodeId(4));
}

/// The node may have voted for the view that has removed it, and whose contact node has a lease.
#[test]
fn removed_node_grants_no_lease_in_its_former_view() {
    let mut group = TestGroup::with_voters(3);
    let former = group.machine(1).voted_view().cloned().expect("a member");
    group.isolated = [1, 2, 3].into();
    let mut view = former.summary();
    view.epoch += 1;
    view.voters = vec![view.voters[2].clone()];
    let rejoin = true;
    group.deliver(3, 2, MembershipFrame::Removed { view, rejoin });
    group.settle();
    assert_eq!(group.standing(2), Standing::Outside);
    let mut grants = |is_restarted: bool, epoch| {
        if is_restarted {
            group.restart(2);
        }
        group.sent.clear();
        let heartbeat = Heartbeat {
            epoch,
            boot: 1,
            sequence: 1_000,
            has_lease: false,
            server_list: ServerListVersion::default(),
        };
        group.deliver(1, 2, MembershipFrame::Heartbeat(heartbeat));
        group.settle();
        let is_grant =
            |frame: &MembershipFrame| matches!(frame, MembershipFrame::LeaseGrant { .. });
        (group.sent.iter()).any(|(from, _, frame)| *from == 2 && is_grant(frame))
    };
    for is_restarted in [false, true] {
        assert!(!grants(is_restarted, former.epoch - 1));
        assert!(!grants(is_restarted, former.epoch));
        assert!(grants(is_restarted, former.epoch + 1));
    }
}

#[test]
fn removed_node_obeys_no_view_from_before_its_removal() {
    let mut group = TestGroup::with_voters(3);
    group.stopped.insert(2);
    let (now, change) = (group.now, GroupChange::SetWeights(Vec::new()));
    let requested = (group.machine(1)).handle_group_change(now, GroupChangeId(1), change, None);
    assert_eq!(requested, Ok(()));
    group.run(ms(20));
    let former = group.machine(1).voted_view().cloned().expect("a member");
    assert_eq!(former.epoch, group.epoch(2) + 1);
    assert!(former.voter(&name(2)).is_some());
    group.run(ms(600));
    let summary = (group.machine(1).voted_view()).map(VotedView::summary);
    let view = summary
        .filter(|view| view.voters.len() == 2)
        .expect("a member");
    group.isolated.insert(2);
    let rejoin = true;
    group.deliver(1, 2, MembershipFrame::Removed { view, rejoin });
    group.settle();
    group.restart(2);
    group.deliver(1, 2, MembershipFrame::Commit { view: former });
    group.settle();
    assert_eq!(group.standing(2), Standing::Outside);
    (group.stopped, group.isolated) = Default::default();
    group.run(ms(2_000));
    assert_eq!(group.voters(2), [1, 3, 2]);
}

#[test]
fn removed_node_obeys_no_view_that_waited_for_its_disk() {
    let mut group = TestGroup::with_voters(3);
    group.slow_disks.insert(2);
    let (now, change) = (group.now, GroupChange::SetWeights(Vec::new()));
    let requested = (group.machine(1)).handle_group_change(now, GroupChangeId(1), change, None);
    assert_eq!(requested, Ok(()));
    group.run(ms(20));
    let newer = group.machine(1).voted_view().cloned().expect("a member");
    let epoch = newer.epoch;
    assert_eq!((epoch, group.id(2)), (group.epoch(2) + 1, NodeId(2)));
    // The group removes the node, and takes it in again by a repeated request, before the disk has the view.
    let [mut without, mut with] = [newer.clone(), newer];
    (without.epoch, with.epoch, with.next_id) = (epoch + 1, epoch + 2, 5);
    without.voters.retain(|voter| voter.name != name(2));
    let own = (with.voters.iter_mut()).find(|voter| voter.name == name(2));
    own.expect("a voter").id = NodeId(4);
    let (view, rejoin) = (without.summary(), true);
    group.deliver(1, 2, MembershipFrame::Removed { view, rejoin });
    group.deliver(1, 2, MembershipFrame::Commit { view: with });
    group.isolated.insert(2);
    group.events.clear();
    group.slow_disks.clear();
    group.run(ms(20));
    assert_eq!((group.epoch(2), group.id(2)), (epoch + 2, NodeId(4)));
    let joined = group.events.iter().filter_map(|(of, event)| match event {
        Event::Joined { id } if *of == 2 => Some(*id),
        _ => None,
    });
    assert_eq!(joined.collect::<Vec<_>>(), [NodeId(4)]);
}

#[test]
fn frames_of_strangers_and_of_old_epochs_change_nothing() {
    let mut group = TestGroup::with_voters(3);
    group.run(ms(60));
    let before = group.machine(2).voted_view().cloned();
    let view = before.clone().expect("a member");
    let later = VotedView {
        epoch: view.epoch + 1,
        ..view.clone()
    };
    let impossible = VotedView {
        next_id: 1,
        ..later.clone()
    };
    let ballot = Ballot {
        round: 7,
        proposer: NodeId(3),
    };
    let heartbeat = Heartbeat {
        epoch: view.epoch,
        boot: 99,
        sequence: 99,
        has_lease: true,
        server_list: ServerListVersion::default(),
    };
    let (epoch, now) = (view.epoch + 1, group.now);
    let frames = [
        (9, MembershipFrame::Prepare { epoch, ballot }),
        (
            9,
            MembershipFrame::Propose {
                ballot,
                view: later.clone(),
            },
        ),
        (9, MembershipFrame::Commit { view: later }),
        (
            1,
            MembershipFrame::Commit {
                view: impossible.clone(),
            },
        ),
        (1, MembershipFrame::Commit { view }),
        (
            3,
            MembershipFrame::Propose {
                ballot,
                view: impossible,
            },
        ),
        (3, MembershipFrame::Accept { epoch, ballot }),
        (3, MembershipFrame::Heartbeat(heartbeat)),
        (
            3,
            MembershipFrame::Joined {
                id: NodeId(2),
                join: JoinNumber(0),
                view: before.clone().expect("a member"),
            },
        ),
        (2, MembershipFrame::WhoIsContact),
    ];
    group.events.clear();
    for (from, frame) in &frames {
        group
            .machine(2)
            .handle_frame(now, &name(*from), frame.clone());
    }
    group.settle();
    let ignored = group
        .events
        .iter()
        .filter(|(node, event)| *node == 2 && matches!(event, Event::Ignored { .. }));
    assert_eq!(ignored.count(), frames.len());
    assert_eq!(group.machine(2).voted_view().cloned(), before);
}

#[test]
fn joins_under_way_are_bounded() {
    let mut group = TestGroup::with_voters(1);
    for node in 100..300 {
        let frame = MembershipFrame::Join {
            role: JoinRole::Backup,
            address: member(node).address,
            join: JoinNumber(u64::from(node)),
        };
        group.deliver(node, 1, frame);
    }
    group.settle();
    let is_refused = |frame: &MembershipFrame| matches!(frame, MembershipFrame::JoinRefused { .. });
    let refused = group
        .sent
        .iter()
        .filter(|(_, _, frame)| is_refused(frame))
        .count();
    assert_eq!(refused, 200 - 16);
    // Nodes that never answer a heartbeat are forgotten.
    group.run(ms(6_000));
    assert_eq!((group.epoch(1), group.serving()), (1, vec![1]));
}

/// A link that passes frames in one direction only must not leave the group without a contact node.
#[test]
fn contact_node_that_hears_no_answers_is_replaced() {
    let mut group = TestGroup::with_voters(3);
    group.deaf.insert(1);
    group.run(ms(3_000));
    assert_eq!(group.serving(), [2]);
    group.deaf.clear();
    group.run(ms(1_000));
    assert_eq!((group.serving(), group.voters(1)), (vec![2], vec![2, 3, 1]));
}

#[test]
fn backup_whose_view_is_late_grants_its_contact_nodes_lease() {
    let mut group = TestGroup::with_voters(3);
    let heartbeat = MembershipFrame::Heartbeat(Heartbeat {
        epoch: group.epoch(3) + 1,
        boot: u64::MAX,
        sequence: 1,
        has_lease: true,
        server_list: ServerListVersion::default(),
    });
    for (from, is_granted) in [(1, true), (2, false)] {
        group.sent.clear();
        let now = group.now;
        (group.machine(3)).handle_frame(now, &name(from), heartbeat.clone());
        group.settle();
        let frames = group.sent.iter().filter(|(sender, _, _)| *sender == 3);
        let frames: Vec<&MembershipFrame> = frames.map(|(_, _, frame)| frame).collect();
        let has = |is_it: fn(&MembershipFrame) -> bool| frames.iter().any(|frame| is_it(frame));
        assert!(has(|frame| matches!(
            frame,
            MembershipFrame::ViewRequest { .. }
        )));
        let is_grant =
            |frame: &MembershipFrame| matches!(frame, MembershipFrame::LeaseGrant { .. });
        assert_eq!(has(is_grant), is_granted, "{from}: {frames:?}");
    }
}

#[test]
fn restarted_voter_heeds_the_ballot_that_it_promised() {
    let mut group = TestGroup::with_voters(3);
    group.isolated = [1, 2, 3].into();
    group.run(ms(300));
    let epoch = group.epoch(2) + 1;
    let [high, low] = [9, 4].map(|round| Ballot {
        round,
        proposer: NodeId(3),
    });
    let prepare = |ballot| MembershipFrame::Prepare { epoch, ballot };
    let now = group.now;
    group.machine(2).handle_frame(now, &name(3), prepare(high));
    group.settle();
    assert_eq!(group.disks[&2].promised, Some(high));
    group.crash(2);
    group.restart(2);
    group.run(ms(260));
    group.sent.clear();
    let now = group.now;
    group.machine(2).handle_frame(now, &name(3), prepare(low));
    group.settle();
    let is_answer = |frame: &MembershipFrame| matches!(frame, MembershipFrame::Reject { ballot, promised_round: 9.., .. } if *ballot == low);
    let answers = group.sent.iter().filter(|(from, _, _)| *from == 2);
    assert!(
        answers.clone().any(|(_, _, frame)| is_answer(frame)),
        "{:?}",
        group.sent
    );
}
