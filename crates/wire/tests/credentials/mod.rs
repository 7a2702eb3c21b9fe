//! Tests of the frames about certificates, and of the join tokens that nodes keep on their disks.

use crate::{blob, decode_all};
use holdfast_wire::credential_frames::{
    AUTHORITIES_MAX, AuthorityId, CredentialFrame, RenewalRefusal, RevocationNumber,
};
use holdfast_wire::enrolment_state::{
    CertificateSerial, EnrolmentState, JoinTokenRecord, KeyDigest, TOKEN_CERTIFICATES_MAX,
    TOKENS_MAX, TokenId, TokenUse,
};
use holdfast_wire::membership_frames::{JoinRole, NodeName};
use holdfast_wire::{Frame, FrameError, encode};
use proptest::collection::vec;
use proptest::prelude::*;

fn authority() -> impl Strategy<Value = AuthorityId> {
    any::<[u8; 16]>().prop_map(AuthorityId)
}

fn number() -> impl Strategy<Value = RevocationNumber> {
    (authority(), any::<u64>())
        .prop_map(|(authority, number)| RevocationNumber { authority, number })
}

fn refusal() -> impl Strategy<Value = RenewalRefusal> {
    use RenewalRefusal::{BadRequest, Failed, NoAuthority, TooSoon};
    proptest::sample::select(vec![NoAuthority, BadRequest, TooSoon, Failed])
}

/// Returns any frame about certificates.
pub fn credential_frame() -> impl Strategy<Value = Frame> {
    use CredentialFrame as F;
    let frame = prop_oneof![
        vec(number(), 0..=AUTHORITIES_MAX).prop_map(|numbers| F::RevocationNumbers { numbers }),
        authority().prop_map(|authority| F::RevocationListRequest { authority }),
        blob().prop_map(|list| F::RevocationList { list }),
        blob().prop_map(|request| F::RenewalRequest { request }),
        blob().prop_map(|certificate| F::Renewed { certificate }),
        refusal().prop_map(|reason| F::RenewalRefused { reason }),
    ];
    frame.prop_map(Frame::Credentials)
}

#[test]
fn more_authorities_than_a_group_has_are_refused() {
    let numbers = |count: usize| {
        let number = RevocationNumber {
            authority: AuthorityId([7; 16]),
            number: 1,
        };
        let numbers = vec![number; count];
        let frame = Frame::Credentials(CredentialFrame::RevocationNumbers { numbers });
        let mut bytes = Vec::new();
        encode(&frame, &mut bytes).unwrap();
        decode_all(&bytes, &[bytes.len()])
    };
    let (frames, end) = numbers(AUTHORITIES_MAX);
    assert_eq!((frames.len(), end), (1, Ok(())));
    let (_, end) = numbers(AUTHORITIES_MAX + 1);
    assert!(matches!(end, Err(FrameError::Malformed { .. })), "{end:?}");
}

fn usage() -> impl Strategy<Value = TokenUse> {
    let name = "[a-z]{1,40}".prop_map(|text| text.parse::<NodeName>().expect("a name"));
    let serial = any::<u128>().prop_map(CertificateSerial);
    let serials = vec(serial, 0..=TOKEN_CERTIFICATES_MAX);
    let used = (name, any::<[u8; 32]>(), any::<u64>(), serials);
    prop_oneof![
        Just(TokenUse::Fresh),
        Just(TokenUse::Revoked),
        used.prop_map(
            |(name, key, first_used_at_s, certificates)| TokenUse::Used {
                name,
                key: KeyDigest(key),
                first_used_at_s,
                certificates,
            }
        )
    ]
}

fn state(tokens_max: usize) -> impl Strategy<Value = EnrolmentState> {
    let role = prop_oneof![Just(JoinRole::Backup), Just(JoinRole::ServerNode)];
    let record = (any::<u64>(), usage(), role);
    vec(record, 0..=tokens_max).prop_map(|records| {
        let token = |(position, (expires_at_s, usage, role)): (usize, _)| {
            let mut id = [7; 32];
            id[..8].copy_from_slice(&position.to_be_bytes());
            JoinTokenRecord {
                id: TokenId(id),
                expires_at_s,
                usage,
                role,
            }
        };
        EnrolmentState {
            tokens: records.into_iter().enumerate().map(token).collect(),
        }
    })
}

proptest! {
    #[test]
    fn saved_tokens_are_read_again(state in state(20)) {
        let bytes = state.encode().unwrap();
        prop_assert_eq!(EnrolmentState::decode(&bytes), Ok(state));
    }

    #[test]
    fn damaged_tokens_are_refused_or_complete(state in state(4), cut in any::<proptest::sample::Index>(), flip in 1u8..) {
        let mut bytes = state.encode().unwrap();
        let at = cut.index(bytes.len());
        prop_assert!(EnrolmentState::decode(&bytes[..at]).is_err());
        bytes[at] ^= flip;
        if let Ok(other) = EnrolmentState::decode(&bytes) {
            prop_assert!(other.tokens.len() <= TOKENS_MAX);
        }
    }
}

#[test]
fn repeated_or_excess_tokens_are_refused() {
    let token = |number: u16| {
        let mut id = [0; 32];
        id[..2].copy_from_slice(&number.to_be_bytes());
        JoinTokenRecord {
            id: TokenId(id),
            expires_at_s: 1,
            usage: TokenUse::Fresh,
            role: JoinRole::Backup,
        }
    };
    let decode = |tokens: Vec<JoinTokenRecord>| {
        let bytes = EnrolmentState { tokens }.encode().unwrap();
        EnrolmentState::decode(&bytes)
    };
    let full: Vec<_> = (0..TOKENS_MAX as u16).map(token).collect();
    assert!(decode(full.clone()).is_ok());
    assert!(decode([full, vec![token(999)]].concat()).is_err());
    assert!(decode(vec![token(1), token(1)]).is_err());
    assert!(EnrolmentState::decode(&[9]).is_err());
}

#[test]
fn tokens_of_the_release_before_admit_server_nodes() {
    // Version 2, one token: number, end (LEB128), use.
    let bytes = [&[2, 1][..], &[7; 32], &[100, 0]].concat();
    let state = EnrolmentState::decode(&bytes).unwrap();
    let token = JoinTokenRecord {
        id: TokenId([7; 32]),
        expires_at_s: 100,
        usage: TokenUse::Fresh,
        role: JoinRole::ServerNode,
    };
    assert_eq!(state.tokens, [token]);
    assert!(EnrolmentState::decode(&bytes[..bytes.len() - 1]).is_err());
}
