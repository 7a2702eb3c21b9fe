//! Answers to handle resolutions, encoded element by element.

use super::HANDLE_RESOLUTION_RESPONSE;
use crate::rserpool::element::{EncodedElement, PoolElement};
use crate::rserpool::encoder::{EncodeError, Writer};
use crate::rserpool::identifiers::PoolHandle;
use crate::rserpool::policy::Policy;
use bytes::BytesMut;

/// Encoder of a positive answer to a handle resolution, which appends element by element.
pub struct ResolutionResponseEncoder<'a> {
    writer: Writer<'a>,
}

impl<'a> ResolutionResponseEncoder<'a> {
    /// Starts an answer; see [`Message::HandleResolutionResponse`](super::Message::HandleResolutionResponse).
    pub fn new(
        buffer: &'a mut BytesMut,
        updates: bool,
        handle: &PoolHandle,
        policy: &Policy,
    ) -> ResolutionResponseEncoder<'a> {
        let mut writer = Writer::begin(buffer, HANDLE_RESOLUTION_RESPONSE, u8::from(updates));
        writer.put(handle);
        writer.put(policy);
        ResolutionResponseEncoder { writer }
    }

    /// Starts an answer with `head`, the bytes that [`ResolutionResponseEncoder::new`] wrote for an earlier one.
    #[inline]
    pub fn from_head(buffer: &'a mut BytesMut, head: &[u8]) -> ResolutionResponseEncoder<'a> {
        ResolutionResponseEncoder {
            writer: Writer::begin_with(buffer, head),
        }
    }

    /// Length of the answer so far, in bytes.
    pub fn length(&self) -> usize {
        self.writer.length()
    }

    /// Appends an element of the resolved pool to the answer.
    pub fn push(&mut self, element: &PoolElement) {
        self.writer.put(element);
    }

    /// Appends an element of the resolved pool that was encoded before.
    #[inline]
    pub fn push_encoded(&mut self, element: &EncodedElement) {
        match &element.0 {
            Ok(element) => self.writer.put_encoded(element),
            Err(error) => self.writer.set_error(*error),
        }
    }

    /// Completes the resolution response: writes its length.
    ///
    /// # Errors
    /// The answer is too long, or an element has no encoding; the buffer is then unchanged.
    pub fn finish(self) -> Result<(), EncodeError> {
        self.writer.finish()
    }
}
