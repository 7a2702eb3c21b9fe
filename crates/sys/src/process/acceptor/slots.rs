//! The descriptors of a husk, which takes them from the restorer.

use super::husk::{Husk, Script};
use crate::process::error::{Error, Result};
use crate::process::files::{OwnWatch, Place};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

/// Numbers between the tree's and the door's, so that it need not be moved for each new one.
const ROOM: u32 = 64;

/// A husk's descriptor table: what is at which number.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots {
    places: BTreeMap<u32, Place>,
    /// By which the husk gets more.
    door: Option<u32>,
}

impl Slots {
    fn has(&self, place: &Place) -> bool {
        self.places.get(&place.number).is_some_and(|there| {
            (there.identity, there.close_on_exec) == (place.identity, place.close_on_exec)
        })
    }

    /// The number that the kernel gives next.
    pub fn lowest_free(&self) -> u32 {
        let free = |number: &u32| !self.places.contains_key(number) && self.door != Some(*number);
        (0..).find(free).unwrap_or(0)
    }

    /// By which number the husk gets more; an error once it has all.
    pub fn door(&self) -> Result<u32> {
        self.door
            .ok_or(Error::Image("descriptors behind the state"))
    }

    /// One more than the highest number.
    fn end(&self) -> u32 {
        self.places.keys().next_back().map_or(0, |last| last + 1)
    }
}

fn move_door(script: &mut Script, from: u32, to: u32) {
    let [from, to] = [from, to].map(u64::from);
    script.call("dup3", libc::SYS_dup3, &[from, to, libc::O_CLOEXEC as u64]);
    script.call("close", libc::SYS_close, &[from]);
}

impl Husk {
    /// Whether it has just these descriptors.
    pub fn has(&self, places: &[Place]) -> bool {
        let slots = self.slots.borrow();
        slots.places.len() == places.len() && places.iter().all(|place| slots.has(place))
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
        let stale = slots
            .places
            .keys()
            .filter(|number| !wanted.contains_key(number));
        for number in stale.copied().collect::<Vec<_>>() {
            script.call("close", libc::SYS_close, &[u64::from(number)]);
            script.flush(self)?;
            slots.places.remove(&number);
        }
        let missing: Vec<Place> = wanted
            .into_values()
            .filter(|place| !slots.has(place))
            .collect();
        if !missing.is_empty() {
            let door = slots.door()?;
            let end = slots.end().max(end.unwrap_or(0));
            if door < end {
                move_door(&mut script, door, end + ROOM);
                slots.door = Some(end + ROOM);
            }
            self.take(&mut slots, missing, &mut script)?;
        }
        self.run(script).map(drop)
    }

    /// Takes open files from the restorer. The kernel gives the lowest free number, so that each call's result is known before it is
    /// made.
    fn take(&self, slots: &mut Slots, missing: Vec<Place>, script: &mut Script) -> Result<()> {
        let mut given = 0;
        let close_on_exec = libc::O_CLOEXEC as u64;
        for place in missing {
            // The door stands above all numbers.
            while slots.places.contains_key(&given) {
                given += 1;
            }
            // SAFETY: the stock has an open file at this number as long as it lives, and lives as long as the husk takes from it.
            let fd = unsafe { BorrowedFd::borrow_raw(place.from.cast_signed()) };
            script.receive(&self.door, slots.door()?, fd)?;
            let [given, to] = [given, place.number].map(u64::from);
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
            slots.places.insert(place.number, place);
            script.flush(self)?;
        }
        Ok(())
    }

    /// Puts the door where it is in nobody's way; of a copy of the restorer that has it at another number.
    pub fn place_door(&self) -> Result<()> {
        let mut script = self.script();
        move_door(&mut script, self.door.number(), ROOM);
        self.slots.borrow_mut().door = Some(ROOM);
        self.run(script).map(drop)
    }

    /// Closes the door, once for all who share the table: it has all descriptors.
    pub fn close_door(&self) -> Result<()> {
        let Some(door) = self.slots.borrow_mut().door.take() else {
            return Ok(());
        };
        let mut script = self.script();
        script.call("close", libc::SYS_close, &[u64::from(door)]);
        self.run(script).map(drop)
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
    pub fn take_terminal(&self, slave: BorrowedFd<'_>, group: i32) -> Result<()> {
        let mut script = self.script();
        let fd = self.receive(&mut script, slave)?;
        let group = script.bytes(&group.to_ne_bytes())?;
        script.call("TIOCSCTTY", libc::SYS_ioctl, &[fd, libc::TIOCSCTTY, 0]);
        script.call("TIOCSPGRP", libc::SYS_ioctl, &[fd, libc::TIOCSPGRP, group]);
        script.call("close", libc::SYS_close, &[fd]);
        self.run(script).map(drop)
    }
}
