//! The two messages of an enrolment: a version byte and postcard.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::ca::REQUEST_BYTES_MAX;

/// Version of the messages that this crate reads and writes.
const VERSION: u8 = 1;

/// Maximum length of an encoded request, in bytes.
pub const REQUEST_MESSAGE_BYTES_MAX: usize = REQUEST_BYTES_MAX + 256;

/// Maximum length of an encoded answer, in bytes: the revocation list may have a mebibyte.
pub const ANSWER_BYTES_MAX: usize = 2 << 20;

/// A host's request for a certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrolmentRequest {
    /// Public key of the token, which names the token.
    pub token: [u8; 32],
    /// Both halves of the proof that the host has the token: see [`TokenKey::prove`](super::TokenKey::prove).
    pub proof: [[u8; 32]; 2],
    /// The certificate request (PKCS #10) in DER.
    #[serde(with = "serde_bytes")]
    pub request: Vec<u8>,
}

/// The answer to an [`EnrolmentRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EnrolmentAnswer {
    /// The node signed a certificate for the host.
    Signed {
        /// The host's new certificate in DER.
        #[serde(with = "serde_bytes")]
        certificate: Vec<u8>,
        /// Settings of the group for the host's configuration.
        group: Box<JoinSettings>,
    },
    /// The host may join, but the node has no authority: the request is to be signed with `holdfast ca sign`.
    SignOffline {
        /// Settings of the group for the host's configuration.
        group: Box<JoinSettings>,
    },
    /// The host gets no certificate.
    Refused {
        /// Reason for refusing the host.
        reason: EnrolmentRefusal,
    },
}

/// Reason for refusing a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum EnrolmentRefusal {
    /// The token is unknown, or the host does not have it.
    #[error("the node does not know this token; make one there with `holdfast group token`")]
    UnknownToken,
    /// The token's time is over.
    #[error("the token has expired; make a new one with `holdfast group token`")]
    ExpiredToken,
    /// Another node has used the token, or the same one too long ago or too often.
    #[error(
        "another node has used the token, or this one too long ago or too often; make a new one with `holdfast group token`"
    )]
    UsedToken,
    /// The operator has revoked the token, or a certificate that was signed for the token.
    #[error("the token was revoked; make a new one with `holdfast group token`")]
    RevokedToken,
    /// A node of the group has the name.
    #[error(
        "a node of the group has this name; choose another one with --name, or revoke that node's certificate first"
    )]
    NameTaken,
    /// The node cannot keep its records or sign.
    #[error("the node cannot sign the certificate: {0}; its log says more")]
    Failed(String),
    /// The certificate request is malformed.
    #[error("the certificate request is refused: {0}")]
    Request(String),
    /// The message is of another release.
    #[error("the node runs release {0}; install the same release on both hosts")]
    OtherRelease(String),
    /// The node has left its group, or has not joined it yet.
    #[error("the node is not in its group; join by another node of the group")]
    NotInGroup,
}

/// Settings of the group that a new node needs in its configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinSettings {
    /// Name of the group.
    pub name: String,
    /// Reach of the group.
    pub reach: GroupReach,
    /// Name of the contact node, if the group is configured by files; none if the group runs itself.
    pub contact: Option<String>,
    /// Nodes of the group; in a group that runs itself, the nodes to ask for the contact node.
    pub nodes: Vec<KnownNode>,
    /// Revocation list of the authority in DER, if there is one.
    #[serde(with = "serde_bytes")]
    pub revocations: Option<Vec<u8>>,
}

/// Way in which clients' packets reach the owner of their flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupReach {
    /// The contact node forwards each flow.
    Steer,
    /// Every node receives every packet.
    Broadcast {
        /// Link address of the service addresses.
        shared_mac: [u8; 6],
    },
}

/// A node of the group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownNode {
    /// The node's name.
    pub name: String,
    /// The node's number.
    pub id: u16,
    /// Address of the node's daemon.
    pub address: SocketAddr,
}

/// Reason why bytes are not a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The message is longer than allowed.
    #[error("a message of {0} bytes is too long; run the same release on both hosts")]
    TooLong(usize),
    /// The other side uses another version.
    #[error(
        "the other host speaks version {0} of enrolment and this one version {VERSION}; install the same release on both"
    )]
    Version(u8),
    /// The message is not one.
    #[error("a message cannot be read ({0}); run the same release on both hosts")]
    Malformed(String),
}

/// Encodes a message of at most `bytes_max` bytes.
///
/// # Errors
/// [`MessageError::TooLong`].
pub fn encode<T: Serialize>(message: &T, bytes_max: usize) -> Result<Vec<u8>, MessageError> {
    let bytes = postcard::to_extend(message, vec![VERSION])
        .map_err(|error| MessageError::Malformed(error.to_string()))?;
    match bytes.len() > bytes_max {
        true => Err(MessageError::TooLong(bytes.len())),
        false => Ok(bytes),
    }
}

