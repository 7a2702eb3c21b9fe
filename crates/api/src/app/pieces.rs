//! Datagrams in messages: a UDP datagram may be longer than a message (65,507 bytes, RFC 768 over RFC 791).

use serde::{Deserialize, Serialize};

/// Maximum size of a piece, in bytes: one piece always fits a message.
const PIECE_BYTES_MAX: usize = 32 * 1024;
/// Maximum size of a datagram, in bytes (the length field of RFC 768 has 16 bits).
const DATAGRAM_BYTES_MAX: usize = 65_535;

/// A datagram, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatagramPiece {
    /// Bytes of the datagram, or of a part of it.
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
    /// True if the next piece belongs to the same datagram.
    pub is_continued: bool,
}

/// Splits datagrams into runs of pieces, each run for one message. Returns at least one run, possibly empty.
pub fn split_pieces<'a>(datagrams: impl IntoIterator<Item = &'a [u8]>) -> Vec<Vec<DatagramPiece>> {
    let mut pieces = Vec::new();
    for datagram in datagrams {
        let mut remaining = datagram;
        loop {
            let (bytes, after) = remaining.split_at(remaining.len().min(PIECE_BYTES_MAX));
            pieces.push(DatagramPiece {
                bytes: bytes.to_vec(),
                is_continued: !after.is_empty(),
            });
            remaining = after;
            if remaining.is_empty() {
                break;
            }
        }
    }
    let runs = super::split(pieces, usize::MAX);
    if runs.is_empty() {
        vec![Vec::new()]
    } else {
        runs
    }
}

/// The reason that pieces are not datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PieceError {
    /// A datagram is longer than possible.
    #[error("a datagram of more than {DATAGRAM_BYTES_MAX} bytes")]
    TooLong,
    /// The last piece says that another follows.
    #[error("the last datagram has no end")]
    Unfinished,
}

/// Joins pieces (all runs of [`split_pieces`] in order) to datagrams.
///
/// # Errors
/// See [`PieceError`].
pub fn join_pieces(
    pieces: impl IntoIterator<Item = DatagramPiece>,
) -> Result<Vec<Vec<u8>>, PieceError> {
    let mut datagrams: Vec<Vec<u8>> = Vec::new();
    let mut unfinished = false;
    for DatagramPiece {
        bytes,
        is_continued: more,
    } in pieces
    {
        match datagrams.last_mut() {
            Some(datagram) if unfinished => datagram.extend(bytes),
            _ => datagrams.push(bytes),
        }
        unfinished = more;
        if datagrams
            .last()
            .is_some_and(|datagram| datagram.len() > DATAGRAM_BYTES_MAX)
        {
            return Err(PieceError::TooLong);
        }
    }
    if unfinished {
        Err(PieceError::Unfinished)
    } else {
        Ok(datagrams)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn incomplete_or_oversized_datagrams_are_refused() {
        let piece = |length: usize, more| DatagramPiece {
            bytes: vec![0; length],
            is_continued: more,
        };
        assert_eq!(join_pieces([piece(3, true)]), Err(PieceError::Unfinished));
        assert_eq!(
            join_pieces([piece(40_000, true), piece(40_000, false)]),
            Err(PieceError::TooLong)
        );
    }

    proptest! {
        #[test]
        fn datagrams_survive(lengths in prop::collection::vec(0..65_507usize, 0..8)) {
            let datagrams: Vec<Vec<u8>> = lengths.iter().map(|&n| (0..n).map(|i| i as u8).collect()).collect();
            let runs = split_pieces(datagrams.iter().map(Vec::as_slice));
            prop_assert!(!runs.is_empty());
            prop_assert_eq!(join_pieces(runs.concat()).unwrap(), datagrams);
        }
    }
}
