//! Parameters that only ASAP has.

use crate::rserpool::decoder::{DecodeErrorKind, Reader};
use crate::rserpool::encoder::Writer;
use crate::rserpool::parameter::{self, Parameter};
use bytes::Bytes;

/// rsplib's private parameter of a handle resolution.
pub(super) struct ItemCount(pub(super) u32);

impl Parameter for ItemCount {
    const KINDS: &'static [u16] = &[parameter::ITEM_COUNT];

    fn read(value: &mut Reader<'_>) -> Result<ItemCount, DecodeErrorKind> {
        let items = value.u32()?;
        value.expect_end()?;
        Ok(ItemCount(items))
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.u32(self.0);
    }
}

/// Number of requests in progress, and their latency in microseconds, if known.
pub(super) struct LoadFigures(pub(super) u32, pub(super) Option<u32>);

impl Parameter for LoadFigures {
    const KINDS: &'static [u16] = &[parameter::LOAD_FIGURES];

    fn read(value: &mut Reader<'_>) -> Result<LoadFigures, DecodeErrorKind> {
        let in_flight = value.u32()?;
        match value.remaining().as_ref() {
            [] => Ok(LoadFigures(in_flight, None)),
            &[a, b, c, d] => Ok(LoadFigures(
                in_flight,
                Some(u32::from_be_bytes([a, b, c, d])),
            )),
            _ => Err(value.invalid_value()),
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

    fn read(value: &mut Reader<'_>) -> Result<Cookie, DecodeErrorKind> {
        Ok(Cookie(value.remaining()))
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.bytes(&self.0);
    }
}
