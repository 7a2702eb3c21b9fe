//! Steps of a donor.

use crate::*;

#[test]
fn donor_sends_frozen_state_at_once_without_copying() {
    let mut donor = new_machine(A, HOLDER);
    let dynamic = Bytes::from(vec![7; 300]);
    let batch = run_donor_to_state(&mut donor, dynamic.clone());
    let (
        B,
        Frame::State {
            flows, last: true, ..
        },
    ) = take_sent_frame(&mut donor)
    else {
        panic!("not the state");
    };
    assert_eq!(flows[0].dynamic.as_ptr(), dynamic.as_ptr());
    let times = holdfast_wire::frame::AcceptorPhaseTimes {
        restore_us: 2_000,
        commit_us: 1_000,
    };
    donor.handle_frame(
        ms(15),
        B,
        Frame::Done {
            batch,
            results: vec![Ok(7)],
            times,
        },
    );
    let Command::Close {
        token,
        acceptor: B,
        flows,
    } = take_command(&mut donor)
    else {
        panic!("not a close");
    };
    assert_eq!(flows[0].epoch, 7);
    complete(&mut donor, ms(16), token, Results::Closed(vec![Ok(())]));
    check_final_events(&mut donor);
}

/// A donor whose acceptor says that it has the flow, after another holder has heard only of the transit. Returns the
/// number of the donor's request to that holder.
fn donor_of_taken_flow_with_new_holder() -> (Handoff, u64) {
    let mut donor = new_machine(A, HOLDER);
    let batch = run_donor_to_state(&mut donor, Bytes::from_static(b"state"));
    take_sent_frame(&mut donor);
    let view = View {
        epoch: 2,
        ..View::configured(B, [A, B, HOLDER])
    };
    donor.handle_view(ms(11), view);
    let (results, times) = (vec![Ok(7)], Default::default());
    let done = Frame::Done {
        batch,
        results,
        times,
    };
    donor.handle_frame(ms(15), B, done);
    let (B, Frame::ChangeRequest { request, changes }) = take_sent_frame(&mut donor) else {
        panic!("the donor does not ask the holder");
    };
    assert_eq!(
        (changes[0].kind, changes[0].epoch),
        (ChangeKind::Rollback, 6)
    );
    (donor, request)
}

#[test]
fn donor_closes_a_taken_flow_that_belongs_to_another_node_at_a_new_holder() {
    let (mut donor, request) = donor_of_taken_flow_with_new_holder();
    let current = Some(OwnershipRecord::owned(B, 7));
    let results = vec![Err(ChangeRefusal { current })];
    donor.handle_frame(ms(16), B, Frame::ChangeResponse { request, results });
    let Command::Close { flows, .. } = take_command(&mut donor) else {
        panic!("not a close");
    };
    assert_eq!(flows[0].epoch, 7);
}

#[test]
fn donor_removes_a_taken_flow_of_which_a_new_holder_knows_only_the_transit() {
    let (mut donor, request) = donor_of_taken_flow_with_new_holder();
    let results = vec![Ok(Some(OwnershipRecord::owned(A, 7)))];
    donor.handle_frame(ms(16), B, Frame::ChangeResponse { request, results });
    let outputs: Vec<_> = std::iter::from_fn(|| donor.poll_output()).collect();
    let [
        Output::Execute(Command::Close { .. }),
        Output::Send {
            to: B,
            frame: Frame::ChangeRequest { changes, .. },
        },
    ] = &outputs[..]
    else {
        panic!("{outputs:?}");
    };
    assert_eq!((changes[0].kind, changes[0].epoch), (ChangeKind::Remove, 7));
}

