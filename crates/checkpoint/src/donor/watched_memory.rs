//! Memory of a tracked process.

use super::halt::HaltedProcess;
use super::mapped_object_catalogue::MappedObjectCatalogue;
use super::precopy_round::PrecopyRound;
use super::tracker_attachment::{TrackerAttachment, read_own_mappings, without_stub};
use super::write_tracking::{self, GuardDetection, PageRegion, ScanRange};
use crate::address_ranges::AddressRanges;
use crate::error::{Context, Error, Result};
use crate::image::{
    ADDRESS_END, MappingBacking, MemoryMapping, MemorySpace, PAGE, PageContent, PageRun,
};
use crate::procfs::{self, MapLine, ProcStat};
use crate::system_v_memory::attachments;
use crate::trace::ProcessMemory;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;

/// Most attempts to read mappings that change meanwhile.
const ATTEMPTS: usize = 50;

/// A process that has memory, and so is no zombie.
#[derive(Debug)]
pub(super) struct WatchedMemory {
    pub attachment: TrackerAttachment,
    /// Securebits of the first thread, read when the tracker attached to the process.
    pub secure_bits: u32,
    pub memory: ProcessMemory,
    pub pagemap: File,
    layout: RandomLayout,
    map_lines: Vec<MapLine>,
    /// Content of `maps` for these lines, without advice: while procfs returns the same text, `lines` and `mappings`
    /// are valid.
    maps_text: Vec<u8>,
    pub mappings: Vec<MemoryMapping>,
    /// Guard pages as of the last scan.
    pub guards: AddressRanges,
    /// Mappings that the acceptor has, and pages that it may have, possibly in an older version.
    delivered: Vec<MemoryMapping>,
    sent_pages: AddressRanges,
    /// Pages that the acceptor has after the current round.
    round_pages: AddressRanges,
    /// Pages that must be sent although the kernel does not report them as written: a round found them and was given
    /// up, could not read them, or protected them before they were sent.
    pending_pages: AddressRanges,
}

/// Addresses that `exec` chooses at random, unless the process has no randomization.
#[derive(Debug, PartialEq, Eq)]
struct RandomLayout {
    stack: u64,
    arguments: u64,
}

impl RandomLayout {
    fn of(stat: &ProcStat) -> RandomLayout {
        /// Numbers of the fields `startstack` and `arg_start` (`proc_pid_stat(5)`).
        const START_STACK: usize = 28;
        const ARG_START: usize = 48;
        RandomLayout {
            stack: stat.field(START_STACK),
            arguments: stat.field(ARG_START),
        }
    }
}

/// Result of a scan of a process's memory.
#[derive(Debug)]
pub(super) struct MemoryScan {
    /// Ranges of private mappings.
    private: AddressRanges,
    /// Pages that the acceptor has, in mappings that have not changed.
    delivered: AddressRanges,
    /// Pages scanned in detail.
    regions: Vec<PageRegion>,
    /// Pages among `delivered` that have not changed.
    unchanged: AddressRanges,
    guards: AddressRanges,
}

impl WatchedMemory {
    /// Creates the record of a stopped process, of which nothing was sent yet.
    pub fn new(pid: i32, attachment: TrackerAttachment, secure_bits: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/pagemap");
        Ok(Self {
            attachment,
            secure_bits,
            memory: ProcessMemory::open(pid)?,
            pagemap: File::open(&path).context(|| path)?,
            layout: RandomLayout::of(&ProcStat::read(pid)?),
            map_lines: Vec::new(),
            maps_text: Vec::new(),
            mappings: Vec::new(),
            guards: AddressRanges::default(),
            delivered: Vec::new(),
            sent_pages: AddressRanges::default(),
            round_pages: AddressRanges::default(),
            pending_pages: AddressRanges::default(),
        })
    }

    /// Returns true if the process with this `stat` still has the same memory, which `exec` replaces.
    pub fn has_same_memory(&self, stat: &ProcStat) -> bool {
        if RandomLayout::of(stat) != self.layout {
            return false;
        }
        // Without randomization, the layout stays. Of memory that nobody has any more, some kernels report no pages, and
        // others an error.
        let first = write_tracking::ScanRange {
            start: 0,
            end: PAGE,
            has_files: false,
        };
        write_tracking::scan(&self.pagemap, &[first], false).is_ok()
    }

    /// Unmaps the stub from a stopped process.
    pub fn remove_stub(&self, halted: &HaltedProcess) -> Result<()> {
        let lines = read_own_mappings(halted.pid, None, false)?;
        if !self.attachment.has_stub(&lines) {
            return Ok(());
        }
        self.attachment.remove_stub(halted, &lines)
    }

