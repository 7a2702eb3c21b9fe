//! A round of pre-copy: the changes of a tree that are to be sent.

use super::tree_tracker::TreeTracker;
use crate::address_ranges::AddressRanges;
use crate::error::Result;
use crate::image::{MemorySpace, PageContent, PageRun, PagesMessage, TreeLayout};
use std::collections::VecDeque;

/// Shape of the tree, and pages to be read. The acceptor must receive the shape before the pages.
#[derive(Debug, Default)]
pub struct PrecopyRound {
    /// Processes, threads, mappings.
    pub tree: TreeLayout,
    runs: VecDeque<PageRun>,
}

impl PrecopyRound {
    /// Returns the number of bytes still to be read and sent.
    #[must_use]
    pub fn remaining_bytes(&self) -> u64 {
        self.runs
            .iter()
            .filter(|run| run.content == PageContent::Bytes)
            .map(|run| run.length)
            .sum()
    }

    pub(super) fn add(&mut self, space: MemorySpace, ranges: &AddressRanges, content: PageContent) {
        self.runs.extend(ranges.iter().map(|(start, end)| PageRun {
            space,
            start,
            length: end - start,
            content,
        }));
    }

    /// Adds the runs of another round, without the shape of its tree.
    pub(super) fn append(&mut self, other: Self) {
        self.runs.extend(other.runs);
    }

    pub(super) fn push(&mut self, run: PageRun) {
        self.runs.push_back(run);
    }

    /// Removes the parts that lie within these ranges of each process, given by index. Returns the removed ranges.
    pub(super) fn take_ranges(&mut self, within: &[AddressRanges]) -> Vec<AddressRanges> {
        let mut found: Vec<Vec<(u64, u64)>> = vec![Vec::new(); within.len()];
        self.runs.retain(|run| {
            let ranges = match (run.space, run.content) {
                (MemorySpace::Process(index), PageContent::Bytes) => found.get_mut(index as usize),
                _ => None,
            };
            let stays = ranges.is_none();
            ranges
                .into_iter()
                .for_each(|ranges| ranges.push((run.start, run.start + run.length)));
            stays
        });
        let mut taken = Vec::with_capacity(within.len());
        for (index, (mut ranges, within)) in found.into_iter().zip(within).enumerate() {
            ranges.sort_unstable();
            let ranges: AddressRanges = ranges.into_iter().collect();
            self.add(
                MemorySpace::Process(index as u32),
                &ranges.difference(within),
                PageContent::Bytes,
            );
            taken.push(ranges.intersection(within));
        }
        taken
    }

    /// Returns the runs still to be read.
    pub(super) fn unread_runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        self.runs.iter().copied()
    }

    /// Takes the next runs, at most `limit` bytes of content.
    fn take_runs(&mut self, limit: u64) -> Vec<PageRun> {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while bytes < limit
            && let Some(run) = self.take_run(limit - bytes)
        {
            if run.content == PageContent::Bytes {
                bytes += run.length;
            }
            taken.push(run);
        }
        taken
    }

    /// Takes the next run, at most `limit` bytes of it.
    fn take_run(&mut self, limit: u64) -> Option<PageRun> {
        let first = self.runs.front_mut()?;
        if first.content == PageContent::Initial || first.length <= limit {
            return self.runs.pop_front();
        }
        let part = PageRun {
            length: limit,
            ..*first
        };
        first.start += limit;
        first.length -= limit;
        Some(part)
    }
}

impl TreeTracker {
    /// Reads the next pages of a round, about `limit` bytes; `None` when all were read.
    ///
    /// # Errors
    /// No error that a later round would not correct: pages that have vanished are left out.
    pub fn read_pages(
        &mut self,
        round: &mut PrecopyRound,
        limit: u64,
    ) -> Result<Option<PagesMessage>> {
        let runs = round.take_runs(limit.next_multiple_of(crate::image::PAGE));
        let mut pages = PagesMessage::default();
        for same_source in runs.chunk_by(|a, b| (a.space, a.content) == (b.space, b.content)) {
            match same_source[0].content {
                PageContent::Initial => pages.runs.extend(same_source),
                PageContent::Bytes => self.read_runs(same_source, &mut pages),
            }
        }
        Ok((!pages.runs.is_empty() || round.remaining_bytes() > 0).then_some(pages))
    }

    /// Reads runs of one address space: all at once, or one by one if that fails.
    fn read_runs(&mut self, runs: &[PageRun], pages: &mut PagesMessage) {
        let at = pages.bytes.len();
        let length: u64 = runs.iter().map(|run| run.length).sum();
        pages.bytes.resize(at + length as usize, 0);
        if self.read_at_once(runs, &mut pages.bytes[at..]) {
            return pages.runs.extend(runs);
        }
        pages.bytes.truncate(at);
        for run in runs {
            let at = pages.bytes.len();
            pages.bytes.resize(at + run.length as usize, 0);
            if self.read_run(*run, &mut pages.bytes[at..]) {
                pages.runs.push(*run);
            } else {
                pages.bytes.truncate(at);
            }
        }
    }

    fn read_at_once(&self, runs: &[PageRun], bytes: &mut [u8]) -> bool {
        let Some(MemorySpace::Process(index)) = runs.first().map(|run| run.space) else {
            return false;
        };
        let tracked = self.processes.get(index as usize);
        let watched = tracked.and_then(|tracked| tracked.watched.as_ref());
        let range_of = |run: &PageRun| (run.start, run.length as usize);
        let ranges: Vec<(u64, usize)> = runs.iter().map(range_of).collect();
        watched.is_some_and(|watched| watched.memory.read_ranges(&ranges, bytes))
    }

    /// Returns the pages that changed since the last scan, among the pages that the acceptor has. The scan is
    /// short: it covers only private memory and does not read mappings. The caller must read the result before the
    /// next scan.
    pub fn scan_delivered_pages(&mut self) -> PrecopyRound {
        let mut round = PrecopyRound::default();
        for (index, tracked) in self.processes.iter_mut().enumerate() {
            if let Some(watched) = &mut tracked.watched {
                watched.scan_delivered_pages(index as u32, &mut round);
            }
        }
        round
    }

    fn read_run(&mut self, run: PageRun, bytes: &mut [u8]) -> bool {
        match run.space {
            MemorySpace::Shared(index) => self.read_shared(index as usize, run.start, bytes),
            MemorySpace::Process(index) => {
                let tracked = self.processes.get_mut(index as usize);
                tracked
                    .and_then(|tracked| tracked.watched.as_mut())
                    .is_some_and(|watched| watched.read(run, bytes))
            }
        }
    }
}
