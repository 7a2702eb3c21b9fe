//! Messages of ASAP out of a stream.

use bytes::Bytes;
use holdfast_sys::transport::Frames;
use holdfast_wire::rserpool::message_length;
use std::io;

/// As short as a registrar would want, so that it is reached.
const LENGTH_MAX: usize = 256;

/// The first byte says how long the pieces are in which the rest comes: the messages are the same as in one piece, none is longer
/// than allowed, and one after another they are the stream's beginning.
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

/// The messages, and whether the stream can be followed to its end.
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
