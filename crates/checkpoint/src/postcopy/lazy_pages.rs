//! Serves the page faults of a tree under post-copy.

use super::lazy_memory::LazyMemory;
use super::missing_page_table::MissingPageTable;
use crate::acceptor::RestorerLink;
use crate::address_ranges::AddressRanges;
use crate::error::{Context, Error, Result};
use crate::image::{
    BorrowedPages, MemorySpace, MissingPages, PAGE, PageContent, PageRun, runs_with_content,
};
use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Poll interval while page faults cannot be handled, since the kernel has not delivered a pending event yet.
const EVENT_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Most ranges that [`LazyPages::missing`] returns.
const RANGES_MAX: usize = 4096;

/// Lazy pages of a tree's processes. The owner must call [`LazyPages::handle_events`] repeatedly, since threads may wait for
/// pages. Dropping this value before all pages are present kills the tree.
#[derive(Debug)]
pub struct LazyPages {
    // Dropped first: the tree must end before its `userfaultfd` descriptors are closed.
    restorer: RestorerLink,
    memories: Vec<LazyMemory>,
    /// Number of descriptors handed to the restorer.
    userfaults_sent: u64,
    /// Pages that were returned as requested.
    requested: HashSet<PageFault>,
}

/// A page that a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageFault {
    /// Index of the process in the tree.
    pub process: u32,
    /// Address of the page at the donor.
    pub address: u64,
}

impl LazyPages {
    /// Takes one descriptor for each process with missing pages, in the order of `missing`.
    pub(crate) fn new(
        missing: &MissingPages,
        userfaults: Vec<OwnedFd>,
        restorer: RestorerLink,
    ) -> Result<Self> {
        if userfaults.len() != missing.processes.len() {
            return Err(Error::Image(
                "number of userfaultfds does not match the processes with missing pages",
            ));
        }
        let mut spaces = Vec::new();
        for ((number, process_missing), userfault) in (0..).zip(&missing.processes).zip(userfaults)
        {
            let table: MissingPageTable = process_missing.ranges.iter().copied().collect();
            let mut memory = LazyMemory::new(userfault, process_missing.process, table);
            memory.userfault_number = number;
            spaces.push(memory);
        }
        Ok(Self {
            userfaults_sent: spaces.len() as u64,
            memories: spaces,
            requested: HashSet::new(),
            restorer,
        })
    }

