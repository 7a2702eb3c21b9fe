//! One timer for each element (paper 001 section 3.3): entries wait in a [wheel](wheel); entries that expire soon are
//! sorted.
//!
//! Most timers are restarted before they expire. A timer that moves to a later time keeps its entry, so a restart is
//! one write. When the wheel returns the entry, it is put back with the timer's new time.

mod wheel;

use crate::element::ElementCore;
use prefetch_index::prefetch_index;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;
use wheel::{SMALL_BUCKET_MAX, Wheel, WheelEntry, slot_of};

/// The purpose of a timer (paper 001 section 3.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TimerKind {
    /// The registrar must send a keep-alive to an element that it owns.
    KeepAliveTransmission,
    /// An owned element has not answered a keep-alive.
    KeepAliveTimeout,
    /// A registration has not been renewed in time.
    #[default]
    RegistrationExpiry,
}

/// A timer that has expired, and is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpiredTimer {
    /// The timer's element.
    pub key: crate::ElementKey,
    /// The timer's purpose.
    pub kind: TimerKind,
    /// The expiry time.
    pub at: Duration,
}

/// An element's timer; times in microseconds, [`NEVER`] for none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ElementTimer {
    pub(crate) at: u64,
    /// The time of the timer's entry, at most `at`.
    entry: u64,
}

impl Default for ElementTimer {
    fn default() -> ElementTimer {
        ElementTimer {
            at: NEVER,
            entry: NEVER,
        }
    }
}

pub(crate) const NEVER: u64 = u64::MAX;

/// Number of entries by which their elements are prefetched ahead.
const PREFETCH_DISTANCE: usize = 32;
/// If more late entries than this arrive, the sorted part covers too much time.
const LATE_ENTRIES_MAX: usize = 4 * SMALL_BUCKET_MAX;
/// Stale entries (without a timer) are removed when they are half of all entries, and more than this.
const STALE_MIN: usize = 1024;

/// The timers of all elements.
#[derive(Debug, Clone)]
pub(crate) struct ElementTimers {
    wheel: Wheel,
    /// The sorted entries last taken from the wheel, and below the number of them already processed.
    due: Vec<WheelEntry>,
    due_processed: usize,
    /// Start time of the last entries taken, or time of the last entry processed.
    processed_until: u64,
    /// Entries, by time and slot, for times that the wheel had already reached when they were added.
    late_entries: BinaryHeap<Reverse<(u64, u32)>>,
    entries: usize,
    /// Upper bound of the number of stale entries: without a timer, or with an earlier entry.
    stale: usize,
}

impl ElementTimers {
    pub(crate) fn new() -> ElementTimers {
        ElementTimers {
            wheel: Wheel::new(),
            due: Vec::new(),
            due_processed: 0,
            processed_until: 0,
            late_entries: BinaryHeap::new(),
            entries: 0,
            stale: 0,
        }
    }

    /// Sets the timer of the element in `slot`, replacing its previous setting.
    #[inline]
    pub(crate) fn set(&mut self, cores: &mut [ElementCore], slot: u32, at: u64) {
        let timer = &mut cores[slot as usize].timer;
        timer.at = at;
        if timer.entry <= at {
            return;
        }
        let had_entry = timer.entry != NEVER;
        timer.entry = at;
        self.push(at, slot);
        if had_entry {
            self.count_stale(cores);
        }
    }

    /// Removes the timer of an element that is about to be removed.
    pub(crate) fn remove(&mut self, cores: &mut [ElementCore], slot: u32) {
        let timer = std::mem::take(&mut cores[slot as usize].timer);
        if timer.entry != NEVER {
            self.count_stale(cores);
        }
    }

    /// Stops and returns the timer that expires first, if its time is at most `now`: slot and time.
    #[inline]
    pub(crate) fn pop(&mut self, cores: &mut [ElementCore], now: u64) -> Option<(u32, u64)> {
        while let Some((time, slot)) = self.pop_entry(cores, now) {
            let timer = &mut cores[slot as usize].timer;
            if timer.entry != time {
                self.stale = self.stale.saturating_sub(1);
            } else if timer.at <= time {
                let expired = std::mem::take(timer);
                return Some((slot, expired.at));
            } else {
                timer.entry = timer.at;
                if timer.at != NEVER {
                    let time = timer.at;
                    self.push(time, slot);
                }
            }
        }
        None
    }

