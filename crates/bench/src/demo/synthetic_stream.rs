//! Second implementation of the file servers' synthetic stream: the outputs of SplitMix64 with seed 0, little endian.

use sha2::{Digest, Sha256};

/// A generator of the stream, from its beginning.
#[derive(Default)]
pub struct SyntheticStream {
    state: u64,
}

impl SyntheticStream {
    /// Fills a buffer with the next bytes; every call but the last must ask for a multiple of 8.
    pub fn fill(&mut self, buffer: &mut [u8]) {
        for word in buffer.chunks_mut(8) {
            self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = self.state;
            mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^= mixed >> 31;
            word.copy_from_slice(&mixed.to_le_bytes()[..word.len()]);
        }
    }
}

/// Returns the digest of the stream's first `size` bytes, in hexadecimal.
pub fn stream_sha256(size: u64) -> String {
    let (mut source, mut hash) = (SyntheticStream::default(), Sha256::new());
    let mut buffer = vec![0; 1 << 18];
    let mut left = size;
    while left > 0 {
        let length = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
        source.fill(&mut buffer[..length]);
        hash.update(&buffer[..length]);
        left -= length as u64;
    }
    hex(&hash.finalize())
}

/// Returns bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_equals_splitmix64() {
        let mut bytes = [0; 12];
        SyntheticStream::default().fill(&mut bytes);
        assert_eq!(bytes[..8], 0xe220_a839_7b1d_cdaf_u64.to_le_bytes());
        assert_eq!(bytes[8..], 0x6e78_9e6a_a1b9_65f4_u64.to_le_bytes()[..4]);
    }

    #[test]
    fn digest_of_empty_stream_is_sha256_of_nothing() {
        assert!(stream_sha256(0).starts_with("e3b0c44298fc1c14"));
    }
}
