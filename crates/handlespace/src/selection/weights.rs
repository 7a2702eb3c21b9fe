//! Elements by weight: the paper's weight sum, kept for every sixteen elements, for every sixteen of those, and so on.

const FAN: usize = 16;
const FAN_BITS: u32 = FAN.trailing_zeros();

/// The weights of a pool's elements, in no order. A position has sixteen weights in one cache line.
#[derive(Debug, Clone, Default)]
pub(crate) struct Weights {
    slots: Vec<u32>,
    weights: Vec<u32>,
    /// The sums of sixteen weights, the sums of sixteen of those, up to a level of at most sixteen.
    sums: Vec<Vec<u64>>,
    total: u64,
}

impl Weights {
    /// The weight sum.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Adds an element; returns its position.
    pub(crate) fn insert(&mut self, weight: u32, slot: u32) -> u32 {
        let position = self.slots.len();
        self.slots.push(slot);
        self.weights.push(0);
        let mut above = position;
        let mut levels = 0;
        while above >= FAN || (levels < self.sums.len()) {
            above >>= FAN_BITS;
            self.reach(levels, above);
            levels += 1;
        }
        self.set(position as u32, weight);
        position as u32
    }

    /// Takes out the element at a position. Returns the slot of the one that moves to this position, if one does.
    pub(crate) fn remove(&mut self, position: u32) -> Option<u32> {
        let last = self.slots.len() - 1;
        let weight = self.weights[last];
        self.set(last as u32, 0);
        let moved = (position as usize != last).then(|| {
            self.set(position, weight);
            let slot = self.slots[last];
            self.slots[position as usize] = slot;
            slot
        });
        self.slots.pop();
        self.weights.pop();
        let mut len = last;
        for level in &mut self.sums {
            len = len.div_ceil(FAN);
            level.truncate(len);
        }
        while self.sums.last().is_some_and(|level| level.len() <= 1) {
            self.sums.pop();
        }
        moved
    }

    /// Changes the weight at a position.
    pub(crate) fn set(&mut self, position: u32, weight: u32) {
        let old = std::mem::replace(&mut self.weights[position as usize], weight);
        let change = u64::from(weight).wrapping_sub(u64::from(old));
        if change == 0 {
            return;
        }
        self.total = self.total.wrapping_add(change);
        let mut above = position as usize;
        for level in &mut self.sums {
            above >>= FAN_BITS;
            level[above] = level[above].wrapping_add(change);
        }
    }

    /// The element at whose weight the sum of the weights up to it first exceeds `point`, which is below the total.
    #[inline]
    pub(crate) fn at(&self, mut point: u64) -> u32 {
        let mut group = 0;
        for level in self.sums.iter().rev() {
            let start = group << FAN_BITS;
            group = start + descend(&level[start..level.len().min(start + FAN)], &mut point);
        }
        let start = group << FAN_BITS;
        let end = self.weights.len().min(start + FAN);
        let position = start + descend(&self.weights[start..end], &mut point);
        self.slots[position]
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let sums: usize = self.sums.iter().map(Vec::capacity).sum();
        (self.slots.capacity() + self.weights.capacity()) * size_of::<u32>()
            + sums * size_of::<u64>()
            + self.sums.capacity() * size_of::<Vec<u64>>()
    }

    /// Makes `sums[level]` reach `index`; a new level begins with the sum of all there was.
    fn reach(&mut self, level: usize, index: usize) {
        if level == self.sums.len() {
            self.sums.push(vec![self.total]);
        }
        if index == self.sums[level].len() {
            self.sums[level].push(0);
        }
    }
}

/// The first whose weight exceeds the point, which becomes the point within it. Without a branch for each: which one it is
/// cannot be foretold.
#[inline]
fn descend<W: Copy + Into<u64>>(weights: &[W], point: &mut u64) -> usize {
    let (mut sum, mut before, mut index) = (0u64, 0u64, 0);
    for &weight in weights {
        sum += weight.into();
        let passed = sum <= *point;
        index += usize::from(passed);
        before = if passed { sum } else { before };
    }
    *point -= before;
    index
}
