//! The memory of a process that is watched.

use super::attach::{Attachment, own_maps};
use super::catalogue::Catalogue;
use super::halt::Halted;
use super::round::Round;
use super::userfault;
use crate::process::error::{Context, Result};
use crate::process::image::{Content, Mapping, PAGE, Run, Space};
use crate::process::procfs::MapLine;
use crate::process::ranges::Ranges;
use crate::process::trace::Memory;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;

/// A process that has memory.
#[derive(Debug)]
pub(super) struct Watched {
    pub attachment: Attachment,
    pub memory: Memory,
    pub pagemap: File,
    lines: Vec<MapLine>,
    pub mappings: Vec<Mapping>,
    /// What the acceptor has: mappings, and pages in one version or another.
    delivered: Vec<Mapping>,
    sent: Ranges,
    /// What it has after the round that is being made.
    next: Ranges,
    /// Pages that were found to be written by a round that was given up.
    owed: Ranges,
}

impl Watched {
    /// Of a process that stands still. What of it was sent is nothing yet.
    pub fn new(pid: i32, attachment: Attachment) -> Result<Self> {
        let path = format!("/proc/{pid}/pagemap");
        Ok(Self {
            attachment,
            memory: Memory::open(pid)?,
            pagemap: File::open(&path).context(|| path)?,
            lines: Vec::new(),
            mappings: Vec::new(),
            delivered: Vec::new(),
            sent: Ranges::default(),
            next: Ranges::default(),
            owed: Ranges::default(),
        })
    }

    /// Whether the process has the memory that it had: not after `exec`.
    pub fn is_current(&self) -> bool {
        userfault::scan(&self.pagemap, (0, PAGE), false).is_ok()
    }

    /// Takes the stub out of a process that stands still.
    pub fn remove(&self, halted: &Halted) -> Result<()> {
        let lines = own_maps(halted.pid, None, false)?;
        if !self.attachment.is_in(&lines) {
            return Ok(());
        }
        self.attachment.remove(halted, &lines)
    }

    /// Looks at what is mapped; with `advice` also at what the process asked of it.
    pub fn read_mappings(
        &mut self,
        pid: i32,
        advice: bool,
        catalogue: &mut Catalogue,
    ) -> Result<()> {
        let mut lines = own_maps(pid, Some(&self.attachment), advice)?;
        if !advice && !keep_advice(&self.lines, &mut lines) {
            lines = own_maps(pid, Some(&self.attachment), true)?;
        }
        catalogue.enter_written(pid, &lines)?;
        let mut mappings = Vec::with_capacity(lines.len());
        for line in &lines {
            mappings.extend(catalogue.mapping(pid, line)?);
        }
        self.lines = lines;
        self.mappings = mappings;
        Ok(())
    }

    /// Finds what the acceptor lacks and protects it against unseen writes.
    pub fn collect(&mut self, index: u32, round: &mut Round) -> Result<()> {
        let mut private = Ranges::default();
        let mut unwatched = Vec::new();
        for mapping in self.mappings.iter().filter(|mapping| mapping.is_private()) {
            private.push(mapping.start, mapping.end);
            let userfault = self.attachment.userfault.as_fd();
            if userfault::watch(userfault, mapping.start, mapping.end).is_err() {
                unwatched.push((mapping.start, mapping.end));
            }
        }
        let scanned = |e: std::io::Error| {
            Err::<Vec<_>, _>(e).context(|| "PAGEMAP_SCAN (Linux 6.7)".to_owned())
        };
        let mut regions = userfault::scan(&self.pagemap, (0, u64::MAX), true).or_else(scanned)?;
        for range in unwatched {
            // Nothing tells what was written here: all of it counts.
            let more = userfault::scan(&self.pagemap, range, false).or_else(scanned)?;
            regions.extend(more.into_iter().map(|region| userfault::Region {
                categories: region.categories | userfault::WRITTEN,
                ..region
            }));
        }
        regions.sort_unstable_by_key(|region| region.start);
        let own = |region: &&userfault::Region| {
            region.categories & (userfault::FILE | userfault::ZERO) == 0
        };
        let here: Ranges = regions
            .iter()
            .filter(own)
            .map(|region| (region.start, region.end))
            .collect();
        let written = |region: &&userfault::Region| region.categories & userfault::WRITTEN != 0;
        let written: Ranges = regions
            .iter()
            .filter(own)
            .filter(written)
            .map(|region| (region.start, region.end))
            .collect();
        let here = here.and(&private);
        let there = self
            .sent
            .and(&Mapping::stable(&self.delivered, &self.mappings));
        let written = written.or(&self.owed).and(&here);
        let send = written.or(&here.minus(&there));
        let gone = there.minus(&here);
        let space = Space::Process(index);
        round.add(space, &gone, Content::Fresh);
        round.add(space, &send, Content::Bytes);
        self.owed = send;
        self.next = here;
        Ok(())
    }

    /// The round is complete: the acceptor gets all of it.
    pub fn deliver(&mut self) {
        self.delivered.clone_from(&self.mappings);
        self.sent = std::mem::take(&mut self.next);
        self.owed = Ranges::default();
    }

    /// A run was not read: it comes with the next round.
    pub fn give_up(&mut self, run: Run) {
        let part: Ranges = [(run.start, run.start + run.length)].into_iter().collect();
        self.sent = match run.content {
            Content::Bytes => self.sent.minus(&part),
            Content::Fresh => self.sent.or(&part),
        };
    }

    /// Reads a run; what is not there any more comes with the next round.
    pub fn read(&mut self, run: Run, bytes: &mut [u8]) -> bool {
        if self.memory.read(run.start, bytes).is_ok() {
            return true;
        }
        self.give_up(run);
        false
    }
}

/// Gives mappings that are as they were the advice that they had; false if there are others.
fn keep_advice(before: &[MapLine], lines: &mut [MapLine]) -> bool {
    let known: HashMap<(u64, u64), &MapLine> = before
        .iter()
        .map(|line| ((line.start, line.end), line))
        .collect();
    lines.iter_mut().all(|line| {
        let old = known.get(&(line.start, line.end));
        let same = old.filter(|old| {
            line.advice = old.advice;
            **old == line
        });
        same.is_some()
    })
}
