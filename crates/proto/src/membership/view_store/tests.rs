//! Tests of groups whose views are in a store.

use super::super::test_group::{TestGroup, ms, name};
use super::super::{Event, Membership, MembershipConfig, OperatorError, Output, Standing};
use super::{StoreAnswer, StoreRequest, StoreToken};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{Ballot, JoinRole, MembershipFrame, VotedView};
use std::time::Duration;

fn stored_voters(group: &mut TestGroup) -> usize {
    let view = group.store().view.as_ref();
    view.map_or(0, |view| view.voters.len())
}

fn has_takeover(group: &TestGroup, node: u16) -> bool {
    group.has_event(node, |event| matches!(event, Event::TakeoverStarted { .. }))
}

#[test]
fn joins_are_decided_in_the_store() {
    let mut group = TestGroup::with_store(3);
    assert_eq!(group.serving(), [1]);
    assert_eq!(stored_voters(&mut group), 3);
    let obeyed = group.machines[&3].voted_view().cloned();
    assert_eq!(group.store().view, obeyed);
    let is_vote = |frame: &MembershipFrame| matches!(frame, MembershipFrame::Propose { .. });
    assert!(!group.sent.iter().any(|(_, _, frame)| is_vote(frame)));
}

#[test]
fn one_backup_of_two_nodes_replaces_the_contact_node_after_its_lease() {
    let mut group = TestGroup::with_store(2);
    group.crash(1);
    let crashed_at = group.now;
    while group.standing(2) != Standing::ContactNode {
        group.run(ms(1));
        assert!(group.now < crashed_at + ms(400));
    }
    let replaced_at = group.now;
    while group.serving() != [2] {
        group.run(ms(1));
        assert!(group.now < replaced_at + ms(400));
    }
    assert!(group.now >= replaced_at + ms(250));
    assert_eq!(group.voters(2), [2]);
    // The former contact node learns of its removal, and joins again.
    group.restart(1);
    group.run(ms(3_000));
    assert_eq!((group.voters(1), group.serving()), (vec![2, 1], vec![2]));
}

#[test]
fn contact_node_of_two_removes_its_silent_backup_and_serves_on() {
    let mut group = TestGroup::with_store(2);
    group.crash(2);
    for _ in 0..1_000 {
        group.run(ms(1));
        assert_eq!(group.serving(), [1]);
    }
    assert_eq!(group.voters(1), [1]);
}

#[test]
fn silent_store_ends_the_lease_and_changes_nothing_else() {
    let mut group = TestGroup::with_store(3);
    let epoch = group.epoch(1);
    group.store().is_down = true;
    group.run(ms(260));
    assert_eq!(group.serving(), [0_u16; 0]);
    group.run(ms(10_000));
    for node in 1..=3 {
        assert_eq!(group.epoch(node), epoch);
        let is_silence = |event: &Event| {
            *event
                == Event::StoreAnswers {
                    is_answering: false,
                }
        };
        assert!(group.has_event(node, is_silence));
        assert!(!has_takeover(&group, node));
    }
    group.store().is_down = false;
    group.run(ms(60));
    assert_eq!(group.serving(), [1]);
    group.run(ms(3_000));
    assert_eq!(group.epoch(3), epoch);
    assert!((1..=3).all(|node| !has_takeover(&group, node)));
}

#[test]
fn short_silence_of_the_store_at_any_time_changes_nothing() {
    for offset in (0..250).step_by(10) {
        for silence in [700, 900, 1_000, 1_100, 1_500, 2_000] {
            let mut group = TestGroup::with_store(3);
            group.run(ms(2_000 + offset));
            let epoch = group.epoch(1);
            group.store().is_down = true;
            group.run(ms(silence));
            group.store().is_down = false;
            group.run(ms(1_500));
            let is_calm = (1..=3).all(|node| !has_takeover(&group, node));
            assert!(is_calm, "{silence} ms at {offset}");
            assert_eq!((group.epoch(3), group.serving()), (epoch, vec![1]));
        }
    }
}

#[test]
fn contact_node_that_dies_while_the_store_is_silent_is_replaced_afterwards() {
    let mut group = TestGroup::with_store(3);
    group.store().is_down = true;
    group.run(ms(2_000));
    group.crash(1);
    group.run(ms(3_000));
    assert_eq!(group.serving(), [0_u16; 0]);
    group.store().is_down = false;
    group.run(ms(5_000));
    assert_eq!(group.serving().len(), 1);
    assert_ne!(group.serving(), [1]);
}

#[test]
fn contact_node_that_alone_is_cut_off_from_the_store_is_replaced() {
    let mut group = TestGroup::with_store(3);
    group.store().cut.insert(1);
    group.run(ms(5_000));
    assert_eq!(group.serving(), [2]);
    assert_eq!(group.standing(1), Standing::Backup);
}

#[test]
fn stored_proposal_without_an_answer_counts_when_it_is_read() {
    let mut group = TestGroup::with_store(3);
    group.store().unanswered.insert(2);
    group.crash(1);
    group.run(ms(2_000));
    assert_eq!((group.serving(), group.epoch(3)), (vec![2], 4));
    assert_eq!(group.voters(3), [2, 3]);
}

