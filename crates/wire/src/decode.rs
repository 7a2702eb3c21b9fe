//! The envelope of a frame: `u32` length of what follows (big endian, at most [`LENGTH_MAX`]), `u8` version
//! ([`VERSION`]), body in postcard.

use crate::frame::{Frame, FrameOf};
use crate::migration::{MoveFrame, MoveFrameOf};
use bytes::{Buf, Bytes, BytesMut};

/// The format this crate speaks.
pub const VERSION: u8 = 1;
/// The most a frame's length field may say, in bytes (version byte and body).
pub const LENGTH_MAX: usize = 16 << 20;
/// For frames up to this length, memory is there from their first bytes on.
const ORDINARY_MAX: usize = 512 << 10;
/// Bytes of the length field.
const LENGTH_BYTES: usize = 4;

/// Why bytes are not a frame, or a frame cannot be bytes. After an error the channel has lost its step: close it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The peer speaks another version.
    #[error(
        "the peer speaks version {0} of the protocol between nodes and this daemon version {VERSION}; run the same release on both"
    )]
    Version(u8),
    /// The length field says more than a frame may have, or this frame would be longer.
    #[error(
        "a frame of {0} bytes is longer than {LENGTH_MAX}; if the peer sent it, check that its address and port are those of a holdfastd"
    )]
    TooLong(u64),
    /// The body is not a frame.
    #[error(
        "a frame of {length} bytes cannot be read ({cause}); close the channel, and if it happens again run the same release on both nodes"
    )]
    Malformed {
        /// Bytes the length field named.
        length: usize,
        /// What the reader met.
        cause: String,
    },
    /// The bytes end within a frame.
    #[error(
        "the channel ended {have} bytes into a frame; the peer or the path to it died, connect again"
    )]
    Truncated {
        /// Bytes of the incomplete frame that did arrive.
        have: usize,
    },
}

/// Appends `frame`, envelope included, to `out`. Each blob is copied once, into `out`.
///
/// # Errors
/// [`FrameError::TooLong`]; `out` is then as before.
pub fn encode(frame: &Frame, out: &mut Vec<u8>) -> Result<(), FrameError> {
    let start = out.len();
    out.reserve(LENGTH_BYTES + 1 + size_estimate(frame));
    out.extend_from_slice(&[0; LENGTH_BYTES]);
    out.push(VERSION);
    *out = postcard::to_extend(frame, std::mem::take(out)).map_err(unwritable)?;
    let length = out.len() - start - LENGTH_BYTES;
    if length > LENGTH_MAX {
        out.truncate(start);
        return Err(FrameError::TooLong(length as u64));
    }
    let field = (length as u32).to_be_bytes();
    out[start..start + LENGTH_BYTES].copy_from_slice(&field);
    Ok(())
}

/// A frame in two parts, to be sent one after the other: of a large piece no copy is made.
///
/// # Errors
/// As [`encode`].
pub fn encode_in_parts(frame: &Frame) -> Result<(Vec<u8>, Bytes), FrameError> {
    let mut front = Vec::new();
    let Frame::Move {
        id,
        frame: MoveFrame::Piece { kind, more, bytes },
    } = frame
    else {
        encode(frame, &mut front)?;
        return Ok((front, Bytes::new()));
    };
    // What stands in a frame before bytes is how many they are; and here they are its end.
    let piece = FrameOf::Move {
        id: *id,
        frame: MoveFrameOf::Piece {
            kind: *kind,
            more: *more,
            bytes: bytes.len(),
        },
    };
    front.extend_from_slice(&[0; LENGTH_BYTES]);
    front.push(VERSION);
    let mut front = postcard::to_extend(&piece, front).map_err(unwritable)?;
    let length = front.len() - LENGTH_BYTES + bytes.len();
    if length > LENGTH_MAX {
        return Err(FrameError::TooLong(length as u64));
    }
    front[..LENGTH_BYTES].copy_from_slice(&(length as u32).to_be_bytes());
    Ok((front, bytes.clone()))
}

