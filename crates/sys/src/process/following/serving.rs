//! Serves the page faults of a tree under post-copy.

use super::space::Space;
use super::table::Table;
use crate::process::acceptor::Courier;
use crate::process::error::{Context, Error, Result};
use crate::process::image::{Content, Missing, PAGE, PagesIn, Run, Space as Whose, each};
use crate::process::ranges::Ranges;
use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Poll interval while page faults cannot be handled, since the kernel has not delivered a pending event yet.
const SOON: Duration = Duration::from_millis(1);
/// Most ranges that [`Following::missing`] returns.
const RANGES_MAX: usize = 4096;

/// Lazy pages of a tree's processes. The owner must call [`Following::look`] repeatedly, since threads may wait for
/// pages. Dropping this value before all pages are present kills the tree.
#[derive(Debug)]
pub struct Following {
    // Dropped first: the tree must end before its `userfaultfd` descriptors are closed.
    courier: Courier,
    spaces: Vec<Space>,
    /// Number of descriptors handed to the restorer.
    kept: u64,
    /// Pages that were returned as wanted.
    asked: HashSet<Want>,
}

/// A page that a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Want {
    /// Index of the process in the tree.
    pub process: u32,
    /// Address of the page at the donor.
    pub address: u64,
}

impl Following {
    /// Takes one descriptor for each process with missing pages, in the order of `missing`.
    pub(crate) fn new(
        missing: &Missing,
        userfaults: Vec<OwnedFd>,
        courier: Courier,
    ) -> Result<Self> {
        if userfaults.len() != missing.processes.len() {
            return Err(Error::Image("descriptors of memory that follows"));
        }
        let mut spaces = Vec::new();
        for ((number, of), userfault) in (0..).zip(&missing.processes).zip(userfaults) {
            let table: Table = of.ranges.iter().copied().collect();
            let mut space = Space::new(userfault, of.process, table);
            space.number = number;
            spaces.push(space);
        }
        Ok(Self {
            kept: spaces.len() as u64,
            spaces,
            asked: HashSet::new(),
            courier,
        })
    }

    /// Waits for an event or until `wake` is readable, at most `limit`.
    pub fn wait(&self, wake: BorrowedFd<'_>, limit: Duration) {
        let behind = self.spaces.iter().any(Space::is_behind);
        let limit = if behind { SOON.min(limit) } else { limit };
        let readable = |fd: i32| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let others = [wake, self.courier.restorer()];
        let fds = others
            .into_iter()
            .chain(self.spaces.iter().map(Space::userfault));
        let mut fds: Vec<libc::pollfd> = fds.map(|fd| readable(fd.as_raw_fd())).collect();
        let limit = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: `fds` has as many structures as the call is told, writable for the call.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, limit) };
    }

    /// Handles pending events, and returns the pages for which threads have begun to wait.
    ///
    /// # Errors
    /// The kernel refuses further pages.
    pub fn look(&mut self) -> Result<Vec<Want>> {
        let looking = || "memory that follows".to_owned();
        let mut wants = Vec::new();
        let mut at = 0;
        // Children are appended behind their parents, so the loop reaches them too.
        while at < self.spaces.len() {
            let children = self.spaces[at].follow().context(looking)?;
            self.adopt(children)?;
            at += 1;
        }
        for space in &mut self.spaces {
            for address in space.waited_for().context(looking)? {
                let want = Want {
                    process: space.process,
                    address,
                };
                if self.asked.insert(want) {
                    wants.push(want);
                }
            }
        }
        self.drop_done()?;
        Ok(wants)
    }

    /// Stops watching address spaces that miss no page or whose process has ended.
    fn drop_done(&mut self) -> Result<()> {
        let is_done = |space: &mut Space| space.ended || space.table.is_empty();
        for done in self.spaces.extract_if(.., is_done) {
            self.courier.drop_one(done.number)?;
        }
        Ok(())
    }

    /// Places pages wherever they are missing, and skips pages that are missing nowhere. Returns true for a message
    /// without pages, by which the donor asks for the missing ranges.
    ///
    /// # Errors
    /// The kernel refuses the pages, or the message is malformed.
    pub fn fill(&mut self, message: &[u8]) -> Result<bool> {
        let pages = PagesIn::read(message)?;
        for (alike, bytes) in pages.alike() {
            for (run, bytes) in each(alike, bytes) {
                let (Whose::Process(process), Some(bytes)) = (run.space, bytes) else {
                    return Err(Error::Image("memory that follows no process"));
                };
                self.fill_run(process, run.start, bytes)?;
            }
        }
        Ok(pages.runs.is_empty())
    }

    fn fill_run(&mut self, process: u32, source: u64, bytes: &[u8]) -> Result<()> {
        let mut at = 0;
        while at < self.spaces.len() {
            if self.spaces[at].process == process {
                let children = self.spaces[at].fill(source, bytes);
                self.adopt(children.context(|| "pages that follow".to_owned())?)?;
            }
            at += 1;
        }
        for page in (source..source + bytes.len() as u64).step_by(PAGE as usize) {
            self.asked.remove(&Want {
                process,
                address: page,
            });
        }
        Ok(())
    }

    /// Starts watching child processes, and hands copies of their descriptors to the restorer.
    fn adopt(&mut self, children: Vec<Space>) -> Result<()> {
        for mut child in children {
            self.courier.keep(child.userfault())?;
            child.number = self.kept;
            self.kept += 1;
            self.spaces.push(child);
        }
        Ok(())
    }

    /// Returns true if no page is missing.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.spaces.iter().all(|space| space.table.is_empty())
    }

    /// Returns true if the restorer and all processes of the tree have ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.courier.has_ended()
    }

    /// Returns the missing ranges in the donor's addresses. If they are fragmented, nearby ranges are joined, so the
    /// result may include present pages.
    #[must_use]
    pub fn missing(&self) -> Vec<Run> {
        let mut sources: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
        for space in &self.spaces {
            sources
                .entry(space.process)
                .or_default()
                .extend(space.table.sources());
        }
        let all = sources.into_iter().map(|(process, mut ranges)| {
            ranges.sort_unstable();
            (process, ranges.into_iter().collect::<Ranges>())
        });
        let mut all: Vec<(u32, Ranges)> = all.collect();
        let mut near = PAGE;
        while all
            .iter()
            .map(|(_, ranges)| ranges.iter().count())
            .sum::<usize>()
            > RANGES_MAX
        {
            for (_, ranges) in &mut all {
                *ranges = ranges.joined(near);
            }
            near *= 2;
        }
        let run = |process: u32, (start, end): (u64, u64)| Run {
            space: Whose::Process(process),
            start,
            length: end - start,
            content: Content::Bytes,
        };
        let runs = all
            .iter()
            .flat_map(|(process, ranges)| ranges.iter().map(|range| run(*process, range)));
        runs.collect()
    }

    /// Returns the pages that were wanted and have not arrived.
    #[must_use]
    pub fn wanted(&self) -> Vec<Want> {
        self.asked.iter().copied().collect()
    }

    /// Ends post-copy after the last page: memory is not watched any more.
    ///
    /// # Errors
    /// The restorer cannot be reached.
    pub fn complete(mut self) -> Result<()> {
        self.courier.complete()
    }

    /// Kills the tree, since some pages cannot arrive and the tree must not run without them.
    pub fn give_up(self) {
        drop(self);
    }
}
