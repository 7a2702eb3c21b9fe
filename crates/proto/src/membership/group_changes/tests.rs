//! Tests of changes of the group's settings, with machines whose frames arrive at once.

use super::super::test_group::{TestGroup, ms, name};
use super::super::{Event, GroupChangeFailure, OperatorError};
use super::{PENDING_MAX, PENDING_OF_NODE_MAX};
use bytes::Bytes;
use holdfast_wire::group_data::{
    GroupChange, GroupChangeId, GroupChangeRefusal, GroupService, ServiceName, ServiceProtocol,
};
use holdfast_wire::membership_frames::{JoinRole, MembershipFrame, VotedView};

fn service_name(text: &str) -> ServiceName {
    text.parse().expect("a name")
}

fn add(text: &str, number: u8) -> GroupChange {
    let addresses = vec![[10, 9, 0, number].into()];
    let service = GroupService::new(service_name(text), ServiceProtocol::Tcp, 80, addresses);
    GroupChange::AddService(Box::new(service))
}

/// Requests a change at a node.
fn request(group: &mut TestGroup, node: u16, id: u64, change: GroupChange) {
    let now = group.now;
    let machine = group.machine(node);
    let result = machine.handle_group_change(now, GroupChangeId(id), change, Some(1000));
    assert_eq!(result, Ok(()));
    group.settle();
}

/// Returns the result of a request at a node.
fn result_at(group: &TestGroup, node: u16, id: u64) -> Option<Result<u64, GroupChangeFailure>> {
    let mut results = group.events.iter().filter_map(|(of, event)| match event {
        Event::GroupChangeEnded { id: ended, result } if *of == node && ended.0 == id => {
            Some(result.clone())
        }
        _ => None,
    });
    let result = results.next();
    assert_eq!(results.next(), None, "a request ends once");
    result
}

fn services(group: &mut TestGroup, node: u16) -> Vec<String> {
    let settings = group.machine(node).settings().expect("settings");
    let names = settings
        .services()
        .iter()
        .map(|service| service.name.as_str());
    names.map(str::to_owned).collect()
}

#[test]
fn every_node_can_request_a_change() {
    let mut group = TestGroup::with_voters(3);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(500));
    for (node, name) in [(1, "a"), (2, "b"), (8, "c")] {
        request(&mut group, node, node.into(), add(name, node as u8));
    }
    group.run(ms(100));
    for node in [1, 2, 8] {
        assert!(matches!(result_at(&group, node, node.into()), Some(Ok(_))));
    }
    // A server node learns of new settings at a random time within a second.
    group.run(ms(1_500));
    for node in [1, 2, 3, 8] {
        assert_eq!(services(&mut group, node), ["a", "b", "c"]);
    }
    let from_backup = |event: &Event| {
        matches!(event, Event::GroupChangeDecided { from, uid: Some(1000), result: Ok(_), .. }
            if *from == name(2))
    };
    assert!(group.has_event(1, from_backup));
}

#[test]
fn changes_that_wait_together_share_a_vote() {
    let mut group = TestGroup::with_voters(3);
    let epoch = group.epoch(1);
    group.slow_disks = [1].into();
    for number in 1..=4 {
        request(
            &mut group,
            2,
            number,
            add(&format!("s{number}"), number as u8),
        );
    }
    group.slow_disks.clear();
    group.finish_save(1);
    group.run(ms(100));
    for number in 1..=4 {
        assert!(matches!(result_at(&group, 2, number), Some(Ok(_))));
    }
    assert_eq!(services(&mut group, 3), ["s1", "s2", "s3", "s4"]);
    assert!(group.epoch(1) <= epoch + 2, "{}", group.epoch(1));
}

