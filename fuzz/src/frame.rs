//! Decoder of frames.

use holdfast_wire::{Frame, FrameDecoder, VERSION, encode};

/// Decodes frames from the bytes after the first. An even first byte makes these bytes a stream, read in pieces of this
/// size plus 1; an odd one makes them the body of one frame. Decoded frames survive encoding and decoding.
pub fn run(data: &[u8]) -> bool {
    let Some((choice, rest)) = data.split_first() else {
        return false;
    };
    let frames = if choice % 2 == 0 {
        decode(rest, usize::from(*choice) + 1)
    } else {
        let length = u32::try_from(rest.len() + 1).unwrap_or(u32::MAX);
        let mut bytes = length.to_be_bytes().to_vec();
        bytes.push(VERSION);
        bytes.extend_from_slice(rest);
        decode(&bytes, bytes.len())
    };
    let mut bytes = Vec::new();
    for frame in &frames {
        encode(frame, &mut bytes).expect("it fitted when it came");
    }
    assert_eq!(decode(&bytes, 1 << 20), frames);
    !frames.is_empty()
}

/// Returns the frames up to the first error.
pub(crate) fn decode(bytes: &[u8], piece: usize) -> Vec<Frame> {
    let mut decoder = FrameDecoder::new();
    let mut frames = Vec::new();
    for piece in bytes.chunks(piece) {
        decoder.feed(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    return frames;
                }
            }
        }
    }
    let _ = decoder.check_complete();
    frames
}
