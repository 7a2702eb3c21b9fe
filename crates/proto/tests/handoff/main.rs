//! One handoff step by step: its frames and commands, their order, and their number.

mod acceptor;
mod donor;
mod view;

use bytes::Bytes;
use holdfast_proto::handoff::{
    Command, CommandToken, Completion, DrainPolicy, Event, FlowEpoch, FlowHandoffOutcome,
    FlowHandoffRequest, FlowHandoffRequestError, FlowKeptReason, FrozenFlow, Handoff,
    HandoffMachineConfig, Output, Results, SendQueueInfo, StaticFlow,
};
use holdfast_proto::view::View;
use holdfast_wire::failure::NodeFault;
use holdfast_wire::frame::FlowToPrepare;
use holdfast_wire::{
    BatchId, ChangeKind, ChangeRefusal, Epoch, Flow, Frame, NodeId, OwnershipRecord,
};
use std::time::Duration;

const A: NodeId = NodeId(1);
const B: NodeId = NodeId(2);
const HOLDER: NodeId = NodeId(3);

fn flow() -> Flow {
    "tcp:10.0.0.1:80-10.0.1.2:4242".parse().expect("a flow")
}

fn new_machine(node: NodeId, holder: NodeId) -> Handoff {
    let view = View::configured(holder, [A, B, HOLDER]);
    Handoff::new(HandoffMachineConfig::new(node, 9), view)
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn new_request(drain: DrainPolicy) -> FlowHandoffRequest {
    FlowHandoffRequest {
        flows: vec![flow()],
        to: B,
        drain,
    }
}

/// Returns the only output.
fn take_only_output(machine: &mut Handoff) -> Output {
    let output = machine.poll_output().expect("an output");
    assert_eq!(machine.poll_output(), None, "after {output:?}");
    output
}

fn take_command(machine: &mut Handoff) -> Command {
    match take_only_output(machine) {
        Output::Execute(command) => command,
        other => panic!("not a command: {other:?}"),
    }
}

fn take_sent_frame(machine: &mut Handoff) -> (NodeId, Frame) {
    match take_only_output(machine) {
        Output::Send { to, frame } => (to, frame),
        other => panic!("not a frame: {other:?}"),
    }
}

fn complete(machine: &mut Handoff, now: Duration, token: CommandToken, results: Results) {
    machine.handle_completion(now, Completion { token, results });
}

/// Lets a donor read a flow with the queue `queue`; the donor's next output follows.
fn complete_read(machine: &mut Handoff, now: Duration, queue: SendQueueInfo) {
    let Command::ReadStatic { token, flows } = take_command(machine) else {
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
fn complete_prepare(machine: &mut Handoff, now: Duration) -> BatchId {
    let (to, Frame::Prepare { batch, flows }) = take_sent_frame(machine) else {
        panic!("not a Prepare");
    };
    assert_eq!((to, flows[0].epoch), (B, 5));
    machine.handle_frame(
        now,
        B,
        Frame::PrepareResponse {
            batch,
            results: vec![Ok(())],
        },
    );
    batch
}

fn answer_holder_request(
    machine: &mut Handoff,
    now: Duration,
    kind: ChangeKind,
    epoch: u32,
    record: OwnershipRecord,
) {
    let (HOLDER, Frame::ChangeRequest { request, changes }) = take_sent_frame(machine) else {
        panic!("not a question to the holder");
    };
    assert_eq!((changes[0].kind, changes[0].epoch), (kind, epoch));
    let results = vec![Ok(Some(record))];
    machine.handle_frame(now, HOLDER, Frame::ChangeResponse { request, results });
}

/// Advances a donor to its `State`, with the given blob.
fn run_donor_to_state(machine: &mut Handoff, dynamic: Bytes) -> BatchId {
    machine
        .handle_request(ms(0), new_request(DrainPolicy::No))
        .expect("possible");
    complete_read(machine, ms(1), SendQueueInfo::default());
    let batch = complete_prepare(machine, ms(3));
    let transit = OwnershipRecord::transit(A, B, 6);
    answer_holder_request(
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
    } = take_command(machine)
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
