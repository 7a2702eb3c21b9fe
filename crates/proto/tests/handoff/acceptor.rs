//! Steps of an acceptor.

use crate::*;

/// Returns an acceptor with a prepared socket for the one flow of `batch`.
fn acceptor_with_prepared_socket(batch: BatchId) -> Handoff {
    let mut acceptor = new_machine(B, HOLDER);
    let prepare = FlowToPrepare {
        flow: flow(),
        epoch: 5,
        static_state: Bytes::new(),
    };
    acceptor.handle_frame(
        ms(0),
        A,
        Frame::Prepare {
            batch,
            flows: vec![prepare.clone()],
        },
    );
    let Command::PrepareSockets { token, .. } = take_command(&mut acceptor) else {
        panic!("not sockets");
    };
    // Meanwhile the same flow cannot be taken again, nor given.
    let other = BatchId { seq: 2, ..batch };
    acceptor.handle_frame(
        ms(0),
        A,
        Frame::Prepare {
            batch: other,
            flows: vec![prepare],
        },
    );
    let (A, Frame::PrepareResponse { results, .. }) = take_sent_frame(&mut acceptor) else {
        panic!("not an answer");
    };
    assert!(results[0].is_err());
    complete(
        &mut acceptor,
        ms(1),
        token,
        Results::PreparedSockets(vec![Ok(())]),
    );
    assert!(matches!(
        take_sent_frame(&mut acceptor),
        (A, Frame::PrepareResponse { .. })
    ));
    acceptor
}

#[test]
fn acceptor_activates_only_after_holder_commits() {
    let batch = BatchId {
        donor: A,
        boot: 1,
        seq: 1,
    };
    let mut acceptor = acceptor_with_prepared_socket(batch);
    let dynamic = Bytes::from(vec![7; 300]);
    let state = holdfast_wire::frame::FrozenFlowState {
        index: 0,
        dynamic: dynamic.clone(),
        application: Bytes::new(),
    };
    acceptor.handle_frame(
        ms(2),
        A,
        Frame::State {
            batch,
            flows: vec![state],
            last: true,
        },
    );
    let Command::Restore { token, flows, .. } = take_command(&mut acceptor) else {
        panic!("not a restore");
    };
    assert_eq!(flows[0].dynamic.as_ptr(), dynamic.as_ptr());
    complete(&mut acceptor, ms(4), token, Results::Restored(vec![Ok(())]));
    answer_holder_request(
        &mut acceptor,
        ms(5),
        ChangeKind::Commit,
        6,
        OwnershipRecord::owned(B, 7),
    );
    let Command::Activate { token, flows } = take_command(&mut acceptor) else {
        panic!("not an activation");
    };
    assert_eq!(flows[0].epoch, 7);
    complete(
        &mut acceptor,
        ms(6),
        token,
        Results::Activated(vec![Ok(())]),
    );
    let accepted = acceptor.poll_output();
    assert!(
        matches!(accepted, Some(Output::Event(Event::FlowsAccepted { .. }))),
        "{accepted:?}"
    );
    let (A, Frame::Done { results, times, .. }) = take_sent_frame(&mut acceptor) else {
        panic!("not done");
    };
    assert_eq!(
        (&results[..], times.restore_us, times.commit_us),
        (&[Ok(7)][..], 2_000, 2_000)
    );
    assert!(acceptor.is_idle());
}
