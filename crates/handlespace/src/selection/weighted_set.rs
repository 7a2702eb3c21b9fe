//! Random selection of elements by weight, in a time that does not depend on their number.
//!
//! Paper 001 section 3.2 lines the weights up, and a random point of the line selects an element, found by descending a
//! tree. Here each element has a part of the line as long as its weight's *ceiling*, a power of four, and elements of
//! equal ceiling are adjacent: so a division finds the element. A point in an element's part beyond its weight is drawn
//! again, which happens for at most three points of four, and for one of three if weights are spread evenly.

use super::splitmix;
use prefetch_index::prefetch_index;
use smallvec::SmallVec;

/// Number of draws by which elements are prefetched ahead; their members (slot and weight) are prefetched at twice the
/// distance.
const PREFETCH_DISTANCE: u32 = 8;
/// With fewer members, prefetching this far ahead is useless.
const PREFETCH_MEMBERS_MIN: usize = 64;

const ROW_BITS: u32 = 2;
/// Exponent for weight 0: never selected; after all others.
const EXCLUDED_EXPONENT: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct WeightedMember {
    slot: u32,
    weight: u32,
}

/// Members with weights of the same ceiling, `1 << exponent`.
#[derive(Debug, Clone, Copy)]
struct WeightRow {
    exponent: u32,
    /// End of the row; its start is the end of the previous row.
    end: u32,
}

/// The weights of a pool's elements, in rows of ascending ceilings. No row is empty.
#[derive(Debug, Clone, Default)]
#[repr(C)]
pub(crate) struct WeightedSet {
    /// Length of the line.
    line_length: u64,
    /// State of the random number generator.
    random: u64,
    members: Vec<WeightedMember>,
    rows: SmallVec<[WeightRow; 4]>,
}

/// A point of the line, inside an element's part.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WeightLinePoint {
    pub(crate) position: u32,
    /// Distance from the start of the part.
    offset: u64,
}

impl WeightedSet {
    /// Creates an empty set, with the state of the random number generator.
    pub(crate) fn with_random_state(random: u64) -> WeightedSet {
        WeightedSet {
            random,
            ..WeightedSet::default()
        }
    }

    /// Draws a random point of the line.
    #[inline]
    pub(crate) fn draw(&mut self) -> WeightLinePoint {
        self.random = splitmix::next_state(self.random);
        self.point_from_random(self.random)
    }

    /// Prefetches the memory for the draw that follows `ahead` others.
    #[inline]
    pub(crate) fn prefetch_draw(&self, ahead: u32) {
        if self.line_length > 0 {
            self.prefetch(self.future_point(ahead).position);
        }
    }

    /// Returns the element of the draw that follows `ahead` others, unless that draw is vain.
    #[inline]
    fn peek_draw(&self, ahead: u32) -> Option<u32> {
        let point = (self.line_length > 0).then(|| self.future_point(ahead))?;
        self.slot_at(point)
    }

    /// Passes the elements that will be drawn next to `show`, up to `items`.
    #[inline]
    pub(crate) fn peek_draws(&self, items: usize, show: impl FnMut(u32)) {
        let draws = 0..2 * items as u32 + 1;
        let drawn = draws.filter_map(|ahead| self.peek_draw(ahead));
        drawn.take(items).for_each(show);
    }

    /// Prefetches for later draws after `draws` draws, and passes elements of earlier ones to `show`. Does nothing for
    /// a small pool, for which all nearby memory is prefetched at once.
    #[inline]
    pub(crate) fn prefetch_draws(&self, draws: u32, mut show: impl FnMut(u32)) {
        if self.members.len() < PREFETCH_MEMBERS_MIN {
            return;
        }
        for draw in 0..draws {
            self.prefetch_draw(2 * PREFETCH_DISTANCE + draw);
            if let Some(slot) = self.peek_draw(PREFETCH_DISTANCE + draw) {
                show(slot);
            }
        }
    }

    #[inline]
    fn future_point(&self, ahead: u32) -> WeightLinePoint {
        self.point_from_random(splitmix::state_after(self.random, ahead + 1))
    }

    #[inline]
    fn point_from_random(&self, random: u64) -> WeightLinePoint {
        self.point(splitmix::below(random, self.line_length))
    }

