//! The donor's part in post-copy: memory of a stopped tree is sent after the tree resumed on the acceptor.

use super::freeze::StoppedTree;
use crate::address_ranges::AddressRanges;
use crate::error::{Error, Result};
use crate::image::{
    MappingBacking, MemoryMapping, MemorySpace, MissingPages, PAGE, PageContent, PageRun,
    PagesMessage, ProcessMissingPages, ProcessTreeState, ThreadState,
};
use crate::postcopy::{MissingPageRange, MissingPageTable, PageFault};
use crate::procfs::VmFlags;
use crate::trace::ProcessMemory;
use std::collections::{BTreeMap, VecDeque};

/// Mappings whose pages are always sent before the tree resumes. Locked pages must be present, the kernel grows
/// stacks itself, and of memory that the kernel may drop or wipe, only the kernel knows the present pages.
const SENT_BEFORE_RESUME: u32 = VmFlags::LOCKED
    | VmFlags::LOCKED_ON_FAULT
    | VmFlags::GROWS_DOWN
    | VmFlags::DROPPABLE
    | VmFlags::WIPE_ON_FORK;

/// Size in bytes of the aligned block that is sent with a requested page.
const BLOCK_BYTES: u64 = 16 * PAGE;

impl StoppedTree {
    /// Leaves unread memory to post-copy and returns its ranges. Pages that threads and the kernel touch first are
    /// not left behind.
    pub fn defer_to_postcopy(&mut self, state: &ProcessTreeState) -> MissingPages {
        let processes = self.tree().processes.iter().zip(&state.processes);
        let deferrable: Vec<AddressRanges> = processes
            .map(|(process, state)| {
                let threads = state.iter().flat_map(|state| &state.threads);
                deferrable_ranges(&process.mappings).difference(&needed_pages(threads))
            })
            .collect();
        let deferred = self.round.take_ranges(&deferrable);
        for (index, ranges) in deferred.iter().enumerate() {
            let runs = ranges.iter();
            self.postcopy_runs
                .extend(runs.map(|(start, end)| run(index as u32, start, end - start)));
        }
        let missing = (0..)
            .zip(&deferred)
            .map(|(process, ranges)| ProcessMissingPages {
                process,
                ranges: ranges.iter().collect(),
            });
        MissingPages {
            processes: missing
                .filter(|process| !process.ranges.is_empty())
                .collect(),
        }
    }

    /// Returns the processes' PIDs as this thread sees them, by index in the tree; for [`PageSource::new`].
    #[must_use]
    pub fn process_ids(&self) -> Vec<Option<i32>> {
        let tracked = self.tracker.processes.iter();
        tracked
            .map(|tracked| tracked.watched.is_some().then_some(tracked.pid))
            .collect()
    }
}

fn deferrable_ranges(mappings: &[MemoryMapping]) -> AddressRanges {
    let is_deferrable = |mapping: &&MemoryMapping| {
        matches!(mapping.backing, MappingBacking::Anonymous(_))
            && !VmFlags(mapping.advice).has_any(SENT_BEFORE_RESUME)
    };
    mappings
        .iter()
        .filter(is_deferrable)
        .map(|mapping| (mapping.start, mapping.end))
        .collect()
}

/// Returns the pages at which threads continue, and the pages that the kernel touches where it cannot wait: when it
/// restores a thread, and when a thread ends.
fn needed_pages<'a>(threads: impl Iterator<Item = &'a ThreadState>) -> AddressRanges {
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
        let page_range = |(at, length): &(u64, u64)| {
            (
                page(*at),
                page(at.saturating_add(length - 1)).saturating_add(PAGE),
            )
        };
        pages.extend(places.iter().map(page_range));
    }
    pages.sort_unstable();
    pages.into_iter().collect()
}

/// Memory of stopped processes that was left to post-copy.
#[derive(Debug)]
pub struct PageSource {
    memories: Vec<Option<ProcessMemory>>,
    unsent: BTreeMap<u32, MissingPageTable>,
    /// True if all unsent ranges are mapped; otherwise they may have holes.
    is_exact: bool,
    requested: VecDeque<PageFault>,
}