    /// Reads the mappings; with `advice` also their advice.
    pub fn read_mappings(
        &mut self,
        pid: i32,
        advice: bool,
        catalogue: &mut MappedObjectCatalogue,
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
        catalogue: &mut MappedObjectCatalogue,
    ) -> Result<()> {
        let known = if advice {
            None
        } else {
            let text = procfs::read_bytes(pid, "maps")?;
            if !text.is_empty() && text == self.maps_text {
                return catalogue.check_segments(pid, &self.map_lines);
            }
            let (text, lines) = procfs::parse_mappings(pid, "maps", text)?;
            let mut lines = without_stub(lines, Some(&self.attachment))?;
            copy_advice(&self.map_lines, &mut lines).then_some((text, lines))
        };
        let (text, lines) = match known {
            Some(known) => known,
            None => {
                let (text, lines) = procfs::read_mappings(pid, "smaps")?;
                let lines = without_stub(lines, Some(&self.attachment))?;
                (procfs::smaps_to_maps(&text), lines)
            }
        };
        catalogue.add_written_files(pid, &lines)?;
        let mut mappings = Vec::with_capacity(lines.len());
        for line in &lines {
            mappings.extend(catalogue.mapping(pid, line)?);
        }
        catalogue.check_segments(pid, &lines)?;
        self.map_lines = lines;
        self.maps_text = text;
        self.mappings = mappings;
        Ok(())
    }

    /// Counts the mappings of System V segments, by segment ID.
    pub fn count_segments(&self, count: &mut HashMap<i32, u64>) {
        for part in attachments(&self.map_lines) {
            *count.entry(part.id).or_default() += part.mappings;
        }
    }

    /// Scans a stopped process if its mappings have not changed. The catalogue stays unchanged, so several threads
    /// can scan several processes.
    pub fn scan_unchanged_mappings(&self, pid: i32) -> Option<MemoryScan> {
        let text = procfs::read_bytes(pid, "maps").ok()?;
        let is_same = !text.is_empty() && text == self.maps_text;
        is_same.then(|| self.scan(false).ok()).flatten()
    }

    /// Makes the check of [`Self::read_mappings`] for mappings that have not changed.
    pub fn check_segments(&self, pid: i32, catalogue: &MappedObjectCatalogue) -> Result<()> {
        catalogue.check_segments(pid, &self.map_lines)
    }

    fn scan(&self, protect: bool) -> io::Result<MemoryScan> {
        let private: AddressRanges = (self.mappings.iter())
            .filter(|mapping| mapping.is_private())
            .map(|mapping| (mapping.start, mapping.end))
            .collect();
        let stable = MemoryMapping::stable_ranges(&self.delivered, &self.mappings);
        let delivered = self.sent_pages.intersection(&stable);
        let (regions, unchanged) = match protect {
            true => (self.scan_and_protect()?, AddressRanges::default()),
            // In unchanged mappings, every page that the acceptor lacks was written since it was protected, or is
            // owed.
            false => self.scan_changes(&private.difference(&stable), &delivered)?,
        };
        let guards = self.find_guards(&regions)?;
        Ok(MemoryScan {
            private,
            delivered,
            regions,
            unchanged,
            guards,
        })
    }

    /// Determines the pages that the acceptor lacks, by a scan unless `found` is given. With `protect`, the scan also
    /// write-protects pages to detect later writes. A stopped process does not need that: pages once reported as
    /// written stay so until they are protected again.
    pub fn collect_changes(
        &mut self,
        index: u32,
        protect: bool,
        found: Option<MemoryScan>,
        round: &mut PrecopyRound,
    ) -> Result<()> {
        let found = found.map_or_else(|| self.scan(protect), Ok);
        if found.is_err() {
            // The set of pages that were protected is unknown.
            self.pending_pages = all_addresses();
        }
        let scanning = || "PAGEMAP_SCAN (requires Linux 6.7)".to_owned();
        let MemoryScan {
            private,
            delivered,
            regions,
            unchanged,
            guards,
        } = found.context(scanning)?;
        self.guards = guards;
        let is_private_page = |region: &&write_tracking::PageRegion| {
            region.categories & (write_tracking::PAGE_IS_FILE | write_tracking::PAGE_IS_PFNZERO)
                == 0
        };
        let present: AddressRanges = regions
            .iter()
            .filter(is_private_page)
            .map(|region| (region.start, region.end))
            .collect();
        let written = |region: &&write_tracking::PageRegion| {
            region.categories & write_tracking::PAGE_IS_WRITTEN != 0
        };
        let written: AddressRanges = regions
            .iter()
            .filter(is_private_page)
            .filter(written)
            .map(|region| (region.start, region.end))
            .collect();
        let here = present
            .union_with(&unchanged)
            .intersection(&private)
            .difference(&self.guards);
        let written = written.union_with(&self.pending_pages).intersection(&here);
        let send = written.union_with(&here.difference(&delivered));
        let vanished = delivered.difference(&here);
        let space = MemorySpace::Process(index);
        round.add(space, &vanished, PageContent::Initial);
        round.add(space, &send, PageContent::Bytes);
        self.pending_pages = send;
        self.round_pages = here;
        Ok(())
    }

