//! One timer for each element (paper 001 section 3.3): a hierarchical wheel (Varghese and Lauck) over a small heap.
//!
//! Eleven levels of 64 buckets cover all of a 64-bit time in microseconds. An entry lies at the level of the highest digit, to
//! base 64, in which its time differs from the wheel's. When its bucket's time has come and the bucket is small, it
//! goes to the heap, which gives the exact order; else it moves to a lower level. So entries pass two or three places
//! whatever their number.
//!
//! Most timers are restarted before they expire. A timer that moves to a later time keeps its entry: restarting is one
//! write. When the entry comes out, it goes back in with the time it has by then.

use crate::element::Core;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
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
/// A bucket of up to this many entries goes to the heap; room for as many stays with it.
const SMALL_ENTRIES: usize = 64;
/// Entries of no timer are cleared out when they are half of all, and more than this.
const STALE_MIN: usize = 1024;

/// By time, then by slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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
    /// What the wheel has reached: the heap has the entries up to that time, the levels those after it.
    reached: u64,
    near: BinaryHeap<Reverse<Entry>>,
    levels: Vec<Level>,
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
            reached: 0,
            near: BinaryHeap::new(),
            levels: vec![level; LEVELS],
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
        timer.entry = at;
        self.push(Entry { time: at, slot });
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
        match self.near.peek() {
            Some(Reverse(entry)) => Some(entry.time),
            None => self.first_bucket().map(|(_, _, start)| start),
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let buckets = self.levels.iter().flat_map(|level| &level.buckets);
        let rooms: usize = buckets.clone().map(Vec::capacity).sum();
        (rooms + self.near.capacity()) * size_of::<Entry>()
            + buckets.count() * size_of::<Vec<Entry>>()
    }

    /// Takes the first entry out if its time is not after `now`.
    #[inline]
    fn pop_entry(&mut self, now: u64) -> Option<Entry> {
        while self.near.is_empty() {
            let (number, bucket, start) = self.first_bucket()?;
            if start > now {
                return None;
            }
            self.advance(number, bucket, start);
        }
        let Reverse(entry) = *self.near.peek()?;
        if entry.time > now {
            return None;
        }
        self.entries -= 1;
        self.near.pop();
        Some(entry)
    }

    /// The first bucket that is not empty: its level, its number, and when it begins. What lies at a lower level is earlier.
    #[inline]
    fn first_bucket(&self) -> Option<(usize, usize, u64)> {
        let number = self.levels.iter().position(|level| level.occupied != 0)?;
        let bucket = self.levels[number].occupied.trailing_zeros();
        let shift = DIGIT_BITS * number as u32;
        let above = self.reached.checked_shr(shift + DIGIT_BITS).unwrap_or(0);
        let above = above.checked_shl(DIGIT_BITS).unwrap_or(0);
        let start = (above | u64::from(bucket)) << shift;
        Some((number, bucket as usize, start))
    }

    /// The time of the first bucket has come: to the heap with it whole if it is small, else to the levels below.
    fn advance(&mut self, number: usize, bucket: usize, start: u64) {
        let level = &mut self.levels[number];
        level.occupied &= !(1 << bucket);
        let mut entries = std::mem::take(&mut level.buckets[bucket]);
        if number == 0 || entries.len() <= SMALL_ENTRIES {
            let last = (1u64 << (DIGIT_BITS * number as u32)) - 1;
            self.reached = start | last;
            self.near.extend(entries.drain(..).map(Reverse));
        } else {
            self.reached = start;
            self.entries -= entries.len();
            for entry in entries.drain(..) {
                self.push(entry);
            }
        }
        if entries.capacity() <= SMALL_ENTRIES {
            self.levels[number].buckets[bucket] = entries;
        }
    }

    #[inline]
    fn push(&mut self, entry: Entry) {
        self.entries += 1;
        if entry.time <= self.reached {
            self.near.push(Reverse(entry));
            return;
        }
        let differs = entry.time ^ self.reached;
        let number = (63 - differs.leading_zeros()) / DIGIT_BITS;
        let bucket = (entry.time >> (DIGIT_BITS * number)) as usize % BUCKETS;
        let level = &mut self.levels[number as usize];
        level.occupied |= 1 << bucket;
        level.buckets[bucket].push(entry);
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
        let valid = |entry: &Entry| cores[entry.slot as usize].timer.entry == entry.time;
        self.near.retain(|Reverse(entry)| valid(entry));
        self.entries = self.near.len();
        self.stale = 0;
        for level in &mut self.levels {
            for (number, bucket) in level.buckets.iter_mut().enumerate() {
                bucket.retain(valid);
                bucket.shrink_to(SMALL_ENTRIES);
                self.entries += bucket.len();
                if bucket.is_empty() {
                    level.occupied &= !(1 << number);
                }
            }
        }
    }
}
