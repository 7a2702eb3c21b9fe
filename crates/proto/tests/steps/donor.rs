//! Steps of a donor.

use crate::*;

#[test]
fn a_donor_sends_the_state_the_moment_it_is_frozen_and_never_copies_it() {
    let mut donor = machine(A, HOLDER);
    let dynamic = Bytes::from(vec![7; 300]);
    let batch = give(&mut donor, dynamic.clone());
    let (
        B,
        Frame::State {
            flows, last: true, ..
        },
    ) = sent(&mut donor)
    else {
        panic!("not the state");
    };
    assert_eq!(flows[0].dynamic.as_ptr(), dynamic.as_ptr());
    let times = holdfast_wire::frame::AcceptorTimes {
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
    } = command(&mut donor)
    else {
        panic!("not a close");
    };
    assert_eq!(flows[0].epoch, 7);
    complete(&mut donor, ms(16), token, Results::Closed(vec![Ok(())]));
    ended_with_its_phases(&mut donor);
}

/// Checks the final events.
fn ended_with_its_phases(donor: &mut Handoff) {
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
    assert_eq!(flows[..], [(flow(), Outcome::Moved { epoch: 7 })]);
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
fn a_donor_that_gives_way_rests_between_batches_for_half_as_long_as_it_was_busy() {
    let mut donor = machine(A, HOLDER);
    donor.give_way(true);
    let batch = give(&mut donor, Bytes::from_static(b"state"));
    sent(&mut donor);
    let next: Flow = "tcp:10.0.0.1:80-10.0.1.2:4243".parse().expect("a flow");
    let another = Request {
        flows: vec![next],
        ..request(Drain::No)
    };
    donor.handle_request(ms(11), another).expect("possible");
    let Command::ReadStatic { token, .. } = command(&mut donor) else {
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
    let prepares = |donor: &mut Handoff| {
        let outputs: Vec<_> = std::iter::from_fn(|| donor.poll_output()).collect();
        let prepare = |output: &Output| {
            let Output::Send { frame, .. } = output else {
                return false;
            };
            matches!(frame, Frame::Prepare { .. })
        };
        outputs.iter().any(prepare)
    };
    assert!(!prepares(&mut donor));
    donor.handle_timeout(ms(20));
    assert!(!prepares(&mut donor), "it rests");
    donor.handle_timeout(ms(21));
    assert!(prepares(&mut donor));
}

#[test]
fn a_donor_without_answer_stays_silent_until_the_holder_speaks() {
    let mut donor = machine(A, HOLDER);
    give(&mut donor, Bytes::from_static(b"state"));
    sent(&mut donor);
    let due = donor.poll_timeout().expect("a limit");
    donor.handle_timeout(due);
    let Some(Output::Send {
        to: B,
        frame: Frame::Abort { .. },
    }) = ({
        let ask = donor.poll_output();
        assert!(
            matches!(
                &ask,
                Some(Output::Send {
                    to: HOLDER,
                    frame: Frame::Ask { .. }
                })
            ),
            "{ask:?}"
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
            "it did something before the holder answered"
        );
        let due = donor.poll_timeout().expect("it asks again");
        donor.handle_timeout(due);
        let mut asked = 0;
        while let Some(output) = donor.poll_output() {
            match output {
                Output::Send {
                    to: HOLDER,
                    frame: Frame::Ask { .. },
                } => asked += 1,
                Output::Event(Event::HolderSilent { .. }) => {}
                other => panic!("in doubt, and {other:?}"),
            }
        }
        assert_eq!(asked, 1);
    }
    assert!(donor.is_moving(&flow()));
}

#[test]
fn a_node_that_holds_the_table_asks_itself_without_a_frame() {
    let mut donor = machine(A, A);
    donor
        .handle_request(ms(0), request(Drain::No))
        .expect("possible");
    read(&mut donor, ms(1), SendQueueInfo::default());
    prepared(&mut donor, ms(2));
    let Command::Arbitrate {
        token,
        asker: A,
        changes,
    } = command(&mut donor)
    else {
        panic!("not an arbitration");
    };
    assert_eq!(changes[0].epoch, 5);
    let results = Results::Arbitrated(vec![Ok(Some(Record::transit(A, B, 6)))]);
    complete(&mut donor, ms(3), token, results);
    assert!(matches!(command(&mut donor), Command::Freeze { .. }));
}

#[test]
fn a_full_queue_drains_before_the_divert_and_no_longer_than_it_should() {
    let mut donor = machine(A, HOLDER);
    donor
        .handle_request(ms(0), request(Drain::Yes))
        .expect("possible");
    let queue = SendQueueInfo {
        unsent: 90_000,
        delivery_rate: 12_500_000,
        rtt: ms(1),
        ..SendQueueInfo::default()
    };
    read(&mut donor, ms(1), queue);
    prepared(&mut donor, ms(2));
    let Command::Drain {
        token, deadline, ..
    } = command(&mut donor)
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
    assert!(matches!(sent(&mut donor), (HOLDER, Frame::Ask { .. })));
}

#[test]
fn what_cannot_be_is_refused_at_once() {
    let mut donor = machine(A, HOLDER);
    let mut ask = |flows: Vec<Flow>, to| {
        donor.handle_request(
            ms(0),
            Request {
                flows,
                to,
                drain: Drain::No,
            },
        )
    };
    assert_eq!(ask(vec![flow()], A), Err(RequestError::ToSelf(A)));
    assert_eq!(
        ask(vec![flow()], NodeId(77)),
        Err(RequestError::UnknownNode(NodeId(77)))
    );
    assert_eq!(ask(vec![], B), Err(RequestError::NoFlows));
    ask(vec![flow()], B).expect("possible");
    let Command::ReadStatic { token, .. } = command(&mut donor) else {
        panic!("not a read");
    };
    donor
        .handle_request(ms(0), request(Drain::No))
        .expect("to be refused flow by flow");
    let refused = donor.poll_output();
    let Some(Output::Event(Event::Outcome { flows, .. })) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(
        flows[0].1,
        Outcome::Kept {
            reason: Reason::AlreadyMoving
        }
    );
    donor.poll_output();
    complete(
        &mut donor,
        ms(1),
        token,
        Results::ReadStatic(vec![Err(Reason::UnknownFlow)]),
    );
    let refused = donor.poll_output();
    let Some(Output::Event(Event::Outcome { flows, .. })) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(
        flows[0].1,
        Outcome::Kept {
            reason: Reason::UnknownFlow
        }
    );
    donor.poll_output();
    assert!(donor.is_idle(), "nothing was touched");
}
