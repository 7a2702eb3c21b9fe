//! Prediction of the freeze's result for the case that nothing is opened or closed until then, made while the tree
//! runs. Most descriptors are unchanged connections, which then cost only the comparison of two listings.

use super::{Draft, inet};
use crate::process::files::fdinfo::FdInfo;
use crate::process::files::image::{FileId, Kind, Slot, Watch};
use crate::process::files::kept::Kept;
use crate::process::files::listed::{self, Listed, Listing, More};
use crate::process::files::survey::{
    DescriptorSeen, Place, Pool, Survey, TableSeen, inner_pid, key,
};
use crate::process::files::watches::Watches;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Prediction of the freeze's result; the module documentation explains it.
#[derive(Debug)]
pub struct Prepared {
    expected: Arc<BTreeSet<FileId>>,
    processes: Vec<Process>,
    tables: Vec<Table>,
    open: Open,
    looks: Looks,
}

/// Open files of a tree: its descriptors, the same grouped by open file, and the numbers of the open files.
pub type Open = (Survey, Pool, Vec<FileId>);

/// A process with descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    pid: i32,
    inner: i32,
    table: u64,
}

/// A descriptor table.
#[derive(Debug)]
struct Table {
    number: u32,
    /// Index of the listing to compare, which is the listing of the table's first process.
    listing: usize,
    /// Known state of the descriptors, in the order of the table's descriptors.
    slots: Vec<Known>,
}

/// State known of a descriptor in addition to the listing.
#[derive(Clone, Copy, Debug)]
struct Known {
    class: usize,
    has_more: bool,
    /// Digest of an epoll set in the draft.
    watches: Option<Watches>,
}

impl Known {
    /// Returns true if the lines of `fdinfo` for the file's kind are unchanged.
    fn has_nothing_new(&self, now: &Listed) -> bool {
        let as_drafted = self.watches.is_some() && self.watches == now.watches;
        !now.has_more || as_drafted
    }
}

/// Open files that the freeze must read.
#[derive(Debug)]
struct Looks {
    /// True for each file that need not be read unless its flags or its watched files change.
    quiet: Vec<bool>,
    /// Indices of all other files.
    loud: Vec<usize>,
}

impl Prepared {
    /// Predicts the freeze's result; `None` if the open files differ from the draft's, or if the comparison is
    /// impossible.
    pub fn new(
        draft: &Draft,
        pids: &[i32],
        listings: Vec<Listing>,
        expected: &Arc<BTreeSet<FileId>>,
    ) -> Option<Self> {
        let processes: Option<Vec<_>> = listings.iter().map(Process::of).collect();
        let processes = processes.filter(|processes| is_of(processes, pids))?;
        let mut firsts: Vec<(usize, Vec<bool>)> = Vec::new();
        for (at, listing) in listings.iter().enumerate() {
            if firsts
                .iter()
                .all(|(first, _)| processes[*first].table != processes[at].table)
            {
                let more = listing.descriptors.iter().map(|one| one.has_more);
                firsts.push((at, more.collect()));
            }
        }
        let survey = listed::survey(pids, listings, &draft.kept).ok()?;
        let pool = Pool::new(&survey);
        let ids = ids(draft, &survey, &pool)?;
        let watches = watches(draft, &survey, &pool, &ids);
        let firsts = firsts.into_iter();
        let tables = firsts
            .map(|(at, more)| Table::of((&survey, &pool, &watches), (at, processes[at].pid), &more))
            .collect::<Option<_>>()?;
        Some(Self {
            expected: Arc::clone(expected),
            processes,
            tables,
            looks: Looks::of(draft, &pool, (&ids, &watches), expected),
            open: (survey, pool, ids),
        })
    }

    /// Returns true if the prediction was made for the same processes and expected sockets.
    pub fn is_for(&self, pids: &[i32], expected: &Arc<BTreeSet<FileId>>) -> bool {
        Arc::ptr_eq(&self.expected, expected) && is_of(&self.processes, pids)
    }

