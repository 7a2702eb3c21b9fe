//! The memory of a process that is watched.

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

/// How often mappings are looked at that are not what they were a moment ago.
const ATTEMPTS: usize = 50;

/// A process that has memory.
#[derive(Debug)]
pub(super) struct Watched {
    pub attachment: Attachment,
    /// Securebits of its first thread, when it was attached to.
    pub secure_bits: u32,
    pub memory: Memory,
    pub pagemap: File,
    lines: Vec<MapLine>,
    /// The lines as procfs wrote them, without advice: as long as it writes the same, `lines` and `mappings` are true.
    text: Vec<u8>,
    pub mappings: Vec<Mapping>,
    /// Guard pages, as of the last look at what is to be sent.
    pub guards: Ranges,
    /// What the acceptor has: mappings, and pages in one version or another.
    delivered: Vec<Mapping>,
    sent: Ranges,
    /// What it has after the round that is being made.
    next: Ranges,
    /// Pages that must be sent although the kernel no longer reports them as written: found by a round that was given up, not read, or
    /// protected again before they were sent.
    owed: Ranges,
}

/// Findings of a look at a process's memory.
#[derive(Debug)]
pub(super) struct Found {
    /// Where private mappings are.
    private: Ranges,
    /// Pages that the acceptor has, where the mapping is still the same.
    there: Ranges,
    /// Pages that were looked at closely.
    regions: Vec<Region>,
    /// Pages among `there` that have not changed.
    same: Ranges,
    guards: Ranges,
}

impl Watched {
    /// Of a process that stands still. What of it was sent is nothing yet.
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

    /// Whether the process has the memory that it had: not after `exec`.
    pub fn is_current(&self) -> bool {
        let first = userfault::Look {
            start: 0,
            end: PAGE,
            files: false,
        };
        userfault::scan(&self.pagemap, &[first], false).is_ok()
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
        for _ in 1..ATTEMPTS {
            match self.try_read_mappings(pid, advice, catalogue) {
                // What it maps was another thing when it was to be opened.
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

    /// Counts mappings of segments of System V, by their numbers.
    pub fn count_segments(&self, count: &mut HashMap<i32, u64>) {
        for part in attachments(&self.lines) {
            *count.entry(part.id).or_default() += part.mappings;
        }
    }

    /// Looks at a process that stands still where its mappings are what they were: nothing has to be entered for that, so that several
    /// threads can look at several processes.
    pub fn look_again(&self, pid: i32) -> Option<Found> {
        let text = procfs::read_bytes(pid, "maps").ok()?;
        let is_same = !text.is_empty() && text == self.text;
        is_same.then(|| self.look(false).ok()).flatten()
    }

    /// What [`Self::read_mappings`] checks where mappings are what they were.
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
            // Where nothing was mapped anew, every page that the acceptor lacks was written since it was protected, or is owed.
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

    /// Finds what the acceptor lacks, unless that was `found` already; with `protect` also protects it against unseen writes, which a
    /// process that stands still needs not: what it was found to have written counts as written until it is protected again.
    pub fn collect(
        &mut self,
        index: u32,
        protect: bool,
        found: Option<Found>,
        round: &mut Round,
    ) -> Result<()> {
        let found = found.map_or_else(|| self.look(protect), Ok);
        if found.is_err() {
            // Which pages were protected is not known.
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

    /// Guard pages: of private mappings from what was found there, of shared ones by another look.
    fn find_guards(&self, regions: &[Region]) -> io::Result<Ranges> {
        /// Most pages that are read to find those that cannot be.
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
        // Nothing tells what was written here: all of it counts.
        let more = userfault::scan(&self.pagemap, &unwatched, false)?;
        regions.extend(more.into_iter().map(|region| Region {
            categories: region.categories | userfault::WRITTEN,
            ..region
        }));
        regions.sort_unstable_by_key(|region| region.start);
        Ok(regions)
    }

    /// The same of a process that stands still, where little was changed: what was neither written nor dropped of the pages that
    /// are `there` is given apart, and not looked at closely, which in large memory takes milliseconds. What was mapped anew is
    /// looked at closely whatever the kernel tells of it.
    fn look_at_changes(&self, new: &Ranges, there: &Ranges) -> io::Result<(Vec<Region>, Ranges)> {
        /// Looking closely at so many bytes takes no longer than another call.
        const NEAR: u64 = 64 * PAGE;
        let looks = userfault::looks(&self.mappings);
        let (written, absent) = userfault::scan_changed(&self.pagemap, &looks)?;
        // Where a guard page was removed, there is nothing.
        let known = there.or(&self.guards);
        let of_files = looks.iter().filter(|look| look.files);
        let of_files: Ranges = of_files.map(|look| (look.start, look.end)).collect();
        // There a page of the process's own may have given way to the file's, which the kernel shows as not written, too.
        let restored = there.and(&of_files);
        let changed = written.or(&absent.and(&known)).or(&restored);
        let unsure = changed.or(&self.owed).or(new);
        let mut closely = Ranges::default();
        let mut close_looks = Vec::new();
        for files in [true, false] {
            let alike = looks.iter().filter(|look| look.files == files);
            let alike: Ranges = alike.map(|look| (look.start, look.end)).collect();
            // What lies between two of them may be of the other kind.
            let part = unsure.and(&alike).joined(NEAR).and(&alike);
            close_looks.extend(part.iter().map(|(start, end)| Look { start, end, files }));
            closely = closely.or(&part);
        }
        let regions = userfault::scan(&self.pagemap, &close_looks, false)?;
        Ok((regions, there.minus(&closely)))
    }

    /// Finds which pages that the acceptor has were changed, and protects them again. Mappings are not looked at: what else
    /// has changed comes with the next look at everything.
    pub fn touch_up(&mut self, index: u32, round: &mut Round) {
        match userfault::scan_written(&self.pagemap, &userfault::looks(&self.mappings)) {
            Ok(written) => {
                let send = written.and(&self.sent);
                round.add(Space::Process(index), &send, Content::Bytes);
                self.owed = self.owed.or(&written.minus(&self.sent));
            }
            // It has ended, or what of it was protected again is not known: all of it comes once more.
            Err(_) => self.owed = everything(),
        }
    }

    /// Has the kernel watch all private mappings; gives those that it cannot.
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

    /// The round is complete: the acceptor gets all of it.
    pub fn deliver(&mut self) {
        self.delivered.clone_from(&self.mappings);
        self.sent = std::mem::take(&mut self.next);
        self.owed = Ranges::default();
    }

    /// A run was not read: it comes with the next round.
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

    /// Reads a run; what is not there any more comes with the next round.
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

/// Private mappings with only private ones between them, from where the mapping before them ends to where the one behind them
/// begins. The kernel splits a mapping where what it is told to watch ends, and `mremap` fails on two: a program that has gone on
/// since the list was made may have other mappings now, but none that reaches over an end.
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