/// Decodes a message of at most `bytes_max` bytes. Allocates no more than in proportion to `bytes`.
///
/// # Errors
/// See [`MessageError`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8], bytes_max: usize) -> Result<T, MessageError> {
    if bytes.len() > bytes_max {
        return Err(MessageError::TooLong(bytes.len()));
    }
    let malformed = |cause: &str| MessageError::Malformed(cause.to_owned());
    let (version, body) = bytes.split_first().ok_or(malformed("it is empty"))?;
    if *version != VERSION {
        return Err(MessageError::Version(*version));
    }
    let (message, rest) =
        postcard::take_from_bytes(body).map_err(|error| malformed(&error.to_string()))?;
    match rest.is_empty() {
        true => Ok(message),
        false => Err(malformed("bytes follow its end")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn settings() -> impl Strategy<Value = JoinSettings> {
        let node = ("[a-z]{1,9}", any::<u16>(), any::<([u8; 4], u16)>());
        let node = node.prop_map(|(name, id, address)| KnownNode {
            name,
            id,
            address: address.into(),
        });
        let reach = prop_oneof![
            Just(GroupReach::Steer),
            any::<[u8; 6]>().prop_map(|shared_mac| GroupReach::Broadcast { shared_mac })
        ];
        let contact = proptest::option::of("[a-z]{1,9}");
        let revocations = proptest::option::of(vec(any::<u8>(), 0..40));
        ("[a-z]{1,9}", reach, contact, vec(node, 0..4), revocations).prop_map(
            |(name, reach, contact, nodes, revocations)| JoinSettings {
                name,
                reach,
                contact,
                nodes,
                revocations,
            },
        )
    }

    fn answer() -> impl Strategy<Value = EnrolmentAnswer> {
        let refusal = prop_oneof![
            Just(EnrolmentRefusal::UsedToken),
            ".{0,9}".prop_map(EnrolmentRefusal::Failed)
        ];
        let bytes = vec(any::<u8>(), 0..40);
        prop_oneof![
            (bytes, settings()).prop_map(|(certificate, group)| EnrolmentAnswer::Signed {
                certificate,
                group: Box::new(group)
            }),
            settings().prop_map(|group| EnrolmentAnswer::SignOffline {
                group: Box::new(group)
            }),
            refusal.prop_map(|reason| EnrolmentAnswer::Refused { reason }),
        ]
    }

    proptest! {
        #[test]
        fn messages_are_read_again(token: [u8; 32], proof: [[u8; 32]; 2], request in vec(any::<u8>(), 0..90), answer in answer()) {
            let request = EnrolmentRequest { token, proof, request };
            let bytes = encode(&request, REQUEST_MESSAGE_BYTES_MAX).unwrap();
            prop_assert_eq!(decode(&bytes, REQUEST_MESSAGE_BYTES_MAX), Ok(request));
            let bytes = encode(&answer, ANSWER_BYTES_MAX).unwrap();
            prop_assert_eq!(decode(&bytes, ANSWER_BYTES_MAX), Ok(answer));
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(mut bytes in vec(any::<u8>(), 0..200)) {
            let _ = decode::<EnrolmentAnswer>(&bytes, ANSWER_BYTES_MAX);
            if let Some(first) = bytes.first_mut() {
                *first = VERSION;
            }
            let _ = decode::<EnrolmentRequest>(&bytes, REQUEST_MESSAGE_BYTES_MAX);
            let _ = decode::<EnrolmentAnswer>(&bytes, ANSWER_BYTES_MAX);
        }

        #[test]
        fn cut_message_is_refused(answer in answer(), cut in any::<proptest::sample::Index>()) {
            let bytes = encode(&answer, ANSWER_BYTES_MAX).unwrap();
            let at = cut.index(bytes.len());
            prop_assert!(decode::<EnrolmentAnswer>(&bytes[..at], ANSWER_BYTES_MAX).is_err());
        }
    }

    #[test]
    fn long_or_foreign_messages_are_refused() {
        let request = EnrolmentRequest {
            token: [1; 32],
            proof: [[2; 32]; 2],
            request: vec![0; REQUEST_MESSAGE_BYTES_MAX],
        };
        let long = encode(&request, REQUEST_MESSAGE_BYTES_MAX);
        assert!(matches!(long, Err(MessageError::TooLong(_))));
        let bytes = vec![VERSION; REQUEST_MESSAGE_BYTES_MAX + 1];
        let long = decode::<EnrolmentRequest>(&bytes, REQUEST_MESSAGE_BYTES_MAX);
        assert_eq!(long, Err(MessageError::TooLong(bytes.len())));
        let other = decode::<EnrolmentRequest>(&[9, 9], 9);
        assert_eq!(other, Err(MessageError::Version(9)));
        let other = decode::<EnrolmentRequest>(&[], 9);
        assert!(matches!(other, Err(MessageError::Malformed(_))));
    }
}