    /// Returns the point of the line for a number below [`line_length`](Self::line_length).
    #[inline]
    pub(crate) fn point(&self, mut number: u64) -> WeightLinePoint {
        let mut rows = self.rows.as_slice();
        while let [before @ .., row] = rows {
            let start = before.last().map_or(0, |row| row.end);
            if row.exponent != EXCLUDED_EXPONENT {
                let length = u64::from(row.end - start) << row.exponent;
                if number < length {
                    return WeightLinePoint {
                        position: start + (number >> row.exponent) as u32,
                        offset: number & ((1 << row.exponent) - 1),
                    };
                }
                number -= length;
            }
            rows = before;
        }
        unreachable!("the number is below the sum of the rows' lengths");
    }

    /// Returns the selected element, unless the point is beyond its weight.
    #[inline]
    pub(crate) fn slot_at(&self, point: WeightLinePoint) -> Option<u32> {
        let member = self.members[point.position as usize];
        (point.offset < u64::from(member.weight)).then_some(member.slot)
    }

    /// Passes the members at the rows' ends to `show`: they move when another one is removed or changes.
    #[inline]
    pub(crate) fn visit_row_ends(&self, mut show: impl FnMut(u32)) {
        for row in &self.rows {
            let end = row.end as usize;
            for member in [end.wrapping_sub(1), end].map(|at| self.members.get(at)) {
                member.into_iter().for_each(|member| show(member.slot));
            }
        }
    }

    /// Returns the number of members.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.members.len() as u32
    }

    /// Prefetches the member at a position.
    #[inline]
    pub(crate) fn prefetch(&self, position: u32) {
        prefetch_index(&self.members, position as usize);
    }

    /// Returns the number of members that can be selected.
    #[inline]
    pub(crate) fn eligible(&self) -> usize {
        let rows = match self.rows.as_slice() {
            [rows @ .., row] if row.exponent == EXCLUDED_EXPONENT => rows,
            rows => rows,
        };
        rows.last().map_or(0, |row| row.end as usize)
    }

    /// Adds an element. Reports every changed position, including the new element's.
    pub(crate) fn insert(&mut self, weight: u32, slot: u32, mut moved: impl FnMut(u32, u32)) {
        let member = WeightedMember { slot, weight };
        self.members.push(member);
        let to = self.row_or_new(exponent(weight));
        let position = self.move_gap(self.members.len() - 1, self.rows.len(), to, &mut moved);
        self.members[position] = member;
        self.line_length += part_length(self.rows[to].exponent);
        moved(slot, position as u32);
    }

    /// Removes the element at a position. Reports every changed position.
    pub(crate) fn remove(&mut self, position: u32, mut moved: impl FnMut(u32, u32)) {
        let from = self.row_of(position);
        self.line_length -= part_length(self.rows[from].exponent);
        self.move_gap(position as usize, from, self.rows.len(), &mut moved);
        self.members.pop();
        self.remove_if_empty(from);
    }

    /// Changes the weight at a position. Reports every changed position.
    pub(crate) fn set_weight(
        &mut self,
        position: u32,
        weight: u32,
        mut moved: impl FnMut(u32, u32),
    ) {
        let mut from = self.row_of(position);
        let old = self.rows[from].exponent;
        let new = exponent(weight);
        let member = &mut self.members[position as usize];
        member.weight = weight;
        if new == old {
            return;
        }
        let member = *member;
        let rows = self.rows.len();
        let to = self.row_or_new(new);
        from += usize::from(self.rows.len() > rows && to <= from);
        let position = self.move_gap(position as usize, from, to, &mut moved);
        self.members[position] = member;
        self.line_length = self.line_length - part_length(old) + part_length(new);
        self.remove_if_empty(from);
        moved(member.slot, position as u32);
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let rows = if self.rows.spilled() {
            self.rows.capacity() * size_of::<WeightRow>()
        } else {
            0
        };
        self.members.capacity() * size_of::<WeightedMember>() + rows
    }

    /// Moves a gap from one row to another; returns its position there. An empty row follows the last one. Each row
    /// between them gives a place at one end and gets one at the other, so one of its members moves.
    fn move_gap(
        &mut self,
        mut gap: usize,
        from: usize,
        to: usize,
        moved: &mut impl FnMut(u32, u32),
    ) -> usize {
        let mut fill = |gap: usize, with: usize| {
            if gap != with {
                self.members[gap] = self.members[with];
                moved(self.members[gap].slot, gap as u32);
            }
            with
        };
        if from < to {
            for row in &mut self.rows[from..to] {
                row.end -= 1;
                gap = fill(gap, row.end as usize);
            }
        } else {
            for row in self.rows[to..from].iter_mut().rev() {
                gap = fill(gap, row.end as usize);
                row.end += 1;
            }
        }
        gap
    }

    fn row_of(&self, position: u32) -> usize {
        let row = self.rows.iter().position(|row| position < row.end);
        let Some(row) = row else {
            unreachable!("every member is in a row");
        };
        row
    }

    /// Returns the row of an exponent, created if missing.
    fn row_or_new(&mut self, exponent: u32) -> usize {
        let row = self.rows.iter().position(|row| row.exponent >= exponent);
        let row = row.unwrap_or(self.rows.len());
        if self.rows.get(row).is_none_or(|row| row.exponent > exponent) {
            let end = row.checked_sub(1).map_or(0, |before| self.rows[before].end);
            self.rows.insert(row, WeightRow { exponent, end });
        }
        row
    }

    fn remove_if_empty(&mut self, row: usize) {
        let start = row.checked_sub(1).map_or(0, |before| self.rows[before].end);
        if self.rows[row].end == start {
            self.rows.remove(row);
        }
    }
}

