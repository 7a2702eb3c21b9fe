//! The checksum by which registrars compare their views of each other's elements (RFC 5353 section 3.6.2).

/// The Internet checksum (RFC 1071) over any number of byte blocks, to which blocks can be added and from which they
/// can be removed.
///
/// The sum of the 16-bit words is kept unfolded, in 64 bits, and folded only on request: so removing a block exactly
/// undoes adding it, for any number of blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Checksum(u64);

impl Checksum {
    pub(crate) fn add(&mut self, block: u64) {
        self.0 += block;
    }

    pub(crate) fn subtract(&mut self, block: u64) {
        self.0 -= block;
    }

    pub(crate) fn value(self) -> u16 {
        !fold(self.0)
    }
}

/// Folds a sum of 16-bit words, adding its carries. The result is 0 for 0 only.
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Returns a pool handle's part in the block of each of its elements: the sum of its words, the last one padded with
/// zeros.
pub(crate) fn handle_block(handle: &[u8]) -> u16 {
    let word = |pair: &[u8]| u64::from(pair[0]) << 8 | pair.get(1).map_or(0, |&b| u64::from(b));
    fold(handle.chunks(2).map(word).sum())
}

/// Returns an element id's part in its block.
pub(crate) fn id_block(id: u32) -> u64 {
    u64::from(id >> 16) + u64::from(id & 0xffff)
}
