//! The chunked transfer coding (RFC 9112, section 7.1), as a state machine that can stop at any byte.

use serde::{Deserialize, Serialize};

/// Position of the next byte within the coding.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Chunked {
    /// At the start of a size line.
    #[default]
    Size,
    /// In a size line's digits, with the value so far.
    Digits(u64),
    /// In a size line after the digits.
    Extension(u64),
    /// In data, with the number of bytes left.
    Data(u64),
    /// In the line end after data.
    DataEnd,
    /// In the trailer; true if the current line already has a byte.
    Trailer(bool),
    /// After the end.
    Done,
}

/// A body that is not in the chunked coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl Chunked {
    /// Consumes `input` and passes data to `data`; returns the number of bytes used: all, unless the end was reached.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn feed(&mut self, input: &[u8], mut data: impl FnMut(&[u8])) -> Result<usize, Malformed> {
        let mut at = 0;
        while at < input.len() && *self != Chunked::Done {
            if let Chunked::Data(left) = *self {
                let length = usize::try_from(left)
                    .map_or(input.len() - at, |left| left.min(input.len() - at));
                data(&input[at..at + length]);
                at += length;
                let left = left - length as u64;
                *self = if left == 0 {
                    Chunked::DataEnd
                } else {
                    Chunked::Data(left)
                };
                continue;
            }
            *self = self.step(input[at])?;
            at += 1;
        }
        Ok(at)
    }

    fn step(&self, byte: u8) -> Result<Self, Malformed> {
        Ok(match (self, byte) {
            (Chunked::Size, _) => Chunked::Digits(digit(byte)?),
            (Chunked::Digits(size), b';' | b' ' | b'\t' | b'\r') => Chunked::Extension(*size),
            // A size line may end with a bare LF (RFC 9112, section 2.2).
            (Chunked::Digits(0) | Chunked::Extension(0), b'\n') => Chunked::Trailer(false),
            (Chunked::Digits(size) | Chunked::Extension(size), b'\n') => Chunked::Data(*size),
            (Chunked::Digits(size), _) => {
                Chunked::Digits(size.checked_mul(16).ok_or(Malformed)? + digit(byte)?)
            }
            (Chunked::Extension(size), _) => Chunked::Extension(*size),
            (Chunked::DataEnd, b'\r') => Chunked::DataEnd,
            (Chunked::DataEnd, b'\n') => Chunked::Size,
            (Chunked::Trailer(false), b'\n') => Chunked::Done,
            (Chunked::Trailer(_), b'\n') => Chunked::Trailer(false),
            (Chunked::Trailer(begun), b'\r') => Chunked::Trailer(*begun),
            (Chunked::Trailer(_), _) => Chunked::Trailer(true),
            (Chunked::DataEnd | Chunked::Data(_) | Chunked::Done, _) => return Err(Malformed),
        })
    }
}

fn digit(byte: u8) -> Result<u64, Malformed> {
    char::from(byte)
        .to_digit(16)
        .map(u64::from)
        .ok_or(Malformed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn stops_at_any_byte(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..6),
            step in 1..9usize,
        ) {
            let mut coded = Vec::new();
            for chunk in &chunks {
                coded.extend(format!("{:X};name=value\r\n", chunk.len()).bytes());
                coded.extend(chunk);
                coded.extend(b"\r\n");
            }
            coded.extend(b"0\r\nTrailer: x\r\n\r\n");
            let length = coded.len();
            coded.extend(b"GET / HTTP/1.1");
            let (mut machine, mut data, mut used) = (Chunked::default(), Vec::<u8>::new(), 0);
            for part in coded.chunks(step) {
                let bytes = postcard::to_allocvec(&machine).unwrap();
                machine = postcard::from_bytes(&bytes).unwrap();
                used += machine.feed(part, |bytes| data.extend(bytes)).unwrap();
            }
            prop_assert_eq!(machine, Chunked::Done);
            prop_assert_eq!(used, length);
            prop_assert_eq!(data, chunks.concat());
        }

        #[test]
        fn never_panics(input in prop::collection::vec(prop_oneof![any::<u8>(), Just(b'\n'), Just(b'f')], 0..300)) {
            let _ = Chunked::default().feed(&input, |_| {});
        }
    }
}
