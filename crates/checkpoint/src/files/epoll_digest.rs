//! Digest of an epoll set: of the files that the set watches. A caller that gets the digest without stopping the
//! process need not read the set again from `/proc`, where the set has a line for each entry.

/// Sum over the entries of a set, independent of their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpollDigest(pub u64);

/// An entry of a set: identity of the open file, descriptor number, requested events, and the program's data.
pub type EpollEntry = (u64, u32, u32, u64);

/// Multiplier of the hash; the eBPF programs that list descriptors use the same (`bpf`, `c/epoll.h`).
const MULTIPLIER: u64 = 0x9fb2_1c65_1e98_df25;

impl EpollDigest {
    /// Returns the digest of these entries.
    pub fn from_entries(entries: impl IntoIterator<Item = EpollEntry>) -> Self {
        let sum = |sum: u64, one| sum.wrapping_add(digest(one));
        Self(entries.into_iter().fold(0, sum))
    }
}

fn digest((file, fd, events, data): EpollEntry) -> u64 {
    let words = [file, u64::from(fd) << 32 | u64::from(events), data, 1];
    words.into_iter().fold(0, |hash, word| {
        let hash = (hash ^ word).wrapping_mul(MULTIPLIER);
        hash ^ (hash >> 32)
    })
}
