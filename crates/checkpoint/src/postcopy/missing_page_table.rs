//! Table of missing pages and their addresses at the donor.

use std::collections::BTreeMap;

/// Ranges of missing pages, each with its address at the donor. Both addresses are equal until the program moves a
/// mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MissingPageTable {
    /// Ranges that have the same address at the donor: start → end.
    unmoved: BTreeMap<u64, u64>,
    /// Ranges that have another address at the donor: start → (end, address at the donor).
    moved: BTreeMap<u64, (u64, u64)>,
}

/// A range of missing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MissingPageRange {
    pub start: u64,
    pub end: u64,
    /// Address of the range at the donor.
    pub source: u64,
}

impl MissingPageTable {
    pub fn is_empty(&self) -> bool {
        self.unmoved.is_empty() && self.moved.is_empty()
    }

    /// Returns the number of missing bytes.
    pub fn bytes(&self) -> u64 {
        let unmoved = self.unmoved.iter().map(|(start, end)| end - start);
        let moved = self.moved.iter().map(|(start, (end, _))| end - start);
        unmoved.chain(moved).sum()
    }

    /// Adds a range that does not overlap the table.
    pub fn add(&mut self, range: MissingPageRange) {
        let MissingPageRange { start, end, source } = range;
        if start >= end {
            return;
        }
        match source == start {
            true => drop(self.unmoved.insert(start, end)),
            false => drop(self.moved.insert(start, (end, source))),
        }
    }

    /// Returns the donor's address of the page at `address`, if that page is missing.
    pub fn source_of(&self, address: u64) -> Option<u64> {
        let unmoved = self.unmoved.range(..=address).next_back();
        if unmoved.is_some_and(|(_, end)| address < *end) {
            return Some(address);
        }
        let (start, (end, source)) = self.moved.range(..=address).next_back()?;
        (address < *end).then(|| source + (address - start))
    }

    /// Removes a range from the table. Returns the missing parts of it.
    pub fn remove(&mut self, start: u64, end: u64) -> Vec<MissingPageRange> {
        let mut found = self.missing_within(start, end);
        for place in &found {
            self.cut_out(place.start, place.end);
        }
        found.sort_unstable();
        found
    }

    /// Returns the missing parts of a range.
    pub fn missing_within(&self, start: u64, end: u64) -> Vec<MissingPageRange> {
        let mut found = Vec::new();
        if start >= end {
            return found;
        }
        let first = self.unmoved.range(..start).next_back();
        for (at, range_end) in first.into_iter().chain(self.unmoved.range(start..end)) {
            let (at, until) = ((*at).max(start), (*range_end).min(end));
            if at < until {
                let source = at;
                found.push(MissingPageRange {
                    start: at,
                    end: until,
                    source,
                });
            }
        }
        let first = self.moved.range(..start).next_back();
        for (at, (range_end, source)) in first.into_iter().chain(self.moved.range(start..end)) {
            let source = source + (start.max(*at) - at);
            let (at, until) = ((*at).max(start), (*range_end).min(end));
            if at < until {
                found.push(MissingPageRange {
                    start: at,
                    end: until,
                    source,
                });
            }
        }
        found
    }

    /// Removes a part of one range of the table.
    fn cut_out(&mut self, start: u64, end: u64) {
        if let Some((at, until)) = self
            .unmoved
            .range(..=start)
            .next_back()
            .map(|(a, b)| (*a, *b))
            && start < until
        {
            self.unmoved.remove(&at);
            self.add(MissingPageRange {
                start: at,
                end: start,
                source: at,
            });
            return self.add(MissingPageRange {
                start: end,
                end: until,
                source: end,
            });
        }
        if let Some((at, (until, source))) = self
            .moved
            .range(..=start)
            .next_back()
            .map(|(a, b)| (*a, *b))
            && start < until
        {
            self.moved.remove(&at);
            self.add(MissingPageRange {
                start: at,
                end: start,
                source,
            });
            self.add(MissingPageRange {
                start: end,
                end: until,
                source: source + (end - at),
            });
        }
    }

    /// Moves the entries of a range after the program moved the mapping (`mremap(2)`).
    pub fn remap(&mut self, from: u64, to: u64, length: u64) {
        let moved = self.remove(from, from.saturating_add(length));
        self.remove(to, to.saturating_add(length));
        for place in moved {
            let moved_address = |address: u64| to.saturating_add(address - from);
            let (start, end) = (moved_address(place.start), moved_address(place.end));
            self.add(MissingPageRange {
                start,
                end,
                source: place.source,
            });
        }
    }

