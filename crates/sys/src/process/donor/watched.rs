//! Memory of a tracked process.

use super::attach::{Attachment, own_maps, without_stub};
use super::catalogue::Catalogue;
use super::halt::Halted;
use super::round::Round;
use super::userfault::{self, Guards, Look, Region};
use crate::process::error::{Context, Error, Result};
use crate::process::image::{ADDRESS_END, Backing, Content, Mapping, PAGE, Run, Space};
use crate::process::procfs::{self, MapLine};
use crate::process::ranges::Ranges;
use crate::process::system_v::attachments;
use crate::process::trace::Memory;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;

/// Most attempts to read mappings that change meanwhile.
const ATTEMPTS: usize = 50;

/// A process that has memory, and so is no zombie.
#[derive(Debug)]
pub(super) struct Watched {
    pub attachment: Attachment,
    /// Securebits of the first thread, read when the tracker attached to the process.
    pub secure_bits: u32,
    pub memory: Memory,
    pub pagemap: File,
    lines: Vec<MapLine>,
    /// Content of `maps` for these lines, without advice: while procfs returns the same text, `lines` and `mappings`
    /// are valid.
    text: Vec<u8>,
    pub mappings: Vec<Mapping>,
    /// Guard pages as of the last scan.
    pub guards: Ranges,
    /// Mappings and pages that the acceptor has, the pages possibly in an older version.
    delivered: Vec<Mapping>,
    sent: Ranges,
    /// Pages that the acceptor has after the current round.
    next: Ranges,
    /// Pages that must be sent although the kernel does not report them as written: a round found them and was given
    /// up, could not read them, or protected them before they were sent.
    owed: Ranges,
}

/// Result of a scan of a process's memory.
#[derive(Debug)]
pub(super) struct Found {
    /// Ranges of private mappings.
    private: Ranges,
    /// Pages that the acceptor has, in mappings that have not changed.
    there: Ranges,
    /// Pages scanned in detail.
    regions: Vec<Region>,
    /// Pages among `there` that have not changed.
    same: Ranges,
    guards: Ranges,
}

impl Watched {
    /// Creates the record of a stopped process, of which nothing was sent yet.
    pub fn new(pid: i32, attachment: Attachment, secure_bits: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/pagemap");
        Ok(Self {
            attachment,
            secure_bits,
            memory: Memory::open(pid)?,
            pagemap: File::open(&path).context(|| path)?,
            lines: Vec::new(),
            text: Vec::new(),
            mappings: Vec::new(),
            guards: Ranges::default(),
            delivered: Vec::new(),
            sent: Ranges::default(),
            next: Ranges::default(),
            owed: Ranges::default(),
        })
    }

    /// Returns true if the process still has the same memory, which `exec` replaces.
    pub fn is_current(&self) -> bool {
        let first = userfault::Look {
            start: 0,
            end: PAGE,
            files: false,
        };
        userfault::scan(&self.pagemap, &[first], false).is_ok()
    }

    /// Unmaps the stub from a stopped process.
    pub fn remove(&self, halted: &Halted) -> Result<()> {
        let lines = own_maps(halted.pid, None, false)?;
        if !self.attachment.is_in(&lines) {
            return Ok(());
        }
        self.attachment.remove(halted, &lines)
    }

    /// Reads the mappings; with `advice` also their advice.
    pub fn read_mappings(
        &mut self,
        pid: i32,
        advice: bool,
        catalogue: &mut Catalogue,
    ) -> Result<()> {
        for _ in 1..ATTEMPTS {
            match self.try_read_mappings(pid, advice, catalogue) {
                // The mapping changed before its file could be opened.
                Err(Error::Kernel { source, .. }) if source.kind() == ErrorKind::NotFound => {}
                other => return other,
            }
        }
        self.try_read_mappings(pid, advice, catalogue)
    }

    fn try_read_mappings(
        &mut self,
        pid: i32,
        advice: bool,
        catalogue: &mut Catalogue,
    ) -> Result<()> {
        let mut text = if advice {
            Vec::new()
        } else {
            procfs::read_bytes(pid, "maps")?
        };
        if !advice && !text.is_empty() && text == self.text {
            return catalogue.check_segments(pid, &self.lines);
        }
        let mut lines = match advice {
            true => Vec::new(),
            false => without_stub(procfs::parse_lines(&text)?, Some(&self.attachment))?,
        };
        if advice || !keep_advice(&self.lines, &mut lines) {
            let told = procfs::read_bytes(pid, "smaps")?;
            lines = without_stub(procfs::parse_lines(&told)?, Some(&self.attachment))?;
            text = procfs::without_advice(&told);
        }
        catalogue.enter_written(pid, &lines)?;
        let mut mappings = Vec::with_capacity(lines.len());
        for line in &lines {
            mappings.extend(catalogue.mapping(pid, line)?);
        }
        catalogue.check_segments(pid, &lines)?;
        self.lines = lines;
        self.text = text;
        self.mappings = mappings;
        Ok(())
    }

