//! Operations on short arrays, always on the whole array: no loop ends early. The end of a loop would be unpredictable,
//! and a mispredicted branch costs more than processing all places.

/// Maximum size of a selection set inside a pool's record; larger sets are stored elsewhere.
pub(super) const SMALL_SIZE: usize = 16;

/// Marks a free place.
pub(super) const FREE: u32 = u32::MAX;

/// Returns the place of an element, which must be in the array.
#[inline]
pub(super) fn index_of(slots: &[u32; SMALL_SIZE], slot: u32) -> usize {
    let mut at = 0;
    for (place, &other) in (0u32..).zip(slots) {
        at |= if other == slot { place } else { 0 };
    }
    at as usize
}

/// Returns the number of elements.
#[inline]
pub(super) fn len(slots: &[u32; SMALL_SIZE]) -> usize {
    let taken = slots.iter().map(|&slot| u32::from(slot != FREE));
    taken.sum::<u32>() as usize
}

/// Returns the number of ascending values that are at most `end`: first finds the block of four, without dependent
/// branches.
#[inline]
pub(super) fn count_up_to(values: &[u64; SMALL_SIZE], end: u64) -> usize {
    let is_up_to = |at: usize| usize::from(values[at % SMALL_SIZE] <= end);
    let block = 4 * (is_up_to(3) + is_up_to(7) + is_up_to(11));
    block + is_up_to(block) + is_up_to(block + 1) + is_up_to(block + 2) + is_up_to(block + 3)
}

/// Inserts a value at a place; the value there and the ones after it move up, and the last one drops out.
#[inline]
pub(super) fn insert_at<V: Copy>(values: &mut [V; SMALL_SIZE], place: usize, value: V) {
    move_to(values, SMALL_SIZE - 1, place, value);
}

/// Removes the value at a place; the values after it move down, and a free one is appended.
#[inline]
pub(super) fn remove_at<V: Copy>(values: &mut [V; SMALL_SIZE], place: usize, free: V) {
    let old = *values;
    for (at, index) in (0..SMALL_SIZE - 1).zip(0u32..) {
        let is_behind = index >= place as u32;
        values[at] = if is_behind { old[at + 1] } else { old[at] };
    }
    values[SMALL_SIZE - 1] = free;
}

/// Moves a value from one place to another and replaces it; the values between them shift by one.
#[inline]
pub(super) fn move_to<V: Copy>(values: &mut [V; SMALL_SIZE], from: usize, to: usize, value: V) {
    let old = *values;
    if from <= to {
        for (at, index) in (0..SMALL_SIZE - 1).zip(0u32..) {
            let is_between = index.wrapping_sub(from as u32) < (to - from) as u32;
            values[at] = if is_between { old[at + 1] } else { old[at] };
        }
    } else {
        for (at, index) in (1..SMALL_SIZE).zip(0u32..) {
            let is_between = index.wrapping_sub(to as u32) < (from - to) as u32;
            values[at] = if is_between { old[at - 1] } else { old[at] };
        }
    }
    values[to] = value;
}

/// Moves the first of `len` values to the end of them.
#[inline]
pub(super) fn rotate(values: &mut [u32; SMALL_SIZE], len: usize) {
    let old = *values;
    for (at, index) in (0..SMALL_SIZE - 1).zip(1u32..) {
        values[at] = if index < len as u32 {
            old[at + 1]
        } else {
            old[at]
        };
    }
    values[len.wrapping_sub(1) % SMALL_SIZE] = old[0];
}

/// Adds an amount to all values from a place on.
#[inline]
pub(super) fn add_from(values: &mut [u64; SMALL_SIZE], place: usize, amount: u64) {
    for (value, index) in values.iter_mut().zip(0u32..) {
        let is_behind = index >= place as u32;
        *value = value.wrapping_add(if is_behind { amount } else { 0 });
    }
}
