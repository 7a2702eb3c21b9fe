//! Splitting of a byte stream into messages.

use bytes::{Bytes, BytesMut};
use std::io;

/// Function that returns the length of a message from its first bytes; `None` while its header is incomplete.
///
/// # Errors
/// The bytes do not begin a message, so the rest of the stream cannot be parsed.
pub type MessageLength = fn(&[u8]) -> io::Result<Option<usize>>;

/// Received bytes that are not a whole message yet.
#[derive(Debug)]
pub struct MessageSplitter {
    buffer: BytesMut,
    length_of: MessageLength,
    length_max: usize,
}

impl MessageSplitter {
    /// Makes a splitter for messages of at most `length_max` bytes.
    #[must_use]
    pub fn new(length_of: MessageLength, length_max: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            length_of,
            length_max,
        }
    }

    /// Appends received bytes. Take out the complete messages before appending more, because they occupy the buffer
    /// until then.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next whole message, which shares a buffer with others.
    ///
    /// # Errors
    /// The bytes are not a message, or the message is too long.
    pub fn next_message(&mut self) -> io::Result<Option<Bytes>> {
        let Some(length) = (self.length_of)(&self.buffer)? else {
            return Ok(None);
        };
        if length == 0 || length > self.length_max {
            let text = format!("a message of {length} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        if self.buffer.len() < length {
            return Ok(None);
        }
        let message = self.buffer.split_to(length).freeze();
        if self.buffer.is_empty() {
            // Messages already returned keep the old buffer alive.
            self.buffer = BytesMut::new();
        }
        Ok(Some(message))
    }

    /// Returns true if an incomplete message is buffered.
    #[must_use]
    pub fn has_incomplete(&self) -> bool {
        !self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Reads a one-byte length; 255 begins no message.
    fn length_of(bytes: &[u8]) -> io::Result<Option<usize>> {
        match bytes.first() {
            Some(255) => Err(io::ErrorKind::InvalidData.into()),
            first => Ok(first.map(|first| usize::from(*first) + 1)),
        }
    }

    fn take_all(splitter: &mut MessageSplitter) -> Vec<Bytes> {
        std::iter::from_fn(|| splitter.next_message().expect("a stream of messages")).collect()
    }

    #[test]
    fn oversized_or_invalid_message_is_an_error() {
        let mut splitter = MessageSplitter::new(length_of, 4);
        splitter.push(&[3, 1, 1, 1, 4]);
        assert_eq!(splitter.next_message().unwrap().unwrap().len(), 4);
        // The length alone is enough to refuse the message.
        assert!(splitter.next_message().is_err());
        let mut splitter = MessageSplitter::new(length_of, 4);
        splitter.push(&[255]);
        assert!(splitter.next_message().is_err());
    }

    proptest! {
        #[test]
        fn message_boundaries_do_not_depend_on_read_sizes(
            lengths in prop::collection::vec(0u8..20, 0..20),
            cuts in prop::collection::vec(1usize..30, 1..40),
        ) {
            let sent: Vec<Vec<u8>> = lengths.iter().map(|length| vec![*length; usize::from(*length) + 1]).collect();
            let stream = sent.concat();
            let (mut frames, mut came, mut rest) = (MessageSplitter::new(length_of, 20), Vec::new(), &stream[..]);
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, after) = rest.split_at((*cut).min(rest.len()));
                frames.push(piece);
                came.extend(take_all(&mut frames));
                rest = after;
            }
            prop_assert_eq!(came, sent);
            prop_assert!(!frames.has_incomplete());
        }
    }
}
