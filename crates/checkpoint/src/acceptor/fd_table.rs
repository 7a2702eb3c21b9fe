//! Descriptor table of a stub process, and its transfer from the restorer.

use super::stub_process::{CallScript, StubProcess};
use crate::error::{Error, Result};
use crate::files::{DescriptorTableSlot, InProcessWatch};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

/// Free numbers between the tree's and the socket's, so that not every new descriptor moves the socket.
const FREE_NUMBERS: u32 = 64;

/// Descriptor table of a stub process, by number.
#[derive(Clone, Debug, Default)]
pub(super) struct FdTable {
    entries: BTreeMap<u32, DescriptorTableSlot>,
    /// Number of the socket over which the process receives descriptors.
    channel_number: Option<u32>,
}

impl FdTable {
    fn has_entry(&self, place: &DescriptorTableSlot) -> bool {
        self.entries.get(&place.number).is_some_and(|present| {
            (present.identity, present.close_on_exec) == (place.identity, place.close_on_exec)
        })
    }

    /// Returns the number that the kernel assigns next.
    pub fn lowest_free(&self) -> u32 {
        let free = |number: &u32| {
            !self.entries.contains_key(number) && self.channel_number != Some(*number)
        };
        (0..).find(free).unwrap_or(0)
    }

    /// Returns the number of the receiving socket; an error after it was closed.
    pub fn channel_number(&self) -> Result<u32> {
        self.channel_number
            .ok_or(Error::Image("descriptors came after the state"))
    }

    /// Returns the highest number plus one.
    fn end_number(&self) -> u32 {
        self.entries.keys().next_back().map_or(0, |last| last + 1)
    }
}

fn move_channel(script: &mut CallScript, from: u32, to: u32) {
    let [from, to] = [from, to].map(u64::from);
    script.add_call("dup3", libc::SYS_dup3, &[from, to, libc::O_CLOEXEC as u64]);
    script.add_call("close", libc::SYS_close, &[from]);
}

impl StubProcess {
    /// Returns true if the process has exactly these descriptors.
    pub fn has_descriptors(&self, entries: &[DescriptorTableSlot]) -> bool {
        let slots = self.fd_table.borrow();
        slots.entries.len() == entries.len() && entries.iter().all(|place| slots.has_entry(place))
    }

    /// Adjusts the descriptors to `entries`, and keeps the ones already there.
    pub fn fill_descriptors(&self, entries: Vec<DescriptorTableSlot>) -> Result<()> {
        let mut slots = self.fd_table.borrow_mut();
        let end = entries.iter().map(|place| place.number + 1).max();
        let wanted: BTreeMap<u32, DescriptorTableSlot> = entries
            .into_iter()
            .map(|place| (place.number, place))
            .collect();
        let mut script = self.script();
        let stale = slots
            .entries
            .keys()
            .filter(|number| !wanted.contains_key(number));
        for number in stale.copied().collect::<Vec<_>>() {
            script.add_call("close", libc::SYS_close, &[u64::from(number)]);
            script.flush(self)?;
            slots.entries.remove(&number);
        }
        let missing: Vec<DescriptorTableSlot> = wanted
            .into_values()
            .filter(|place| !slots.has_entry(place))
            .collect();
        if !missing.is_empty() {
            let number = slots.channel_number()?;
            let end = slots.end_number().max(end.unwrap_or(0));
            if number < end {
                move_channel(&mut script, number, end + FREE_NUMBERS);
                slots.channel_number = Some(end + FREE_NUMBERS);
            }
            self.receive_missing_fds(&mut slots, missing, &mut script)?;
        }
        self.run_script(script).map(drop)
    }

    /// Receives open files from the restorer. The kernel assigns the lowest free number, so each call's result is
    /// known in advance.
    fn receive_missing_fds(
        &self,
        slots: &mut FdTable,
        missing: Vec<DescriptorTableSlot>,
        script: &mut CallScript,
    ) -> Result<()> {
        let mut lowest = 0;
        let close_on_exec = libc::O_CLOEXEC as u64;
        for place in missing {
            // The receiving socket has a higher number than all of these.
            while slots.entries.contains_key(&lowest) {
                lowest += 1;
            }
            // SAFETY: the store keeps an open file at this number as long as the store exists, and outlives this
            // transfer.
            let fd = unsafe { BorrowedFd::borrow_raw(place.store_fd.cast_signed()) };
            script.add_receive(&self.fd_channel, slots.channel_number()?, fd)?;
            let [given, to] = [lowest, place.number].map(u64::from);
            if given != to {
                let flags = if place.close_on_exec {
                    close_on_exec
                } else {
                    0
                };
                script.add_call("dup3", libc::SYS_dup3, &[given, to, flags]);
                script.add_call("close", libc::SYS_close, &[given]);
            } else if !place.close_on_exec {
                script.add_call("F_SETFD", libc::SYS_fcntl, &[to, libc::F_SETFD as u64, 0]);
            }
            slots.entries.insert(place.number, place);
            script.flush(self)?;
        }
        Ok(())
    }

    /// Moves the receiving socket, which a copy of the restorer has under another number, out of the way of the
    /// tree's descriptors.
    pub fn place_channel(&self) -> Result<()> {
        let mut script = self.script();
        move_channel(&mut script, self.fd_channel.receiver_number(), FREE_NUMBERS);
        self.fd_table.borrow_mut().channel_number = Some(FREE_NUMBERS);
        self.run_script(script).map(drop)
    }

    /// Closes the receiving socket, once for all processes that share the table, when all descriptors have arrived.
    pub fn close_channel(&self) -> Result<()> {
        let Some(number) = self.fd_table.borrow_mut().channel_number.take() else {
            return Ok(());
        };
        let mut script = self.script();
        script.add_call("close", libc::SYS_close, &[u64::from(number)]);
        self.run_script(script).map(drop)
    }

    /// Registers entries of epoll sets again, so that they belong to this process.
    pub fn register_epoll_entries(&self, watches: &[InProcessWatch]) -> Result<()> {
        let mut script = self.script();
        for watch in watches {
            // `struct epoll_event` is packed on x86_64.
            let mut event = watch.events.to_ne_bytes().to_vec();
            event.extend(watch.data.to_ne_bytes());
            let event = script.add_bytes(&event)?;
            let [set, fd] = [watch.set, watch.fd].map(u64::from);
            let entry = |operation: i32| [set, operation as u64, fd, event];
            script.add_optional_call(libc::SYS_epoll_ctl, &entry(libc::EPOLL_CTL_DEL));
            script.add_call(
                "epoll_ctl",
                libc::SYS_epoll_ctl,
                &entry(libc::EPOLL_CTL_ADD),
            );
            script.flush(self)?;
        }
        self.run_script(script).map(drop)
    }

    /// Makes a terminal the controlling terminal of the session that this process leads, and `group` its foreground
    /// group.
    pub fn set_controlling_terminal(&self, slave: BorrowedFd<'_>, group: i32) -> Result<()> {
        let mut script = self.script();
        let fd = self.pass_fd(&mut script, slave)?;
        let group = script.add_bytes(&group.to_ne_bytes())?;
        script.add_call("TIOCSCTTY", libc::SYS_ioctl, &[fd, libc::TIOCSCTTY, 0]);
        script.add_call("TIOCSPGRP", libc::SYS_ioctl, &[fd, libc::TIOCSPGRP, group]);
        script.add_call("close", libc::SYS_close, &[fd]);
        self.run_script(script).map(drop)
    }
}