    /// Returns guard pages: of private mappings from the scanned regions, of shared mappings by another scan.
    fn find_guards(&self, regions: &[PageRegion]) -> io::Result<AddressRanges> {
        /// Most pages to read in the search for unreadable ones.
        const READ_MAX: u64 = 1 << 16;
        if GuardDetection::detect() == GuardDetection::ReadFailure {
            let swapped = |region: &&PageRegion| {
                region.categories
                    & (write_tracking::PAGE_IS_SWAPPED | write_tracking::PAGE_IS_PRESENT)
                    == write_tracking::PAGE_IS_SWAPPED
            };
            let swapped = regions.iter().filter(swapped);
            let pages =
                swapped.flat_map(|region| (region.start..region.end).step_by(PAGE as usize));
            let guards = pages
                .take(READ_MAX as usize)
                .filter(|page| self.memory.read(*page, &mut [0]).is_err());
            return Ok(guards.map(|page| (page, page + PAGE)).collect());
        }
        let is_reported =
            |region: &&PageRegion| region.categories & write_tracking::PAGE_IS_GUARD != 0;
        let private: AddressRanges = (regions.iter().filter(is_reported))
            .map(|region| (region.start, region.end))
            .collect();
        let shared = self.mappings.iter().filter(|mapping| {
            !mapping.is_private() && !matches!(mapping.backing, MappingBacking::Kernel(_))
        });
        let shared = shared.map(|mapping| (mapping.start, mapping.end));
        Ok(private.union_with(&write_tracking::scan_guards(&self.pagemap, shared)?))
    }

    fn scan_and_protect(&self) -> io::Result<Vec<PageRegion>> {
        let unwatched = self.watch_private_mappings();
        let mut regions = write_tracking::scan(
            &self.pagemap,
            &write_tracking::scan_ranges(&self.mappings),
            true,
        )?;
        // Writes to these ranges are not detected, so all pages count as written.
        let unwatched_regions = write_tracking::scan(&self.pagemap, &unwatched, false)?;
        regions.extend(unwatched_regions.into_iter().map(|region| PageRegion {
            categories: region.categories | write_tracking::PAGE_IS_WRITTEN,
            ..region
        }));
        regions.sort_unstable_by_key(|region| region.start);
        Ok(regions)
    }

    /// Scans a stopped process, in which little has changed. Pages of `delivered` that were neither written nor dropped
    /// are returned separately and not scanned in detail, which would take milliseconds for large memory. New
    /// mappings are always scanned in detail.
    fn scan_changes(
        &self,
        new: &AddressRanges,
        delivered: &AddressRanges,
    ) -> io::Result<(Vec<PageRegion>, AddressRanges)> {
        /// Gap in bytes up to which one detailed scan takes no longer than two calls.
        const JOIN_GAP: u64 = 64 * PAGE;
        let ranges = write_tracking::scan_ranges(&self.mappings);
        let (written, absent) = write_tracking::scan_changed(&self.pagemap, &ranges)?;
        // A removed guard page leaves no page.
        let known = delivered.union_with(&self.guards);
        let file_ranges = ranges.iter().filter(|range| range.has_files);
        let of_files: AddressRanges = file_ranges.map(|range| (range.start, range.end)).collect();
        // In file mappings, the file's page may have replaced the process's own, and the kernel reports it as not
        // written.
        let restored = delivered.intersection(&of_files);
        let changed = written
            .union_with(&absent.intersection(&known))
            .union_with(&restored);
        let unsure = changed.union_with(&self.pending_pages).union_with(new);
        let mut detailed = AddressRanges::default();
        let mut detailed_ranges = Vec::new();
        for files in [true, false] {
            let same_kind = ranges.iter().filter(|range| range.has_files == files);
            let same_kind: AddressRanges =
                same_kind.map(|range| (range.start, range.end)).collect();
            // The gap between two ranges may be of the other kind.
            let part = unsure
                .intersection(&same_kind)
                .merge_gaps(JOIN_GAP)
                .intersection(&same_kind);
            detailed_ranges.extend(part.iter().map(|(start, end)| ScanRange {
                start,
                end,
                has_files: files,
            }));
            detailed = detailed.union_with(&part);
        }
        let regions = write_tracking::scan(&self.pagemap, &detailed_ranges, false)?;
        Ok((regions, delivered.difference(&detailed)))
    }

