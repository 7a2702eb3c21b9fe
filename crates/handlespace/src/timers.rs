//! One timer for each element (paper 001 section 3.3): a hierarchical wheel (Varghese and Lauck) of microseconds.
//!
//! Eleven levels of 64 buckets cover all of a 64-bit time. An entry lies at the level of the highest digit, to base 64, in
//! which its time differs from the wheel's; when the wheel reaches its bucket it moves down, until at the lowest level a bucket is
//! one microsecond. So entries come out in exact order, and each moves at most once per level.
//!
//! Most timers are restarted before they expire. A timer that moves to a later time keeps its entry: restarting is one
//! write. When the entry comes out, it goes back in with the time it has by then.

use crate::element::Core;
use std::time::Duration;

/// What is to happen (paper 001 section 3.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TimerKind {
    /// An own element is to be sent a keep-alive.
    KeepAliveTransmission,
    /// An own element has not answered one.
    KeepAliveTimeout,
    /// A registration has not been renewed in time.
    #[default]
    RegistrationExpiry,
}

/// A timer that has expired; it is no longer set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expired {
    /// Whose it was.
    pub key: crate::ElementKey,
    /// What it was set for.
    pub kind: TimerKind,
    /// When it was to expire.
    pub at: Duration,
}

/// An element's timer; times in microseconds, [`NEVER`] for none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timer {
    pub(crate) at: u64,
    /// The time of its entry in the wheel, not later than `at`.
    entry: u64,
    pub(crate) kind: TimerKind,
}

impl Default for Timer {
    fn default() -> Timer {
        Timer {
            at: NEVER,
            entry: NEVER,
            kind: TimerKind::default(),
        }
    }
}

pub(crate) const NEVER: u64 = u64::MAX;

const DIGIT_BITS: u32 = 6;
const BUCKETS: usize = 1 << DIGIT_BITS;
const LEVELS: usize = 64usize.div_ceil(DIGIT_BITS as usize);
/// Room for this many entries stays with a bucket; more was for a crowd that has moved on.
const KEPT_ENTRIES: usize = 64;
/// Entries of no timer are cleared out when they are half of all, and more than this.
const STALE_MIN: usize = 1024;

#[derive(Debug, Clone, Copy)]
struct Entry {
    time: u64,
    slot: u32,
}

#[derive(Debug, Clone)]
struct Level {
    /// Which buckets are not empty.
    occupied: u64,
    buckets: Vec<Vec<Entry>>,
}

/// The timers of all elements.
#[derive(Debug, Clone)]
pub(crate) struct Timers {
    levels: Vec<Level>,
    /// No entry is earlier.
    reached: u64,
    entries: usize,
    /// Entries at most whose timers have gone, or have an earlier entry.
    stale: usize,
}

impl Timers {
    pub(crate) fn new() -> Timers {
        let level = Level {
            occupied: 0,
            buckets: vec![Vec::new(); BUCKETS],
        };
        Timers {
            levels: vec![level; LEVELS],
            reached: 0,
            entries: 0,
            stale: 0,
        }
    }

    /// Sets the timer of the element in `slot`, whatever it was set to before.
    #[inline]
    pub(crate) fn set(&mut self, cores: &mut [Core], slot: u32, kind: TimerKind, at: u64) {
        let timer = &mut cores[slot as usize].timer;
        timer.at = at;
        timer.kind = kind;
        if timer.entry <= at {
            return;
        }
        let had_entry = timer.entry != NEVER;
        timer.entry = at.max(self.reached);
        let entry = timer.entry;
        self.push(Entry { time: entry, slot });
        if had_entry {
            self.forget(cores);
        }
    }

    /// The element's timer is gone: it has been stopped and the element is about to go.
    pub(crate) fn remove(&mut self, cores: &mut [Core], slot: u32) {
        let timer = &mut cores[slot as usize].timer;
        let had_entry = timer.entry != NEVER;
        *timer = Timer::default();
        if had_entry {
            self.forget(cores);
        }
    }

