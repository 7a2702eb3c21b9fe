//! Descriptor table of an empty process, and its transfer from the restorer.

use super::husk::{Husk, Script};
use crate::process::error::{Error, Result};
use crate::process::files::{OwnWatch, Place};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

/// Free numbers between the tree's and the socket's, so that not every new descriptor moves the socket.
const ROOM: u32 = 64;

/// Descriptor table of an empty process, by number.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots {
    places: BTreeMap<u32, Place>,
    /// Number of the socket over which the process receives descriptors.
    door: Option<u32>,
}

impl Slots {
    fn has(&self, place: &Place) -> bool {
        self.places.get(&place.number).is_some_and(|there| {
            (there.identity, there.close_on_exec) == (place.identity, place.close_on_exec)
        })
    }

    /// Returns the number that the kernel assigns next.
    pub fn lowest_free(&self) -> u32 {
        let free = |number: &u32| !self.places.contains_key(number) && self.door != Some(*number);
        (0..).find(free).unwrap_or(0)
    }

    /// Returns the number of the receiving socket; an error after it was closed.
    pub fn door(&self) -> Result<u32> {
        self.door
            .ok_or(Error::Image("descriptors behind the state"))
    }

    /// Returns the highest number plus one.
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
    /// Returns true if the process has exactly these descriptors.
    pub fn has(&self, places: &[Place]) -> bool {
        let slots = self.slots.borrow();
        slots.places.len() == places.len() && places.iter().all(|place| slots.has(place))
    }

    /// Adjusts the descriptors to `places`, and keeps the ones already there.
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

    /// Receives open files from the restorer. The kernel assigns the lowest free number, so each call's result is
    /// known in advance.
    fn take(&self, slots: &mut Slots, missing: Vec<Place>, script: &mut Script) -> Result<()> {
        let mut given = 0;
        let close_on_exec = libc::O_CLOEXEC as u64;
        for place in missing {
            // The receiving socket has a higher number than all of these.
            while slots.places.contains_key(&given) {
                given += 1;
            }
            // SAFETY: the store keeps an open file at this number as long as the store exists, and outlives this
            // transfer.
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

    /// Moves the receiving socket, which a copy of the restorer has under another number, out of the way of the
    /// tree's descriptors.
    pub fn place_door(&self) -> Result<()> {
        let mut script = self.script();
        move_door(&mut script, self.door.number(), ROOM);
        self.slots.borrow_mut().door = Some(ROOM);
        self.run(script).map(drop)
    }

    /// Closes the receiving socket, once for all processes that share the table, when all descriptors have arrived.
    pub fn close_door(&self) -> Result<()> {
        let Some(door) = self.slots.borrow_mut().door.take() else {
            return Ok(());
        };
        let mut script = self.script();
        script.call("close", libc::SYS_close, &[u64::from(door)]);
        self.run(script).map(drop)
    }

    /// Registers entries of epoll sets again, so that they belong to this process.
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

    /// Makes a terminal the controlling terminal of the session that this process leads, and `group` its foreground
    /// group.
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
