//! Short arrays, moved as a whole: no loop ends early. Where it would is chance, and a processor that guesses wrong loses more than
//! it takes to do all.

/// A pool of more elements than this has its selection set elsewhere than in its record.
pub(super) const FEW: usize = 16;

/// No element.
pub(super) const FREE: u32 = u32::MAX;

/// The place of an element that is there.
#[inline]
pub(super) fn place(slots: &[u32; FEW], slot: u32) -> usize {
    let mut at = 0;
    for (place, &other) in (0u32..).zip(slots) {
        at |= if other == slot { place } else { 0 };
    }
    at as usize
}

/// How many there are.
#[inline]
pub(super) fn len(slots: &[u32; FEW]) -> usize {
    let taken = slots.iter().map(|&slot| u32::from(slot != FREE));
    taken.sum::<u32>() as usize
}

/// How many of ascending values are not above one: four blocks of four are told apart first, and no guess waits for another.
#[inline]
pub(super) fn up_to(values: &[u64; FEW], end: u64) -> usize {
    let is_up_to = |at: usize| usize::from(values[at % FEW] <= end);
    let block = 4 * (is_up_to(3) + is_up_to(7) + is_up_to(11));
    block + is_up_to(block) + is_up_to(block + 1) + is_up_to(block + 2) + is_up_to(block + 3)
}

/// Puts something at a place; what was there and behind it goes one further, the last out.
#[inline]
pub(super) fn open<V: Copy>(values: &mut [V; FEW], place: usize, value: V) {
    shift(values, FEW - 1, place, value);
}

/// Takes out what is at a place; what is behind it comes one nearer, and a free one comes last.
#[inline]
pub(super) fn close<V: Copy>(values: &mut [V; FEW], place: usize, free: V) {
    let old = *values;
    for (at, index) in (0..FEW - 1).zip(0u32..) {
        let is_behind = index >= place as u32;
        values[at] = if is_behind { old[at + 1] } else { old[at] };
    }
    values[FEW - 1] = free;
}

/// Moves what is at a place to another, and changes it; what is between makes room.
#[inline]
pub(super) fn shift<V: Copy>(values: &mut [V; FEW], from: usize, to: usize, value: V) {
    let old = *values;
    if from <= to {
        for (at, index) in (0..FEW - 1).zip(0u32..) {
            let is_between = index.wrapping_sub(from as u32) < (to - from) as u32;
            values[at] = if is_between { old[at + 1] } else { old[at] };
        }
    } else {
        for (at, index) in (1..FEW).zip(0u32..) {
            let is_between = index.wrapping_sub(to as u32) < (from - to) as u32;
            values[at] = if is_between { old[at - 1] } else { old[at] };
        }
    }
    values[to] = value;
}

/// Puts the first of so many behind the others.
#[inline]
pub(super) fn rotate(values: &mut [u32; FEW], len: usize) {
    let old = *values;
    for (at, index) in (0..FEW - 1).zip(1u32..) {
        values[at] = if index < len as u32 {
            old[at + 1]
        } else {
            old[at]
        };
    }
    values[len.wrapping_sub(1) % FEW] = old[0];
}

/// Adds something to all values from a place on.
#[inline]
pub(super) fn add(values: &mut [u64; FEW], place: usize, more: u64) {
    for (value, index) in values.iter_mut().zip(0u32..) {
        let is_behind = index >= place as u32;
        *value = value.wrapping_add(if is_behind { more } else { 0 });
    }
}