/// Writing to memory cannot fail; a type that postcard cannot write would be a defect of a frame.
fn unwritable(error: postcard::Error) -> FrameError {
    malformed(0, &error.to_string())
}

/// About how many bytes the body takes; only saves growing `out` step by step.
fn size_estimate(frame: &Frame) -> usize {
    match frame {
        Frame::Prepare { flows, .. } => flows.iter().map(|flow| flow.static_state.len() + 56).sum(),
        Frame::State { flows, .. } => flows
            .iter()
            .map(|flow| flow.dynamic.len() + flow.application.len() + 16)
            .sum(),
        Frame::Ask { changes, .. } => changes.len() * 56,
        Frame::Move { frame, .. } => match frame {
            MoveFrame::Offer(offer) => offer.description.len() + 64,
            MoveFrame::Arm { flows, .. } | MoveFrame::Final { flows, .. } => 64 + flows.len() * 48,
            _ => 64,
        },
        _ => 64,
    }
}

/// Takes bytes in pieces of any size and gives frames.
///
/// Memory grows with the bytes that arrived; what a length field promises counts only up to half a mebibyte.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: BytesMut,
}

impl Decoder {
    /// A decoder at the start of a channel.
    pub fn new() -> Decoder {
        Decoder::default()
    }

    /// Takes the next bytes of the channel.
    pub fn feed(&mut self, chunk: &[u8]) {
        self.buffer.extend_from_slice(chunk);
        // Frames of an ordinary length are not moved step by step into larger memory.
        if let Some(field) = self.buffer.first_chunk::<LENGTH_BYTES>() {
            let length = u32::from_be_bytes(*field) as usize;
            let missing = (LENGTH_BYTES + length).saturating_sub(self.buffer.len());
            if length <= ORDINARY_MAX {
                self.buffer.reserve(missing);
            }
        }
    }

    /// The buffer itself, for a reader that appends to it without a copy. Only append.
    pub fn buffer_mut(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// The next whole frame, or none until more bytes are fed. Its blobs share the memory the frame arrived in.
    ///
    /// # Errors
    /// Anything but a frame of this version. The decoder has then lost its step; close the channel.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some(field) = self.buffer.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*field) as usize;
        if length > LENGTH_MAX {
            return Err(FrameError::TooLong(length as u64));
        }
        if length == 0 {
            return Err(malformed(0, "it is empty"));
        }
        // The version is checked as soon as it is there: a peer of another version is named at once.
        if let Some(&version) = self.buffer.get(LENGTH_BYTES)
            && version != VERSION
        {
            return Err(FrameError::Version(version));
        }
        if self.buffer.len() < LENGTH_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(LENGTH_BYTES);
        let body = self.buffer.split_to(length).freeze().slice(1..);
        read_body(&body).map(Some)
    }

    /// To be called when the channel has ended.
    ///
    /// # Errors
    /// [`FrameError::Truncated`] when it ended within a frame.
    pub fn finish(&self) -> Result<(), FrameError> {
        match self.buffer.len() {
            0 => Ok(()),
            have => Err(FrameError::Truncated { have }),
        }
    }
}

fn read_body(body: &Bytes) -> Result<Frame, FrameError> {
    let (frame, rest) = postcard::take_from_bytes::<FrameOf<&[u8]>>(body)
        .map_err(|error| malformed(body.len() + 1, &error.to_string()))?;
    if !rest.is_empty() {
        let cause = format!("{} bytes follow its end", rest.len());
        return Err(malformed(body.len() + 1, &cause));
    }
    Ok(frame.map_blobs(|blob| body.slice_ref(blob)))
}

fn malformed(length: usize, cause: &str) -> FrameError {
    FrameError::Malformed {
        length,
        cause: cause.to_owned(),
    }
}
