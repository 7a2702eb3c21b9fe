//! Wake-up times of the machines.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use super::links::LinkOwner;

/// The wake-up time of each machine that has one, since the daemon's start.
#[derive(Debug, Default)]
pub(super) struct MachineTimers {
    order: BTreeSet<(Duration, LinkOwner)>,
    due_time_of: HashMap<LinkOwner, Duration>,
}

impl MachineTimers {
    /// Sets a machine's wake-up time, in place of an earlier one.
    pub(super) fn set(&mut self, owner: LinkOwner, due: Option<Duration>) {
        let before = match due {
            Some(due) => self.due_time_of.insert(owner, due),
            None => self.due_time_of.remove(&owner),
        };
        if let Some(before) = before {
            self.order.remove(&(before, owner));
        }
        if let Some(due) = due {
            self.order.insert((due, owner));
        }
    }

    /// Returns the earliest wake-up time.
    pub(super) fn next(&self) -> Option<Duration> {
        self.order.first().map(|(due, _)| *due)
    }

    /// Removes and returns the first machine that is due.
    pub(super) fn pop_due(&mut self, now: Duration) -> Option<LinkOwner> {
        let (_, owner) = self.order.first().copied().filter(|(due, _)| *due <= now)?;
        self.order.pop_first();
        self.due_time_of.remove(&owner);
        Some(owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_wake_in_order_of_their_last_times() {
        let mut timers = MachineTimers::default();
        let at = |seconds| Some(Duration::from_secs(seconds));
        timers.set(LinkOwner::User, at(3));
        timers.set(LinkOwner::Element(1), at(2));
        timers.set(LinkOwner::Element(2), at(1));
        timers.set(LinkOwner::User, at(1));
        timers.set(LinkOwner::Element(2), None);
        assert_eq!(timers.next(), at(1));
        assert_eq!(
            timers.pop_due(Duration::from_secs(2)),
            Some(LinkOwner::User)
        );
        let next = timers.pop_due(Duration::from_secs(2));
        assert_eq!(next, Some(LinkOwner::Element(1)));
        assert_eq!((timers.pop_due(Duration::MAX), timers.next()), (None, None));
    }
}
