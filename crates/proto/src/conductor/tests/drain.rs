//! Tests of drained nodes.

use super::*;

#[test]
fn drain_moves_everything_that_can_move_and_names_the_rest() {
    let mut group = TestGroup::new(&[&[100; 5], &[100; 4], &[100; 5]]);
    group.samples(A)[0].rules.is_pinned = true;
    group.samples(A)[1].blocked = Some(failure());
    group.run(STARTUP);
    let now = group.now;
    let status = group.node(A).handle_drain(now, None);
    assert_eq!((status.remaining, status.stuck.len()), (3, 2), "{status:?}");
    assert!(!status.is_safe_to_reboot && status.estimate >= secs(3));
    group.run(60);
    assert_eq!(
        (group.points(A), group.points(B), group.points(C)),
        (20, 60, 60)
    );
    let now = group.now;
    let status = group
        .node(A)
        .drain_status(now)
        .expect("the node is being drained");
    assert_eq!(
        (status.moved, status.remaining, status.stuck.len()),
        (3, 0, 2)
    );
    assert!(!status.is_safe_to_reboot);
    let ended = |(_, event): &&(NodeId, Event)| matches!(event, Event::DrainEnded(_));
    assert_eq!(group.events.iter().filter(ended).count(), 1);
    // The processes that cannot move end.
    group.samples(A).clear();
    group.run(2);
    let now = group.now;
    let status = group
        .node(A)
        .drain_status(now)
        .expect("the node is being drained");
    assert!(status.is_safe_to_reboot);
}

#[test]
fn drained_node_takes_nothing_until_it_is_undrained() {
    let mut group = TestGroup::new(&[&[100], &[50; 16], &[50; 16]]);
    group.run(STARTUP - 20);
    let now = group.now;
    group.node(A).handle_drain(now, None);
    group.run(200);
    assert!(
        group.begun.iter().all(|begun| begun.donor == A),
        "{:?}",
        group.begun
    );
    let declined = group.answers(A, B, offer(900, 50));
    let reason = DeclineReason::Draining;
    assert!(matches!(&declined[..], [ConductorFrame::Decline { reason: r, .. }] if *r == reason));
    let now = group.now;
    group.node(A).handle_undrain(now);
    group.run(300);
    assert!(group.points(A) >= 40, "{:?}", group.begun);
}

#[test]
fn deadline_ends_a_drain() {
    let slow = |config: &mut ConductorConfig| config.drain_moves_per_minute_max = 8;
    let mut group = TestGroup::with(&[&[20; 30], &[], &[]], slow);
    group.run(STARTUP);
    let deadline = group.now + secs(20);
    let now = group.now;
    group.node(A).handle_drain(now, Some(deadline));
    group.run(120);
    assert!(group.points(A) > 0 && group.begun.iter().all(|begun| begun.at < deadline));
    assert!(matches!(
        group.plan(A),
        Decision::Stay(StayReason::DeadlinePassed)
    ));
}

#[test]
fn drain_leaves_processes_that_no_node_has_room_for() {
    let mut group = TestGroup::new(&[&[300, 100], &[800], &[850]]);
    group.run(STARTUP);
    let now = group.now;
    group.node(A).handle_drain(now, None);
    group.run(60);
    assert_eq!(
        (group.points(A), group.points(B), group.points(C)),
        (30, 90, 85)
    );
}

#[test]
fn process_of_an_operators_move_is_not_offered_until_a_sample_shows_where_it_runs() {
    let mut group = TestGroup::new(&[&[100, 100], &[200], &[200]]);
    group.run(STARTUP);
    let now = group.now;
    group.node(A).handle_moves_under_way(now, 1);
    group.measure(A);
    group.node(A).handle_drain(now, None);
    let busy = Decision::Stay(StayReason::Unavailable(Unavailable::Busy));
    assert_eq!(group.plan(A), busy);
    // The operator's move ends: the last sample still lists the process.
    group.samples(A).remove(0);
    group.node(A).handle_moves_under_way(now, 0);
    assert_eq!(group.plan(A), busy);
    group.measure(A);
    let plan = group.plan(A);
    assert!(
        matches!(&plan, Decision::Move(plan) if plan.process == ProcessKey(2)),
        "{plan:?}"
    );
}
