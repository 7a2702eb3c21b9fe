//! Enrolment of new hosts: a host with a join token gets a certificate of the group's authority.
//!
//! The host connects with TLS 1.3 to the enrolment port of a node, and checks that the node has a certificate of the
//! authority that the token names. The host has no certificate yet; it proves that it has the token by a signature over
//! key material of the TLS connection, so neither the node nor anybody between them learns a secret that serves elsewhere.
//! One [`EnrolmentRequest`] and one [`EnrolmentAnswer`] are exchanged, each with its length in front and bounded.

#[cfg(feature = "enrolment")]
mod client;
mod message;
mod node_file;
#[cfg(feature = "enrolment")]
mod proof;
#[cfg(feature = "enrolment")]
mod timed_stream;
mod token;

#[cfg(feature = "enrolment")]
pub use client::{
    Enrolled, EnrolmentError, certificate_matches, certified_role, enrol, first_certificate,
};
pub use message::{
    ANSWER_BYTES_MAX, EnrolmentAnswer, EnrolmentRefusal, EnrolmentRequest, GroupReach,
    JoinSettings, KnownNode, MessageError, REQUEST_MESSAGE_BYTES_MAX, decode, encode,
};
pub use node_file::NodeFile;
#[cfg(feature = "enrolment")]
pub use proof::{EXPORTER_LABEL, TokenKey, authority_id, verify_proof};
#[cfg(feature = "enrolment")]
pub use timed_stream::{TimedStream, read_message, write_message};
pub use token::{AuthorityId, JoinToken, TokenError, digest};

/// Default TCP port of enrolment.
pub const DEFAULT_ENROLMENT_PORT: u16 = 7401;

/// Protocol name of enrolment (ALPN, RFC 7301).
pub const ALPN_PROTOCOL: &[u8] = b"holdfast-enrolment/1";
