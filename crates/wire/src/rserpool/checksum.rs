//! The checksum over the elements of a registrar (RFC 5353 section 3.6.2).

use super::decoder::{DecodeErrorKind, Reader};
use super::encoder::Writer;
use super::identifiers::{ElementId, PoolHandle};
use super::parameter::{self, Parameter};

/// The checksum of a set of pool elements, updated as elements are added and removed.
///
/// RFC 1071 over each element's block: the pool's handle padded with zeros to a multiple of 4 bytes, then the element's
/// number. The words are summed in 64 bits without folding, so each element can be removed exactly, in any order, and
/// no set of elements is large enough to overflow the sum (rsplib's accumulator of 32 bits wraps beyond some 10,000
/// elements, and the lost carries make the checksum wrong).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeChecksum {
    sum: u64,
}

impl PeChecksum {
    /// Adds an element to the set.
    pub fn add(&mut self, handle: &PoolHandle, id: ElementId) {
        self.sum += block_sum(handle, id);
    }

    /// Removes an element that was added.
    pub fn remove(&mut self, handle: &PoolHandle, id: ElementId) {
        self.sum = self.sum.wrapping_sub(block_sum(handle, id));
    }

    /// Returns the checksum; `0xffff` for an empty set.
    pub fn value(&self) -> u16 {
        let mut sum = self.sum;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }
}

/// The sum of the 16-bit words of an element's block.
fn block_sum(handle: &PoolHandle, id: ElementId) -> u64 {
    let mut words = handle.0.chunks_exact(2);
    let word_sum: u64 = words
        .by_ref()
        .map(|word| u64::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    let odd_byte = words
        .remainder()
        .first()
        .map_or(0, |&byte| u64::from(byte) << 8);
    word_sum + odd_byte + u64::from(id.0 >> 16) + u64::from(id.0 & 0xffff)
}

/// The value as a PE Checksum parameter (RFC 5354 section 3.15).
pub(super) struct ChecksumValue(pub(super) u16);

impl Parameter for ChecksumValue {
    const KINDS: &'static [u16] = &[parameter::CHECKSUM];

    fn read(value: &mut Reader<'_>) -> Result<ChecksumValue, DecodeErrorKind> {
        let checksum = value.u16()?;
        value.expect_end()?;
        Ok(ChecksumValue(checksum))
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.u16(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// RFC 1071 by the book: over all the bytes at once.
    fn rfc1071(bytes: &[u8]) -> u16 {
        let mut sum = 0u32;
        for word in bytes.chunks(2) {
            sum += u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    #[test]
    fn empty_set_has_all_ones() {
        assert_eq!(PeChecksum::default().value(), 0xffff);
    }

    #[test]
    fn hundred_thousand_elements_keep_carries() {
        let handle = PoolHandle::from("\u{7f}~\u{7f}~");
        let (mut checksum, mut bytes) = (PeChecksum::default(), Vec::new());
        for id in (0..100_000).map(|id| u32::MAX - id) {
            checksum.add(&handle, ElementId(id));
            bytes.extend_from_slice(&handle.0);
            bytes.extend_from_slice(&id.to_be_bytes());
        }
        assert_eq!(checksum.value(), rfc1071(&bytes));
    }

    proptest! {
        #[test]
        fn added_and_removed_elements_leave_checksum_of_rest(
            elements in proptest::collection::vec(
                (proptest::collection::vec(any::<u8>(), 0..9), any::<u32>(), any::<bool>()), 0..40),
        ) {
            let (mut checksum, mut bytes) = (PeChecksum::default(), Vec::new());
            let handle = |bytes: &Vec<u8>| PoolHandle(bytes.clone().into());
            for (name, id, _) in &elements {
                checksum.add(&handle(name), ElementId(*id));
            }
            for (name, id, stays) in &elements {
                if *stays {
                    bytes.extend_from_slice(name);
                    bytes.resize(bytes.len().next_multiple_of(4), 0);
                    bytes.extend_from_slice(&id.to_be_bytes());
                } else {
                    checksum.remove(&handle(name), ElementId(*id));
                }
            }
            prop_assert_eq!(checksum.value(), rfc1071(&bytes));
        }
    }
}
