//! Answers to handle resolutions, written as they are put together.

use super::HANDLE_RESOLUTION_RESPONSE;
use crate::rserpool::element::{EncodedElement, PoolElement};
use crate::rserpool::id::PoolHandle;
use crate::rserpool::policy::Policy;
use crate::rserpool::write::{EncodeError, Writer};
use bytes::BytesMut;

/// Writes the answer to a handle resolution, a positive one, element by element.
pub struct ResolutionResponse<'a> {
    writer: Writer<'a>,
}

impl<'a> ResolutionResponse<'a> {
    /// Begins an answer; see [`Message::HandleResolutionResponse`](super::Message::HandleResolutionResponse).
    pub fn new(
        buffer: &'a mut BytesMut,
        updates: bool,
        handle: &PoolHandle,
        policy: &Policy,
    ) -> ResolutionResponse<'a> {
        let mut writer = Writer::begin(buffer, HANDLE_RESOLUTION_RESPONSE, u8::from(updates));
        writer.put(handle);
        writer.put(policy);
        ResolutionResponse { writer }
    }

    /// Begins an answer as one before began: with what [`ResolutionResponse::new`] wrote of that.
    #[inline]
    pub fn again(buffer: &'a mut BytesMut, head: &[u8]) -> ResolutionResponse<'a> {
        ResolutionResponse {
            writer: Writer::go_on(buffer, head),
        }
    }

    /// Bytes of the answer so far.
    pub fn length(&self) -> usize {
        self.writer.length()
    }

    /// Appends an element.
    pub fn push(&mut self, element: &PoolElement) {
        self.writer.put(element);
    }

    /// Appends an element that was encoded before.
    #[inline]
    pub fn push_encoded(&mut self, element: &EncodedElement) {
        match &element.0 {
            Ok(element) => self.writer.put_written(element),
            Err(error) => self.writer.fail(*error),
        }
    }

    /// Completes the answer.
    ///
    /// # Errors
    /// It is too long, or an element has no encoding; the buffer is as it was before.
    pub fn finish(self) -> Result<(), EncodeError> {
        self.writer.finish()
    }
}
