//! The envelope of a frame: `u32` length of the rest (big endian, at most [`LENGTH_MAX`]), `u8` version ([`VERSION`]),
//! body in postcard.

use crate::frame::{Frame, GenericFrame};
use crate::move_frames::{GenericMoveFrame, MoveFrame};
use bytes::{Buf, Bytes, BytesMut};

/// Version of the format that this crate reads and writes.
pub const VERSION: u8 = 1;
/// Maximum value of a frame's length field, in bytes (version byte and body).
pub const LENGTH_MAX: usize = 16 << 20;
/// Frames up to this length, in bytes, get their whole memory when the length field arrives.
const PREALLOCATED_MAX: usize = 512 << 10;
/// Size of the length field, in bytes.
const LENGTH_BYTES: usize = 4;

/// A failure to decode or encode a frame. After an error the position in the stream is unknown: close the channel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The peer uses another version.
    #[error(
        "the peer speaks version {0} of the protocol between nodes and this daemon version {VERSION}; run the same release on both"
    )]
    Version(u8),
    /// The length field exceeds [`LENGTH_MAX`], or an encoded frame would.
    #[error(
        "a frame of {0} bytes is longer than {LENGTH_MAX}; if the peer sent it, check that its address and port are those of a holdfastd"
    )]
    TooLong(u64),
    /// The body is not a frame.
    #[error(
        "a frame of {length} bytes cannot be read ({cause}); close the channel, and if it happens again run the same release on both nodes"
    )]
    Malformed {
        /// Value of the length field, in bytes.
        length: usize,
        /// The reader's error.
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
/// [`FrameError::TooLong`]; `out` is then unchanged.
pub fn encode(frame: &Frame, out: &mut Vec<u8>) -> Result<(), FrameError> {
    let start = out.len();
    out.reserve(LENGTH_BYTES + 1 + size_estimate(frame));
    out.extend_from_slice(&[0; LENGTH_BYTES]);
    out.push(VERSION);
    *out = postcard::to_extend(frame, std::mem::take(out)).map_err(encode_error)?;
    let length = out.len() - start - LENGTH_BYTES;
    if length > LENGTH_MAX {
        out.truncate(start);
        return Err(FrameError::TooLong(length as u64));
    }
    let field = (length as u32).to_be_bytes();
    out[start..start + LENGTH_BYTES].copy_from_slice(&field);
    Ok(())
}

/// Encodes a frame as two parts, to be sent in sequence: a large piece is not copied.
///
/// # Errors
/// Same as [`encode`].
pub fn encode_in_parts(frame: &Frame) -> Result<(Vec<u8>, Bytes), FrameError> {
    let mut head = Vec::new();
    let Frame::Move {
        id,
        frame: MoveFrame::Piece { kind, more, bytes },
    } = frame
    else {
        encode(frame, &mut head)?;
        return Ok((head, Bytes::new()));
    };
    // In a frame, bytes follow their count; here the bytes end the frame, so the front ends with the count.
    let piece = GenericFrame::Move {
        id: *id,
        frame: GenericMoveFrame::Piece {
            kind: *kind,
            more: *more,
            bytes: bytes.len(),
        },
    };
    head.extend_from_slice(&[0; LENGTH_BYTES]);
    head.push(VERSION);
    let mut head = postcard::to_extend(&piece, head).map_err(encode_error)?;
    let length = head.len() - LENGTH_BYTES + bytes.len();
    if length > LENGTH_MAX {
        return Err(FrameError::TooLong(length as u64));
    }
    head[..LENGTH_BYTES].copy_from_slice(&(length as u32).to_be_bytes());
    Ok((head, bytes.clone()))
}

/// Writing to memory cannot fail; a type that postcard cannot write would be a defect of a frame.
fn encode_error(error: postcard::Error) -> FrameError {
    malformed_error(0, &error.to_string())
}

/// Estimates the body's size in bytes; only saves growing `out` in steps.
fn size_estimate(frame: &Frame) -> usize {
    match frame {
        Frame::Prepare { flows, .. } => flows.iter().map(|flow| flow.static_state.len() + 56).sum(),
        Frame::State { flows, .. } => flows
            .iter()
            .map(|flow| flow.dynamic.len() + flow.application.len() + 16)
            .sum(),
        Frame::ChangeRequest { changes, .. } => changes.len() * 56,
        Frame::Move { frame, .. } => match frame {
            MoveFrame::Offer(offer) => offer.description.len() + 64,
            MoveFrame::Arm { flows, .. } | MoveFrame::Final { flows, .. } => 64 + flows.len() * 48,
            _ => 64,
        },
        _ => 64,
    }
}

/// Decodes frames from bytes in pieces of any size.
///
/// Memory grows with the bytes that arrived; a length field alone reserves at most 512 KiB.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    buffer: BytesMut,
}

impl FrameDecoder {
    /// Returns a decoder at the start of a channel.
    pub fn new() -> FrameDecoder {
        FrameDecoder::default()
    }

    /// Appends the next bytes of the channel.
    pub fn feed(&mut self, chunk: &[u8]) {
        self.buffer.extend_from_slice(chunk);
        // Reserve a frame of ordinary length at once, so that it is not moved as the buffer grows.
        if let Some(field) = self.buffer.first_chunk::<LENGTH_BYTES>() {
            let length = u32::from_be_bytes(*field) as usize;
            let missing = (LENGTH_BYTES + length).saturating_sub(self.buffer.len());
            if length <= PREALLOCATED_MAX {
                self.buffer.reserve(missing);
            }
        }
    }

    /// Returns the buffer itself, for a reader that appends to it without a copy. Only append.
    pub fn buffer_mut(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// Returns the next complete frame, or none until more bytes are fed. The frame's blobs share the memory of the
    /// buffer.
    ///
    /// # Errors
    /// Any input other than a frame of this version. The position in the stream is then unknown; close the channel.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some(field) = self.buffer.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*field) as usize;
        if length > LENGTH_MAX {
            return Err(FrameError::TooLong(length as u64));
        }
        if length == 0 {
            return Err(malformed_error(0, "the frame is empty"));
        }
        // Check the version as soon as it has arrived: a peer of another version is reported at once.
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

    /// Checks that the channel ended between frames; called at its end.
    ///
    /// # Errors
    /// [`FrameError::Truncated`] when the channel ended within a frame.
    pub fn check_complete(&self) -> Result<(), FrameError> {
        match self.buffer.len() {
            0 => Ok(()),
            have => Err(FrameError::Truncated { have }),
        }
    }
}

fn read_body(body: &Bytes) -> Result<Frame, FrameError> {
    let (frame, rest) = postcard::take_from_bytes::<GenericFrame<&[u8]>>(body)
        .map_err(|error| malformed_error(body.len() + 1, &error.to_string()))?;
    if !rest.is_empty() {
        let cause = format!("{} bytes follow the end of the frame", rest.len());
        return Err(malformed_error(body.len() + 1, &cause));
    }
    Ok(frame.map_blobs(|blob| body.slice_ref(blob)))
}

fn malformed_error(length: usize, cause: &str) -> FrameError {
    FrameError::Malformed {
        length,
        cause: cause.to_owned(),
    }
}
