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
        // Rounded up: a timer is never early.
        let at =
            u64::try_from(at.as_nanos().div_ceil(1000)).map_or(NEVER - 1, |at| at.min(NEVER - 1));
        self.timers.set(&mut self.elements.cores, slot, kind, at);
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
        let timer = self.elements.cores[slot as usize].timer;
        (timer.at != NEVER).then_some((timer.kind, Duration::from_micros(timer.at)))
    }

    /// The timer that expires first, if it has by `now`; it is no longer set. They come in the order of their times.
    #[inline]
    pub fn pop_expired(&mut self, now: Duration) -> Option<Expired> {
        let now = u64::try_from(now.as_micros()).unwrap_or(NEVER - 1);
        let (slot, timer) = self.timers.pop(&mut self.elements.cores, now)?;
        Some(Expired {
            key: self.elements.key_of(slot),
            kind: timer.kind,
            at: Duration::from_micros(timer.at),
        })
    }

    /// When to call [`pop_expired`](Self::pop_expired) next: no timer expires earlier, though none may expire at that
    /// very time. Calling again and again comes to the first one's time within eleven steps.
    pub fn next_timer(&self) -> Option<Duration> {
        self.timers.next().map(Duration::from_micros)
    }
}
