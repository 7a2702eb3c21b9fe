//! An address space with missing pages.

use super::missing_page_table::{MissingPageRange, MissingPageTable};
use super::userfault::{self, UserfaultEvent};
use crate::image::PAGE;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Pause before events are read again, when the kernel says that an event is pending but has not delivered it.
const EVENT_PAUSE: Duration = Duration::from_micros(50);
/// Most attempts to place a page while the machine is out of memory, and the pause between two attempts: 30 s in
/// total.
const OUT_OF_MEMORY_ATTEMPTS: u32 = 3_000;
const OUT_OF_MEMORY_PAUSE: Duration = Duration::from_millis(10);

/// Memory of a process, or of a child that the process forked after it resumed.
#[derive(Debug)]
pub(super) struct LazyMemory {
    userfault: OwnedFd,
    /// Index of the process in the tree at the donor. A child has its parent's.
    pub process: u32,
    pub table: MissingPageTable,
    /// Number of descriptors that the restorer received before this space's.
    pub userfault_number: u64,
    /// Addresses of page faults that were not handled yet.
    faults: Vec<u64>,
    /// True if the process has ended or called `exec`.
    pub has_ended: bool,
}

impl LazyMemory {
    pub fn new(userfault: OwnedFd, process: u32, table: MissingPageTable) -> Self {
        Self {
            userfault,
            process,
            table,
            userfault_number: 0,
            faults: Vec::new(),
            has_ended: false,
        }
    }

    pub fn userfault(&self) -> BorrowedFd<'_> {
        self.userfault.as_fd()
    }

    /// Returns true if there are unhandled page faults.
    pub fn has_unhandled_faults(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Handles all pending events. Returns the memory of new children.
    pub fn handle_events(&mut self) -> io::Result<Vec<Self>> {
        let mut children = Vec::new();
        loop {
            let events = userfault::read_events(self.userfault.as_fd())?;
            if events.is_empty() {
                return Ok(children);
            }
            for event in events {
                self.handle_event(event, &mut children);
            }
        }
    }

    fn handle_event(&mut self, event: UserfaultEvent, children: &mut Vec<Self>) {
        match event {
            UserfaultEvent::Fault(address) => self.faults.push(address & !(PAGE - 1)),
            UserfaultEvent::Fork(userfault) => {
                children.push(Self::new(userfault, self.process, self.table.clone()));
            }
            // A thread that waits in a moved or removed range must fault again: no page will arrive there.
            UserfaultEvent::Remap(from, to, length) => {
                self.table.remap(from, to, length);
                userfault::wake_range(self.userfault.as_fd(), from, length);
            }
            UserfaultEvent::Remove(start, end) => {
                self.table.remove(start, end);
                userfault::wake_range(self.userfault.as_fd(), start, end.saturating_sub(start));
            }
        }
    }

    /// Handles page faults. Returns the donor's addresses of the requested pages. A page that the table does not list is
    /// filled with zeros.
    pub fn resolve_faults(&mut self) -> io::Result<Vec<u64>> {
        let mut wanted = Vec::new();
        for address in std::mem::take(&mut self.faults) {
            match self.table.source_of(address) {
                Some(source) => wanted.push(source),
                None => self.place_zeros(address)?,
            }
        }
        Ok(wanted)
    }

    fn place_zeros(&mut self, address: u64) -> io::Result<()> {
        match userfault::zero_pages(self.userfault.as_fd(), address, PAGE) {
            Ok(_) => {}
            Err(error) => match CopyRefusal::from_error(error)? {
                CopyRefusal::EventPending => self.faults.push(address),
                CopyRefusal::Present | CopyRefusal::NotMapped => {
                    userfault::wake_range(self.userfault.as_fd(), address, PAGE);
                }
                CopyRefusal::Ended => self.has_ended = true,
            },
        }
        Ok(())
    }

    /// Places pages of the donor, from `source` on, wherever they are missing. Returns the memory of children forked
    /// meanwhile, which still miss the pages not placed yet.
    pub fn place_pages(&mut self, source: u64, bytes: &[u8]) -> io::Result<Vec<Self>> {
        let mut children = Vec::new();
        let end = source + bytes.len() as u64;
        while !self.has_ended
            && let Some(range) = self.table.ranges_with_source(source, end).first().copied()
        {
            let from = (range.source - source) as usize;
            let length = (range.end - range.start) as usize;
            if !self.place_in_range(range, &bytes[from..from + length])? {
                children.extend(self.handle_events()?);
                std::thread::sleep(EVENT_PAUSE);
            }
        }
        Ok(children)
    }

    /// Places pages in one range. Returns false if an event must be handled first.
    fn place_in_range(&mut self, range: MissingPageRange, bytes: &[u8]) -> io::Result<bool> {
        let (mut done, mut step, mut attempts) = (0, bytes.len(), 0);
        while done < bytes.len() {
            let at = range.start + done as u64;
            let part = &bytes[done..(done + step).min(bytes.len())];
            match userfault::copy_pages(self.userfault.as_fd(), at, part) {
                Ok(put) => done += put as usize,
                Err(error)
                    if error.raw_os_error() == Some(libc::ENOMEM)
                        && attempts < OUT_OF_MEMORY_ATTEMPTS =>
                {
                    attempts += 1;
                    std::thread::sleep(OUT_OF_MEMORY_PAUSE);
                }
                Err(error) => match CopyRefusal::from_error(error)? {
                    CopyRefusal::EventPending => break,
                    CopyRefusal::Present => {
                        userfault::wake_range(self.userfault.as_fd(), at, PAGE);
                        done += PAGE as usize;
                    }
                    // The range is not within one mapping, or not mapped at all.
                    CopyRefusal::NotMapped if step > PAGE as usize => step = PAGE as usize,
                    CopyRefusal::NotMapped => done += PAGE as usize,
                    CopyRefusal::Ended => {
                        self.has_ended = true;
                        break;
                    }
                },
            }
        }
        self.table.remove(range.start, range.start + done as u64);
        Ok(done == bytes.len() || self.has_ended)
    }
}

/// Reason why a page could not be placed.
enum CopyRefusal {
    /// An event must be read first.
    EventPending,
    /// The page is present already.
    Present,
    /// No watched mapping is there.
    NotMapped,
    Ended,
}

impl CopyRefusal {
    fn from_error(error: io::Error) -> io::Result<Self> {
        match (error.kind(), error.raw_os_error()) {
            (ErrorKind::WouldBlock, _) => Ok(Self::EventPending),
            (ErrorKind::AlreadyExists, _) => Ok(Self::Present),
            (ErrorKind::NotFound, _) => Ok(Self::NotMapped),
            (_, Some(libc::ESRCH | libc::ENOSPC)) => Ok(Self::Ended),
            _ => Err(error),
        }
    }
}
