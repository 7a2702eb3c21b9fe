//! Serves whoever waits for memory that follows.

use super::space::Space;
use super::table::Table;
use crate::process::acceptor::Courier;
use crate::process::error::{Context, Error, Result};
use crate::process::image::{Content, Missing, PAGE, PagesIn, Run, Space as Whose, each};
use crate::process::ranges::Ranges;
use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// How soon is looked again while something is under way that is not told yet.
const SOON: Duration = Duration::from_millis(1);
/// Most ranges of [`Following::missing`].
const RANGES_MAX: usize = 4096;

/// Memory that follows the processes of a tree. Must be asked again and again ([`Following::look`]): they may wait. Dropping it
/// before all is there ends the tree.
#[derive(Debug)]
pub struct Following {
    // Dropped first: what watches memory outlives whom it watches.
    courier: Courier,
    spaces: Vec<Space>,
    /// How many descriptors the restorer was given.
    kept: u64,
    /// Pages that were given as wanted.
    asked: HashSet<Want>,
}

/// A page that somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Want {
    /// Whose it is, by index in the tree.
    pub process: u32,
    /// Where the donor has it.
    pub address: u64,
}

impl Following {
    /// With a descriptor for each process that lacks something, in order.
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

    /// Waits until something may have happened, or `wake` is readable, at most so long.
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
        // SAFETY: as many structures as is said, writable for the call.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, limit) };
    }

    /// Takes in what happened, and gives pages that somebody has begun to wait for.
    ///
    /// # Errors
    /// The kernel does not take pages any more.
    pub fn look(&mut self) -> Result<Vec<Want>> {
        let looking = || "memory that follows".to_owned();
        let mut wants = Vec::new();
        let mut at = 0;
        // Children come behind their parents.
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

    /// Who lacks nothing, or has ended, is watched no more.
    fn drop_done(&mut self) -> Result<()> {
        let is_done = |space: &mut Space| space.ended || space.table.is_empty();
        for done in self.spaces.extract_if(.., is_done) {
            self.courier.drop_one(done.number)?;
        }
        Ok(())
    }

    /// Puts pages where they are missing. What is missing nowhere any more is left out. Whether there were none: then the donor asks
    /// what is missing.
    ///
    /// # Errors
    /// The kernel does not take them, or they make no sense.
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

    /// The restorer keeps what watches children, too.
    fn adopt(&mut self, children: Vec<Space>) -> Result<()> {
        for mut child in children {
            self.courier.keep(child.userfault())?;
            child.number = self.kept;
            self.kept += 1;
            self.spaces.push(child);
        }
        Ok(())
    }

    /// Whether nothing is missing any more.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.spaces.iter().all(|space| space.table.is_empty())
    }

    /// Whether the restorer has ended, and the last of the tree with it.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.courier.has_ended()
    }

    /// What is missing still, as the donor has it, about: more than that where it is in too many pieces.
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

    /// Pages that were wanted and have not come, again.
    #[must_use]
    pub fn wanted(&self) -> Vec<Want> {
        self.asked.iter().copied().collect()
    }

    /// All is there: nothing is watched from now on.
    ///
    /// # Errors
    /// The restorer does not hear it.
    pub fn complete(mut self) -> Result<()> {
        self.courier.complete()
    }

    /// Not all of it can come: ends the tree, which must not go on with less.
    pub fn give_up(self) {
        drop(self);
    }
}