    /// Updates the prediction from a listing made since the tree was stopped. Returns false, and the prediction is
    /// unusable, if anything differs except positions, flags, and the lines of `fdinfo` for a file's kind.
    pub fn renew(&mut self, listings: &[Listing], kept: &Kept) -> bool {
        let now = listings.iter().map(Process::of);
        if !now.eq(self.processes.iter().map(|process| Some(*process))) {
            return false;
        }
        let (survey, pool, _) = &mut self.open;
        for table in &self.tables {
            let listed = &listings[table.listing].descriptors;
            let renewed = survey.get_mut(&table.number).and_then(|seen| {
                let changed = table.compare(&seen.descriptors, listed)?;
                table.renew((seen, pool, &mut self.looks), (listed, &changed), kept)
            });
            if renewed.is_none() {
                return false;
            }
        }
        self.looks.loud.sort_unstable();
        true
    }

    /// Takes out the open files; [`Self::give_back`] returns them.
    pub fn take(&mut self) -> Open {
        std::mem::take(&mut self.open)
    }

    /// Puts the open files back, so that they live as long as the prediction.
    pub fn give_back(&mut self, open: Open) {
        self.open = open;
    }

    /// Returns the indices of the open files that the freeze must read, in order.
    pub fn loud(&self) -> &[usize] {
        &self.looks.loud
    }
}

impl Process {
    /// Returns the process, or `None` if it has more than one descriptor table.
    fn of(listing: &Listing) -> Option<Self> {
        let table = listing.table.filter(|_| !listing.thread_tables)?;
        Some(Self {
            pid: listing.pid,
            inner: inner_pid(listing.pid)?,
            table,
        })
    }
}

fn is_of(processes: &[Process], pids: &[i32]) -> bool {
    processes
        .iter()
        .map(|process| process.pid)
        .eq(pids.iter().copied())
}

/// Returns the draft's numbers of all open files; `None` if the draft's descriptors differ from these in any way.
fn ids(draft: &Draft, survey: &Survey, pool: &Pool) -> Option<Vec<FileId>> {
    let mut ids: Vec<Option<FileId>> = vec![None; pool.classes.len()];
    let mut met = HashSet::new();
    for (number, seen) in survey {
        let table = draft.image.tables.get(number)?;
        let pids: BTreeSet<i32> = seen.holders.iter().map(|holder| holder.inner).collect();
        if table.pids != pids || table.slots.len() != seen.descriptors.len() {
            return None;
        }
        for one in &seen.descriptors {
            let (before, file) = draft.known.files.get(&(*number, one.number))?;
            let slot = Slot {
                file: *file,
                close_on_exec: one.info.close_on_exec,
            };
            let id = &mut ids[pool.at(*number, one.number)?];
            let is_same = id.map_or_else(|| met.insert(*file), |id| id == *file);
            *id = Some(*file);
            if !is_same || *before != key(&one.info) || table.slots.get(&one.number) != Some(&slot)
            {
                return None;
            }
        }
    }
    let all = draft.image.tables.len() == survey.len() && draft.image.files.len() == met.len();
    ids.into_iter().collect::<Option<_>>().filter(|_| all)
}

/// Returns the draft's digests of the epoll sets among the open files; `None` for a set that watches a file which no
/// process has open.
fn watches(draft: &Draft, survey: &Survey, pool: &Pool, ids: &[FileId]) -> Vec<Option<Watches>> {
    let set = |id: &FileId| match &draft.image.files.get(id)?.kind {
        Kind::Epoll { watches } => Some(watches),
        _ => None,
    };
    if ids.iter().all(|id| set(id).is_none()) {
        return vec![None; ids.len()];
    }
    let mut files = HashMap::new();
    for (number, seen) in survey {
        for one in &seen.descriptors {
            let class = pool.at(*number, one.number);
            files.extend(class.zip(one.file).map(|(class, file)| (ids[class], file)));
        }
    }
    let entry = |watch: &Watch| {
        let file = files.get(&watch.file)?;
        Some((*file, watch.fd, watch.events, watch.data))
    };
    let watches = |id| {
        let entries: Option<Vec<_>> = set(id)?.iter().map(entry).collect();
        entries.map(Watches::of)
    };
    ids.iter().map(watches).collect()
}

