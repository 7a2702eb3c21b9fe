//! A round of pre-copy: the changes of a tree that are to be sent.

use super::tracker::Tracker;
use crate::process::error::Result;
use crate::process::image::{Content, Pages, Run, Space, Tree};
use crate::process::ranges::Ranges;
use std::collections::VecDeque;

/// Shape of the tree, and pages to be read. The acceptor must receive the shape before the pages.
#[derive(Debug, Default)]
pub struct Round {
    /// Processes, threads, mappings.
    pub tree: Tree,
    runs: VecDeque<Run>,
}

impl Round {
    /// Returns the number of bytes still to be read and sent.
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

    /// Adds the runs of another round, without the shape of its tree.
    pub(super) fn append(&mut self, other: Self) {
        self.runs.extend(other.runs);
    }

    pub(super) fn push(&mut self, run: Run) {
        self.runs.push_back(run);
    }

    /// Removes the parts that lie within these ranges of each process, given by index. Returns the removed ranges.
    pub(super) fn take_out(&mut self, within: &[Ranges]) -> Vec<Ranges> {
        let mut found: Vec<Vec<(u64, u64)>> = vec![Vec::new(); within.len()];
        self.runs.retain(|run| {
            let ranges = match (run.space, run.content) {
                (Space::Process(index), Content::Bytes) => found.get_mut(index as usize),
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
            let ranges: Ranges = ranges.into_iter().collect();
            self.add(
                Space::Process(index as u32),
                &ranges.minus(within),
                Content::Bytes,
            );
            taken.push(ranges.and(within));
        }
        taken
    }

    /// Returns the runs still to be read.
    pub(super) fn rest(&self) -> impl Iterator<Item = Run> + '_ {
        self.runs.iter().copied()
    }

    /// Takes the next runs, at most `limit` bytes of content.
    fn take_some(&mut self, limit: u64) -> Vec<Run> {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while bytes < limit
            && let Some(run) = self.take(limit - bytes)
        {
            if run.content == Content::Bytes {
                bytes += run.length;
            }
            taken.push(run);
        }
        taken
    }

    /// Takes the next run, at most `limit` bytes of it.
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
    /// Reads the next pages of a round, about `limit` bytes; `None` when all were read.
    ///
    /// # Errors
    /// No error that a later round would not correct: pages that have vanished are left out.
    pub fn read(&mut self, round: &mut Round, limit: u64) -> Result<Option<Pages>> {
        let runs = round.take_some(limit.next_multiple_of(crate::process::image::PAGE));
        let mut pages = Pages::default();
        for alike in runs.chunk_by(|a, b| (a.space, a.content) == (b.space, b.content)) {
            match alike[0].content {
                Content::Fresh => pages.runs.extend(alike),
                Content::Bytes => self.read_runs(alike, &mut pages),
            }
        }
        Ok((!pages.runs.is_empty() || round.bytes() > 0).then_some(pages))
    }

    /// Reads runs of one address space: all at once, or one by one if that fails.
    fn read_runs(&mut self, runs: &[Run], pages: &mut Pages) {
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

    fn read_at_once(&self, runs: &[Run], bytes: &mut [u8]) -> bool {
        let Some(Space::Process(index)) = runs.first().map(|run| run.space) else {
            return false;
        };
        let tracked = self.processes.get(index as usize);
        let watched = tracked.and_then(|tracked| tracked.watched.as_ref());
        let place = |run: &Run| (run.start, run.length as usize);
        let places: Vec<(u64, usize)> = runs.iter().map(place).collect();
        watched.is_some_and(|watched| watched.memory.read_places(&places, bytes))
    }

    /// Returns the pages that changed since the last scan, among the pages that the acceptor has. The scan is
    /// short: it covers only private memory and does not read mappings. The caller must read the result before the
    /// next scan.
    pub fn touch_up(&mut self) -> Round {
        let mut round = Round::default();
        for (index, tracked) in self.processes.iter_mut().enumerate() {
            if let Some(watched) = &mut tracked.watched {
                watched.touch_up(index as u32, &mut round);
            }
        }
        round
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
