//! The elements' timers, as a registrar sets them and sees them expire.

use crate::element::ElementKey;
use crate::space::Handlespace;
use crate::timers::{Expired, NEVER, TimerKind};
use std::time::Duration;

impl<T> Handlespace<T> {
    /// Sets the element's one timer, in place of what it was set to. False if the registration is gone.
    #[inline]
    pub fn set_timer(&mut self, key: ElementKey, kind: TimerKind, at: Duration) -> bool {
        let Some(slot) = self.elements.slot_of(key) else {
            return false;
        };
        let cores = &mut self.elements.cores;
        cores[slot as usize].timer_kind = kind;
        // Rounded up: a timer is never early.
        let at = micros(at, at.subsec_nanos().div_ceil(1000));
        self.timers.set(cores, slot, at);
        true
    }

    /// Stops the element's timer. False if the registration is gone.
    pub fn stop_timer(&mut self, key: ElementKey) -> bool {
        let Some(slot) = self.elements.slot_of(key) else {
            return false;
        };
        self.elements.cores[slot as usize].timer.at = NEVER;
        true
    }

    /// What the element's timer is set for, and when; to the microsecond.
    pub fn timer(&self, key: ElementKey) -> Option<(TimerKind, Duration)> {
        let slot = self.elements.slot_of(key)?;
        let core = &self.elements.cores[slot as usize];
        let at = core.timer.at;
        (at != NEVER).then_some((core.timer_kind, Duration::from_micros(at)))
    }

    /// The timer that expires first, if it has by `now`; it is no longer set. They come in the order of their times.
    #[inline]
    pub fn pop_expired(&mut self, now: Duration) -> Option<Expired> {
        let now = micros(now, now.subsec_micros());
        let (slot, at) = self.timers.pop(&mut self.elements.cores, now)?;
        Some(Expired {
            key: self.elements.key_of(slot),
            kind: self.elements.cores[slot as usize].timer_kind,
            at: Duration::from_micros(at),
        })
    }

    /// When to call [`pop_expired`](Self::pop_expired) next: no timer expires earlier, though none may expire at that
    /// very time. Calling again and again comes to the first one's time within a few steps.
    pub fn next_timer(&self) -> Option<Duration> {
        self.timers.next().map(Duration::from_micros)
    }
}

/// Microseconds, the part of the second given; before [`NEVER`].
#[inline]
fn micros(time: Duration, of_second: u32) -> u64 {
    let seconds = time.as_secs().saturating_mul(1_000_000);
    seconds.saturating_add(u64::from(of_second)).min(NEVER - 1)
}
