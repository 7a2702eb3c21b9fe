//! The donor's part in post-copy: memory of a stopped tree is sent after the tree resumed on the acceptor.

use super::freeze::StoppedTree;
use crate::process::error::{Error, Result};
use crate::process::following::{Place, Table, Want};
use crate::process::image::{
    Backing, Content, Frozen, FrozenThread, Mapping, Missing, MissingOf, PAGE, Pages, Run, Space,
};
use crate::process::procfs::Advice;
use crate::process::ranges::Ranges;
use crate::process::trace::Memory;
use std::collections::{BTreeMap, VecDeque};

/// Mappings whose pages are always sent before the tree resumes. Locked pages must be present, the kernel grows
/// stacks itself, and of memory that the kernel may drop or wipe, only the kernel knows the present pages.
const GOES: u32 = Advice::LOCKED
    | Advice::LOCKED_ON_FAULT
    | Advice::GROWS_DOWN
    | Advice::DROPPABLE
    | Advice::WIPE_ON_FORK;

/// Size in bytes of the aligned block that is sent with a wanted page.
const NEIGHBOURS: u64 = 16 * PAGE;

impl StoppedTree {
    /// Leaves unread memory to post-copy and returns its ranges. Pages that threads and the kernel touch first are
    /// not left behind.
    pub fn leave_behind(&mut self, state: &Frozen) -> Missing {
        let processes = self.tree().processes.iter().zip(&state.processes);
        let may: Vec<Ranges> = processes
            .map(|(process, state)| {
                let threads = state.iter().flat_map(|state| &state.threads);
                may_follow(&process.mappings).minus(&needed(threads))
            })
            .collect();
        let taken = self.round.take_out(&may);
        for (index, ranges) in taken.iter().enumerate() {
            let runs = ranges.iter();
            self.behind
                .extend(runs.map(|(start, end)| run(index as u32, start, end - start)));
        }
        let lacking = (0..).zip(&taken).map(|(process, ranges)| MissingOf {
            process,
            ranges: ranges.iter().collect(),
        });
        Missing {
            processes: lacking.filter(|of| !of.ranges.is_empty()).collect(),
        }
    }

    /// Returns the processes' PIDs as this thread sees them, by index in the tree; for [`Behind::new`].
    #[must_use]
    pub fn process_ids(&self) -> Vec<Option<i32>> {
        let tracked = self.tracker.processes.iter();
        tracked
            .map(|of| of.watched.is_some().then_some(of.pid))
            .collect()
    }
}

fn may_follow(mappings: &[Mapping]) -> Ranges {
    let may = |mapping: &&Mapping| {
        matches!(mapping.backing, Backing::Anonymous(_)) && !Advice(mapping.advice).has(GOES)
    };
    mappings
        .iter()
        .filter(may)
        .map(|mapping| (mapping.start, mapping.end))
        .collect()
}

/// Returns the pages at which threads continue, and the pages that the kernel touches where it cannot wait: when it
/// restores a thread, and when a thread ends.
fn needed<'a>(threads: impl Iterator<Item = &'a FrozenThread>) -> Ranges {
    let mut pages: Vec<(u64, u64)> = Vec::new();
    for thread in threads {
        let registers = &thread.registers;
        let rseq = thread.rseq.map_or(0, |rseq| rseq.address);
        let places = [
            (registers.rsp.saturating_sub(PAGE), 3 * PAGE),
            (registers.rip, 1),
            (registers.fs_base, 1),
            (thread.clear_tid, 8),
            (thread.robust_list.0, 24),
            (rseq, 64),
        ];
        let page = |at: u64| at & !(PAGE - 1);
        let whole = |(at, length): &(u64, u64)| {
            (
                page(*at),
                page(at.saturating_add(length - 1)).saturating_add(PAGE),
            )
        };
        pages.extend(places.iter().map(whole));
    }
    pages.sort_unstable();
    pages.into_iter().collect()
}