impl Table {
    fn of(
        (survey, pool, watches): (&Survey, &Pool, &[Option<Watches>]),
        (listing, pid): (usize, i32),
        more: &[bool],
    ) -> Option<Self> {
        let mut tables = survey.iter();
        let (number, seen) =
            tables.find(|(_, seen)| seen.holders.iter().any(|holder| holder.pid == pid))?;
        let slots = seen.descriptors.iter().zip(more).map(|(one, has_more)| {
            let class = pool.at(*number, one.number)?;
            Some(Known {
                class,
                has_more: *has_more,
                watches: watches[class],
            })
        });
        Some(Self {
            number: *number,
            listing,
            slots: slots.collect::<Option<_>>()?,
        })
    }

    /// Returns the indices of descriptors to update; `None` if a descriptor refers to another file than in the listing
    /// before.
    fn compare(&self, seen: &[DescriptorSeen], listed: &[Listed]) -> Option<Vec<usize>> {
        if listed.len() != seen.len() {
            return None;
        }
        let mut changed = Vec::new();
        for (at, ((before, now), known)) in seen.iter().zip(listed).zip(&self.slots).enumerate() {
            let (was, is) = (&before.info, &now.info);
            let same = before.number == now.number
                && before.file == Some(now.file)
                && known.has_more == now.has_more
                && (was.mount, was.inode, was.close_on_exec)
                    == (is.mount, is.inode, is.close_on_exec);
            if !same {
                return None;
            }
            let as_it_was = (was.flags, was.owned, was.offset) == (is.flags, is.owned, is.offset);
            if !(as_it_was && known.has_nothing_new(now)) {
                changed.push(at);
            }
        }
        Some(changed)
    }

    fn renew(
        &self,
        (seen, pool, looks): (&mut TableSeen, &mut Pool, &mut Looks),
        (listed, changed): (&[Listed], &[usize]),
        kept: &Kept,
    ) -> Option<()> {
        let mut more = More::new(seen.holders[0].pid, kept);
        for &at in changed {
            let (one, known) = (&mut seen.descriptors[at], self.slots[at]);
            let info = match known.has_more {
                true => FdInfo {
                    owned: listed[at].info.owned,
                    ..more.read(one.number).ok()?
                },
                false => listed[at].info.clone(),
            };
            // Only the lines of `fdinfo` distinguish one eventfd from another.
            if key(&info) != key(&one.info) {
                return None;
            }
            let class = &mut pool.classes[known.class];
            let shown = (class.info.flags, class.info.owned) == (info.flags, info.owned);
            let news = !shown || !known.has_nothing_new(&listed[at]);
            looks.note(known.class, news);
            if class.slots.first() == Some(&(self.number, one.number)) {
                class.info.clone_from(&info);
            } else {
                renew_shared(&mut class.info, &info);
            }
            one.info = info;
        }
        Some(())
    }
}

/// Copies the fields that all descriptors of an open file share.
fn renew_shared(info: &mut FdInfo, now: &FdInfo) {
    (info.flags, info.owned, info.offset) = (now.flags, now.owned, now.offset);
}

impl Looks {
    fn of(
        draft: &Draft,
        pool: &Pool,
        (ids, watches): (&[FileId], &[Option<Watches>]),
        expected: &BTreeSet<FileId>,
    ) -> Self {
        let known = ids.iter().zip(watches);
        let quiet = pool
            .classes
            .iter()
            .zip(known)
            .map(|(class, (id, watches))| {
                let (Some(before), &Place::Process(pid, fd)) =
                    (draft.image.files.get(id), &class.place)
                else {
                    return false;
                };
                let is_expected_socket = || {
                    expected.contains(id)
                        && draft.places.get(id) == Some(&(pid, fd))
                        && inet::is_unchanged(&class.info, before)
                };
                let is_plain_set = || {
                    let tells_nobody = before.owner.is_none() && !class.info.tells_somebody();
                    watches.is_some() && tells_nobody && before.locks.is_empty()
                };
                let as_drafted = class.listed && before.flags == class.info.flags;
                as_drafted && (is_expected_socket() || is_plain_set())
            });
        let quiet: Vec<bool> = quiet.collect();
        let loud = (0..quiet.len()).filter(|class| !quiet[*class]).collect();
        Self { quiet, loud }
    }

    fn note(&mut self, class: usize, news: bool) {
        if news && self.quiet[class] {
            self.quiet[class] = false;
            self.loud.push(class);
        }
    }
}
