//! Corpus of enrolment: messages, a certificate request, a token and saved tokens; and frames about certificates.

use crate::write_input;
use bytes::Bytes;
use holdfast_api::ca::NodeKey;
use holdfast_api::enrolment::{
    ANSWER_BYTES_MAX, AuthorityId, EnrolmentAnswer, EnrolmentRefusal, EnrolmentRequest, GroupReach,
    JoinSettings, JoinToken, KnownNode, REQUEST_MESSAGE_BYTES_MAX, encode,
};
use holdfast_wire::Frame;
use holdfast_wire::credential_frames::{self, CredentialFrame, RenewalRefusal, RevocationNumber};
use holdfast_wire::enrolment_state::{
    CertificateSerial, EnrolmentState, JoinTokenRecord, KeyDigest, TokenId, TokenUse,
};
use holdfast_wire::membership_frames::JoinRole;

/// Returns one frame about certificates of each kind.
pub fn frames() -> Vec<Frame> {
    use CredentialFrame as F;
    let authority = credential_frames::AuthorityId([7; 16]);
    let number = RevocationNumber {
        authority,
        number: 3,
    };
    let frames = [
        F::RevocationNumbers {
            numbers: vec![number],
        },
        F::RevocationListRequest { authority },
        F::RevocationList {
            list: Bytes::from_static(b"list"),
        },
        F::RenewalRequest {
            request: Bytes::from_static(b"request"),
        },
        F::Renewed {
            certificate: Bytes::from_static(b"certificate"),
        },
        F::RenewalRefused {
            reason: RenewalRefusal::TooSoon,
        },
    ];
    frames.map(Frame::Credentials).to_vec()
}

/// Writes one input of each kind.
pub fn write_enrolment() -> std::io::Result<()> {
    let signed = NodeKey::generate().and_then(|key| key.request("n2"));
    let certificate_request = signed.expect("a name").der;
    let request = EnrolmentRequest {
        token: [1; 32],
        proof: [[2; 32]; 2],
        request: certificate_request.clone(),
    };
    let group = Box::new(JoinSettings {
        name: "web".to_owned(),
        reach: GroupReach::Broadcast { shared_mac: [2; 6] },
        contact: Some("n1".to_owned()),
        nodes: vec![KnownNode {
            name: "n1".to_owned(),
            id: 1,
            address: "10.0.0.11:7400".parse().expect("an address"),
        }],
        revocations: Some(b"list".to_vec()),
    });
    let certificate = b"certificate".to_vec();
    let answers = [
        EnrolmentAnswer::Signed {
            certificate,
            group: group.clone(),
        },
        EnrolmentAnswer::SignOffline { group },
        EnrolmentAnswer::Refused {
            reason: EnrolmentRefusal::Failed("why".to_owned()),
        },
    ];
    let token = JoinToken::with_secret(AuthorityId([7; 16]), [8; 16]);
    let record = |number: u8, usage| JoinTokenRecord {
        id: TokenId([number; 32]),
        expires_at_s: 1_800_000_000,
        usage,
        role: JoinRole::Backup,
    };
    let used = TokenUse::Used {
        name: "n2".parse().expect("a name"),
        key: KeyDigest([9; 32]),
        first_used_at_s: 1_799_999_000,
        certificates: vec![CertificateSerial(5)],
    };
    let state = EnrolmentState {
        tokens: vec![
            record(1, TokenUse::Fresh),
            record(2, used),
            record(3, TokenUse::Revoked),
        ],
    };
    let message = encode(&request, REQUEST_MESSAGE_BYTES_MAX).expect("small");
    let mut inputs = vec![
        ("request", 0, message),
        ("certificate-request", 2, certificate_request),
        ("token", 3, token.to_string().into_bytes()),
        ("saved", 4, state.encode().expect("small")),
    ];
    for (name, answer) in ["signed", "offline", "refused"].into_iter().zip(&answers) {
        inputs.push((name, 1, encode(answer, ANSWER_BYTES_MAX).expect("small")));
    }
    for (name, choice, bytes) in inputs {
        write_input("enrolment", name, &[&[choice], &bytes[..]].concat())?;
    }
    Ok(())
}
