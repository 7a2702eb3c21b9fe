//! The messages by which revocation lists reach all nodes of a group, and by which nodes renew their certificates.
//!
//! A revocation list is signed by the authority, so any node may pass it on. Lists of one authority are ordered by their
//! CRL numbers (RFC 5280, section 5.2.3), and the newest is in force.

use crate::frame::bounded_list_of;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Maximum length of a revocation list in DER, in bytes: some 25,000 revoked certificates.
pub const REVOCATION_LIST_BYTES_MAX: usize = 1 << 20;
/// Maximum length of a certificate request in DER, in bytes.
pub const CERTIFICATE_REQUEST_BYTES_MAX: usize = 4_096;
/// Maximum length of a certificate in DER, in bytes.
pub const CERTIFICATE_BYTES_MAX: usize = 16_384;
/// Maximum number of authorities of a group; more than one only while an authority replaces another.
pub const AUTHORITIES_MAX: usize = 8;

/// Identifies an authority: the first 16 bytes of the SHA-256 digest of the authority's public key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AuthorityId(pub [u8; 16]);

impl fmt::Display for AuthorityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for AuthorityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AuthorityId({self})")
    }
}

/// Number of an authority's revocation list that a node has in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RevocationNumber {
    /// The authority that signed the revocation list.
    pub authority: AuthorityId,
    /// CRL number of the list.
    pub number: u64,
}

/// The reason for which a node does not renew the certificate of another.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    thiserror::Error,
)]
pub enum RenewalRefusal {
    /// The node has no authority.
    #[error("the node has no authority; `authority` of [joining] names its directory")]
    NoAuthority,
    /// The request is not one, or for another name than that of the sender's certificate.
    #[error(
        "the request does not fit the sender's certificate; run the same release on both nodes"
    )]
    BadRequest,
    /// The sender's certificate was renewed a moment ago.
    #[error("the certificate was renewed a moment ago; the node asks again by itself")]
    TooSoon,
    /// The authority's files cannot be used.
    #[error("the authority cannot sign; the log of its node says why")]
    Failed,
}

/// The frames about certificates, with [`Bytes`] for blobs.
pub type CredentialFrame = GenericCredentialFrame<Bytes>;

/// The frames about certificates. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound(serialize = "B: Serialize", deserialize = "B: Deserialize<'de>"))]
pub enum GenericCredentialFrame<B> {
    /// Any node to any node, when they have connected and after each change: the lists that the sender has in force.
    RevocationNumbers {
        /// One number for each authority with a list.
        #[serde(deserialize_with = "bounded_list_of::<_, _, AUTHORITIES_MAX>")]
        numbers: Vec<RevocationNumber>,
    },
    /// The answer to newer numbers: send the list of this authority.
    RevocationListRequest {
        /// The authority whose revocation list the receiver is to send.
        authority: AuthorityId,
    },
    /// The answer to `RevocationListRequest`.
    RevocationList {
        /// The list in DER, at most [`REVOCATION_LIST_BYTES_MAX`] bytes.
        list: B,
    },
    /// Any node to a node with an authority: sign a new certificate for the sender.
    RenewalRequest {
        /// The request (PKCS #10) in DER, at most [`CERTIFICATE_REQUEST_BYTES_MAX`] bytes.
        request: B,
    },
    /// The answer to `RenewalRequest`.
    Renewed {
        /// The certificate in DER, at most [`CERTIFICATE_BYTES_MAX`] bytes.
        certificate: B,
    },
    /// The answer to `RenewalRequest`: no certificate was signed.
    RenewalRefused {
        /// The reason for which no certificate was signed.
        reason: RenewalRefusal,
    },
}

impl<B> GenericCredentialFrame<B> {
    /// The frame's name, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            GenericCredentialFrame::RevocationNumbers { .. } => "RevocationNumbers",
            GenericCredentialFrame::RevocationListRequest { .. } => "RevocationListRequest",
            GenericCredentialFrame::RevocationList { .. } => "RevocationList",
            GenericCredentialFrame::RenewalRequest { .. } => "RenewalRequest",
            GenericCredentialFrame::Renewed { .. } => "Renewed",
            GenericCredentialFrame::RenewalRefused { .. } => "RenewalRefused",
        }
    }

    /// The same frame with its blob put through `convert`.
    pub(crate) fn map_blobs<C>(self, convert: impl Fn(B) -> C) -> GenericCredentialFrame<C> {
        use GenericCredentialFrame as F;
        match self {
            F::RevocationNumbers { numbers } => F::RevocationNumbers { numbers },
            F::RevocationListRequest { authority } => F::RevocationListRequest { authority },
            F::RevocationList { list } => F::RevocationList {
                list: convert(list),
            },
            F::RenewalRequest { request } => F::RenewalRequest {
                request: convert(request),
            },
            F::Renewed { certificate } => F::Renewed {
                certificate: convert(certificate),
            },
            F::RenewalRefused { reason } => F::RenewalRefused { reason },
        }
    }
}
