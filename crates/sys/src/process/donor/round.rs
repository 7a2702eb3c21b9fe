//! What one look at a tree found to be sent.

use super::tracker::Tracker;
use super::userfault;
use crate::process::error::{Context, Result};
use crate::process::image::{Content, Pages, Run, Space, Tree};
use crate::process::ranges::Ranges;
use std::collections::VecDeque;

/// The shape of the tree, and pages to be read. The acceptor must have the shape before it gets the pages.
#[derive(Debug, Default)]
pub struct Round {
    /// Processes, threads, mappings.
    pub tree: Tree,
    runs: VecDeque<Run>,
}

impl Round {
    /// Bytes that are still to be read and sent.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.runs
            .iter()
            .filter(|run| run.content == Content::Bytes)
            .map(|run| run.length)
            .sum()
    }

    pub(super) fn add(&mut self, space: Space, ranges: &Ranges, content: Content) {
        self.runs.extend(ranges.iter().map(|(start, end)| Run {
            space,
            start,
            length: end - start,
            content,
        }));
    }

    pub(super) fn push(&mut self, run: Run) {
        self.runs.push_back(run);
    }

    /// What is still to be read.
    pub(super) fn rest(&self) -> impl Iterator<Item = Run> + '_ {
        self.runs.iter().copied()
    }

    /// The next run, at most `limit` bytes of it.
    fn take(&mut self, limit: u64) -> Option<Run> {
        let first = self.runs.front_mut()?;
        if first.content == Content::Fresh || first.length <= limit {
            return self.runs.pop_front();
        }
        let part = Run {
            length: limit,
            ..*first
        };
        first.start += limit;
        first.length -= limit;
        Some(part)
    }
}

impl Tracker {
    /// Reads the next pages of a round, about `limit` bytes; nothing when all were read.
    ///
    /// # Errors
    /// None that a later round would not mend: what has vanished is left out.
    pub fn read(&mut self, round: &mut Round, limit: u64) -> Result<Option<Pages>> {
        let limit = limit.next_multiple_of(crate::process::image::PAGE);
        let mut pages = Pages::default();
        while (pages.bytes.len() as u64) < limit {
            let Some(run) = round.take(limit - pages.bytes.len() as u64) else {
                break;
            };
            if run.content == Content::Fresh {
                pages.runs.push(run);
                continue;
            }
            let at = pages.bytes.len();
            pages.bytes.resize(at + run.length as usize, 0);
            if self.read_run(run, &mut pages.bytes[at..]) {
                pages.runs.push(run);
            } else {
                pages.bytes.truncate(at);
            }
        }
        Ok((!pages.runs.is_empty() || round.bytes() > 0).then_some(pages))
    }

    /// Bytes of memory that have changed since the last round, about: memory that nobody can watch is left out, and so is
    /// shared memory.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn dirty_bytes(&self) -> Result<u64> {
        let mut bytes = 0;
        for watched in self.processes.iter().filter_map(|of| of.watched.as_ref()) {
            let everything = (0, u64::MAX);
            let regions = userfault::scan(&watched.pagemap, everything, false)
                .context(|| "PAGEMAP_SCAN (Linux 6.7)".to_owned())?;
            let unsent = |region: &&userfault::Region| {
                use userfault::{FILE, WRITTEN, ZERO};
                region.categories & WRITTEN != 0 && region.categories & (FILE | ZERO) == 0
            };
            let changed: Ranges = regions
                .iter()
                .filter(unsent)
                .map(|region| (region.start, region.end))
                .collect();
            let private: Ranges = (watched.mappings.iter())
                .filter(|mapping| mapping.is_private())
                .map(|mapping| (mapping.start, mapping.end))
                .collect();
            let changed = changed.and(&private);
            bytes += changed.iter().map(|(start, end)| end - start).sum::<u64>();
        }
        Ok(bytes)
    }

    fn read_run(&mut self, run: Run, bytes: &mut [u8]) -> bool {
        match run.space {
            Space::Shared(index) => self.read_shared(index as usize, run.start, bytes),
            Space::Process(index) => {
                let tracked = self.processes.get_mut(index as usize);
                tracked
                    .and_then(|tracked| tracked.watched.as_mut())
                    .is_some_and(|watched| watched.read(run, bytes))
            }
        }
    }
}