#[test]
fn refusal_reaches_the_node_that_asked() {
    let mut group = TestGroup::with_voters(3);
    request(&mut group, 2, 1, add("web", 1));
    group.run(ms(50));
    request(&mut group, 3, 2, add("web", 2));
    // Refused by a change that is not committed yet, too.
    group.slow_disks = [1].into();
    request(&mut group, 3, 3, add("mail", 3));
    request(&mut group, 2, 4, add("mail", 4));
    let refused = |name| {
        let refusal = GroupChangeRefusal::NameTaken(service_name(name));
        Some(Err(GroupChangeFailure::Refused(refusal)))
    };
    assert_eq!(result_at(&group, 3, 2), refused("web"));
    assert_eq!(result_at(&group, 2, 4), refused("mail"));
    assert_eq!(result_at(&group, 3, 3), None);
    group.slow_disks.clear();
    group.finish_save(1);
    group.run(ms(50));
    assert!(matches!(result_at(&group, 3, 3), Some(Ok(_))));
    // A node's own address is not a service address.
    let addresses = vec![group.machines[&1].config.address.ip()];
    let own = GroupService::new(service_name("own"), ServiceProtocol::Udp, 9, addresses);
    request(&mut group, 2, 5, GroupChange::AddService(Box::new(own)));
    let result = result_at(&group, 2, 5);
    assert!(matches!(
        result,
        Some(Err(GroupChangeFailure::Refused(
            GroupChangeRefusal::NodeAddress(_)
        )))
    ));
}

#[test]
fn request_survives_the_contact_node() {
    let mut group = TestGroup::with_voters(3);
    group.crash(1);
    request(&mut group, 3, 1, add("web", 1));
    group.run(ms(200));
    assert_eq!(result_at(&group, 3, 1), None);
    group.run(ms(1_500));
    assert!(matches!(result_at(&group, 3, 1), Some(Ok(_))));
    assert_eq!(services(&mut group, 2), ["web"]);
}

#[test]
fn repeated_request_is_answered_and_changes_nothing() {
    let mut group = TestGroup::with_voters(3);
    // The answer of the contact node is lost.
    let frame = MembershipFrame::GroupChangeRequest {
        id: GroupChangeId(1),
        change: add("web", 1),
        uid: None,
    };
    let now = group.now;
    group.machine(1).handle_frame(now, &name(3), frame);
    group.run(ms(50));
    let view = group.machine(1).voted_view().map(VotedView::summary);
    group.crash(1);
    group.run(ms(1_500));
    request(&mut group, 3, 1, add("web", 1));
    group.run(ms(300));
    let version = view.expect("a member").group_data_version;
    assert_eq!(result_at(&group, 3, 1), Some(Ok(version)));
    assert_eq!(services(&mut group, 3), ["web"]);
}

#[test]
fn request_without_contact_node_ends_unanswered() {
    let mut group = TestGroup::with_voters(2);
    group.crash(1);
    group.run(ms(500));
    request(&mut group, 2, 1, add("web", 1));
    group.run(ms(9_000));
    assert_eq!(result_at(&group, 2, 1), None);
    group.run(ms(1_100));
    assert_eq!(
        result_at(&group, 2, 1),
        Some(Err(GroupChangeFailure::Unanswered))
    );
}

#[test]
fn stranger_changes_nothing() {
    let mut group = TestGroup::with_voters(3);
    let now = group.now;
    let frame = MembershipFrame::GroupChangeRequest {
        id: GroupChangeId(1),
        change: add("web", 1),
        uid: None,
    };
    group.machine(1).handle_frame(now, &name(9), frame);
    let response = MembershipFrame::GroupChangeResponse {
        id: GroupChangeId(2),
        result: Ok(1),
    };
    group.slow_disks = [1].into();
    request(&mut group, 2, 2, add("mail", 2));
    let now = group.now;
    group.machine(2).handle_frame(now, &name(9), response);
    group.run(ms(100));
    assert_eq!(result_at(&group, 2, 2), None);
    assert_eq!(services(&mut group, 1), Vec::<String>::new());
}

#[test]
fn waiting_requests_are_bounded() {
    let mut group = TestGroup::with_voters(2);
    group.crash(1);
    let change = GroupChange::SetWeights(Vec::new());
    for id in 0..PENDING_MAX as u64 {
        request(&mut group, 2, id, change.clone());
    }
    let now = group.now;
    let id = GroupChangeId(1_000);
    let result = group.machine(2).handle_group_change(now, id, change, None);
    assert_eq!(result, Err(OperatorError::Busy));
}