#[test]
fn promoted_backup_waits_for_the_end_of_the_former_lease() {
    let mut group = TestGroup::with_store(3);
    let id = group.id(2);
    let now = group.now;
    group.machine(1).handle_promote(now, id).expect("possible");
    group.settle();
    let mut gap = 0;
    while group.serving() != [2] {
        gap += 1;
        group.run(ms(1));
        assert!(group.serving().len() <= 1 && gap < 1_000);
    }
    assert!(gap >= 250, "{gap}");
    assert_eq!(group.voters(3), [2, 3, 1]);
}

#[test]
fn removed_node_does_not_join_again() {
    let mut group = TestGroup::with_store(3);
    let id = group.id(3);
    let now = group.now;
    group.machine(1).handle_remove(now, id).expect("possible");
    group.run(ms(3_000));
    assert_eq!(group.standing(3), Standing::Outside);
    assert_eq!(group.voters(1), [1, 2]);
}

#[test]
fn contact_node_fills_a_store_that_has_lost_views() {
    let mut group = TestGroup::with_store(3);
    let newest = group.store().view.clone();
    group.store().view = None;
    group.run(ms(500));
    assert_eq!(group.store().view, newest);
    let older = newest.clone().map(|view| VotedView { epoch: 1, ..view });
    group.store().view = older;
    group.run(ms(500));
    assert_eq!(group.store().view, newest);
    assert_eq!(group.serving(), [1]);
}

#[test]
fn impossible_view_is_reported_and_not_obeyed() {
    let mut group = TestGroup::with_store(2);
    let epoch = group.epoch(1);
    let view = group.store().view.clone().expect("stored");
    let without_voters = VotedView {
        epoch: epoch + 1,
        voters: Vec::new(),
        ..view.clone()
    };
    let beyond_reach = VotedView {
        epoch: epoch + (1 << 50),
        ..view
    };
    for view in [without_voters, beyond_reach] {
        group.store().view = Some(view);
        group.run(ms(500));
        assert_eq!((group.epoch(1), group.epoch(2)), (epoch, epoch));
    }
    let is_report = |(_, event): &&(u16, Event)| *event == Event::StoreUnusable;
    assert!((1..=4).contains(&group.events.iter().filter(is_report).count()));
    assert_eq!(group.serving(), [0_u16; 0]);
}

#[test]
fn votes_and_forced_takeovers_are_refused() {
    let mut group = TestGroup::with_store(2);
    group.run(ms(500));
    let now = group.now;
    let ballot = Ballot {
        round: 1,
        proposer: NodeId(1),
    };
    let prepare = MembershipFrame::Prepare { epoch: 3, ballot };
    group.machine(2).handle_frame(now, &name(1), prepare);
    group.settle();
    assert!(group.has_event(2, |event| matches!(event, Event::Ignored { .. })));
    let forced = group.machine(2).handle_force_takeover(now);
    assert_eq!(forced, Err(OperatorError::StoreDecides));
}

/// A machine whose requests a test answers itself.
fn lone_contact() -> (Membership, Vec<(Duration, StoreToken, StoreRequest)>) {
    let address = "10.0.0.1:7400".parse().expect("an address");
    let mut config = MembershipConfig::new(name(1), address, JoinRole::Backup, 1);
    config.has_view_store = true;
    (Membership::create(Duration::ZERO, config), Vec::new())
}

/// Runs the machine for a time, with a disk that saves at once.
fn collect(
    machine: &mut Membership,
    from: Duration,
    to: Duration,
    requests: &mut Vec<(Duration, StoreToken, StoreRequest)>,
) {
    let mut now = from;
    while now < to {
        machine.handle_timeout(now);
        while let Some(output) = machine.poll_output() {
            match output {
                Output::Save { token, .. } => machine.handle_saved(now, token, Ok(())),
                Output::Store { token, request } => requests.push((now, token, *request)),
                _ => {}
            }
        }
        now += ms(1);
    }
}

#[test]
fn lease_counts_from_the_read_and_not_from_its_answer() {
    let (mut machine, mut requests) = lone_contact();
    collect(&mut machine, Duration::ZERO, ms(400), &mut requests);
    let view = machine.voted_view().cloned();
    let (sent_at, token, _) = requests.last().cloned().expect("reads each 50 ms");
    let answer = StoreAnswer::View(view);
    machine.handle_store_answer(sent_at + ms(200), token, answer.clone());
    assert!(machine.is_serving(sent_at + ms(239)));
    assert!(!machine.is_serving(sent_at + ms(241)));
    // A repeated answer renews nothing.
    machine.handle_store_answer(sent_at + ms(230), token, answer);
    assert!(!machine.is_serving(sent_at + ms(241)));
}

#[test]
fn late_answer_with_an_older_view_changes_nothing() {
    let (mut machine, mut requests) = lone_contact();
    collect(&mut machine, Duration::ZERO, ms(400), &mut requests);
    let view = machine.voted_view().cloned().expect("created");
    let reads: Vec<_> = requests.iter().map(|(_, token, _)| *token).collect();
    let [.., first, second] = reads[..] else {
        panic!("reads each 50 ms");
    };
    let answer = StoreAnswer::View(Some(view));
    machine.handle_store_answer(ms(400), second, answer);
    assert!(machine.is_serving(ms(400)));
    machine.handle_store_answer(ms(401), first, StoreAnswer::View(None));
    assert!(machine.is_serving(ms(401)));
    requests.clear();
    collect(&mut machine, ms(401), ms(402), &mut requests);
    let is_proposal = |request: &StoreRequest| matches!(request, StoreRequest::Propose { .. });
    assert!(!requests.iter().any(|(_, _, request)| is_proposal(request)));
}
