//! Sets of addresses.

/// Set of disjoint address ranges in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AddressRanges(Vec<(u64, u64)>);

impl AddressRanges {
    /// Adds a range that begins at or after the end of the last range.
    pub fn push(&mut self, start: u64, end: u64) {
        match self.0.last_mut() {
            Some(last) if last.1 >= start => last.1 = last.1.max(end),
            _ if start < end => self.0.push((start, end)),
            _ => {}
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().copied()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the intersection of both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        let mut found = Self::default();
        let (mut left, mut right) = (self.0.iter().peekable(), other.0.iter().peekable());
        while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
            let (start, end) = (a.0.max(b.0), a.1.min(b.1));
            if start < end {
                found.push(start, end);
            }
            if a.1 < b.1 {
                left.next()
            } else {
                right.next()
            };
        }
        found
    }

    /// Returns the addresses of this set that are not in `other`.
    pub fn difference(&self, other: &Self) -> Self {
        let mut found = Self::default();
        let mut others = other.0.iter().peekable();
        for (start, end) in self.iter() {
            let mut at = start;
            while let Some((hole, hole_end)) = others.peek() {
                if *hole >= end {
                    break;
                }
                if at < *hole {
                    found.push(at, *hole);
                }
                at = at.max(*hole_end);
                if *hole_end > end {
                    break;
                }
                others.next();
            }
            if at < end {
                found.push(at, end);
            }
        }
        found
    }

    /// Joins ranges whose gap is at most `gap_max` bytes. The gap becomes part of the set.
    pub fn merge_gaps(&self, gap_max: u64) -> Self {
        let mut found = Self::default();
        for (start, end) in self.iter() {
            match found.0.last_mut() {
                Some(last) if start - last.1 <= gap_max => last.1 = end,
                _ => found.push(start, end),
            }
        }
        found
    }

    /// Returns the union of both sets.
    pub fn union_with(&self, other: &Self) -> Self {
        let mut merged: Vec<(u64, u64)> = self.iter().chain(other.iter()).collect();
        merged.sort_unstable();
        merged.into_iter().collect()
    }
}

impl FromIterator<(u64, u64)> for AddressRanges {
    /// Builds a set from ranges in ascending order.
    fn from_iter<I: IntoIterator<Item = (u64, u64)>>(ranges: I) -> Self {
        let mut found = Self::default();
        for (start, end) in ranges {
            found.push(start, end);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn from_bits(bits: u64) -> AddressRanges {
        (0..64)
            .filter(|bit| bits & (1 << bit) != 0)
            .map(|bit| (bit, bit + 1))
            .collect()
    }

    #[test]
    fn neighbouring_ranges_merge() {
        let ranges: AddressRanges = [(0, 2), (4, 5), (9, 10)].into_iter().collect();
        assert_eq!(ranges.merge_gaps(2).0, [(0, 5), (9, 10)]);
        assert_eq!(ranges.merge_gaps(1), ranges);
    }

    proptest! {
        #[test]
        fn sets_behave_like_bits(a in any::<u64>(), b in any::<u64>()) {
            prop_assert_eq!(from_bits(a).intersection(&from_bits(b)), from_bits(a & b));
            prop_assert_eq!(from_bits(a).difference(&from_bits(b)), from_bits(a & !b));
            prop_assert_eq!(from_bits(a).union_with(&from_bits(b)), from_bits(a | b));
        }
    }
}
