//! Parameters that only ASAP has.

use crate::rserpool::parameter::{self, Parameter};
use crate::rserpool::read::{ErrorKind, Reader};
use crate::rserpool::write::Writer;
use bytes::Bytes;

/// rsplib's private parameter of a handle resolution.
pub(super) struct Items(pub(super) u32);

impl Parameter for Items {
    const KINDS: &'static [u16] = &[parameter::ITEMS];

    fn read(value: &mut Reader<'_>) -> Result<Items, ErrorKind> {
        let items = value.u32()?;
        value.end()?;
        Ok(Items(items))
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.u32(self.0);
    }
}

/// Number of requests in progress, and their latency in microseconds, if known.
pub(super) struct Busy(pub(super) u32, pub(super) Option<u32>);

impl Parameter for Busy {
    const KINDS: &'static [u16] = &[parameter::BUSY];

    fn read(value: &mut Reader<'_>) -> Result<Busy, ErrorKind> {
        let in_flight = value.u32()?;
        match value.rest().as_ref() {
            [] => Ok(Busy(in_flight, None)),
            &[a, b, c, d] => Ok(Busy(in_flight, Some(u32::from_be_bytes([a, b, c, d])))),
            _ => Err(value.invalid()),
        }
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.u32(self.0);
        if let Some(latency_us) = self.1 {
            writer.u32(latency_us);
        }
    }
}

/// RFC 5354 section 3.13.
pub(super) struct Cookie(pub(super) Bytes);

impl Parameter for Cookie {
    const KINDS: &'static [u16] = &[parameter::COOKIE];

    fn read(value: &mut Reader<'_>) -> Result<Cookie, ErrorKind> {
        Ok(Cookie(value.rest()))
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.bytes(&self.0);
    }
}