    /// The element whose timer expires first, if that is not after `now`, and its timer, which is no longer set.
    #[inline]
    pub(crate) fn pop(&mut self, cores: &mut [Core], now: u64) -> Option<(u32, Timer)> {
        while let Some(entry) = self.pop_entry(now) {
            let timer = &mut cores[entry.slot as usize].timer;
            if timer.entry != entry.time {
                self.stale = self.stale.saturating_sub(1);
            } else if timer.at <= entry.time {
                let expired = std::mem::take(timer);
                return Some((entry.slot, expired));
            } else {
                timer.entry = timer.at;
                if timer.at != NEVER {
                    let time = timer.at;
                    self.push(Entry { time, ..entry });
                }
            }
        }
        None
    }

    /// A time before which nothing expires; the first one's own, or that of the bucket it is in.
    pub(crate) fn next(&self) -> Option<u64> {
        self.first_bucket().map(|(_, _, start)| start)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let buckets = self.levels.iter().flat_map(|level| &level.buckets);
        buckets
            .map(|bucket| bucket.capacity() * size_of::<Entry>() + size_of::<Vec<Entry>>())
            .sum()
    }

    /// Takes the first entry out if its time is not after `now`.
    #[inline]
    fn pop_entry(&mut self, now: u64) -> Option<Entry> {
        loop {
            let (number, bucket, start) = self.first_bucket()?;
            if start > now {
                return None;
            }
            self.reached = start;
            let level = &mut self.levels[number];
            if number == 0 {
                let entry = level.buckets[bucket].pop();
                if level.buckets[bucket].is_empty() {
                    level.occupied &= !(1 << bucket);
                }
                self.entries -= 1;
                return entry;
            }
            level.occupied &= !(1 << bucket);
            self.move_down(number, bucket);
        }
    }

    /// The first bucket that is not empty: its level, its number, and when it begins. What lies at a lower level is earlier.
    #[inline]
    fn first_bucket(&self) -> Option<(usize, usize, u64)> {
        let number = self.levels.iter().position(|level| level.occupied != 0)?;
        let bucket = self.levels[number].occupied.trailing_zeros();
        let shift = DIGIT_BITS * number as u32;
        let above = self.reached.checked_shr(shift + DIGIT_BITS).unwrap_or(0);
        let above = above.checked_shl(DIGIT_BITS).unwrap_or(0);
        Some((
            number,
            bucket as usize,
            (above | u64::from(bucket)) << shift,
        ))
    }

    fn move_down(&mut self, number: usize, bucket: usize) {
        let mut entries = std::mem::take(&mut self.levels[number].buckets[bucket]);
        self.entries -= entries.len();
        for entry in entries.drain(..) {
            self.push(entry);
        }
        if entries.capacity() <= KEPT_ENTRIES {
            self.levels[number].buckets[bucket] = entries;
        }
    }

    #[inline]
    fn push(&mut self, entry: Entry) {
        let differs = (entry.time ^ self.reached) | 1;
        let number = (63 - differs.leading_zeros()) / DIGIT_BITS;
        let bucket = (entry.time >> (DIGIT_BITS * number)) as usize % BUCKETS;
        let level = &mut self.levels[number as usize];
        level.occupied |= 1 << bucket;
        level.buckets[bucket].push(entry);
        self.entries += 1;
    }

    /// An entry has lost its timer.
    fn forget(&mut self, cores: &[Core]) {
        self.stale += 1;
        if self.stale > STALE_MIN && self.stale * 2 > self.entries {
            self.clear_out(cores);
        }
    }

    #[cold]
    fn clear_out(&mut self, cores: &[Core]) {
        self.entries = 0;
        self.stale = 0;
        for level in &mut self.levels {
            for (number, bucket) in level.buckets.iter_mut().enumerate() {
                bucket.retain(|entry| cores[entry.slot as usize].timer.entry == entry.time);
                bucket.shrink_to(KEPT_ENTRIES);
                self.entries += bucket.len();
                if bucket.is_empty() {
                    level.occupied &= !(1 << number);
                }
            }
        }
    }
}
