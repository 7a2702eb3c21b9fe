//! One address space that lacks pages.

use super::table::{Place, Table};
use super::userfault::{self, Event};
use crate::process::image::PAGE;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// How long something that happens in the memory may take to be told, when the kernel says that it is under way.
const NAP: Duration = Duration::from_micros(50);
/// Where the machine has no memory for a page: for how long it is tried, and between two times.
const MEMORY_MAX: u32 = 3_000;
const MEMORY_NAP: Duration = Duration::from_millis(10);

/// A process's memory, or that of a child that it has made since.
#[derive(Debug)]
pub(super) struct Space {
    userfault: OwnedFd,
    /// Which process of the tree it was at the donor.
    pub process: u32,
    pub table: Table,
    /// How many the restorer was given before the one that watches this.
    pub number: u64,
    /// Addresses that threads wait at, and that were not looked at yet.
    faults: Vec<u64>,
    /// The process has ended, or has called `exec`.
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

    /// Whether threads wait that were not looked at.
    pub fn is_behind(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Takes in all that happened; gives the memory of children.
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
            // Who waits in what was moved or removed looks again: nothing will come there.
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

    /// Looks at who waits: gives where the donor has what they wait for. What is no more, or never was, is zeros.
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

    /// Puts pages of the donor, from `source` on, wherever they are missing; gives the memory of children that were made
    /// meanwhile, which lack what was not put here yet.
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

    /// Puts pages at one place; false if something happens there that is to be taken in first.
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
                    // Not all of it is one mapping, or nothing is.
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

/// Why a page was not put where it belongs.
enum Refusal {
    /// An event is to be read first.
    Later,
    /// There is one already.
    There,
    /// Nothing is watched there.
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