#[test]
fn requests_of_one_node_are_judged_a_few_at_a_time() {
    let mut group = TestGroup::with_voters(3);
    let (now, before) = (group.now, group.sent.len());
    let request_of = |id| MembershipFrame::GroupChangeRequest {
        id: GroupChangeId(id),
        change: GroupChange::RemoveService(service_name("none")),
        uid: None,
    };
    for id in 1..=100 {
        let machine = group.machine(1);
        machine.handle_frame(now, &name(3), request_of(id));
    }
    group.settle();
    let is_answer = |(_, to, frame): &&(u16, u16, MembershipFrame)| {
        *to == 3 && matches!(frame, MembershipFrame::GroupChangeResponse { .. })
    };
    let answers = group.sent[before..].iter().filter(is_answer).count();
    assert_eq!(answers, PENDING_OF_NODE_MAX);
    // A node repeats its requests until all are answered.
    for id in 1_001..=1_040 {
        request(&mut group, 2, id, add(&format!("s{id}"), id as u8));
    }
    group.run(ms(6_000));
    for id in 1_001..=1_040 {
        assert!(matches!(result_at(&group, 2, id), Some(Ok(_))), "{id}");
    }
}

#[test]
fn unreadable_settings_are_reported_and_not_changed() {
    let mut group = TestGroup::with_voters(2);
    let mut view = group.machine(1).voted_view().expect("a member").clone();
    view.epoch += 1;
    view.group_data.version += 1;
    view.group_data.bytes = Bytes::from_static(&[99, 1]);
    let now = group.now;
    for (node, from) in [(1, 2), (2, 1)] {
        let view = view.clone();
        let frame = MembershipFrame::Commit { view };
        group.machine(node).handle_frame(now, &name(from), frame);
    }
    group.run(ms(200));
    assert!(group.has_event(1, |event| matches!(event, Event::SettingsUnreadable { .. })));
    request(&mut group, 2, 1, add("web", 1));
    group.run(ms(100));
    let refusal = GroupChangeRefusal::UnreadableSettings;
    assert_eq!(
        result_at(&group, 2, 1),
        Some(Err(GroupChangeFailure::Refused(refusal)))
    );
}

/// Changes that the forced node had missed have the versions of its own later changes.
#[test]
fn server_node_takes_the_settings_of_a_forced_takeover() {
    let mut group = TestGroup::with_voters(3);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(500));
    let before = group.disks[&3].clone();
    request(&mut group, 1, 1, add("lost", 1));
    group.run(ms(2_000));
    assert_eq!(services(&mut group, 8), ["lost"]);
    for node in [1, 2, 3] {
        group.crash(node);
    }
    group.disks.insert(3, before);
    group.restart(3);
    group.run(ms(1_000));
    let now = group.now;
    assert_eq!(group.machine(3).handle_force_takeover(now), Ok(()));
    group.run(ms(200));
    // Without any change since, the settings are those of the forced node.
    group.run(ms(20_000));
    assert_eq!(group.epoch(8), group.epoch(3));
    assert_eq!(services(&mut group, 8), [""; 0]);
    request(&mut group, 3, 2, add("kept", 2));
    group.run(ms(5_000));
    assert_eq!(services(&mut group, 8), ["kept"]);
}

/// As the test before, with the change made before the server node hears of the takeover.
#[test]
fn server_node_takes_the_settings_of_a_takeover_that_it_missed() {
    let mut group = TestGroup::with_voters(3);
    group.start(8, JoinRole::ServerNode);
    group.run(ms(500));
    let before = group.disks[&3].clone();
    request(&mut group, 1, 1, add("lost", 1));
    group.run(ms(2_000));
    for node in [1, 2, 3] {
        group.crash(node);
    }
    group.isolated.insert(8);
    group.disks.insert(3, before);
    group.restart(3);
    group.run(ms(1_000));
    let now = group.now;
    assert_eq!(group.machine(3).handle_force_takeover(now), Ok(()));
    group.run(ms(200));
    request(&mut group, 3, 2, add("kept", 2));
    group.run(ms(200));
    let version = |group: &TestGroup, node: u16| {
        let view = group.machines[&node].voted_view();
        view.expect("a member").group_data.version
    };
    assert_eq!(version(&group, 3), version(&group, 8));
    group.isolated.clear();
    group.run(ms(20_000));
    assert_eq!(group.epoch(8), group.epoch(3));
    assert_eq!(services(&mut group, 8), ["kept"]);
}
