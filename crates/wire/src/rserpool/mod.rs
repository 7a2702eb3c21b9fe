//! Reliable Server Pooling (RFC 5351 to 5356): its identities and policies, its parameters, [`asap`] and [`enrp`].
//!
//! A parameter that is not known where it stands is treated by the two top bits of its type (RFC 5354 section 3): the
//! message is discarded, or the parameter skipped, and either is reported or not. What is to be reported comes with the
//! message or with the error. Of a message type that is not known, only those with the top bits 01 are reported.
//!
//! Where rsplib departs from the RFCs, its form is understood, and written when its fields are set: each says so.

pub mod asap;
mod cause;
mod checksum;
mod element;
pub mod enrp;
mod id;
mod parameter;
pub mod peek;
mod policy;
mod read;
mod transport;
mod write;

pub use cause::{Cause, CauseCode};
pub use checksum::PeChecksum;
pub use element::{EncodedElement, PoolElement, ServerInformation};
pub use id::{ElementId, PoolHandle, RegistrarId};
pub use policy::{Policy, PolicyKind, PolicyNameError};
pub use read::{Error, ErrorKind, Parsed, REPORTS_MAX, message_length};
pub use transport::{Addresses, SctpTransport, Transport, TransportUse};
pub use write::{EncodeError, LENGTH_MAX};
