//! One timer for each element (paper 001 section 3.3): entries wait in a [wheel](wheel); those whose time is near are sorted.
//!
//! Most timers are restarted before they expire. A timer that moves to a later time keeps its entry: restarting is one
//! write. When the entry comes out of the wheel, it goes back in with the time it has by then.

mod wheel;

use crate::element::Core;
use prefetch_index::prefetch_index;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;
use wheel::{Entry, SMALL_ENTRIES, Wheel, slot};

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
    /// The time of its entry, not later than `at`.
    entry: u64,
}

impl Default for Timer {
    fn default() -> Timer {
        Timer {
            at: NEVER,
            entry: NEVER,
        }
    }
}

pub(crate) const NEVER: u64 = u64::MAX;

/// How many entries ahead their elements are fetched.
const AHEAD: usize = 32;
/// If more than this came in late, what is sorted covers too much time.
const NEAR_MAX: usize = 4 * SMALL_ENTRIES;
/// Entries of no timer are cleared out when they are half of all, and more than this.
const STALE_MIN: usize = 1024;

/// The timers of all elements.
#[derive(Debug, Clone)]
pub(crate) struct Timers {
    wheel: Wheel,
    /// What came out of the wheel last, in order, and how many of that are gone.
    due: Vec<Entry>,
    taken: usize,
    /// When what came out last began, or the last that went.
    past: u64,
    /// By time and slot: what came when the wheel had reached its time.
    near: BinaryHeap<Reverse<(u64, u32)>>,
    entries: usize,
    /// Entries at most whose timers have gone, or have an earlier entry.
    stale: usize,
}

impl Timers {
    pub(crate) fn new() -> Timers {
        Timers {
            wheel: Wheel::new(),
            due: Vec::new(),
            taken: 0,
            past: 0,
            near: BinaryHeap::new(),
            entries: 0,
            stale: 0,
        }
    }

    /// Sets the timer of the element in `slot`, whatever it was set to before.
    #[inline]
    pub(crate) fn set(&mut self, cores: &mut [Core], slot: u32, at: u64) {
        let timer = &mut cores[slot as usize].timer;
        timer.at = at;
        if timer.entry <= at {
            return;
        }
        let had_entry = timer.entry != NEVER;
        timer.entry = at;
        self.push(at, slot);
        if had_entry {
            self.forget(cores);
        }
    }

    /// The element's timer is gone: it has been stopped and the element is about to go.
    pub(crate) fn remove(&mut self, cores: &mut [Core], slot: u32) {
        let timer = std::mem::take(&mut cores[slot as usize].timer);
        if timer.entry != NEVER {
            self.forget(cores);
        }
    }

    /// The element whose timer expires first, if that is not after `now`, and when that was. The timer is no longer set.
    #[inline]
    pub(crate) fn pop(&mut self, cores: &mut [Core], now: u64) -> Option<(u32, u64)> {
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

    /// A time before which nothing expires; the first one's own, or that of the bucket it is in.
    pub(crate) fn next(&self) -> Option<u64> {
        let near = self.near.peek().map(|&Reverse((time, _))| time);
        let due = self.first_due();
        match (near, due) {
            (Some(near), Some(due)) => Some(near.min(due)),
            (None, None) => self.wheel.next(),
            (near, due) => near.or(due),
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.wheel.heap_bytes()
            + self.due.capacity() * size_of::<Entry>()
            + self.near.capacity() * size_of::<(u64, u32)>()
    }

    /// The time of the first entry that has come out of the wheel.
    #[inline]
    fn first_due(&self) -> Option<u64> {
        let entry = self.due.get(self.taken)?;
        Some(self.wheel.time(*entry))
    }

    /// Takes the first entry out if its time is not after `now`.
    #[inline]
    fn pop_entry(&mut self, cores: &mut [Core], now: u64) -> Option<(u64, u32)> {
        if self.taken == self.due.len() && self.near.is_empty() && !self.refill(cores, now) {
            return None;
        }
        let due = self.first_due();
        if let Some(&Reverse((time, slot))) = self.near.peek()
            && due.is_none_or(|due| time < due)
        {
            if time > now {
                return None;
            }
            self.near.pop();
            self.entries -= 1;
            self.past = self.past.max(time);
            return Some((time, slot));
        }
        let time = due.filter(|&due| due <= now)?;
        if let Some(&ahead) = self.due.get(self.taken + AHEAD) {
            prefetch_index(&*cores, slot(ahead) as usize);
        }
        let slot = slot(self.due[self.taken]);
        self.taken += 1;
        self.entries -= 1;
        self.past = time;
        Some((time, slot))
    }

    /// The next entries out of the wheel, with the times that their timers have by then. False if none is up to `now`.
    fn refill(&mut self, cores: &mut [Core], now: u64) -> bool {
        self.due.clear();
        self.taken = 0;
        while self.due.is_empty() {
            let Some(start) = self.wheel.take(now, &mut self.due) else {
                return false;
            };
            self.past = start;
            self.sift(cores);
        }
        self.due.sort_unstable();
        true
    }

    /// Drops the entries that have come out for no timer, and gives those of moved timers their new times.
    fn sift(&mut self, cores: &mut [Core]) {
        let mut kept = 0;
        for &entry in self.due.iter().take(AHEAD) {
            prefetch_index(&*cores, slot(entry) as usize);
        }
        for index in 0..self.due.len() {
            if let Some(&ahead) = self.due.get(index + AHEAD) {
                prefetch_index(&*cores, slot(ahead) as usize);
            }
            let entry = self.due[index];
            let time = self.wheel.time(entry);
            let slot = slot(entry);
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
        self.near.push(Reverse((time, slot)));
        if self.near.len() > NEAR_MAX && self.past < self.wheel.reached() {
            self.go_back();
        }
    }

    /// Back into the wheel with what came out of it but lies in the future.
    #[cold]
    fn go_back(&mut self) {
        self.wheel.rewind(self.past);
        let wheel = &mut self.wheel;
        for entry in self.due.drain(self.taken..) {
            let time = wheel.time(entry);
            if time > self.past {
                wheel.push(time, slot(entry));
            } else {
                self.near.push(Reverse((time, slot(entry))));
            }
        }
        self.near.retain(|&Reverse((time, slot))| {
            let past = time <= self.past;
            if !past {
                wheel.push(time, slot);
            }
            past
        });
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
        let valid = |time: u64, slot: u32| cores[slot as usize].timer.entry == time;
        self.near.retain(|&Reverse((time, slot))| valid(time, slot));
        self.due.drain(..self.taken);
        self.taken = 0;
        let wheel = &self.wheel;
        self.due
            .retain(|&entry| valid(wheel.time(entry), slot(entry)));
        self.entries = self.near.len() + self.due.len() + self.wheel.retain(valid);
        self.stale = 0;
    }
}