    /// Waits for an event or until `wake` is readable, at most `limit`.
    pub fn wait(&self, wake: BorrowedFd<'_>, limit: Duration) {
        let has_unhandled = self.memories.iter().any(LazyMemory::has_unhandled_faults);
        let limit = if has_unhandled {
            EVENT_POLL_INTERVAL.min(limit)
        } else {
            limit
        };
        let poll_read = |fd: i32| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let others = [wake, self.restorer.pidfd()];
        let fds = others
            .into_iter()
            .chain(self.memories.iter().map(LazyMemory::userfault));
        let mut fds: Vec<libc::pollfd> = fds.map(|fd| poll_read(fd.as_raw_fd())).collect();
        let limit = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: `fds` has as many structures as the call is told, writable for the call.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, limit) };
    }

    /// Handles pending events, and returns the pages for which threads have begun to wait.
    ///
    /// # Errors
    /// The kernel refuses further pages.
    pub fn handle_events(&mut self) -> Result<Vec<PageFault>> {
        let handling = || "post-copy of missing pages".to_owned();
        let mut requests = Vec::new();
        let mut at = 0;
        // Children are appended behind their parents, so the loop reaches them too.
        while at < self.memories.len() {
            let children = self.memories[at].handle_events().context(handling)?;
            self.watch_children(children)?;
            at += 1;
        }
        for space in &mut self.memories {
            for address in space.resolve_faults().context(handling)? {
                let request = PageFault {
                    process: space.process,
                    address,
                };
                if self.requested.insert(request) {
                    requests.push(request);
                }
            }
        }
        self.drop_complete()?;
        Ok(requests)
    }

    /// Stops watching address spaces that miss no page or whose process has ended.
    fn drop_complete(&mut self) -> Result<()> {
        let is_complete = |space: &mut LazyMemory| space.has_ended || space.table.is_empty();
        for complete in self.memories.extract_if(.., is_complete) {
            self.restorer.release_userfault(complete.userfault_number)?;
        }
        Ok(())
    }

    /// Places pages wherever they are missing, and skips pages that are missing nowhere. Returns true for a message
    /// without pages, by which the donor asks for the missing ranges.
    ///
    /// # Errors
    /// The kernel refuses the pages, or the message is malformed.
    pub fn place_pages(&mut self, message: &[u8]) -> Result<bool> {
        let pages = BorrowedPages::decode(message)?;
        for (runs, bytes) in pages.groups() {
            for (run, bytes) in runs_with_content(runs, bytes) {
                let (MemorySpace::Process(process), Some(bytes)) = (run.space, bytes) else {
                    return Err(Error::Image("missing pages that belong to no process"));
                };
                self.place_run(process, run.start, bytes)?;
            }
        }
        Ok(pages.runs.is_empty())
    }

    fn place_run(&mut self, process: u32, source: u64, bytes: &[u8]) -> Result<()> {
        let mut at = 0;
        while at < self.memories.len() {
            if self.memories[at].process == process {
                let children = self.memories[at].place_pages(source, bytes);
                self.watch_children(children.context(|| "placing missing pages".to_owned())?)?;
            }
            at += 1;
        }
        for page in (source..source + bytes.len() as u64).step_by(PAGE as usize) {
            self.requested.remove(&PageFault {
                process,
                address: page,
            });
        }
        Ok(())
    }

    /// Starts watching child processes, and hands copies of their descriptors to the restorer.
    fn watch_children(&mut self, children: Vec<LazyMemory>) -> Result<()> {
        for mut child in children {
            self.restorer.send_userfault(child.userfault())?;
            child.userfault_number = self.userfaults_sent;
            self.userfaults_sent += 1;
            self.memories.push(child);
        }
        Ok(())
    }

    /// Returns true if no page is missing.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.memories.iter().all(|space| space.table.is_empty())
    }

    /// Returns true if the restorer and all processes of the tree have ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.restorer.has_ended()
    }

    /// Returns the missing ranges in the donor's addresses. If they are fragmented, nearby ranges are joined, so the
    /// result may include present pages.
    #[must_use]
    pub fn missing_runs(&self) -> Vec<PageRun> {
        let mut sources: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
        for space in &self.memories {
            sources
                .entry(space.process)
                .or_default()
                .extend(space.table.sources());
        }
        let all = sources.into_iter().map(|(process, mut ranges)| {
            ranges.sort_unstable();
            (process, ranges.into_iter().collect::<AddressRanges>())
        });
        let mut all: Vec<(u32, AddressRanges)> = all.collect();
        let mut join_gap = PAGE;
        while all
            .iter()
            .map(|(_, ranges)| ranges.iter().count())
            .sum::<usize>()
            > RANGES_MAX
        {
            for (_, ranges) in &mut all {
                *ranges = ranges.merge_gaps(join_gap);
            }
            join_gap *= 2;
        }
        let run = |process: u32, (start, end): (u64, u64)| PageRun {
            space: MemorySpace::Process(process),
            start,
            length: end - start,
            content: PageContent::Bytes,
        };
        let runs = all
            .iter()
            .flat_map(|(process, ranges)| ranges.iter().map(|range| run(*process, range)));
        runs.collect()
    }

    /// Returns the pages that were requested and have not arrived.
    #[must_use]
    pub fn requested_pages(&self) -> Vec<PageFault> {
        self.requested.iter().copied().collect()
    }

    /// Ends post-copy after the last page: memory is not watched any more.
    ///
    /// # Errors
    /// The restorer cannot be reached.
    pub fn finish(mut self) -> Result<()> {
        self.restorer.report_complete()
    }

    /// Kills the tree, since some pages cannot arrive and the tree must not run without them.
    pub fn abort(self) {
        drop(self);
    }
}
