//! Framing of ASAP messages in a byte stream.

use bytes::Bytes;
use holdfast_sys::transport::Frames;
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
    let (whole, was_whole) = messages([stream].into_iter());
    let (pieces, in_pieces) = messages(stream.chunks(usize::from(piece) % 97 + 1));
    assert_eq!((&whole, was_whole), (&pieces, in_pieces));
    assert!(
        whole
            .iter()
            .all(|message| (4..=LENGTH_MAX).contains(&message.len()))
    );
    assert!(stream.starts_with(&whole.concat()));
    !whole.is_empty()
}

/// Returns the messages, and true if the stream was valid to its end.
fn messages<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<Bytes>, bool) {
    let length_of =
        |bytes: &[u8]| message_length(bytes).map_err(|_| io::ErrorKind::InvalidData.into());
    let (mut frames, mut came) = (Frames::new(length_of, LENGTH_MAX), Vec::new());
    for piece in pieces {
        frames.push(piece);
        loop {
            match frames.next_message() {
                Ok(Some(message)) => came.push(message),
                Ok(None) => break,
                Err(_) => return (came, false),
            }
        }
    }
    (came, true)
}
