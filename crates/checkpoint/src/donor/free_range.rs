//! Search for free address ranges.

/// Lower bound: the kernel maps nothing below by itself, except programs that are not position-independent.
const LOWEST: u64 = 0x1_0000_0000;
/// Free space in bytes on both sides, into which neighbours may grow.
const MARGIN: u64 = 1 << 30;
const HIGHEST: u64 = 0x7000_0000_0000;

/// Returns an address at which `bytes` are free in all of these address spaces, with a margin on both sides if
/// possible.
pub(crate) fn find(used: &[(u64, u64)], bytes: u64) -> Option<u64> {
    find_with_margin(used, bytes, MARGIN).or_else(|| find_with_margin(used, bytes, 0))
}

fn find_with_margin(used: &[(u64, u64)], bytes: u64, margin: u64) -> Option<u64> {
    let mut sorted = used.to_vec();
    sorted.sort_unstable();
    let mut at = LOWEST + margin;
    for (start, end) in sorted {
        if start >= at + bytes + margin {
            break;
        }
        at = at.max(end + margin);
    }
    (at + bytes <= HIGHEST).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_range_lies_between_mappings() {
        assert_eq!(find(&[], 0x1000), Some(LOWEST + MARGIN));
        let low = [(0x40_0000, 0x50_0000), (LOWEST, LOWEST + 2 * MARGIN)];
        assert_eq!(find(&low, 0x1000), Some(LOWEST + 3 * MARGIN));
        let tight = [(LOWEST + 0x1000, HIGHEST)];
        assert_eq!(find(&tight, 0x1000), Some(LOWEST));
        assert_eq!(find(&[(LOWEST, HIGHEST)], 0x1000), None);
    }
}