/// Returns the exponent of a weight's ceiling.
#[inline]
fn exponent(weight: u32) -> u32 {
    match weight.checked_sub(1) {
        Some(below) => (32 - below.leading_zeros()).next_multiple_of(ROW_BITS),
        None => EXCLUDED_EXPONENT,
    }
}

/// Returns the length of an element's part of the line.
#[inline]
fn part_length(exponent: u32) -> u64 {
    1u64.checked_shl(exponent).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// Counts the points of the line per element, which must equal the element's weight.
    fn points_per_element(weights: &WeightedSet) -> HashMap<u32, u32> {
        let mut shares = HashMap::new();
        for number in 0..weights.line_length {
            if let Some(slot) = weights.slot_at(weights.point(number)) {
                *shares.entry(slot).or_default() += 1;
            }
        }
        shares
    }

    #[derive(Default)]
    struct Model {
        weights: WeightedSet,
        positions: HashMap<u32, u32>,
        expected: HashMap<u32, u32>,
    }

    impl Model {
        fn step(&mut self, slot: u32, weight: Option<u32>) {
            let is_member = self.expected.contains_key(&slot);
            match (weight, is_member) {
                (Some(weight), false) => {
                    self.weights
                        .insert(weight, slot, position_writer(&mut self.positions));
                }
                (Some(weight), true) => {
                    let position = self.positions[&slot];
                    self.weights
                        .set_weight(position, weight, position_writer(&mut self.positions));
                }
                (None, true) => {
                    let position = self.positions[&slot];
                    self.weights
                        .remove(position, position_writer(&mut self.positions));
                    self.positions.remove(&slot);
                    self.expected.remove(&slot);
                }
                (None, false) => {}
            }
            if let Some(weight) = weight {
                self.expected.insert(slot, weight);
            }
        }
    }

    fn position_writer(positions: &mut HashMap<u32, u32>) -> impl FnMut(u32, u32) {
        |slot, position| {
            positions.insert(slot, position);
        }
    }

    proptest! {
        #[test]
        fn each_element_keeps_its_weight(steps in prop::collection::vec((0u32..20, prop::option::of(0u32..70)), 1..150)) {
            let mut model = Model::default();
            for (slot, weight) in steps {
                model.step(slot, weight);
                for (&slot, &position) in &model.positions {
                    prop_assert_eq!(model.weights.members[position as usize].slot, slot);
                }
            }
            let chosen = model.expected.iter().filter(|&(_, &weight)| weight > 0);
            let chosen: HashMap<u32, u32> = chosen.map(|(&slot, &weight)| (slot, weight)).collect();
            prop_assert_eq!(model.weights.eligible(), chosen.len());
            prop_assert!(model.weights.rows.iter().is_sorted_by_key(|row| row.exponent));
            prop_assert_eq!(points_per_element(&model.weights), chosen);
        }
    }

    #[test]
    fn weight_ceilings_are_powers_of_four() {
        let ceilings =
            [0, 1, 2, 4, 5, 16, 17, u32::MAX].map(|weight| part_length(exponent(weight)));
        assert_eq!(ceilings, [0, 1, 4, 4, 16, 16, 64, 1 << 32]);
    }
}
