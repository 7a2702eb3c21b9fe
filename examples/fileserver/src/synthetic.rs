//! A data stream without a disk: byte `o` is byte `o % 8` (little endian) of `mix(o / 8)`, where `mix` is the output
//! function of SplitMix64. So every node generates the same bytes, from any offset.

use sha2::{Digest, Sha256};

/// Maximum size in a path, 1 TiB.
pub const SIZE_MAX: u64 = 1 << 40;

fn mix(index: u64) -> u64 {
    let mut word = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Fills `buffer` with the stream from `offset` on.
pub fn fill(offset: u64, buffer: &mut [u8]) {
    let skip = (offset % 8) as usize;
    let head = if skip == 0 {
        0
    } else {
        (8 - skip).min(buffer.len())
    };
    let (first, rest) = buffer.split_at_mut(head);
    first.copy_from_slice(&mix(offset / 8).to_le_bytes()[skip % 8..][..head]);
    let mut index = offset.div_ceil(8);
    let mut words = rest.chunks_exact_mut(8);
    for word in &mut words {
        word.copy_from_slice(&mix(index).to_le_bytes());
        index += 1;
    }
    let last = words.into_remainder();
    last.copy_from_slice(&mix(index).to_le_bytes()[..last.len()]);
}

/// Returns the digest of the first `size` bytes, in hexadecimal.
pub fn sha256(size: u64) -> String {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 64 * 1024];
    let mut offset = 0;
    while offset < size {
        let length =
            usize::try_from(size - offset).map_or(buffer.len(), |left| left.min(buffer.len()));
        fill(offset, &mut buffer[..length]);
        hash.update(&buffer[..length]);
        offset += length as u64;
    }
    hex(&hash.finalize())
}

/// Formats bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn stream_has_the_fixed_bytes() {
        let mut bytes = [0; 16];
        fill(0, &mut bytes);
        // SplitMix64 with seed 0 generates these two words first.
        assert_eq!(bytes[..8], 0xe220_a839_7b1d_cdaf_u64.to_le_bytes());
        assert_eq!(bytes[8..], 0x6e78_9e6a_a1b9_65f4_u64.to_le_bytes());
    }

    #[test]
    fn empty_stream_has_the_sha256_of_no_bytes() {
        assert_eq!(
            sha256(0),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
    }

    proptest! {
        #[test]
        fn any_part_equals_that_slice_of_the_stream(offset in 0..300usize, length in 0..300usize) {
            let mut whole = [0; 600];
            fill(0, &mut whole);
            let mut part = vec![0; length];
            fill(offset as u64, &mut part);
            prop_assert_eq!(&part, &whole[offset..offset + length]);
        }
    }
}
