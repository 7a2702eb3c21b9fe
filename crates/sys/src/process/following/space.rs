//! An address space with missing pages.

use super::table::{Place, Table};
use super::userfault::{self, Event};
use crate::process::image::PAGE;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Pause before events are read again, when the kernel says that an event is pending but has not delivered it.
const NAP: Duration = Duration::from_micros(50);
/// Most attempts to place a page while the machine is out of memory, and the pause between two attempts: 30 s in
/// total.
const MEMORY_MAX: u32 = 3_000;
const MEMORY_NAP: Duration = Duration::from_millis(10);

/// Memory of a process, or of a child that the process forked after it resumed.
#[derive(Debug)]
pub(super) struct Space {
    userfault: OwnedFd,
    /// Index of the process in the tree at the donor. A child has its parent's.
    pub process: u32,
    pub table: Table,
    /// Number of descriptors that the restorer received before this space's.
    pub number: u64,
    /// Addresses of page faults that were not handled yet.
    faults: Vec<u64>,
    /// True if the process has ended or called `exec`.
    pub ended: bool,
}

impl Space {
    pub fn new(userfault: OwnedFd, process: u32, table: Table) -> Self {
        Self {
            userfault,
            process,
            table,
            number: 0,
            faults: Vec::new(),
            ended: false,
        }
    }

    pub fn userfault(&self) -> BorrowedFd<'_> {
        self.userfault.as_fd()
    }

    /// Returns true if there are unhandled page faults.
    pub fn is_behind(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Handles all pending events. Returns the memory of new children.
    pub fn follow(&mut self) -> io::Result<Vec<Self>> {
        let mut children = Vec::new();
        loop {
            let events = userfault::read(self.userfault.as_fd())?;
            if events.is_empty() {
                return Ok(children);
            }
            for event in events {
                self.happened(event, &mut children);
            }
        }
    }

    fn happened(&mut self, event: Event, children: &mut Vec<Self>) {
        match event {
            Event::Fault(address) => self.faults.push(address & !(PAGE - 1)),
            Event::Fork(userfault) => {
                children.push(Self::new(userfault, self.process, self.table.clone()));
            }
            // A thread that waits in a moved or removed range must fault again: no page will arrive there.
            Event::Remap(from, to, length) => {
                self.table.remap(from, to, length);
                userfault::wake(self.userfault.as_fd(), from, length);
            }
            Event::Remove(start, end) => {
                self.table.take(start, end);
                userfault::wake(self.userfault.as_fd(), start, end.saturating_sub(start));
            }
        }
    }

    /// Handles page faults. Returns the donor's addresses of the wanted pages. A page that the table does not list is
    /// filled with zeros.
    pub fn waited_for(&mut self) -> io::Result<Vec<u64>> {
        let mut wanted = Vec::new();
        for address in std::mem::take(&mut self.faults) {
            match self.table.source(address) {
                Some(source) => wanted.push(source),
                None => self.put_zeros(address)?,
            }
        }
        Ok(wanted)
    }

    fn put_zeros(&mut self, address: u64) -> io::Result<()> {
        match userfault::zero(self.userfault.as_fd(), address, PAGE) {
            Ok(_) => {}
            Err(error) => match Refusal::of(error)? {
                Refusal::Later => self.faults.push(address),
                Refusal::There | Refusal::Nowhere => {
                    userfault::wake(self.userfault.as_fd(), address, PAGE);
                }
                Refusal::Ended => self.ended = true,
            },
        }
        Ok(())
    }

    /// Places pages of the donor, from `source` on, wherever they are missing. Returns the memory of children forked
    /// meanwhile, which still miss the pages not placed yet.
    pub fn fill(&mut self, source: u64, bytes: &[u8]) -> io::Result<Vec<Self>> {
        let mut children = Vec::new();
        let end = source + bytes.len() as u64;
        while !self.ended
            && let Some(place) = self.table.places_of(source, end).first().copied()
        {
            let from = (place.source - source) as usize;
            let length = (place.end - place.start) as usize;
            if !self.put(place, &bytes[from..from + length])? {
                children.extend(self.follow()?);
                std::thread::sleep(NAP);
            }
        }
        Ok(children)
    }

    /// Places pages in one range. Returns false if an event must be handled first.
    fn put(&mut self, place: Place, bytes: &[u8]) -> io::Result<bool> {
        let (mut done, mut step, mut attempts) = (0, bytes.len(), 0);
        while done < bytes.len() {
            let at = place.start + done as u64;
            let part = &bytes[done..(done + step).min(bytes.len())];
            match userfault::copy(self.userfault.as_fd(), at, part) {
                Ok(put) => done += put as usize,
                Err(error)
                    if error.raw_os_error() == Some(libc::ENOMEM) && attempts < MEMORY_MAX =>
                {
                    attempts += 1;
                    std::thread::sleep(MEMORY_NAP);
                }
                Err(error) => match Refusal::of(error)? {
                    Refusal::Later => break,
                    Refusal::There => {
                        userfault::wake(self.userfault.as_fd(), at, PAGE);
                        done += PAGE as usize;
                    }
                    // The range is not within one mapping, or not mapped at all.
                    Refusal::Nowhere if step > PAGE as usize => step = PAGE as usize,
                    Refusal::Nowhere => done += PAGE as usize,
                    Refusal::Ended => {
                        self.ended = true;
                        break;
                    }
                },
            }
        }
        self.table.take(place.start, place.start + done as u64);
        Ok(done == bytes.len() || self.ended)
    }
}

/// Reason why a page could not be placed.
enum Refusal {
    /// An event must be read first.
    Later,
    /// The page is present already.
    There,
    /// No watched mapping is there.
    Nowhere,
    Ended,
}

impl Refusal {
    fn of(error: io::Error) -> io::Result<Self> {
        match (error.kind(), error.raw_os_error()) {
            (ErrorKind::WouldBlock, _) => Ok(Self::Later),
            (ErrorKind::AlreadyExists, _) => Ok(Self::There),
            (ErrorKind::NotFound, _) => Ok(Self::Nowhere),
            (_, Some(libc::ESRCH | libc::ENOSPC)) => Ok(Self::Ended),
            _ => Err(error),
        }
    }
}