impl PageSource {
    /// Opens the memory of processes, given by index in their tree, to send the missing ranges.
    ///
    /// # Errors
    /// A process has ended.
    pub fn new(pids: &[Option<i32>], missing: &MissingPages) -> Result<Self> {
        let open = |pid: &Option<i32>| pid.map(ProcessMemory::open).transpose();
        let unsent = missing.processes.iter();
        Ok(Self {
            memories: pids.iter().map(open).collect::<Result<_>>()?,
            unsent: unsent
                .map(|process| (process.process, process.ranges.iter().copied().collect()))
                .collect(),
            is_exact: true,
            requested: VecDeque::new(),
        })
    }

    /// Queues a page that a thread at the acceptor waits for.
    pub fn request_page(&mut self, fault: PageFault) {
        self.requested.push_back(fault);
    }

    /// Replaces the unsent ranges by the acceptor's list, which is approximate, whatever was sent before.
    pub fn set_missing(&mut self, missing: &MissingPages) {
        self.requested.clear();
        self.is_exact = false;
        let unsent = missing.processes.iter();
        self.unsent = unsent
            .map(|process| (process.process, process.ranges.iter().copied().collect()))
            .collect();
    }

    /// Returns the number of bytes that were not sent yet.
    #[must_use]
    pub fn remaining_bytes(&self) -> u64 {
        self.unsent.values().map(MissingPageTable::bytes).sum()
    }

    /// Reads the next pages to send: a requested page with its block, and true; or else the first `limit` bytes of the
    /// rest, and false. Returns `None` when all pages were sent.
    ///
    /// # Errors
    /// A page cannot be read.
    pub fn next(&mut self, limit: u64) -> Result<Option<(PagesMessage, bool)>> {
        while let Some(fault) = self.requested.pop_front() {
            let Some(table) = self.unsent.get_mut(&fault.process) else {
                continue;
            };
            // A page outside of the table was sent already.
            if table.source_of(fault.address).is_some() {
                let start = fault.address & !(BLOCK_BYTES - 1);
                let ranges = table.remove(start, start + BLOCK_BYTES);
                return self
                    .read(fault.process, &ranges)
                    .map(|pages| Some((pages, true)));
            }
        }
        let Some((process, table)) = self.unsent.iter_mut().find(|(_, table)| !table.is_empty())
        else {
            return Ok(None);
        };
        let (process, ranges) = (*process, table.remove_first(limit));
        self.read(process, &ranges)
            .map(|pages| Some((pages, false)))
    }

    fn read(&self, process: u32, ranges: &[MissingPageRange]) -> Result<PagesMessage> {
        let mut pages = PagesMessage::default();
        let Some(Some(memory)) = self.memories.get(process as usize) else {
            return Ok(pages);
        };
        for place in ranges {
            let length = (place.end - place.start) as usize;
            let at = pages.bytes.len();
            pages.bytes.resize(at + length, 0);
            match memory.read(place.start, &mut pages.bytes[at..]) {
                Ok(()) => pages.runs.push(run(process, place.start, length as u64)),
                // Approximate ranges may include addresses that are not mapped.
                Err(error) if !self.is_exact && is_unmapped_address(&error) => {
                    pages.bytes.truncate(at);
                    read_each(memory, process, place, &mut pages)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(pages)
    }
}

fn read_each(
    memory: &ProcessMemory,
    process: u32,
    range: &MissingPageRange,
    pages: &mut PagesMessage,
) -> Result<()> {
    for start in (range.start..range.end).step_by(PAGE as usize) {
        let at = pages.bytes.len();
        pages.bytes.resize(at + PAGE as usize, 0);
        match memory.read(start, &mut pages.bytes[at..]) {
            Ok(()) => pages.runs.push(run(process, start, PAGE)),
            Err(error) if is_unmapped_address(&error) => pages.bytes.truncate(at),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_unmapped_address(error: &Error) -> bool {
    matches!(error, Error::Kernel { source, .. } if source.raw_os_error() == Some(libc::EIO))
}

fn run(process: u32, start: u64, length: u64) -> PageRun {
    PageRun {
        space: MemorySpace::Process(process),
        start,
        length,
        content: PageContent::Bytes,
    }
}