/// Memory of stopped processes that was left to post-copy.
#[derive(Debug)]
pub struct Behind {
    memories: Vec<Option<Memory>>,
    unsent: BTreeMap<u32, Table>,
    /// True if all unsent ranges are mapped; otherwise they may have holes.
    exact: bool,
    wanted: VecDeque<Want>,
}

impl Behind {
    /// Opens the memory of processes, given by index in their tree, to send the missing ranges.
    ///
    /// # Errors
    /// A process has ended.
    pub fn new(pids: &[Option<i32>], missing: &Missing) -> Result<Self> {
        let open = |pid: &Option<i32>| pid.map(Memory::open).transpose();
        let unsent = missing.processes.iter();
        Ok(Self {
            memories: pids.iter().map(open).collect::<Result<_>>()?,
            unsent: unsent
                .map(|of| (of.process, of.ranges.iter().copied().collect()))
                .collect(),
            exact: true,
            wanted: VecDeque::new(),
        })
    }

    /// Queues a page that a thread at the acceptor waits for.
    pub fn want(&mut self, want: Want) {
        self.wanted.push_back(want);
    }

    /// Replaces the unsent ranges by the acceptor's list, which is approximate, whatever was sent before.
    pub fn lacks(&mut self, missing: &Missing) {
        self.wanted.clear();
        self.exact = false;
        let unsent = missing.processes.iter();
        self.unsent = unsent
            .map(|of| (of.process, of.ranges.iter().copied().collect()))
            .collect();
    }

    /// Returns the number of bytes that were not sent yet.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.unsent.values().map(Table::bytes).sum()
    }

    /// Reads the next pages to send: a wanted page with its block, and true; or else the first `limit` bytes of the
    /// rest, and false. Returns `None` when all pages were sent.
    ///
    /// # Errors
    /// A page cannot be read.
    pub fn next(&mut self, limit: u64) -> Result<Option<(Pages, bool)>> {
        while let Some(want) = self.wanted.pop_front() {
            let Some(table) = self.unsent.get_mut(&want.process) else {
                continue;
            };
            // A page outside of the table was sent already.
            if table.source(want.address).is_some() {
                let start = want.address & !(NEIGHBOURS - 1);
                let places = table.take(start, start + NEIGHBOURS);
                return self
                    .read(want.process, &places)
                    .map(|pages| Some((pages, true)));
            }
        }
        let Some((process, table)) = self.unsent.iter_mut().find(|(_, table)| !table.is_empty())
        else {
            return Ok(None);
        };
        let (process, places) = (*process, table.take_first(limit));
        self.read(process, &places)
            .map(|pages| Some((pages, false)))
    }

    fn read(&self, process: u32, places: &[Place]) -> Result<Pages> {
        let mut pages = Pages::default();
        let Some(Some(memory)) = self.memories.get(process as usize) else {
            return Ok(pages);
        };
        for place in places {
            let length = (place.end - place.start) as usize;
            let at = pages.bytes.len();
            pages.bytes.resize(at + length, 0);
            match memory.read(place.start, &mut pages.bytes[at..]) {
                Ok(()) => pages.runs.push(run(process, place.start, length as u64)),
                // Approximate ranges may include addresses that are not mapped.
                Err(error) if !self.exact && is_nowhere(&error) => {
                    pages.bytes.truncate(at);
                    read_each(memory, process, place, &mut pages)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(pages)
    }
}

fn read_each(memory: &Memory, process: u32, place: &Place, pages: &mut Pages) -> Result<()> {
    for start in (place.start..place.end).step_by(PAGE as usize) {
        let at = pages.bytes.len();
        pages.bytes.resize(at + PAGE as usize, 0);
        match memory.read(start, &mut pages.bytes[at..]) {
            Ok(()) => pages.runs.push(run(process, start, PAGE)),
            Err(error) if is_nowhere(&error) => pages.bytes.truncate(at),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_nowhere(error: &Error) -> bool {
    matches!(error, Error::Kernel { source, .. } if source.raw_os_error() == Some(libc::EIO))
}

fn run(process: u32, start: u64, length: u64) -> Run {
    Run {
        space: Space::Process(process),
        start,
        length,
        content: Content::Bytes,
    }
}
