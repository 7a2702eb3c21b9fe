//! TCP sequence numbers without their wrap, and the part of their space that has been seen.

use std::collections::BTreeMap;
use std::ops::Range;

/// The part of one direction's sequence space that has been seen, as 64-bit positions.
#[derive(Debug, Default)]
pub struct SequenceRanges {
    /// Ends of disjoint, non-adjacent ranges, by their starts.
    ranges: BTreeMap<u64, u64>,
    highest: Option<u64>,
}

/// Position of sequence number 0: far enough from position 0 that numbers before the first segment have a position too.
const ORIGIN: u64 = 1 << 33;

impl SequenceRanges {
    /// Returns the position of a sequence number: the one nearest to the highest seen (RFC 9293, section 3.4:
    /// comparison modulo 2^32).
    pub fn position(&self, sequence: u32) -> u64 {
        let Some(highest) = self.highest else {
            return ORIGIN + u64::from(sequence);
        };
        let distance = sequence.wrapping_sub(highest as u32).cast_signed();
        highest.saturating_add_signed(distance.into())
    }

    /// Returns the position after the last one seen; none before the first segment.
    pub fn next(&self) -> Option<u64> {
        self.highest
    }

    /// Returns the number of positions of `range` that have been seen.
    pub fn count_seen(&self, range: &Range<u64>) -> u64 {
        self.ranges
            .range(..range.end)
            .rev()
            .take_while(|(_, end)| **end > range.start)
            .map(|(start, end)| end.min(&range.end) - start.max(&range.start))
            .sum()
    }

    /// Marks `range` as seen.
    pub fn mark_seen(&mut self, range: Range<u64>) {
        let (mut start, mut end) = (range.start, range.end);
        while let Some((&low, &high)) = self.ranges.range(..=end).next_back() {
            if high < start {
                break;
            }
            (start, end) = (start.min(low), end.max(high));
            self.ranges.remove(&low);
        }
        self.ranges.insert(start, end);
        self.highest = Some(self.highest.map_or(end, |highest| highest.max(end)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_continue_over_the_wrap() {
        let mut seen = SequenceRanges::default();
        let start = seen.position(u32::MAX - 9);
        seen.mark_seen(start..start + 20);
        assert_eq!(seen.position(10), start + 20);
        assert_eq!(seen.position(u32::MAX), start + 9);
        // Numbers before the first one seen have positions, too.
        assert_eq!(seen.position(u32::MAX - 10), start - 1);
    }

    #[test]
    fn adjacent_ranges_merge_and_are_counted() {
        let mut seen = SequenceRanges::default();
        seen.mark_seen(100..200);
        seen.mark_seen(300..400);
        assert_eq!(seen.count_seen(&(150..350)), 100);
        assert_eq!(seen.count_seen(&(200..300)), 0);
        seen.mark_seen(200..300);
        assert_eq!(seen.ranges, BTreeMap::from([(100, 400)]));
        assert_eq!(seen.count_seen(&(0..1000)), 300);
        assert_eq!(seen.next(), Some(400));
    }
}
