//! Failures in frames: any failure survives encoding and decoding, and any bytes decode to one.

use crate::{flow, node, record};
use holdfast_wire::failure::{
    Cause, Context, Failure, HandoffStep, KernelFault, MigrationStep, NodeFault, OperatorFault,
    Party, PeerFault, ProgramFault, ProtocolViolation, Step, SystemError, Text,
};
use holdfast_wire::{ChangeRefusal, Flow};
use proptest::collection::vec;
use proptest::prelude::*;
use std::net::SocketAddr;
use std::time::Duration;

pub fn failure() -> BoxedStrategy<Failure> {
    let party = proptest::sample::select(vec![
        Party::ThisNode,
        Party::Peer,
        Party::Program,
        Party::Operator,
        Party::Kernel,
    ]);
    (party, cause(), vec(context(), 0..4))
        .prop_map(|(party, cause, contexts)| {
            let failure = Failure::new(party, cause);
            contexts.into_iter().fold(failure, Failure::within)
        })
        .boxed()
}

/// Returns the result of a step on the wire.
pub fn result() -> BoxedStrategy<Result<(), Failure>> {
    proptest::result::maybe_ok(Just(()), failure()).boxed()
}

fn text() -> BoxedStrategy<Text> {
    prop_oneof![
        ".*".prop_map(Text::from),
        (0_usize..3_000).prop_map(|count| Text::from("ä".repeat(count)))
    ]
    .boxed()
}

fn system_error() -> impl Strategy<Value = SystemError> {
    prop_oneof![
        any::<i32>().prop_map(SystemError::Code),
        text().prop_map(SystemError::Text)
    ]
}

fn address() -> impl Strategy<Value = SocketAddr> {
    flow()
        .prop_filter("a process", |flow| !flow.is_process())
        .prop_map(|flow| flow.local)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        Just(Step::Handoff(HandoffStep::Extract)),
        Just(Step::Migration(MigrationStep::Arm))
    ]
}

fn context() -> BoxedStrategy<Context> {
    prop_oneof![
        node().prop_map(Context::RefusedBy),
        node().prop_map(Context::MoveAbortedBy),
        Just(Context::DonorAborted),
        Just(Context::StepFailed(MigrationStep::Freeze)),
        flow().prop_map(Context::Flow),
        any::<i32>().prop_map(Context::Process),
        any::<u32>().prop_map(Context::Socket),
    ]
    .boxed()
}

fn cause() -> BoxedStrategy<Cause> {
    prop_oneof![
        Just(Cause::Unknown),
        node_or_peer_fault(),
        protocol_violation().prop_map(Cause::Protocol),
        program_fault().prop_map(Cause::Program),
        operator_fault().prop_map(Cause::Operator),
        kernel_fault().prop_map(Cause::Kernel),
    ]
    .boxed()
}

fn node_or_peer_fault() -> BoxedStrategy<Cause> {
    let refusal = proptest::option::of(record()).prop_map(|current| ChangeRefusal { current });
    prop_oneof![
        Just(NodeFault::ThreadEnded.into()),
        flow().prop_map(|flow| NodeFault::FlowInOtherMove(flow).into()),
        (node(), step()).prop_map(|(node, step)| PeerFault::NoAnswer { node, step }.into()),
        refusal.prop_map(|refusal| PeerFault::FlowNotDiverted(refusal).into()),
    ]
    .boxed()
}

fn protocol_violation() -> BoxedStrategy<ProtocolViolation> {
    prop_oneof![
        Just(ProtocolViolation::MixedMessages),
        text().prop_map(ProtocolViolation::MalformedImage),
        flow().prop_map(ProtocolViolation::NotMovedAway),
    ]
    .boxed()
}

fn program_fault() -> BoxedStrategy<ProgramFault> {
    let part = (
        any::<i32>(),
        any::<Option<u32>>(),
        proptest::option::of(text()),
        text(),
    );
    prop_oneof![
        any::<u64>().prop_map(|bytes| ProgramFault::FlowTooBig { bytes }),
        part.prop_map(|(pid, fd, path, reason)| ProgramFault::Obstacle {
            pid,
            fd,
            path,
            reason
        }),
        (address(), address())
            .prop_map(|(local, remote)| ProgramFault::ConnectionWithinHost { local, remote }),
    ]
    .boxed()
}

fn operator_fault() -> BoxedStrategy<OperatorFault> {
    let durations = any::<[u32; 2]>()
        .prop_map(|millis| millis.map(|number| Duration::from_millis(u64::from(number))));
    prop_oneof![
        proptest::option::of(record()).prop_map(OperatorFault::FlowOwnedElsewhere),
        (flow(), record()).prop_map(|(flow, record)| {
            OperatorFault::FlowOfProcessOwnedElsewhere { flow, record }
        }),
        durations.prop_map(|[predicted, max]| OperatorFault::FreezeTooLong { predicted, max }),
        (text(), system_error())
            .prop_map(|(path, error)| OperatorFault::RecordNotWritten { path, error }),
        (text(), address())
            .prop_map(|(node, address)| OperatorFault::NoProgramServes { node, address }),
    ]
    .boxed()
}

fn kernel_fault() -> BoxedStrategy<KernelFault> {
    prop_oneof![
        (text(), system_error())
            .prop_map(|(action, error)| KernelFault::SystemCall { action, error }),
        text().prop_map(KernelFault::Ebpf),
        any::<i32>().prop_map(KernelFault::StopTimeout),
    ]
    .boxed()
}

proptest! {
    #[test]
    fn failure_round_trips(failure in failure()) {
        prop_assert_eq!(Failure::decode(&failure.encode()), failure.clone());
        prop_assert!(!failure.contexts().is_empty() || failure.to_string() == failure.cause().to_string());
    }

    #[test]
    fn any_bytes_decode_to_failure(bytes in vec(any::<u8>(), 0..300)) {
        let failure = Failure::decode(&bytes);
        prop_assert_eq!(Failure::decode(&failure.encode()), failure);
    }
}

#[test]
fn failure_format_is_stable() {
    let flow: Flow = "tcp:10.0.0.1:80-10.0.1.2:4242".parse().expect("a flow");
    let failure = Failure::from(NodeFault::ThreadEnded).within(Context::Flow(flow));
    let expected = [
        0, 17, 1, 4, 11, 0, 0, 10, 0, 0, 1, 80, 0, 10, 0, 1, 2, 0x92, 0x21,
    ];
    assert_eq!(failure.encode(), expected);
}
