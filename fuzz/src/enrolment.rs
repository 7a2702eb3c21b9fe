//! The texts and messages by which hosts join a group, and the join tokens on a node's disk.

use holdfast_api::ca::CertificateRequest;
use holdfast_api::enrolment::{
    ANSWER_BYTES_MAX, EnrolmentAnswer, EnrolmentRequest, JoinToken, REQUEST_MESSAGE_BYTES_MAX,
    decode, encode,
};
use holdfast_wire::enrolment_state::EnrolmentState;

/// Reads `data` as the kind of input that the first byte chooses (modulo 5): a request, an answer, a certificate request,
/// a token's text, or saved tokens. Accepted messages must have the same meaning after they are written again.
pub fn run(data: &[u8]) -> bool {
    let Some((choice, rest)) = data.split_first() else {
        return false;
    };
    match *choice % 5 {
        0 => {
            let message = decode::<EnrolmentRequest>(rest, REQUEST_MESSAGE_BYTES_MAX);
            message.is_ok_and(|message| {
                let bytes = encode(&message, REQUEST_MESSAGE_BYTES_MAX).expect("not longer");
                assert_eq!(decode(&bytes, REQUEST_MESSAGE_BYTES_MAX), Ok(message));
                true
            })
        }
        1 => decode::<EnrolmentAnswer>(rest, ANSWER_BYTES_MAX).is_ok_and(|message| {
            let bytes = encode(&message, ANSWER_BYTES_MAX).expect("not longer");
            assert_eq!(decode(&bytes, ANSWER_BYTES_MAX), Ok(message));
            true
        }),
        2 => CertificateRequest::from_der(rest).is_ok_and(|request| !request.name().is_empty()),
        3 => {
            let token = String::from_utf8_lossy(rest).parse::<JoinToken>();
            token.is_ok_and(|token| token.to_string().parse() == Ok(token))
        }
        _ => EnrolmentState::decode(rest).is_ok_and(|state| {
            let bytes = state.encode().expect("it was decoded");
            assert_eq!(EnrolmentState::decode(&bytes), Ok(state));
            true
        }),
    }
}