    /// Counts the mappings of System V segments, by segment ID.
    pub fn count_segments(&self, count: &mut HashMap<i32, u64>) {
        for part in attachments(&self.lines) {
            *count.entry(part.id).or_default() += part.mappings;
        }
    }

    /// Scans a stopped process if its mappings have not changed. The catalogue stays unchanged, so several threads
    /// can scan several processes.
    pub fn look_again(&self, pid: i32) -> Option<Found> {
        let text = procfs::read_bytes(pid, "maps").ok()?;
        let is_same = !text.is_empty() && text == self.text;
        is_same.then(|| self.look(false).ok()).flatten()
    }

    /// Makes the check of [`Self::read_mappings`] for mappings that have not changed.
    pub fn check_segments(&self, pid: i32, catalogue: &Catalogue) -> Result<()> {
        catalogue.check_segments(pid, &self.lines)
    }

    fn look(&self, protect: bool) -> io::Result<Found> {
        let private: Ranges = (self.mappings.iter())
            .filter(|mapping| mapping.is_private())
            .map(|mapping| (mapping.start, mapping.end))
            .collect();
        let stable = Mapping::stable(&self.delivered, &self.mappings);
        let there = self.sent.and(&stable);
        let (regions, same) = match protect {
            true => (self.look_and_protect()?, Ranges::default()),
            // In unchanged mappings, every page that the acceptor lacks was written since it was protected, or is
            // owed.
            false => self.look_at_changes(&private.minus(&stable), &there)?,
        };
        let guards = self.find_guards(&regions)?;
        Ok(Found {
            private,
            there,
            regions,
            same,
            guards,
        })
    }

