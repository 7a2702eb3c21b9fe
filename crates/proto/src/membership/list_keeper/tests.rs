//! Tests of the list of server nodes, its copies, and what both cost.

use super::super::Event;
use super::super::test_group::{TestGroup, member, ms, name};
use holdfast_wire::NodeId;
use holdfast_wire::group_data::{GroupChange, GroupChangeId};
use holdfast_wire::membership_frames::{JoinNumber, JoinRole, MembershipFrame};

#[test]
fn failed_server_node_is_dropped_and_registers_again() {
    let mut group = TestGroup::with_voters(2);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(500));
    let (id, now) = (group.id(8), group.now);
    assert_eq!(group.machine(1).handle_server_node_failed(now, id), Ok(()));
    group.run(ms(100));
    assert_eq!(group.machine(2).server_nodes().count(), 0);
    group.run(ms(6_000));
    assert_eq!(group.machine(1).server_nodes().count(), 1);
    assert_eq!(group.machine(2).server_nodes().count(), 1);
    assert_eq!(group.id(8), id);
}

#[test]
fn silent_server_node_is_dropped_after_a_while_and_registers_again() {
    let mut group = TestGroup::with_voters(2);
    for node in [8, 9] {
        group.start(node, JoinRole::ServerNode);
    }
    group.run(ms(500));
    group.isolated.insert(8);
    group.run(ms(9_000));
    assert_eq!(group.machine(1).server_nodes().count(), 2);
    group.run(ms(8_000));
    assert!(group.has_event(1, |event| *event
        == Event::ServerNodeSilent { node: name(8) }));
    for node in [1, 2, 9] {
        assert_eq!(known_server_nodes(&group, node), [9], "n{node}");
    }
    group.isolated.clear();
    group.run(ms(6_000));
    for node in [1, 2, 9] {
        assert_eq!(known_server_nodes(&group, node), [8, 9], "n{node}");
    }
}

/// Frames of the contact node keep a server node from registering: the contact node asks before it drops the node.
#[test]
fn living_server_nodes_are_never_dropped_for_silence() {
    let mut group = TestGroup::with_voters(2);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(500));
    for change in 0..20 {
        let (id, now) = (GroupChangeId(change), group.now);
        let weights = GroupChange::SetWeights(Vec::new());
        assert_eq!(
            group.machine(1).handle_group_change(now, id, weights, None),
            Ok(())
        );
        // The daemon of the contact node sleeps now and then.
        group.stopped.insert(1);
        group.run(ms(20));
        group.stopped.clear();
        group.run(ms(1_980));
    }
    group.run(ms(20_000));
    assert!(!group.has_event(1, |event| matches!(event, Event::ServerNodeSilent { .. })));
    assert_eq!(known_server_nodes(&group, 1), [8]);
}

#[test]
fn server_nodes_follow_a_new_contact_node() {
    let mut group = TestGroup::with_voters(3);
    group.start(8, JoinRole::ServerNode);
    group.start(9, JoinRole::ServerNode);
    group.run(ms(1_000));
    let ids = [8, 9].map(|node| group.id(node));
    group.crash(1);
    group.run(ms(3_000));
    let view = group.machine(2).current_view().expect("a member");
    assert_eq!(view.server_nodes, ids.into());
    for node in [8, 9] {
        let own = group.machine(node).current_view().expect("a member");
        assert_eq!((own.contact_node, own.epoch), (NodeId(2), view.epoch));
    }
    assert_eq!(group.machine(8).server_nodes().count(), 2);
}

/// Returns the names' numbers of the server nodes that a node knows.
fn known_server_nodes(group: &TestGroup, node: u16) -> Vec<u16> {
    let members = group.machines[&node].server_nodes();
    let number = |name: &str| name[1..].parse().expect("a name of a test");
    let mut numbers: Vec<u16> = members.map(|member| number(member.name.as_str())).collect();
    numbers.sort_unstable();
    numbers
}

