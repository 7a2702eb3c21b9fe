//! Counter-based random numbers (splitmix64): the next ones are known, so the elements they select can be prefetched.

/// Increment of splitmix64's state.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the next state.
#[inline]
pub(super) fn next_state(random: u64) -> u64 {
    random.wrapping_add(INCREMENT)
}

/// Returns the state after `numbers` steps.
#[inline]
pub(super) fn state_after(random: u64, numbers: u32) -> u64 {
    random.wrapping_add(u64::from(numbers).wrapping_mul(INCREMENT))
}

/// Returns the state's random number, below `end`.
#[inline]
pub(super) fn below(random: u64, end: u64) -> u64 {
    let mut mixed = random;
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    ((u128::from(mixed) * u128::from(end)) >> 64) as u64
}
