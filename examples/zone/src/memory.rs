//! Memory that is written continuously, and checked before each write.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::status::{Counts, add};

/// Number of words in a page of 4 KiB.
const WORDS_PER_PAGE: usize = 512;
const PAGES_PER_MIB: usize = 256;
/// Interval between portions of writing.
const WRITE_INTERVAL: Duration = Duration::from_millis(10);

/// A page aligned to the machine's pages, so that writing to one changes no other.
#[derive(Clone)]
#[repr(align(4096))]
struct Page([u64; WORDS_PER_PAGE]);

/// Pages, and the order in which they are written.
pub struct Memory {
    pages: Vec<Page>,
    /// Number of writes to each page.
    write_counts: Vec<u32>,
    order: Vec<u32>,
    /// Index in `order` of the next page.
    next: usize,
    random: u64,
}

impl Memory {
    /// Allocates `mib` MiB, each page with its own content.
    pub fn new(mib: usize) -> Self {
        let count = mib * PAGES_PER_MIB;
        let mut memory = Self {
            pages: vec![Page([0; WORDS_PER_PAGE]); count],
            write_counts: vec![0; count],
            order: (0..count as u32).collect(),
            next: 0,
            random: 0x9e37_79b9_7f4a_7c15,
        };
        for (number, page) in memory.pages.iter_mut().enumerate() {
            write(page, number, 0);
        }
        memory.shuffle();
        memory
    }

    /// Writes `mib_per_s` MiB per second, forever.
    pub fn write_forever(mut self, mib_per_s: u64, counts: &Counts) {
        let pages_per_s = mib_per_s * PAGES_PER_MIB as u64;
        if self.pages.is_empty() || pages_per_s == 0 {
            return;
        }
        let mut pages_due = Duration::ZERO;
        let mut last = Instant::now();
        loop {
            sleep(WRITE_INTERVAL);
            // Time lost in a stop is not made up for.
            pages_due += last.elapsed().min(2 * WRITE_INTERVAL);
            last = Instant::now();
            let pages = pages_due.as_micros() as u64 * pages_per_s / 1_000_000;
            pages_due -= Duration::from_micros(pages * 1_000_000 / pages_per_s);
            for _ in 0..pages {
                let is_intact = self.write_next();
                add(&counts.pages_wrong, u64::from(!is_intact));
            }
            add(&counts.pages, pages);
        }
    }

    /// Writes the next page; returns true if its previous content was right.
    fn write_next(&mut self) -> bool {
        if self.next == self.order.len() {
            self.shuffle();
            self.next = 0;
        }
        let number = self.order[self.next] as usize;
        self.next += 1;
        let (page, writing) = (&mut self.pages[number], &mut self.write_counts[number]);
        let is_intact = has_content(page, number, *writing);
        *writing += 1;
        write(page, number, *writing);
        is_intact
    }

    fn shuffle(&mut self) {
        for end in (1..self.order.len()).rev() {
            self.random = next_random(self.random);
            self.order
                .swap(end, (self.random % (end as u64 + 1)) as usize);
        }
    }
}

/// Returns the words of a page: different for every page and every write.
fn page_words(number: usize, writing: u32) -> impl Iterator<Item = u64> {
    let seed = (number as u64) << 32 | u64::from(writing);
    let first = next_random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    std::iter::successors(Some(first), |word| Some(next_random(*word)))
}

fn write(page: &mut Page, number: usize, writing: u32) {
    for (word, value) in page.0.iter_mut().zip(page_words(number, writing)) {
        *word = value;
    }
}

fn has_content(page: &Page, number: usize, writing: u32) -> bool {
    page.0
        .iter()
        .copied()
        .eq(page_words(number, writing).take(WORDS_PER_PAGE))
}

fn next_random(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ (state << 17)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_writes_every_page_once() {
        let mut memory = Memory::new(1);
        for round in 1..4 {
            for _ in 0..PAGES_PER_MIB {
                assert!(memory.write_next());
            }
            assert!(
                memory
                    .write_counts
                    .iter()
                    .all(|writings| *writings == round)
            );
        }
    }

    #[test]
    fn changed_page_is_detected() {
        let mut memory = Memory::new(1);
        memory.pages[7].0[511] ^= 1;
        let wrong_pages = (0..PAGES_PER_MIB).filter(|_| !memory.write_next()).count();
        assert_eq!(wrong_pages, 1);
    }
}