    /// Finds changed pages among the pages that the acceptor has, and protects them again. Mappings are not read:
    /// other changes come with the next full round.
    pub fn scan_delivered_pages(&mut self, index: u32, round: &mut PrecopyRound) {
        match write_tracking::scan_written(
            &self.pagemap,
            &write_tracking::scan_ranges(&self.mappings),
        ) {
            Ok(written) => {
                let send = written.intersection(&self.sent_pages);
                round.add(MemorySpace::Process(index), &send, PageContent::Bytes);
                self.pending_pages = self
                    .pending_pages
                    .union_with(&written.difference(&self.sent_pages));
            }
            // The process has ended, or the set of protected pages is unknown, so all pages are sent again.
            Err(_) => self.pending_pages = all_addresses(),
        }
    }

    /// Watches all private mappings. Returns the mappings that the kernel cannot watch.
    fn watch_private_mappings(&self) -> Vec<ScanRange> {
        let userfault = self.attachment.userfault.as_fd();
        let mut unwatched = Vec::new();
        for (start, end, mappings) in private_neighbours(&self.mappings) {
            if write_tracking::watch_range(userfault, start, end).is_ok() {
                continue;
            }
            let refused = mappings.iter().filter(|mapping| {
                write_tracking::watch_range(userfault, mapping.start, mapping.end).is_err()
            });
            unwatched.extend(refused.map(|mapping| ScanRange {
                start: mapping.start,
                end: mapping.end,
                has_files: true,
            }));
        }
        unwatched
    }

    /// Marks the round as complete: the acceptor receives all of it.
    pub fn mark_delivered(&mut self) {
        self.delivered.clone_from(&self.mappings);
        self.sent_pages = std::mem::take(&mut self.round_pages);
        self.pending_pages = AddressRanges::default();
    }

    /// Leaves an unread run to the next round. The acceptor may have its pages in an older version: if they are gone by
    /// then, it must drop them.
    pub fn return_run(&mut self, run: PageRun) {
        let part: AddressRanges = [(run.start, run.start + run.length)].into_iter().collect();
        self.sent_pages = self.sent_pages.union_with(&part);
        if run.content == PageContent::Bytes {
            self.pending_pages = self.pending_pages.union_with(&part);
        }
    }

    /// Reads a run. A run that has vanished is left to the next round.
    pub fn read(&mut self, run: PageRun, bytes: &mut [u8]) -> bool {
        if self.memory.read(run.start, bytes).is_ok() {
            return true;
        }
        self.return_run(run);
        false
    }
}

fn all_addresses() -> AddressRanges {
    [(0, ADDRESS_END)].into_iter().collect()
}

/// Copies the advice of unchanged mappings. Returns false if there are other mappings.
fn copy_advice(before: &[MapLine], lines: &mut [MapLine]) -> bool {
    let known: HashMap<(u64, u64), &MapLine> = before
        .iter()
        .map(|line| ((line.start, line.end), line))
        .collect();
    lines.iter_mut().all(|line| {
        let old = known.get(&(line.start, line.end));
        let unchanged = old.filter(|old| {
            line.vm_flags = old.vm_flags;
            **old == line
        });
        unchanged.is_some()
    })
}

/// Returns groups of private mappings with no other mapping between them, each with the range from the end of the
/// mapping before to the start of the mapping behind. The kernel splits a mapping at the end of a watched range, and
/// `mremap` fails on two mappings. The program may have changed its mappings since the list was made, but no private
/// mapping can reach over an end of such a range.
fn private_neighbours(mappings: &[MemoryMapping]) -> Vec<(u64, u64, &[MemoryMapping])> {
    let mut found = Vec::new();
    let mut at = 0;
    for same_kind in mappings.chunk_by(|a, b| a.is_private() == b.is_private()) {
        let next = at + same_kind.len();
        if same_kind[0].is_private() {
            let start = at.checked_sub(1).map_or(0, |before| mappings[before].end);
            let end = mappings.get(next).map_or(ADDRESS_END, |next| next.start);
            found.push((start, end, same_kind));
        }
        at = next;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watched_range_ends_at_non_private_mapping() {
        let mapping = |start: u64, end: u64, shared| MemoryMapping {
            start,
            end,
            protection: libc::PROT_READ,
            advice: 0,
            backing: match shared {
                true => MappingBacking::Shared {
                    object: 0,
                    offset: 0,
                },
                false => MappingBacking::Anonymous(Vec::new()),
            },
        };
        let mappings = [
            mapping(10, 20, false),
            mapping(30, 40, false),
            mapping(50, 60, true),
            mapping(70, 80, false),
        ];
        let found: Vec<(u64, u64, usize)> = private_neighbours(&mappings)
            .into_iter()
            .map(|(start, end, alike)| (start, end, alike.len()))
            .collect();
        assert_eq!(found, [(0, 50, 2), (60, ADDRESS_END, 1)]);
    }
}