    /// Determines the pages that the acceptor lacks, by a scan unless `found` is given. With `protect`, the scan also
    /// write-protects pages to detect later writes. A stopped process does not need that: pages once reported as
    /// written stay so until they are protected again.
    pub fn collect(
        &mut self,
        index: u32,
        protect: bool,
        found: Option<Found>,
        round: &mut Round,
    ) -> Result<()> {
        let found = found.map_or_else(|| self.look(protect), Ok);
        if found.is_err() {
            // The set of pages that were protected is unknown.
            self.owed = everything();
        }
        let scanning = || "PAGEMAP_SCAN (Linux 6.7)".to_owned();
        let Found {
            private,
            there,
            regions,
            same,
            guards,
        } = found.context(scanning)?;
        self.guards = guards;
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
        let here = here.or(&same).and(&private).minus(&self.guards);
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

    /// Returns guard pages: of private mappings from the scanned regions, of shared mappings by another scan.
    fn find_guards(&self, regions: &[Region]) -> io::Result<Ranges> {
        /// Most pages to read in the search for unreadable ones.
        const READ_MAX: u64 = 1 << 16;
        if Guards::of_kernel() == Guards::Unreadable {
            let swapped = |region: &&Region| {
                region.categories & (userfault::SWAPPED | userfault::PRESENT) == userfault::SWAPPED
            };
            let swapped = regions.iter().filter(swapped);
            let pages =
                swapped.flat_map(|region| (region.start..region.end).step_by(PAGE as usize));
            let guards = pages
                .take(READ_MAX as usize)
                .filter(|page| self.memory.read(*page, &mut [0]).is_err());
            return Ok(guards.map(|page| (page, page + PAGE)).collect());
        }
        let shown = |region: &&Region| region.categories & userfault::GUARD != 0;
        let private: Ranges = (regions.iter().filter(shown))
            .map(|region| (region.start, region.end))
            .collect();
        let shared = self.mappings.iter().filter(|mapping| {
            !mapping.is_private() && !matches!(mapping.backing, Backing::Kernel(_))
        });
        let shared = shared.map(|mapping| (mapping.start, mapping.end));
        Ok(private.or(&userfault::scan_guards(&self.pagemap, shared)?))
    }

    fn look_and_protect(&self) -> io::Result<Vec<Region>> {
        let unwatched = self.watch();
        let mut regions = userfault::scan(&self.pagemap, &userfault::looks(&self.mappings), true)?;
        // Writes to these ranges are not detected, so all pages count as written.
        let more = userfault::scan(&self.pagemap, &unwatched, false)?;
        regions.extend(more.into_iter().map(|region| Region {
            categories: region.categories | userfault::WRITTEN,
            ..region
        }));
        regions.sort_unstable_by_key(|region| region.start);
        Ok(regions)
    }

    /// Scans a stopped process, in which little has changed. Pages of `there` that were neither written nor dropped
    /// are returned separately and not scanned in detail, which would take milliseconds for large memory. New
    /// mappings are always scanned in detail.
    fn look_at_changes(&self, new: &Ranges, there: &Ranges) -> io::Result<(Vec<Region>, Ranges)> {
        /// Gap in bytes up to which one detailed scan takes no longer than two calls.
        const NEAR: u64 = 64 * PAGE;
        let looks = userfault::looks(&self.mappings);
        let (written, absent) = userfault::scan_changed(&self.pagemap, &looks)?;
        // A removed guard page leaves no page.
        let known = there.or(&self.guards);
        let of_files = looks.iter().filter(|look| look.files);
        let of_files: Ranges = of_files.map(|look| (look.start, look.end)).collect();
        // In file mappings, the file's page may have replaced the process's own, and the kernel reports it as not
        // written.
        let restored = there.and(&of_files);
        let changed = written.or(&absent.and(&known)).or(&restored);
        let unsure = changed.or(&self.owed).or(new);
        let mut closely = Ranges::default();
        let mut close_looks = Vec::new();
        for files in [true, false] {
            let alike = looks.iter().filter(|look| look.files == files);
            let alike: Ranges = alike.map(|look| (look.start, look.end)).collect();
            // The gap between two ranges may be of the other kind.
            let part = unsure.and(&alike).joined(NEAR).and(&alike);
            close_looks.extend(part.iter().map(|(start, end)| Look { start, end, files }));
            closely = closely.or(&part);
        }
        let regions = userfault::scan(&self.pagemap, &close_looks, false)?;
        Ok((regions, there.minus(&closely)))
    }

    /// Finds changed pages among the pages that the acceptor has, and protects them again. Mappings are not read:
    /// other changes come with the next full round.
    pub fn touch_up(&mut self, index: u32, round: &mut Round) {
        match userfault::scan_written(&self.pagemap, &userfault::looks(&self.mappings)) {
            Ok(written) => {
                let send = written.and(&self.sent);
                round.add(Space::Process(index), &send, Content::Bytes);
                self.owed = self.owed.or(&written.minus(&self.sent));
            }
            // The process has ended, or the set of protected pages is unknown, so all pages are sent again.
            Err(_) => self.owed = everything(),
        }
    }

    /// Watches all private mappings. Returns the mappings that the kernel cannot watch.
    fn watch(&self) -> Vec<Look> {
        let userfault = self.attachment.userfault.as_fd();
        let mut unwatched = Vec::new();
        for (start, end, mappings) in neighbourhoods(&self.mappings) {
            if userfault::watch(userfault, start, end).is_ok() {
                continue;
            }
            let refused = mappings
                .iter()
                .filter(|mapping| userfault::watch(userfault, mapping.start, mapping.end).is_err());
            unwatched.extend(refused.map(|mapping| Look {
                start: mapping.start,
                end: mapping.end,
                files: true,
            }));
        }
        unwatched
    }

    /// Marks the round as complete: the acceptor receives all of it.
    pub fn deliver(&mut self) {
        self.delivered.clone_from(&self.mappings);
        self.sent = std::mem::take(&mut self.next);
        self.owed = Ranges::default();
    }

    /// Leaves an unread run to the next round.
    pub fn give_up(&mut self, run: Run) {
        let part: Ranges = [(run.start, run.start + run.length)].into_iter().collect();
        match run.content {
            Content::Bytes => {
                self.sent = self.sent.minus(&part);
                self.owed = self.owed.or(&part);
            }
            Content::Fresh => self.sent = self.sent.or(&part),
        }
    }

    /// Reads a run. A run that has vanished is left to the next round.
    pub fn read(&mut self, run: Run, bytes: &mut [u8]) -> bool {
        if self.memory.read(run.start, bytes).is_ok() {
            return true;
        }
        self.give_up(run);
        false
    }
}

fn everything() -> Ranges {
    [(0, ADDRESS_END)].into_iter().collect()
}

/// Copies the advice of unchanged mappings. Returns false if there are other mappings.
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

/// Returns groups of private mappings with no other mapping between them, each with the range from the end of the
/// mapping before to the start of the mapping behind. The kernel splits a mapping at the end of a watched range, and
/// `mremap` fails on two mappings. The program may have changed its mappings since the list was made, but no private
/// mapping can reach over an end of such a range.
fn neighbourhoods(mappings: &[Mapping]) -> Vec<(u64, u64, &[Mapping])> {
    let mut found = Vec::new();
    let mut at = 0;
    for alike in mappings.chunk_by(|a, b| a.is_private() == b.is_private()) {
        let next = at + alike.len();
        if alike[0].is_private() {
            let start = at.checked_sub(1).map_or(0, |before| mappings[before].end);
            let end = mappings.get(next).map_or(ADDRESS_END, |next| next.start);
            found.push((start, end, alike));
        }
        at = next;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_watched_ends_where_no_mapping_can_reach_over() {
        let mapping = |start: u64, end: u64, shared| Mapping {
            start,
            end,
            protection: libc::PROT_READ,
            advice: 0,
            backing: match shared {
                true => Backing::Shared {
                    object: 0,
                    offset: 0,
                },
                false => Backing::Anonymous(Vec::new()),
            },
        };
        let mappings = [
            mapping(10, 20, false),
            mapping(30, 40, false),
            mapping(50, 60, true),
            mapping(70, 80, false),
        ];
        let found: Vec<(u64, u64, usize)> = neighbourhoods(&mappings)
            .into_iter()
            .map(|(start, end, alike)| (start, end, alike.len()))
            .collect();
        assert_eq!(found, [(0, 50, 2), (60, ADDRESS_END, 1)]);
    }
}
