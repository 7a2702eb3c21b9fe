//! Encoding: appends messages to the caller's buffer, and fills in lengths afterwards.

use super::parameter::Parameter;
use bytes::{Bytes, BytesMut};

/// The reason that a message cannot be encoded; the buffer is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The length field has 16 bits.
    #[error(
        "the message would have {0} bytes, more than the maximum of {LENGTH_MAX}; split or shorten it"
    )]
    TooLong(usize),
    /// RFC 5354 section 3.4 requires at least one address.
    #[error("an SCTP transport without an address; give it at least one")]
    NoAddress,
}

/// Largest message in bytes: a multiple of 4 in a field of 16 bits.
pub const LENGTH_MAX: usize = 65_532;

/// Growth step of the buffer, in bytes: resizing the buffer for each field would cost more than the field.
const GROWTH_BYTES: usize = 256;

/// Encoder of one message. Padding is written before the next part, so that padding is never counted in the length of
/// the parameter it pads nor, at the end of a nested parameter, in the length of the outer one (RFC 5354 section 2).
pub(super) struct Writer<'a> {
    /// Longer than the written part, until the message is finished.
    buffer: &'a mut BytesMut,
    start: usize,
    /// Position of the next byte.
    position: usize,
    error: Option<EncodeError>,
}

/// Appends a message with the given type and flags, its body written by `body`.
pub(super) fn encode_message(
    buffer: &mut BytesMut,
    kind: u8,
    flags: u8,
    body: impl FnOnce(&mut Writer<'_>),
) -> Result<(), EncodeError> {
    let mut writer = Writer::begin(buffer, kind, flags);
    body(&mut writer);
    writer.finish()
}

/// Encodes one parameter outside a message, unpadded; the receiver detects any error in it.
pub(super) fn parameter_bytes<P: Parameter>(parameter: &P) -> Bytes {
    encode_parameter(parameter).0
}

/// Encodes one parameter for use in messages.
pub(super) fn checked_parameter_bytes<P: Parameter>(parameter: &P) -> Result<Bytes, EncodeError> {
    match encode_parameter(parameter) {
        (bytes, None) if bytes.len() <= LENGTH_MAX => Ok(bytes),
        (bytes, None) => Err(EncodeError::TooLong(bytes.len())),
        (_, Some(error)) => Err(error),
    }
}

fn encode_parameter<P: Parameter>(parameter: &P) -> (Bytes, Option<EncodeError>) {
    let mut buffer = BytesMut::new();
    let mut writer = Writer {
        buffer: &mut buffer,
        start: 0,
        position: 0,
        error: None,
    };
    writer.put(parameter);
    let (end, error) = (writer.position, writer.error);
    buffer.truncate(end);
    (buffer.freeze(), error)
}

impl<'a> Writer<'a> {
    /// Starts a message; [`Writer::finish`] completes it.
    pub(super) fn begin(buffer: &'a mut BytesMut, kind: u8, flags: u8) -> Writer<'a> {
        Writer::begin_with(buffer, &[kind, flags, 0, 0])
    }

    /// Starts a message with its first bytes.
    #[inline]
    pub(super) fn begin_with(buffer: &'a mut BytesMut, first: &[u8]) -> Writer<'a> {
        let start = buffer.len();
        let mut writer = Writer {
            buffer,
            start,
            position: start,
            error: None,
        };
        writer.bytes(first);
        writer
    }

    /// Pads the message and fills in its length, which counts the padding: parameters are padded within the message.
    pub(super) fn finish(mut self) -> Result<(), EncodeError> {
        self.pad();
        let length = self.length();
        let error = match self.error {
            None if length <= LENGTH_MAX => {
                self.set_length(self.start);
                self.buffer.truncate(self.position);
                return Ok(());
            }
            None => EncodeError::TooLong(length),
            Some(error) => error,
        };
        self.buffer.truncate(self.start);
        Err(error)
    }

    /// Length of the message so far, in bytes.
    pub(super) fn length(&self) -> usize {
        self.position - self.start
    }

    /// Removes all but the first `length` bytes of the message.
    pub(super) fn truncate(&mut self, length: usize) {
        self.position = self.start + length;
    }

    /// Sets bits in the message's flags.
    pub(super) fn set_flags(&mut self, flags: u8) {
        self.buffer[self.start + 1] |= flags;
    }

    #[inline]
    pub(super) fn u16(&mut self, value: u16) {
        self.array(value.to_be_bytes());
    }

    #[inline]
    pub(super) fn u32(&mut self, value: u32) {
        self.array(value.to_be_bytes());
    }

    #[inline]
    pub(super) fn bytes(&mut self, value: &[u8]) {
        let end = self.reserve(value.len());
        self.buffer[self.position..end].copy_from_slice(value);
        self.position = end;
    }

    #[inline]
    fn array<const N: usize>(&mut self, value: [u8; N]) {
        let end = self.reserve(N);
        self.buffer[self.position..end].copy_from_slice(&value);
        self.position = end;
    }

    /// Returns the end position of the next `length` bytes, and grows the buffer to hold them.
    #[inline]
    fn reserve(&mut self, length: usize) -> usize {
        let end = self.position + length;
        if end > self.buffer.len() {
            self.buffer.resize(end + GROWTH_BYTES, 0);
        }
        end
    }

    pub(super) fn set_error(&mut self, error: EncodeError) {
        self.error = Some(error);
    }

    #[inline]
    pub(super) fn put<P: Parameter>(&mut self, parameter: &P) {
        self.tlv(parameter.kind(), |writer| parameter.write(writer));
    }

    /// Appends a parameter that was encoded before.
    #[inline]
    pub(super) fn put_encoded(&mut self, parameter: &[u8]) {
        self.pad();
        self.bytes(parameter);
    }

    pub(super) fn put_all<'p, P: Parameter + 'p>(
        &mut self,
        parameters: impl IntoIterator<Item = &'p P>,
    ) {
        for parameter in parameters {
            self.put(parameter);
        }
    }

    /// Appends a type, a length, and the value that `value` writes.
    #[inline]
    pub(super) fn tlv(&mut self, kind: u16, value: impl FnOnce(&mut Self)) {
        self.pad();
        let start = self.position;
        self.u32(u32::from(kind) << 16);
        value(self);
        self.set_length(start);
    }

    /// Fills in the length of the part that began at `start`. A part too long for the field makes the message too long:
    /// see `finish`.
    #[inline]
    fn set_length(&mut self, start: usize) {
        let length = u16::try_from(self.position - start).unwrap_or(u16::MAX);
        self.buffer[start + 2..start + 4].copy_from_slice(&length.to_be_bytes());
    }

    #[inline]
    fn pad(&mut self) {
        match self.length() % 4 {
            0 => {}
            1 => self.array([0; 3]),
            2 => self.array([0; 2]),
            _ => self.array([0]),
        }
    }
}
