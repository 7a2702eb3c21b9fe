use super::*;
use crate::NodeId;
use std::io;

fn error_number(code: i32) -> SystemError {
    SystemError::from(&io::Error::from_raw_os_error(code))
}

#[test]
fn text_names_contexts_from_outermost_to_innermost() {
    let failure = Failure::from(KernelFault::SystemCall {
        action: "TCP_REPAIR".into(),
        error: error_number(1),
    });
    let failure = failure
        .within(Context::FlowNotRestored)
        .within(Context::RefusedBy(NodeId(3)));
    assert_eq!(
        failure.to_string(),
        "node 3 refused: the flow's state could not be restored: TCP_REPAIR: Operation not permitted (os error 1)"
    );
    let two = [failure, NodeFault::ThreadEnded.into()];
    assert!(join(&two).ends_with("(os error 1); the move's thread has ended"));
}

#[test]
fn fault_of_either_side_is_seen_from_the_receiver() {
    let own = Failure::from(NodeFault::ThreadEnded).from_peer();
    assert_eq!(own.party(), Party::Peer);
    let counterpart = Failure::from(ProtocolViolation::MixedMessages).from_peer();
    assert_eq!(counterpart.party(), Party::ThisNode);
    for fault in [
        Failure::from(ProgramFault::ProgramEnded),
        OperatorFault::Cancelled.into(),
        KernelFault::RestorerDied.into(),
    ] {
        assert_eq!(fault.clone().from_peer(), fault);
    }
}

#[test]
fn party_number_is_its_position() {
    for (number, party) in Party::ALL.into_iter().enumerate() {
        assert_eq!(party as usize, number);
    }
}

#[test]
fn unknown_cause_and_party_of_newer_release_are_decoded() {
    let encode = |party: u8, content: &[u8]| {
        postcard::to_stdvec(&EncodedFailure { party, content }).expect("memory")
    };
    let failure = Failure::decode(&encode(3, &[99, 1, 2, 3]));
    assert_eq!(
        (failure.party(), failure.cause()),
        (Party::Operator, &Cause::Unknown)
    );
    let failure = Failure::decode(&encode(77, &[99]));
    assert_eq!(failure, Cause::Unknown.into());
    // The cause is known, and its second context is not.
    let cause = Cause::from(NodeFault::ThreadEnded);
    let mut content = postcard::to_stdvec(&cause).expect("memory");
    content = postcard::to_extend(&Context::DonorAborted, content).expect("memory");
    content.extend([99, 98]);
    let failure = Failure::decode(&encode(0, &content));
    assert_eq!(failure, Failure::from(cause).within(Context::DonorAborted));
    assert_eq!(Failure::decode(&[]), Cause::Unknown.into());
}

#[test]
fn long_text_is_cut_at_a_character() {
    let text = Text::from("ä".repeat(TEXT_BYTES_MAX));
    assert!(text.as_str().len() <= TEXT_BYTES_MAX && text.as_str().ends_with("ä…"));
    let long = postcard::to_stdvec(&"x".repeat(2 * TEXT_BYTES_MAX)).expect("memory");
    let decoded: Text = postcard::from_bytes(&long).expect("a text");
    assert_eq!(decoded.as_str().len(), TEXT_BYTES_MAX);
}

#[test]
fn contexts_are_limited() {
    let mut failure = Failure::from(NodeFault::ThreadEnded);
    for pid in 0..20 {
        failure = failure.within(Context::Process(pid));
    }
    assert_eq!(failure.contexts().len(), CONTEXTS_MAX);
    assert_eq!(Failure::decode(&failure.encode()), failure);
}

#[test]
fn failure_is_as_small_as_a_pointer() {
    assert_eq!(size_of::<Result<(), Failure>>(), size_of::<usize>());
}
