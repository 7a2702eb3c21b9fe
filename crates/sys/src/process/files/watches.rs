//! What an epoll set watches, as one number: a caller that sees the number from beside the process need not read the set
//! again, of which `/proc` tells in a line for each entry.

/// The sum over the entries of a set; their order does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watches(pub u64);

/// An entry of a set: the identity of the open file, its number, events as asked for, and the caller's data.
pub type Entry = (u64, u32, u32, u64);

/// The listing's programs have the same (`bpf`, `c/epoll.h`).
const MULTIPLIER: u64 = 0x9fb2_1c65_1e98_df25;

impl Watches {
    /// That of these entries.
    pub fn of(entries: impl IntoIterator<Item = Entry>) -> Self {
        let sum = |sum: u64, one| sum.wrapping_add(digest(one));
        Self(entries.into_iter().fold(0, sum))
    }
}

fn digest((file, fd, events, data): Entry) -> u64 {
    let words = [file, u64::from(fd) << 32 | u64::from(events), data, 1];
    words.into_iter().fold(0, |hash, word| {
        let hash = (hash ^ word).wrapping_mul(MULTIPLIER);
        hash ^ (hash >> 32)
    })
}
