//! Reliable Server Pooling (RFC 5351 to 5356): its identities and policies, its parameters, [`asap`] and [`enrp`].
//!
//! The two top bits of a parameter's type tell how to treat it where it is unknown (RFC 5354 section 3): discard the
//! message or skip the parameter, and report it or not. The reports are returned with the message or with the error. Of
//! the unknown message types, only the types with top bits 01 are reported.
//!
//! rsplib departs from the RFCs in some fields, which name it: its form is decoded, and encoded when these fields are
//! set.

pub mod asap;
mod checksum;
mod decoder;
mod element;
mod encoder;
pub mod enrp;
mod error_cause;
mod identifiers;
pub mod message_subject;
mod parameter;
mod policy;
mod transport;

pub use checksum::PeChecksum;
pub use decoder::{DecodeError, DecodeErrorKind, ParsedMessage, REPORTS_MAX, message_length};
pub use element::{EncodedElement, PoolElement, ServerInformation};
pub use encoder::{EncodeError, LENGTH_MAX};
pub use error_cause::{CauseCode, ErrorCause};
pub use identifiers::{ElementId, PoolHandle, RegistrarId};
pub use policy::{Policy, PolicyKind, PolicyNameError};
pub use transport::{Addresses, SctpTransport, Transport, TransportUse};
