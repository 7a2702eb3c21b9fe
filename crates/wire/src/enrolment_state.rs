//! Join tokens as a node keeps them on its disk.
//!
//! A token is a secret that the operator carries to a new host. The node keeps only the token's public key, which
//! identifies the token and checks proofs of its possession.

use crate::frame::bounded_list_of;
use crate::membership_frames::{JoinRole, NodeName};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Maximum number of tokens that a node remembers, used and ended ones included.
pub const TOKENS_MAX: usize = 256;
/// Maximum number of certificates for one token, all for the same node and key.
pub const TOKEN_CERTIFICATES_MAX: usize = 5;

/// Identifies a token: its public key (Ed25519).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenId(pub [u8; 32]);

impl fmt::Display for TokenId {
    /// Writes the first 8 bytes, which people can compare.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8]
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenId({self})")
    }
}

/// Digest (SHA-256) of the public key in a certificate request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct KeyDigest(pub [u8; 32]);

/// Serial number of a certificate (RFC 5280, section 4.1.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CertificateSerial(pub u128);

/// The use of a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenUse {
    /// No node has used the token.
    Fresh,
    /// A node has used the token. The same node may repeat its request, because the answer may have been lost.
    Used {
        /// Name of the node that has used the token.
        name: NodeName,
        /// The node's key.
        key: KeyDigest,
        /// Time of the first use, in seconds since 1970.
        first_used_at_s: u64,
        /// Serial numbers of the certificates signed for the token. The last one may not have been signed, if the daemon
        /// ended in between.
        #[serde(deserialize_with = "bounded_list_of::<_, _, TOKEN_CERTIFICATES_MAX>")]
        certificates: Vec<CertificateSerial>,
    },
    /// The operator has revoked the token.
    Revoked,
}

/// A join token as its issuer keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinTokenRecord {
    /// Public key of the join token, which identifies the token.
    pub id: TokenId,
    /// Time from which the token is refused, in seconds since 1970.
    pub expires_at_s: u64,
    /// The use of the token.
    pub usage: TokenUse,
    /// The highest role that the certificate for the token admits to.
    pub role: JoinRole,
}

/// All tokens of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrolmentState {
    /// The tokens, in the order in which they were made.
    #[serde(deserialize_with = "bounded_list_of::<_, _, TOKENS_MAX>")]
    pub tokens: Vec<JoinTokenRecord>,
}

/// The bytes on the disk are not a state that this release wrote.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the saved join tokens cannot be read ({0}); remove the file, and make new tokens")]
pub struct EnrolmentStateError(String);

/// First byte of a saved state.
const STATE_VERSION: u8 = 3;
/// First byte of a state of the release before, whose tokens have no role.
const STATE_VERSION_WITHOUT_ROLES: u8 = 2;

/// A token without a role, as the release before kept it.
#[derive(Deserialize)]
struct RecordWithoutRole {
    id: TokenId,
    expires_at_s: u64,
    usage: TokenUse,
}

/// The state of the release before.
#[derive(Deserialize)]
struct StateWithoutRoles {
    #[serde(deserialize_with = "bounded_list_of::<_, _, TOKENS_MAX>")]
    tokens: Vec<RecordWithoutRole>,
}

impl From<StateWithoutRoles> for EnrolmentState {
    /// Returns the state in which the tokens admit server nodes: no operator has said that their hosts may decide.
    fn from(state: StateWithoutRoles) -> EnrolmentState {
        let token = |record: RecordWithoutRole| JoinTokenRecord {
            id: record.id,
            expires_at_s: record.expires_at_s,
            usage: record.usage,
            role: JoinRole::ServerNode,
        };
        EnrolmentState {
            tokens: state.tokens.into_iter().map(token).collect(),
        }
    }
}

impl EnrolmentState {
    /// Returns the bytes to write to the disk.
    ///
    /// # Errors
    /// The state cannot be encoded, which would be a defect of this crate.
    pub fn encode(&self) -> Result<Vec<u8>, EnrolmentStateError> {
        postcard::to_extend(self, vec![STATE_VERSION])
            .map_err(|error| EnrolmentStateError(error.to_string()))
    }

    /// Reads the bytes that `encode` of this release or of the one before returned.
    ///
    /// # Errors
    /// The bytes are no state, or one that no node can have.
    pub fn decode(bytes: &[u8]) -> Result<EnrolmentState, EnrolmentStateError> {
        let error = |cause: &str| EnrolmentStateError(cause.to_owned());
        let decoded = match bytes.split_first() {
            Some((&STATE_VERSION, body)) => postcard::take_from_bytes::<EnrolmentState>(body),
            Some((&STATE_VERSION_WITHOUT_ROLES, body)) => {
                postcard::take_from_bytes::<StateWithoutRoles>(body)
                    .map(|(state, rest)| (state.into(), rest))
            }
            _ => return Err(error("the version is unknown")),
        };
        let (state, rest) = decoded.map_err(|cause| error(&cause.to_string()))?;
        let is_repeated = |(position, token): (usize, &JoinTokenRecord)| {
            state.tokens[..position]
                .iter()
                .any(|other| other.id == token.id)
        };
        match rest.is_empty() {
            false => Err(error("bytes follow the end")),
            true if state.tokens.iter().enumerate().any(is_repeated) => {
                Err(error("a token appears twice"))
            }
            true => Ok(state),
        }
    }
}
