//! The parameters of RFC 5354 by number, and the trait of types that are parameters.

use super::decoder::{DecodeErrorKind, Reader};
use super::encoder::Writer;

pub(super) const IPV4_ADDRESS: u16 = 0x0001;
pub(super) const IPV6_ADDRESS: u16 = 0x0002;
pub(super) const DCCP_TRANSPORT: u16 = 0x0003;
pub(super) const SCTP_TRANSPORT: u16 = 0x0004;
pub(super) const TCP_TRANSPORT: u16 = 0x0005;
pub(super) const UDP_TRANSPORT: u16 = 0x0006;
pub(super) const UDP_LITE_TRANSPORT: u16 = 0x0007;
pub(super) const POLICY: u16 = 0x0008;
pub(super) const POOL_HANDLE: u16 = 0x0009;
pub(super) const POOL_ELEMENT: u16 = 0x000a;
pub(super) const SERVER_INFORMATION: u16 = 0x000b;
pub(super) const OPERATION_ERROR: u16 = 0x000c;
pub(super) const COOKIE: u16 = 0x000d;
pub(super) const ELEMENT_ID: u16 = 0x000e;
pub(super) const CHECKSUM: u16 = 0x000f;
pub(super) const OPAQUE_TRANSPORT: u16 = 0x0010;
/// rsplib's private parameter of a handle resolution: the number of elements requested.
pub(super) const ITEM_COUNT: u16 = 0x803f;
/// Private parameter of the answer to a probe: an element's load.
pub(super) const LOAD_FIGURES: u16 = 0x803e;

/// A value that is encoded as a parameter: type, length, value (RFC 5354 section 3).
pub(super) trait Parameter: Sized {
    /// The possible types on the wire.
    const KINDS: &'static [u16];

    /// Returns this value's type.
    fn kind(&self) -> u16 {
        Self::KINDS[0]
    }

    /// Decodes the whole value.
    fn read(value: &mut Reader<'_>) -> Result<Self, DecodeErrorKind>;

    /// Encodes the value, without padding at its end.
    fn write(&self, writer: &mut Writer<'_>);
}

/// Treatment of a parameter that is unknown where it stands, from the two top bits of its type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UnknownTreatment {
    /// Continue after the parameter; if false, the message is discarded.
    pub(super) skip: bool,
    /// Report the parameter to the sender.
    pub(super) report: bool,
}

impl UnknownTreatment {
    pub(super) fn from_kind(kind: u16) -> UnknownTreatment {
        UnknownTreatment {
            skip: kind & 0x8000 != 0,
            report: kind & 0x4000 != 0,
        }
    }
}
