//! Framing of ASAP messages in a byte stream.

use bytes::Bytes;
use holdfast_sctp::MessageSplitter;
use holdfast_wire::rserpool::message_length;
use std::io;

/// A length limit as short as a registrar could set, so that inputs reach it.
const LENGTH_MAX: usize = 256;

/// Splits a stream into messages, read in pieces of a size that the first byte gives. The messages are the same as from
/// one piece, none exceeds the limit, and together they are the beginning of the stream.
pub fn run(data: &[u8]) -> bool {
    let Some((&piece, stream)) = data.split_first() else {
        return false;
    };
    let (messages_at_once, is_valid_at_once) = messages([stream].into_iter());
    let (messages_in_pieces, is_valid_in_pieces) =
        messages(stream.chunks(usize::from(piece) % 97 + 1));
    assert_eq!(
        (&messages_at_once, is_valid_at_once),
        (&messages_in_pieces, is_valid_in_pieces)
    );
    assert!(
        messages_at_once
            .iter()
            .all(|message| (4..=LENGTH_MAX).contains(&message.len()))
    );
    assert!(stream.starts_with(&messages_at_once.concat()));
    !messages_at_once.is_empty()
}

/// Returns the messages, and true if the stream was valid to its end.
fn messages<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<Bytes>, bool) {
    let length_of =
        |bytes: &[u8]| message_length(bytes).map_err(|_| io::ErrorKind::InvalidData.into());
    let (mut frames, mut messages) = (MessageSplitter::new(length_of, LENGTH_MAX), Vec::new());
    for piece in pieces {
        frames.push(piece);
        loop {
            match frames.next_message() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(_) => return (messages, false),
            }
        }
    }
    (messages, true)
}