    /// Returns a time before which no timer expires: the first timer's own time, or the start of its bucket.
    pub(crate) fn next(&self) -> Option<u64> {
        let near = self.late_entries.peek().map(|&Reverse((time, _))| time);
        let due = self.first_due_time();
        match (near, due) {
            (Some(near), Some(due)) => Some(near.min(due)),
            (None, None) => self.wheel.next(),
            (near, due) => near.or(due),
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.wheel.heap_bytes()
            + self.due.capacity() * size_of::<WheelEntry>()
            + self.late_entries.capacity() * size_of::<(u64, u32)>()
    }

    /// Returns the time of the first entry taken from the wheel.
    #[inline]
    fn first_due_time(&self) -> Option<u64> {
        let entry = self.due.get(self.due_processed)?;
        Some(self.wheel.time(*entry))
    }

    /// Removes and returns the first entry if its time is at most `now`.
    #[inline]
    fn pop_entry(&mut self, cores: &mut [ElementCore], now: u64) -> Option<(u64, u32)> {
        if self.due_processed == self.due.len()
            && self.late_entries.is_empty()
            && !self.refill(cores, now)
        {
            return None;
        }
        let due = self.first_due_time();
        if let Some(&Reverse((time, slot))) = self.late_entries.peek()
            && due.is_none_or(|due| time < due)
        {
            if time > now {
                return None;
            }
            self.late_entries.pop();
            self.entries -= 1;
            self.processed_until = self.processed_until.max(time);
            return Some((time, slot));
        }
        let time = due.filter(|&due| due <= now)?;
        if let Some(&ahead) = self.due.get(self.due_processed + PREFETCH_DISTANCE) {
            prefetch_index(&*cores, slot_of(ahead) as usize);
        }
        let slot = slot_of(self.due[self.due_processed]);
        self.due_processed += 1;
        self.entries -= 1;
        self.processed_until = time;
        Some((time, slot))
    }

    /// Takes the next entries from the wheel, with the current times of their timers. Returns false if there is none up
    /// to `now`.
    fn refill(&mut self, cores: &mut [ElementCore], now: u64) -> bool {
        self.due.clear();
        self.due_processed = 0;
        while self.due.is_empty() {
            let Some(start) = self.wheel.take(now, &mut self.due) else {
                return false;
            };
            self.processed_until = start;
            self.refresh_due(cores);
        }
        self.due.sort_unstable();
        true
    }

    /// Drops the taken entries without a timer, and updates the entries of moved timers.
    fn refresh_due(&mut self, cores: &mut [ElementCore]) {
        let mut kept = 0;
        for &entry in self.due.iter().take(PREFETCH_DISTANCE) {
            prefetch_index(&*cores, slot_of(entry) as usize);
        }
        for index in 0..self.due.len() {
            if let Some(&ahead) = self.due.get(index + PREFETCH_DISTANCE) {
                prefetch_index(&*cores, slot_of(ahead) as usize);
            }
            let entry = self.due[index];
            let time = self.wheel.time(entry);
            let slot = slot_of(entry);
            let timer = &mut cores[slot as usize].timer;
            if timer.entry == time && timer.at <= time {
                self.due[kept] = entry;
                kept += 1;
            } else if timer.entry != time {
                self.stale = self.stale.saturating_sub(1);
                self.entries -= 1;
            } else {
                timer.entry = timer.at;
                if timer.at == NEVER {
                    self.entries -= 1;
                } else if timer.at <= self.wheel.reached() {
                    self.due[kept] = self.wheel.entry(timer.at, slot);
                    kept += 1;
                } else {
                    self.wheel.push(timer.at, slot);
                }
            }
        }
        self.due.truncate(kept);
    }

    #[inline]
    fn push(&mut self, time: u64, slot: u32) {
        self.entries += 1;
        if time > self.wheel.reached() {
            self.wheel.push(time, slot);
            return;
        }
        self.late_entries.push(Reverse((time, slot)));
        if self.late_entries.len() > LATE_ENTRIES_MAX && self.processed_until < self.wheel.reached()
        {
            self.return_due_to_wheel();
        }
    }

    /// Puts taken entries with a future time back into the wheel.
    #[cold]
    fn return_due_to_wheel(&mut self) {
        self.wheel.rewind(self.processed_until);
        let wheel = &mut self.wheel;
        for entry in self.due.drain(self.due_processed..) {
            let time = wheel.time(entry);
            if time > self.processed_until {
                wheel.push(time, slot_of(entry));
            } else {
                self.late_entries.push(Reverse((time, slot_of(entry))));
            }
        }
        self.late_entries.retain(|&Reverse((time, slot))| {
            let past = time <= self.processed_until;
            if !past {
                wheel.push(time, slot);
            }
            past
        });
    }

    /// Counts an entry that has lost its timer.
    fn count_stale(&mut self, cores: &[ElementCore]) {
        self.stale += 1;
        if self.stale > STALE_MIN && self.stale * 2 > self.entries {
            self.remove_stale(cores);
        }
    }

    #[cold]
    fn remove_stale(&mut self, cores: &[ElementCore]) {
        let valid = |time: u64, slot: u32| cores[slot as usize].timer.entry == time;
        self.late_entries
            .retain(|&Reverse((time, slot))| valid(time, slot));
        self.due.drain(..self.due_processed);
        self.due_processed = 0;
        let wheel = &self.wheel;
        self.due
            .retain(|&entry| valid(wheel.time(entry), slot_of(entry)));
        self.entries = self.late_entries.len() + self.due.len() + self.wheel.retain(valid);
        self.stale = 0;
    }
}