    /// Returns the missing ranges whose pages the donor has in this range of its own addresses.
    pub fn ranges_with_source(&self, start: u64, end: u64) -> Vec<MissingPageRange> {
        let is_unmoved = |place: &MissingPageRange| place.source == place.start;
        let mut found: Vec<MissingPageRange> = self
            .missing_within(start, end)
            .into_iter()
            .filter(is_unmoved)
            .collect();
        for (at, (until, source)) in &self.moved {
            let (low, high) = ((*source).max(start), (source + (until - at)).min(end));
            if low < high {
                let start = at + (low - source);
                found.push(MissingPageRange {
                    start,
                    end: start + (high - low),
                    source: low,
                });
            }
        }
        found
    }

    /// Removes and returns the first `limit` missing bytes.
    pub fn remove_first(&mut self, limit: u64) -> Vec<MissingPageRange> {
        let (mut found, mut left) = (Vec::new(), limit);
        while left > 0
            && let Some((start, end)) = self.unmoved.first_key_value().map(|(a, b)| (*a, *b))
        {
            let end = end.min(start + left);
            left -= end - start;
            found.extend(self.remove(start, end));
        }
        found
    }

    /// Returns all missing ranges in the donor's addresses.
    pub fn sources(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let unmoved = self.unmoved.iter().map(|(start, end)| (*start, *end));
        let moved =
            (self.moved.iter()).map(|(start, (end, source))| (*source, source + (end - start)));
        unmoved.chain(moved)
    }
}

impl FromIterator<(u64, u64)> for MissingPageTable {
    /// Builds a table from disjoint ranges.
    fn from_iter<I: IntoIterator<Item = (u64, u64)>>(ranges: I) -> Self {
        let mut table = Self::default();
        for (start, end) in ranges {
            table.add(MissingPageRange {
                start,
                end,
                source: start,
            });
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// For each of 64 pages, the donor's page that is missing there.
    type Model = [Option<u64>; 64];

    #[derive(Clone, Copy, Debug)]
    enum ModelStep {
        Take(u64, u64),
        Remap(u64, u64, u64),
        /// Pages arrive from the donor.
        Fill(u64, u64),
        TakeFirst(u64),
    }

    fn any_step() -> impl Strategy<Value = ModelStep> {
        let any_page = 0..64u64;
        prop_oneof![
            (any_page.clone(), 0..9u64)
                .prop_map(|(at, length)| ModelStep::Take(at, (at + length).min(64))),
            (any_page.clone(), any_page.clone(), 1..9u64)
                .prop_map(|(a, b, c)| ModelStep::Remap(a, b, c)),
            (any_page, 0..9u64).prop_map(|(at, length)| ModelStep::Fill(at, (at + length).min(64))),
            (1..5u64).prop_map(ModelStep::TakeFirst),
        ]
    }

    fn apply(model: &mut Model, table: &mut MissingPageTable, step: ModelStep) {
        let range = |start: u64, end: u64| start as usize..end as usize;
        match step {
            ModelStep::Take(start, end) => {
                table.remove(start, end);
                model[range(start, end)].fill(None);
            }
            ModelStep::Remap(from, to, length) => {
                // The kernel refuses to move a mapping onto itself.
                let length = length.min(64 - from).min(64 - to);
                if from.abs_diff(to) < length {
                    return;
                }
                table.remap(from, to, length);
                let moved: Vec<Option<u64>> = model[range(from, from + length)].to_vec();
                model[range(from, from + length)].fill(None);
                model[range(to, to + length)].copy_from_slice(&moved);
            }
            ModelStep::Fill(start, end) => {
                for place in table.ranges_with_source(start, end) {
                    table.remove(place.start, place.end);
                }
                for place in model.iter_mut() {
                    *place = place.filter(|source| !(start..end).contains(source));
                }
            }
            ModelStep::TakeFirst(limit) => {
                for place in table.remove_first(limit) {
                    for at in place.start..place.end {
                        assert_eq!(model[at as usize].take(), Some(at));
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn table_matches_page_list(
            missing in any::<u64>(),
            steps in proptest::collection::vec(any_step(), 0..40),
        ) {
            let is_missing = |at: &u64| missing & (1 << at) != 0;
            let mut model: Model = std::array::from_fn(|at| Some(at as u64).filter(is_missing));
            let ranges = (0..64).filter(is_missing).map(|at| (at, at + 1));
            let mut table: MissingPageTable = ranges.collect();
            for step in steps {
                apply(&mut model, &mut table, step);
                for at in 0..64 {
                    prop_assert_eq!(table.source_of(at), model[at as usize], "{:?} {}", step, at);
                }
                let missing_pages = model.iter().flatten().count() as u64;
                prop_assert_eq!((table.bytes(), table.is_empty()), (missing_pages, missing_pages == 0));
                let mut sources: Vec<u64> = table.sources().flat_map(|(a, b)| a..b).collect();
                let mut expected: Vec<u64> = model.iter().flatten().copied().collect();
                sources.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(sources, expected);
            }
        }
    }
}
