//! Changes of the group's view: another holder of the steering table, other nodes in the group.

use super::*;
use holdfast_proto::machine_output::IgnoredInput;
use holdfast_proto::view::NO_NODE;
use holdfast_wire::OwnershipChange;

/// A view after the first one, with another contact node.
fn later_view(contact_node: NodeId) -> View {
    View {
        epoch: 2,
        ..View::configured(contact_node, [A, B, HOLDER])
    }
}

fn report(machine: &mut Handoff) {
    let change = OwnershipChange {
        flow: flow(),
        kind: ChangeKind::Establish,
        epoch: 1,
    };
    machine.handle_changes(ms(0), vec![change]);
}

#[test]
fn open_request_goes_to_new_holder_at_once() {
    let mut machine = new_machine(A, HOLDER);
    report(&mut machine);
    let (HOLDER, Frame::ChangeRequest { request, .. }) = take_sent_frame(&mut machine) else {
        panic!("no request");
    };
    machine.handle_view(ms(1), later_view(B));
    let (B, Frame::ChangeRequest { request: again, .. }) = take_sent_frame(&mut machine) else {
        panic!("no request to the new holder");
    };
    let answer = |request| Frame::ChangeResponse {
        request,
        results: vec![Ok(Some(OwnershipRecord::owned(A, 1)))],
    };
    machine.handle_frame(ms(2), HOLDER, answer(request));
    let ignored = machine.poll_output();
    assert!(matches!(
        ignored,
        Some(Output::Event(Event::Ignored(IgnoredInput {
            from: HOLDER,
            ..
        })))
    ));
    machine.handle_frame(ms(3), B, answer(again));
    let answered = machine.poll_output();
    assert!(matches!(
        answered,
        Some(Output::Event(Event::ReportAnswered { .. }))
    ));
    assert!(machine.is_idle());
}

#[test]
fn answer_of_earlier_term_is_ignored() {
    let mut machine = new_machine(A, HOLDER);
    report(&mut machine);
    let mut take_request = |now, view: Option<View>| {
        if let Some(view) = view {
            machine.handle_view(now, view);
        }
        match take_sent_frame(&mut machine) {
            (_, Frame::ChangeRequest { request, .. }) => request,
            other => panic!("{other:?}"),
        }
    };
    let first = take_request(ms(0), None);
    let second = take_request(ms(1), Some(later_view(B)));
    let third = View {
        epoch: 3,
        ..later_view(HOLDER)
    };
    let third = take_request(ms(2), Some(third));
    assert!(first != second && second != third && first != third);
    let answer = |request| Frame::ChangeResponse {
        request,
        results: vec![Ok(Some(OwnershipRecord::owned(A, 1)))],
    };
    // The holder of the term in between may have decided otherwise.
    machine.handle_frame(ms(3), HOLDER, answer(first));
    let ignored = machine.poll_output();
    assert!(matches!(ignored, Some(Output::Event(Event::Ignored(_)))));
    assert!(!machine.is_idle());
    machine.handle_frame(ms(4), HOLDER, answer(third));
    let answered = machine.poll_output();
    assert!(matches!(
        answered,
        Some(Output::Event(Event::ReportAnswered { .. }))
    ));
    assert!(machine.is_idle());
}

#[test]
fn restarted_daemon_numbers_its_requests_otherwise() {
    let request_of = |boot| {
        let view = View::configured(HOLDER, [A, B, HOLDER]);
        let mut machine = Handoff::new(HandoffMachineConfig::new(A, boot), view);
        report(&mut machine);
        match take_sent_frame(&mut machine) {
            (HOLDER, Frame::ChangeRequest { request, .. }) => request,
            other => panic!("{other:?}"),
        }
    };
    // The holder may still let the former daemon's request wait, and its answer would be taken for another's.
    assert_ne!(request_of(1), request_of(1_000_000));
}

#[test]
fn new_holder_decides_own_open_request() {
    let mut machine = new_machine(A, HOLDER);
    report(&mut machine);
    take_sent_frame(&mut machine);
    machine.handle_view(ms(1), later_view(A));
    let Command::Arbitrate {
        token,
        asker: A,
        changes,
    } = take_command(&mut machine)
    else {
        panic!("not decided here");
    };
    assert_eq!(changes.len(), 1);
    let results = vec![Ok(Some(OwnershipRecord::owned(A, 1)))];
    complete(&mut machine, ms(2), token, Results::Arbitrated(results));
    let answered = machine.poll_output();
    assert!(matches!(
        answered,
        Some(Output::Event(Event::ReportAnswered { .. }))
    ));
    assert!(machine.is_idle());
}

#[test]
fn older_view_is_ignored() {
    let mut machine = new_machine(A, HOLDER);
    machine.handle_view(ms(0), later_view(B));
    machine.handle_view(ms(1), View::configured(HOLDER, [A, B, HOLDER]));
    report(&mut machine);
    assert!(matches!(take_sent_frame(&mut machine), (B, _)));
}

#[test]
fn node_outside_of_view_takes_no_flows() {
    let mut machine = new_machine(A, HOLDER);
    let without_b = View {
        epoch: 2,
        ..View::configured(HOLDER, [A, HOLDER])
    };
    machine.handle_view(ms(0), without_b);
    let refused = machine.handle_request(ms(1), new_request(DrainPolicy::No));
    assert!(
        matches!(refused, Err(FlowHandoffRequestError::UnknownNode(B))),
        "{refused:?}"
    );
}

#[test]
fn removed_node_neither_decides_nor_hands_off_until_it_has_a_view() {
    let mut machine = new_machine(HOLDER, HOLDER);
    report(&mut machine);
    let Command::Arbitrate { .. } = take_command(&mut machine) else {
        panic!("the holder decides");
    };
    machine.handle_removal(ms(1));
    let (to, _) = take_sent_frame(&mut machine);
    assert_eq!(to, NO_NODE);
    let refused = machine.handle_request(ms(2), new_request(DrainPolicy::No));
    assert!(
        matches!(refused, Err(FlowHandoffRequestError::UnknownNode(B))),
        "{refused:?}"
    );
    machine.handle_view(ms(3), later_view(A));
    assert!(matches!(take_sent_frame(&mut machine), (A, _)));
}
