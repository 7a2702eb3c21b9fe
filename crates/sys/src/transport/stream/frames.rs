//! Messages out of a stream, which has no bounds of its own.

use bytes::{Bytes, BytesMut};
use std::io;

/// How long the message is whose first bytes these are: its header tells. `None`: as long as the header is not all there.
///
/// # Errors
/// These bytes begin no message: the stream cannot be followed any further.
pub type MessageLength = fn(&[u8]) -> io::Result<Option<usize>>;

/// Bytes that came and are no whole message yet.
#[derive(Debug)]
pub struct Frames {
    buffer: BytesMut,
    length_of: MessageLength,
    length_max: usize,
}

impl Frames {
    /// Of a stream whose messages are at most so long.
    #[must_use]
    pub fn new(length_of: MessageLength, length_max: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            length_of,
            length_max,
        }
    }

    /// More of the stream. Take out the messages before there is more: it is kept until then.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message; it shares a buffer with others.
    ///
    /// # Errors
    /// The stream is not one of messages, or the next one is too long.
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
            // What was taken keeps the old one.
            self.buffer = BytesMut::new();
        }
        Ok(Some(message))
    }

    /// Whether a message has begun that is not whole.
    #[must_use]
    pub fn has_part(&self) -> bool {
        !self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// One byte that says how much follows; 255 begins nothing.
    fn length_of(bytes: &[u8]) -> io::Result<Option<usize>> {
        match bytes.first() {
            Some(255) => Err(io::ErrorKind::InvalidData.into()),
            first => Ok(first.map(|first| usize::from(*first) + 1)),
        }
    }

    fn all(frames: &mut Frames) -> Vec<Bytes> {
        std::iter::from_fn(|| frames.next_message().expect("a stream of messages")).collect()
    }

    #[test]
    fn what_is_too_long_or_no_message_ends_the_stream() {
        let mut frames = Frames::new(length_of, 4);
        frames.push(&[3, 1, 1, 1, 4]);
        assert_eq!(frames.next_message().unwrap().unwrap().len(), 4);
        // Not one byte of it is waited for.
        assert!(frames.next_message().is_err());
        let mut frames = Frames::new(length_of, 4);
        frames.push(&[255]);
        assert!(frames.next_message().is_err());
    }

    proptest! {
        #[test]
        fn messages_are_the_same_however_they_come(
            lengths in prop::collection::vec(0u8..20, 0..20),
            cuts in prop::collection::vec(1usize..30, 1..40),
        ) {
            let sent: Vec<Vec<u8>> = lengths.iter().map(|length| vec![*length; usize::from(*length) + 1]).collect();
            let stream = sent.concat();
            let (mut frames, mut came, mut rest) = (Frames::new(length_of, 20), Vec::new(), &stream[..]);
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, after) = rest.split_at((*cut).min(rest.len()));
                frames.push(piece);
                came.extend(all(&mut frames));
                rest = after;
            }
            prop_assert_eq!(came, sent);
            prop_assert!(!frames.has_part());
        }
    }
}
