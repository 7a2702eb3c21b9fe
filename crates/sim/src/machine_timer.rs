//! The timer of a state machine.

use crate::time::Time;
use std::time::Duration;

/// The wake-up that a world has queued for one state machine. A wake-up is queued only if no earlier one is: when that
/// is due, the world asks the state machine again.
#[derive(Debug, Clone, Copy, Default)]
pub struct MachineTimer {
    queued: Option<Time>,
}

impl MachineTimer {
    /// Returns the time for which the world must queue a wake-up, if one is needed for a state machine that is `due`.
    #[inline]
    #[must_use]
    pub fn arm(&mut self, due: Option<Duration>) -> Option<Time> {
        let at = Time::from(due?);
        if self.queued.is_some_and(|queued| queued <= at) {
            return None;
        }
        self.queued = Some(at);
        Some(at)
    }

    /// Takes the wake-up of time `at` from the timer; returns false for one that an earlier wake-up has replaced.
    #[inline]
    #[must_use]
    pub fn take(&mut self, at: Time) -> bool {
        let is_queued = self.queued == Some(at);
        if is_queued {
            self.queued = None;
        }
        is_queued
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_wake_up_replaces_a_later_one() {
        let ms = Duration::from_millis;
        let mut timer = MachineTimer::default();
        assert_eq!(timer.arm(None), None);
        assert_eq!(timer.arm(Some(ms(5))), Some(Time(5_000_000)));
        assert_eq!(timer.arm(Some(ms(7))), None);
        assert_eq!(timer.arm(Some(ms(3))), Some(Time(3_000_000)));
        assert!(timer.take(Time(3_000_000)));
        assert!(!timer.take(Time(5_000_000)));
        assert_eq!(timer.arm(Some(ms(7))), Some(Time(7_000_000)));
    }
}