/// Checks the final events.
fn check_final_events(donor: &mut Handoff) {
    let events: Vec<_> = std::iter::from_fn(|| donor.poll_output()).collect();
    let [
        Output::Event(Event::Outcome { flows, .. }),
        Output::Event(finished),
        Output::Event(Event::RequestFinished {
            moved: 1, kept: 0, ..
        }),
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!(
        flows[..],
        [(flow(), FlowHandoffOutcome::Moved { epoch: 7 })]
    );
    let Event::BatchFinished {
        bytes: 309, phases, ..
    } = finished
    else {
        panic!("{finished:?}");
    };
    assert_eq!(
        (phases.prepare, phases.divert, phases.extract),
        (ms(3), ms(3), ms(4))
    );
    assert_eq!(
        (phases.transfer, phases.restore, phases.commit),
        (ms(2), ms(2), ms(1))
    );
    assert_eq!(phases.freeze(), ms(9));
    assert!(donor.is_idle() && donor.poll_timeout().is_none());
}

#[test]
fn yielding_donor_rests_half_its_busy_time_between_batches() {
    let mut donor = new_machine(A, HOLDER);
    donor.set_pause_between_batches(true);
    let batch = run_donor_to_state(&mut donor, Bytes::from_static(b"state"));
    take_sent_frame(&mut donor);
    let next: Flow = "tcp:10.0.0.1:80-10.0.1.2:4243".parse().expect("a flow");
    let another = FlowHandoffRequest {
        flows: vec![next],
        ..new_request(DrainPolicy::No)
    };
    donor.handle_request(ms(11), another).expect("possible");
    let Command::ReadStatic { token, .. } = take_command(&mut donor) else {
        panic!("not a read");
    };
    let (results, times) = (vec![Ok(7)], Default::default());
    let done = Frame::Done {
        batch,
        results,
        times,
    };
    // The first batch was diverted at 3 ms: the donor has been busy for 12 ms.
    donor.handle_frame(ms(15), B, done);
    let state = StaticFlow {
        epoch: 5,
        static_state: Bytes::from_static(b"static"),
        queue: SendQueueInfo::default(),
    };
    complete(
        &mut donor,
        ms(16),
        token,
        Results::ReadStatic(vec![Ok(state)]),
    );
    let sends_prepare = |donor: &mut Handoff| {
        let outputs: Vec<_> = std::iter::from_fn(|| donor.poll_output()).collect();
        let prepare = |output: &Output| {
            let Output::Send { frame, .. } = output else {
                return false;
            };
            matches!(frame, Frame::Prepare { .. })
        };
        outputs.iter().any(prepare)
    };
    assert!(!sends_prepare(&mut donor));
    donor.handle_timeout(ms(20));
    assert!(
        !sends_prepare(&mut donor),
        "the donor pauses between batches"
    );
    donor.handle_timeout(ms(21));
    assert!(sends_prepare(&mut donor));
}

#[test]
fn unanswered_donor_stays_frozen_until_holder_answers() {
    let mut donor = new_machine(A, HOLDER);
    run_donor_to_state(&mut donor, Bytes::from_static(b"state"));
    take_sent_frame(&mut donor);
    let due = donor.poll_timeout().expect("a limit");
    donor.handle_timeout(due);
    let Some(Output::Send {
        to: B,
        frame: Frame::Abort { .. },
    }) = ({
        let holder_request = donor.poll_output();
        assert!(
            matches!(
                &holder_request,
                Some(Output::Send {
                    to: HOLDER,
                    frame: Frame::ChangeRequest { .. }
                })
            ),
            "{holder_request:?}"
        );
        donor.poll_output()
    })
    else {
        panic!("no abort");
    };
    for _ in 0..20 {
        assert_eq!(
            donor.poll_output(),
            None,
            "the donor acted before the holder answered"
        );
        let due = donor.poll_timeout().expect("a retry timer");
        donor.handle_timeout(due);
        let mut request_count = 0;
        while let Some(output) = donor.poll_output() {
            match output {
                Output::Send {
                    to: HOLDER,
                    frame: Frame::ChangeRequest { .. },
                } => request_count += 1,
                Output::Event(Event::HolderSilent { .. }) => {}
                other => panic!("output while the holder's answer is missing: {other:?}"),
            }
        }
        assert_eq!(request_count, 1);
    }
    assert!(donor.is_moving(&flow()));
}

#[test]
fn holder_node_arbitrates_own_request_without_frame() {
    let mut donor = new_machine(A, A);
    donor
        .handle_request(ms(0), new_request(DrainPolicy::No))
        .expect("possible");
    complete_read(&mut donor, ms(1), SendQueueInfo::default());
    complete_prepare(&mut donor, ms(2));
    let Command::Arbitrate {
        token,
        asker: A,
        changes,
    } = take_command(&mut donor)
    else {
        panic!("not an arbitration");
    };
    assert_eq!(changes[0].epoch, 5);
    let results = Results::Arbitrated(vec![Ok(Some(OwnershipRecord::transit(A, B, 6)))]);
    complete(&mut donor, ms(3), token, results);
    assert!(matches!(take_command(&mut donor), Command::Freeze { .. }));
}

#[test]
fn full_queue_drains_before_divert_within_limit() {
    let mut donor = new_machine(A, HOLDER);
    donor
        .handle_request(ms(0), new_request(DrainPolicy::Yes))
        .expect("possible");
    let queue = SendQueueInfo {
        unsent: 90_000,
        delivery_rate: 12_500_000,
        rtt: ms(1),
        ..SendQueueInfo::default()
    };
    complete_read(&mut donor, ms(1), queue);
    complete_prepare(&mut donor, ms(2));
    let Command::Drain {
        token, deadline, ..
    } = take_command(&mut donor)
    else {
        panic!("not a drain");
    };
    assert!(
        deadline > ms(2 + 9) && deadline < ms(2 + 40),
        "{deadline:?}"
    );
    complete(
        &mut donor,
        ms(12),
        token,
        Results::Drained(vec![SendQueueInfo::default()]),
    );
    assert!(matches!(
        take_sent_frame(&mut donor),
        (HOLDER, Frame::ChangeRequest { .. })
    ));
}

#[test]
fn impossible_requests_are_refused_at_once() {
    let mut donor = new_machine(A, HOLDER);
    let mut start_request = |flows: Vec<Flow>, to| {
        donor.handle_request(
            ms(0),
            FlowHandoffRequest {
                flows,
                to,
                drain: DrainPolicy::No,
            },
        )
    };
    assert_eq!(
        start_request(vec![flow()], A),
        Err(FlowHandoffRequestError::ToSelf(A))
    );
    assert_eq!(
        start_request(vec![flow()], NodeId(77)),
        Err(FlowHandoffRequestError::UnknownNode(NodeId(77)))
    );
    assert_eq!(
        start_request(vec![], B),
        Err(FlowHandoffRequestError::NoFlows)
    );
    start_request(vec![flow()], B).expect("possible");
    let Command::ReadStatic { token, .. } = take_command(&mut donor) else {
        panic!("not a read");
    };
    donor
        .handle_request(ms(0), new_request(DrainPolicy::No))
        .expect("a request with refusals per flow");
    let refused = donor.poll_output();
    let Some(Output::Event(Event::Outcome { flows, .. })) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(
        flows[0].1,
        FlowHandoffOutcome::Kept {
            reason: FlowKeptReason::AlreadyMoving
        }
    );
    donor.poll_output();
    complete(
        &mut donor,
        ms(1),
        token,
        Results::ReadStatic(vec![Err(FlowKeptReason::UnknownFlow)]),
    );
    let refused = donor.poll_output();
    let Some(Output::Event(Event::Outcome { flows, .. })) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(
        flows[0].1,
        FlowHandoffOutcome::Kept {
            reason: FlowKeptReason::UnknownFlow
        }
    );
    donor.poll_output();
    assert!(donor.is_idle(), "nothing was touched");
}

#[test]
fn failed_resume_is_repeated_until_it_succeeds() {
    let mut donor = new_machine(A, HOLDER);
    donor
        .handle_request(ms(0), new_request(DrainPolicy::No))
        .expect("possible");
    complete_read(&mut donor, ms(1), SendQueueInfo::default());
    take_sent_frame(&mut donor);
    donor.handle_peer_lost(ms(3), B);
    let (mut now, mut reports) = (ms(3), 0);
    // Far more attempts, over a far longer time, than those of other commands.
    for attempt in 0.. {
        let outputs: Vec<Output> = std::iter::from_fn(|| donor.poll_output()).collect();
        let mut resumes = outputs.iter().filter_map(|output| match output {
            Output::Execute(Command::Resume { token, .. }) => Some(*token),
            _ => None,
        });
        let token = resumes.next().expect("a further attempt");
        let is_report = |output: &&Output| {
            let Output::Event(event) = output else {
                return false;
            };
            matches!(event, Event::CommandFailed { .. })
        };
        reports += outputs.iter().filter(is_report).count();
        let claim = (flow(), Some(OwnershipRecord::owned(A, 5)));
        assert_eq!(donor.ownership_claims(), [claim]);
        if attempt == 100 {
            complete(&mut donor, now, token, Results::Resumed(vec![Ok(())]));
            break;
        }
        let failed = Results::Resumed(vec![Err(NodeFault::FlowNotPrepared.into())]);
        complete(&mut donor, now, token, failed);
        let due = donor.poll_timeout().expect("the next attempt");
        assert!(due > now && due <= now + Duration::from_secs(1));
        now = due;
        donor.handle_timeout(now);
    }
    assert!(now > Duration::from_secs(60));
    assert_eq!(reports, 1);
    assert!(donor.is_idle() || donor.poll_output().is_some());
}

#[test]
fn flow_stays_at_donor_if_holder_has_record_of_earlier_connection() {
    for (epoch, is_earlier) in [(4, true), (5, false)] {
        let mut donor = new_machine(A, HOLDER);
        donor
            .handle_request(ms(0), new_request(DrainPolicy::No))
            .expect("possible");
        complete_read(&mut donor, ms(1), SendQueueInfo::default());
        complete_prepare(&mut donor, ms(3));
        let (HOLDER, Frame::ChangeRequest { request, .. }) = take_sent_frame(&mut donor) else {
            panic!("not a request");
        };
        let current = Some(OwnershipRecord::owned(B, epoch));
        let results = vec![Err(ChangeRefusal { current })];
        let answer = Frame::ChangeResponse { request, results };
        donor.handle_frame(ms(6), HOLDER, answer);
        let outputs: Vec<Output> = std::iter::from_fn(|| donor.poll_output()).collect();
        let epochs_of = |is_wanted: fn(&Command) -> Option<&[FlowEpoch]>| -> Vec<Epoch> {
            let commands = outputs.iter().filter_map(|output| match output {
                Output::Execute(command) => is_wanted(command),
                _ => None,
            });
            commands.flatten().map(|flow| flow.epoch).collect()
        };
        let resumed = epochs_of(|command| match command {
            Command::Resume { flows, .. } => Some(flows),
            _ => None,
        });
        let closed = epochs_of(|command| match command {
            Command::Close { flows, .. } => Some(flows),
            _ => None,
        });
        match is_earlier {
            true => assert_eq!((resumed, closed), (vec![5], vec![])),
            false => assert_eq!((resumed, closed), (vec![], vec![5])),
        }
    }
}
