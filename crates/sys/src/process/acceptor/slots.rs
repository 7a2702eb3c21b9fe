//! The descriptors of a husk, which takes them from the restorer.

use super::husk::{Husk, Script};
use crate::process::error::Result;
use crate::process::files::{OwnWatch, Place};
use std::collections::BTreeMap;

/// A husk's descriptor table: what is at which number.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots(BTreeMap<u32, Place>);

impl Slots {
    fn has(&self, place: &Place) -> bool {
        self.0.get(&place.number).is_some_and(|there| {
            (there.identity, there.close_on_exec) == (place.identity, place.close_on_exec)
        })
    }

    /// The number that the kernel gives next.
    pub fn lowest_free(&self) -> u32 {
        let mut taken = self.0.keys();
        (0..)
            .find(|number| taken.next() != Some(number))
            .unwrap_or(0)
    }

    /// One more than the highest number.
    fn end(&self) -> u32 {
        self.0.keys().next_back().map_or(0, |last| last + 1)
    }
}

impl Husk {
    /// Whether it has so many descriptors.
    pub fn has(&self, count: usize) -> bool {
        self.slots.borrow().0.len() == count
    }

    /// Brings the descriptors to these; what is there already stays.
    pub fn fill(&self, places: Vec<Place>) -> Result<()> {
        let mut slots = self.slots.borrow_mut();
        let end = places.iter().map(|place| place.number + 1).max();
        let wanted: BTreeMap<u32, Place> = places
            .into_iter()
            .map(|place| (place.number, place))
            .collect();
        let mut script = self.script();
        let stale = slots.0.keys().filter(|number| !wanted.contains_key(number));
        for number in stale.copied().collect::<Vec<_>>() {
            script.call("close", libc::SYS_close, &[u64::from(number)]);
            script.flush(self)?;
            slots.0.remove(&number);
        }
        let missing: Vec<Place> = wanted
            .into_values()
            .filter(|place| !slots.has(place))
            .collect();
        if !missing.is_empty() {
            let door = slots.end().max(end.unwrap_or(0));
            self.take(&mut slots, door, missing, &mut script)?;
        }
        self.run(script).map(drop)
    }

    /// Takes open files from the restorer, which is process 1 here and is reached by the number `door`. The kernel gives the
    /// lowest free number, so that each call's result is known before it is made.
    fn take(
        &self,
        slots: &mut Slots,
        door: u32,
        missing: Vec<Place>,
        script: &mut Script,
    ) -> Result<()> {
        let mut free = slots.lowest_free();
        let mut next_free = |slots: &Slots| {
            while slots.0.contains_key(&free) {
                free += 1;
            }
            free
        };
        let close_on_exec = libc::O_CLOEXEC as u64;
        let first = next_free(slots);
        script.call("pidfd_open", libc::SYS_pidfd_open, &[1, 0]);
        if first != door {
            let [from, to] = [first, door].map(u64::from);
            script.call("dup3", libc::SYS_dup3, &[from, to, close_on_exec]);
            script.call("close", libc::SYS_close, &[from]);
        }
        let door = u64::from(door);
        for place in missing {
            let [from, to] = [place.from, place.number].map(u64::from);
            let mut given = u64::from(next_free(slots));
            // The door stands above all numbers.
            given += u64::from(given == door);
            script.call("pidfd_getfd", libc::SYS_pidfd_getfd, &[door, from, 0]);
            if given != to {
                let flags = if place.close_on_exec {
                    close_on_exec
                } else {
                    0
                };
                script.call("dup3", libc::SYS_dup3, &[given, to, flags]);
                script.call("close", libc::SYS_close, &[given]);
            } else if !place.close_on_exec {
                script.call("F_SETFD", libc::SYS_fcntl, &[to, libc::F_SETFD as u64, 0]);
            }
            slots.0.insert(place.number, place);
            script.flush(self)?;
        }
        script.call("close", libc::SYS_close, &[door]);
        Ok(())
    }

    /// Makes entries of epoll sets again, so that they belong to this process.
    pub fn watch_again(&self, watches: &[OwnWatch]) -> Result<()> {
        let mut script = self.script();
        for watch in watches {
            // `struct epoll_event` is packed on x86_64.
            let mut event = watch.events.to_ne_bytes().to_vec();
            event.extend(watch.data.to_ne_bytes());
            let event = script.bytes(&event)?;
            let [set, fd] = [watch.set, watch.fd].map(u64::from);
            let entry = |what: i32| [set, what as u64, fd, event];
            script.attempt(libc::SYS_epoll_ctl, &entry(libc::EPOLL_CTL_DEL));
            script.call(
                "epoll_ctl",
                libc::SYS_epoll_ctl,
                &entry(libc::EPOLL_CTL_ADD),
            );
            script.flush(self)?;
        }
        self.run(script).map(drop)
    }

    /// Makes a terminal the controlling one of the session that this process leads, and `group` its foreground group.
    pub fn take_terminal(&self, fd: u32, group: i32) -> Result<()> {
        let mut script = self.script();
        let group = script.bytes(&group.to_ne_bytes())?;
        let fd = u64::from(fd);
        script.call("TIOCSCTTY", libc::SYS_ioctl, &[fd, libc::TIOCSCTTY, 0]);
        script.call("TIOCSPGRP", libc::SYS_ioctl, &[fd, libc::TIOCSPGRP, group]);
        self.run(script).map(drop)
    }
}
