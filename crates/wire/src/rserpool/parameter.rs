//! The parameters of RFC 5354 by number, and what each type that is one can do.

use super::read::{ErrorKind, Reader};
use super::write::Writer;

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
/// rsplib's own, in a handle resolution: how many elements are wanted.
pub(super) const ITEMS: u16 = 0x803f;
/// Ours, in the answer to a probe: how busy an element is.
pub(super) const BUSY: u16 = 0x803e;

/// A value that travels as a parameter: type, length, value (RFC 5354 section 3).
pub(super) trait Parameter: Sized {
    /// The types it can have on the wire.
    const KINDS: &'static [u16];

    /// The type of this one.
    fn kind(&self) -> u16 {
        Self::KINDS[0]
    }

    /// Reads the value, all of it.
    fn read(value: &mut Reader<'_>) -> Result<Self, ErrorKind>;

    /// Writes the value, without padding at its end.
    fn write(&self, writer: &mut Writer<'_>);
}

/// What to do with a parameter that is not recognised where it stands, by the two top bits of its type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unrecognized {
    /// Go on behind the parameter; otherwise the message is discarded.
    pub(super) skip: bool,
    /// Tell the sender.
    pub(super) report: bool,
}

impl Unrecognized {
    pub(super) fn of(kind: u16) -> Unrecognized {
        Unrecognized {
            skip: kind & 0x8000 != 0,
            report: kind & 0x4000 != 0,
        }
    }
}
