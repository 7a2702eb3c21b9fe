//! Random numbers that are numbered (splitmix64): which come next is known, so what they choose can be fetched.

/// What splitmix64 adds for the next number.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// How far the numbers have come with the next one.
#[inline]
pub(super) fn next(random: u64) -> u64 {
    random.wrapping_add(GOLDEN)
}

/// How far they come with so many.
#[inline]
pub(super) fn ahead(random: u64, numbers: u32) -> u64 {
    random.wrapping_add(u64::from(numbers).wrapping_mul(GOLDEN))
}

/// The number to which they have come, below `end`.
#[inline]
pub(super) fn below(random: u64, end: u64) -> u64 {
    let mut mixed = random;
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    ((u128::from(mixed) * u128::from(end)) >> 64) as u64
}
