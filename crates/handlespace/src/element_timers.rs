//! The elements' timers.

use crate::element::ElementKey;
use crate::handlespace::Handlespace;
use crate::timers::{ExpiredTimer, NEVER, TimerKind};
use std::time::Duration;

impl<T> Handlespace<T> {
    /// Sets the element's only timer, replacing its previous setting. Returns false if the registration has ended.
    #[inline]
    pub fn set_timer(&mut self, key: ElementKey, kind: TimerKind, at: Duration) -> bool {
        let Some(slot) = self.elements.slot_of(key) else {
            return false;
        };
        let cores = &mut self.elements.cores;
        cores[slot as usize].timer_kind = kind;
        // Round up, so that a timer never expires early.
        let at = micros(at, at.subsec_nanos().div_ceil(1000));
        self.timers.set(cores, slot, at);
        true
    }

    /// Stops the element's timer. Returns false if the registration has ended.
    pub fn stop_timer(&mut self, key: ElementKey) -> bool {
        let Some(slot) = self.elements.slot_of(key) else {
            return false;
        };
        self.elements.cores[slot as usize].timer.at = NEVER;
        true
    }

    /// Returns the kind and time of the element's timer, to the microsecond.
    pub fn timer(&self, key: ElementKey) -> Option<(TimerKind, Duration)> {
        let slot = self.elements.slot_of(key)?;
        let core = &self.elements.cores[slot as usize];
        let at = core.timer.at;
        (at != NEVER).then_some((core.timer_kind, Duration::from_micros(at)))
    }

    /// Removes and returns the timer that expires first, if it expires by `now`. Timers are returned in the order of
    /// their times.
    #[inline]
    pub fn pop_expired(&mut self, now: Duration) -> Option<ExpiredTimer> {
        let now = micros(now, now.subsec_micros());
        let (slot, at) = self.timers.pop(&mut self.elements.cores, now)?;
        Some(ExpiredTimer {
            key: self.elements.key_of(slot),
            kind: self.elements.cores[slot as usize].timer_kind,
            at: Duration::from_micros(at),
        })
    }

    /// Returns the time for the next call of [`pop_expired`](Self::pop_expired): no timer expires earlier, though none
    /// may expire at exactly that time. Repeated calls reach the first timer's time within a few steps.
    pub fn next_timer(&self) -> Option<Duration> {
        self.timers.next().map(Duration::from_micros)
    }
}

/// Converts a time to microseconds, with the part of the second given; less than [`NEVER`].
#[inline]
fn micros(time: Duration, subsecond_micros: u32) -> u64 {
    let seconds = time.as_secs().saturating_mul(1_000_000);
    seconds
        .saturating_add(u64::from(subsecond_micros))
        .min(NEVER - 1)
}
