//! The checksum by which registrars compare what they know of each other's elements (RFC 5353 section 3.6.2).

/// The Internet checksum (RFC 1071) over any number of byte blocks, to which blocks are added and taken away.
///
/// The sum of the 16-bit words is kept whole, in 64 bits, and folded when asked for: so taking a block away undoes adding
/// it exactly, whatever their number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Checksum(u64);

impl Checksum {
    pub(crate) fn add(&mut self, block: u64) {
        self.0 += block;
    }

    pub(crate) fn take(&mut self, block: u64) {
        self.0 -= block;
    }

    pub(crate) fn value(self) -> u16 {
        !fold(self.0)
    }
}

/// The sum of a number's 16-bit words, with carries added where they come out. It is 0 for 0 only.
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// What a pool handle adds for each element of the pool: its words, the last one padded with zeros.
pub(crate) fn handle_block(handle: &[u8]) -> u16 {
    let word = |pair: &[u8]| u64::from(pair[0]) << 8 | pair.get(1).map_or(0, |&b| u64::from(b));
    fold(handle.chunks(2).map(word).sum())
}

/// What an element's id adds.
pub(crate) fn id_block(id: u32) -> u64 {
    u64::from(id >> 16) + u64::from(id & 0xffff)
}
