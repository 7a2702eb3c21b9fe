//! Encoding: appends messages to the caller's buffer, lengths filled in behind.

use super::parameter::Parameter;
use bytes::{BufMut, Bytes, BytesMut};

/// Why a message cannot be encoded; the buffer is as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The length field has 16 bits.
    #[error(
        "the message would take {0} bytes, the format allows {LENGTH_MAX}; send it in several, or less in it"
    )]
    TooLong(usize),
    /// RFC 5354 section 3.4: at least one.
    #[error("an SCTP transport without an address; give it at least one")]
    NoAddress,
}

/// Largest message in bytes: a multiple of 4 in a field of 16 bits.
pub const LENGTH_MAX: usize = 65_532;

/// Writes one message. Padding is written before what follows it: so it is never in the length of the parameter that it
/// pads, nor, at the end of a nested parameter, in that of the outer one (RFC 5354 section 2).
pub(super) struct Writer<'a> {
    buffer: &'a mut BytesMut,
    start: usize,
    error: Option<EncodeError>,
}

/// Appends a message with the given type and flags, its body written by `body`.
pub(super) fn message(
    buffer: &mut BytesMut,
    kind: u8,
    flags: u8,
    body: impl FnOnce(&mut Writer<'_>),
) -> Result<(), EncodeError> {
    let mut writer = Writer::begin(buffer, kind, flags);
    body(&mut writer);
    writer.finish()
}

/// One parameter that stands alone, unpadded.
pub(super) fn parameter<P: Parameter>(parameter: &P) -> Bytes {
    let mut buffer = BytesMut::new();
    let mut writer = Writer {
        buffer: &mut buffer,
        start: 0,
        error: None,
    };
    writer.put(parameter);
    buffer.freeze()
}

impl<'a> Writer<'a> {
    /// Starts a message; [`Writer::finish`] completes it.
    pub(super) fn begin(buffer: &'a mut BytesMut, kind: u8, flags: u8) -> Writer<'a> {
        let start = buffer.len();
        buffer.put_slice(&[kind, flags, 0, 0]);
        Writer {
            buffer,
            start,
            error: None,
        }
    }

    /// Pads the message and fills in its length, which counts the padding: parameters are padded within the message.
    pub(super) fn finish(mut self) -> Result<(), EncodeError> {
        self.pad();
        let length = self.length();
        let error = match self.error {
            None if length <= LENGTH_MAX => {
                self.set_length(self.start);
                return Ok(());
            }
            None => EncodeError::TooLong(length),
            Some(error) => error,
        };
        self.buffer.truncate(self.start);
        Err(error)
    }

    /// Bytes of the message so far.
    pub(super) fn length(&self) -> usize {
        self.buffer.len() - self.start
    }

    /// Takes back all but the first `length` bytes of the message.
    pub(super) fn truncate(&mut self, length: usize) {
        self.buffer.truncate(self.start + length);
    }

    /// Sets bits in the message's flags.
    pub(super) fn set_flags(&mut self, flags: u8) {
        self.buffer[self.start + 1] |= flags;
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.buffer.put_u16(value);
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.buffer.put_u32(value);
    }

    pub(super) fn bytes(&mut self, value: &[u8]) {
        self.buffer.put_slice(value);
    }

    pub(super) fn fail(&mut self, error: EncodeError) {
        self.error = Some(error);
    }

    pub(super) fn put<P: Parameter>(&mut self, parameter: &P) {
        self.tlv(parameter.kind(), |writer| parameter.write(writer));
    }

    pub(super) fn put_all<'p, P: Parameter + 'p>(
        &mut self,
        parameters: impl IntoIterator<Item = &'p P>,
    ) {
        for parameter in parameters {
            self.put(parameter);
        }
    }

    /// A type, the length, and the value that `value` writes.
    pub(super) fn tlv(&mut self, kind: u16, value: impl FnOnce(&mut Self)) {
        self.pad();
        let start = self.buffer.len();
        self.buffer.put_u32(u32::from(kind) << 16);
        value(self);
        self.set_length(start);
    }

    /// Fills in the length of what began at `start`. Too long for the field is too long for the message: see `finish`.
    fn set_length(&mut self, start: usize) {
        let length = u16::try_from(self.buffer.len() - start).unwrap_or(u16::MAX);
        self.buffer[start + 2..start + 4].copy_from_slice(&length.to_be_bytes());
    }

    fn pad(&mut self) {
        let padding = self.length().wrapping_neg() % 4;
        self.buffer.put_slice(&[0; 3][..padding]);
    }
}