#[test]
fn server_nodes_learn_of_those_that_join_later_or_are_removed() {
    let mut group = TestGroup::with_voters(3);
    for node in [8, 9, 10] {
        group.start(node, JoinRole::ServerNode);
        group.run(ms(2_500));
    }
    for node in [8, 9, 10] {
        assert_eq!(known_server_nodes(&group, node), [8, 9, 10], "n{node}");
    }
    let (id, now) = (group.id(9), group.now);
    assert_eq!(group.machine(1).handle_remove(now, id), Ok(()));
    group.run(ms(200));
    assert_eq!(known_server_nodes(&group, 8), [8, 10]);
    // A restarted daemon has no copy.
    group.crash(10);
    group.restart(10);
    group.run(ms(100));
    assert_eq!(known_server_nodes(&group, 10), [8, 10]);
    // A server node that was cut off learns when it registers.
    group.isolated.insert(10);
    group.start(11, JoinRole::ServerNode);
    group.run(ms(4_000));
    group.isolated.clear();
    group.run(ms(6_000));
    assert_eq!(known_server_nodes(&group, 10), [8, 10, 11]);
}

/// Server nodes that come and go all the time cost the others two messages a second.
#[test]
fn changing_list_of_server_nodes_costs_few_messages() {
    let mut group = TestGroup::with_voters(2);
    for node in 100..150 {
        group.start(node, JoinRole::ServerNode);
    }
    group.run(ms(8_000));
    group.sent.clear();
    for _ in 0..100 {
        let (id, now) = (group.id(100), group.now);
        assert_eq!(group.machine(1).handle_server_node_failed(now, id), Ok(()));
        let frame = MembershipFrame::Register {
            id,
            address: member(100).address,
            join: JoinNumber(7),
        };
        group.machine(1).handle_frame(now, &name(100), frame);
        group.run(ms(100));
    }
    let is_of_node = |of: u16| {
        let sent = group.sent.iter();
        sent.filter(move |(from, to, _)| *from == of || *to == of)
            .count()
    };
    for node in 101..150 {
        assert!(is_of_node(node) <= 20, "n{node}: {}", is_of_node(node));
    }
    group.run(ms(2_500));
    let list = known_server_nodes(&group, 1);
    assert_eq!(known_server_nodes(&group, 149), list);
    // Each change is sent once, not the whole list.
    let entries = group.sent.iter().map(|(_, to, frame)| match frame {
        MembershipFrame::ServerNodes { changes, .. } if *to == 149 => changes.len(),
        _ => 0,
    });
    assert!(entries.sum::<usize>() <= 260);
}

#[test]
fn restarted_contact_node_gets_the_list_of_server_nodes_back() {
    let mut group = TestGroup::with_voters(2);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(1_000));
    group.crash(1);
    group.run(ms(50));
    group.restart(1);
    group.run(ms(400));
    assert_eq!(group.serving(), [1]);
    assert_eq!(group.machine(1).server_nodes().count(), 1);
    assert_eq!(group.machine(2).server_nodes().count(), 1);
}

/// A thousand server nodes: the contact node handles at most two messages a second for each of them, also when the
/// contact node changes.
#[test]
fn server_nodes_cost_the_contact_node_few_messages() {
    let mut group = TestGroup::with_voters(3);
    let count = 1_000;
    for node in 100..100 + count {
        group.start(node, JoinRole::ServerNode);
    }
    group.run(ms(8_000));
    assert_eq!(group.machine(1).server_nodes().count(), usize::from(count));
    let is_of_server_node = |from: &u16, to: &u16| *from >= 100 || *to >= 100;
    let mut messages = |time| {
        group.sent.clear();
        group.run(ms(time));
        let sent = group.sent.iter();
        sent.filter(|(from, to, _)| is_of_server_node(from, to))
            .count()
    };
    let at_rest = messages(5_000);
    assert!(at_rest <= 2 * usize::from(count) + 100, "{at_rest} in 5 s");
    group.crash(1);
    group.sent.clear();
    group.run(ms(3_000));
    let sent = group.sent.iter();
    let at_takeover = sent
        .filter(|(from, to, _)| is_of_server_node(from, to))
        .count();
    assert!(
        at_takeover <= 6 * usize::from(count),
        "{at_takeover} in 3 s"
    );
    let contact = group
        .machine(2)
        .current_view()
        .expect("a member")
        .contact_node;
    let own = group
        .machine(100 + count - 1)
        .current_view()
        .expect("a member");
    assert_eq!((own.contact_node, contact), (NodeId(2), NodeId(2)));
}
