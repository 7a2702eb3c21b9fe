//! One handoff step by step: its frames and commands, their order, and their number.

mod acceptor;
mod donor;

use bytes::Bytes;
use holdfast_proto::handoff::{
    Command, Completion, Config, Drain, Event, FrozenFlow, Handoff, Outcome, Output, Reason,
    Request, RequestError, Results, SendQueueInfo, StaticFlow, Token,
};
use holdfast_wire::frame::PrepareFlow;
use holdfast_wire::{BatchId, ChangeKind, Flow, Frame, NodeId, Record};
use std::time::Duration;

const A: NodeId = NodeId(1);
const B: NodeId = NodeId(2);
const HOLDER: NodeId = NodeId(3);

fn flow() -> Flow {
    "tcp:10.0.0.1:80-10.0.1.2:4242".parse().expect("a flow")
}

fn machine(node: NodeId, holder: NodeId) -> Handoff {
    Handoff::new(Config::new(node, 9, holder, [A, B, HOLDER]))
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn request(drain: Drain) -> Request {
    Request {
        flows: vec![flow()],
        to: B,
        drain,
    }
}

/// Returns the only output.
fn only(machine: &mut Handoff) -> Output {
    let output = machine.poll_output().expect("an output");
    assert_eq!(machine.poll_output(), None, "after {output:?}");
    output
}

fn command(machine: &mut Handoff) -> Command {
    match only(machine) {
        Output::Do(command) => command,
        other => panic!("not a command: {other:?}"),
    }
}

fn sent(machine: &mut Handoff) -> (NodeId, Frame) {
    match only(machine) {
        Output::Send { to, frame } => (to, frame),
        other => panic!("not a frame: {other:?}"),
    }
}

fn complete(machine: &mut Handoff, now: Duration, token: Token, results: Results) {
    machine.handle_done(now, Completion { token, results });
}

/// Lets a donor read a flow with the queue `queue`; the donor's next output follows.
fn read(machine: &mut Handoff, now: Duration, queue: SendQueueInfo) {
    let Command::ReadStatic { token, flows } = command(machine) else {
        panic!("not a read");
    };
    assert_eq!(flows, [flow()]);
    let static_state = Bytes::from_static(b"static");
    let state = StaticFlow {
        epoch: 5,
        static_state,
        queue,
    };
    complete(machine, now, token, Results::ReadStatic(vec![Ok(state)]));
}

/// Takes a donor's `Prepare` and answers that all sockets are prepared.
fn prepared(machine: &mut Handoff, now: Duration) -> BatchId {
    let (to, Frame::Prepare { batch, flows }) = sent(machine) else {
        panic!("not a Prepare");
    };
    assert_eq!((to, flows[0].epoch), (B, 5));
    machine.handle_frame(
        now,
        B,
        Frame::Prepared {
            batch,
            results: vec![Ok(())],
        },
    );
    batch
}

fn answer(machine: &mut Handoff, now: Duration, kind: ChangeKind, epoch: u32, record: Record) {
    let (HOLDER, Frame::Ask { request, changes }) = sent(machine) else {
        panic!("not a question to the holder");
    };
    assert_eq!((changes[0].kind, changes[0].epoch), (kind, epoch));
    let results = vec![Ok(Some(record))];
    machine.handle_frame(now, HOLDER, Frame::Answer { request, results });
}

/// Advances a donor to its `State`, with the given blob.
fn give(machine: &mut Handoff, dynamic: Bytes) -> BatchId {
    machine
        .handle_request(ms(0), request(Drain::No))
        .expect("possible");
    read(machine, ms(1), SendQueueInfo::default());
    let batch = prepared(machine, ms(3));
    let transit = Record::transit(A, B, 6);
    answer(
        machine,
        ms(6),
        ChangeKind::Divert { acceptor: B },
        5,
        transit,
    );
    let Command::Freeze {
        token,
        acceptor,
        flows,
    } = command(machine)
    else {
        panic!("not a freeze");
    };
    assert_eq!((acceptor, flows[0].epoch), (B, 6));
    let application = Bytes::from_static(b"offset 17");
    let frozen = FrozenFlow {
        dynamic,
        application,
    };
    complete(machine, ms(10), token, Results::Frozen(vec![Ok(frozen)]));
    batch
}
