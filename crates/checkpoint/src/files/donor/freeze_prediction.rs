//! Prediction of the freeze's result for the case that nothing is opened or closed until then, made while the tree
//! runs. Most descriptors are unchanged connections, which then cost only the comparison of two listings.

use super::{FilesSnapshot, inet_sockets};
use crate::files::descriptor_listings::{self, DescriptorListing, DetailReader, ListedDescriptor};
use crate::files::descriptor_survey::{
    DescriptorSurvey, FdSource, ScannedDescriptor, ScannedDescriptorTable, SurveyedOpenFiles,
    file_key, live_inner_pid,
};
use crate::files::epoll_digest::EpollDigest;
use crate::files::fdinfo::FdInfo;
use crate::files::fdinfo_cache::FdInfoCache;
use crate::files::image::{DescriptorSlot, EpollWatch, FileId, OpenFileKind};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Prediction of the freeze's result; the module documentation explains it.
#[derive(Debug)]
pub struct FreezePrediction {
    expected: Arc<BTreeSet<FileId>>,
    processes: Vec<PredictedProcess>,
    tables: Vec<PredictedTable>,
    open_files: GroupedFiles,
    reads: RequiredReads,
}

/// Open files of a tree: its descriptors, the same grouped by open file, and the numbers of the open files.
pub type GroupedFiles = (DescriptorSurvey, SurveyedOpenFiles, Vec<FileId>);

/// A process with descriptors, as predicted for the freeze.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PredictedProcess {
    pid: i32,
    inner_pid: i32,
    table: u64,
}

/// A descriptor table, as predicted for the freeze.
#[derive(Debug)]
struct PredictedTable {
    number: u32,
    /// Index of the listing to compare, which is the listing of the table's first process.
    listing: usize,
    /// Known state of the descriptors, in the order of the table's descriptors.
    slots: Vec<PredictedSlot>,
}

/// State known of a descriptor in addition to the listing.
#[derive(Clone, Copy, Debug)]
struct PredictedSlot {
    open_file_index: usize,
    has_extra_lines: bool,
    /// Digest of an epoll set in the files snapshot.
    epoll_digest: Option<EpollDigest>,
}

impl PredictedSlot {
    /// Returns true if the lines of `fdinfo` for the file's kind are unchanged.
    fn has_same_extra_lines(&self, now: &ListedDescriptor) -> bool {
        let has_snapshot_watches =
            self.epoll_digest.is_some() && self.epoll_digest == now.epoll_digest;
        !now.has_extra_lines || has_snapshot_watches
    }
}

/// Open files that the freeze must read.
#[derive(Debug)]
struct RequiredReads {
    /// True for each file that need not be read unless its flags or its watched files change.
    skippable: Vec<bool>,
    /// Indices of all other files.
    required: Vec<usize>,
}

impl FreezePrediction {
    /// Predicts the freeze's result; `None` if the open files differ from the files snapshot's, or if the comparison is
    /// impossible.
    pub fn new(
        snapshot: &FilesSnapshot,
        pids: &[i32],
        listings: Vec<DescriptorListing>,
        expected: &Arc<BTreeSet<FileId>>,
    ) -> Option<Self> {
        let processes: Option<Vec<_>> = listings
            .iter()
            .map(PredictedProcess::from_listing)
            .collect();
        let processes = processes.filter(|processes| are_processes_of(processes, pids))?;
        let mut firsts: Vec<(usize, Vec<bool>)> = Vec::new();
        for (at, listing) in listings.iter().enumerate() {
            if firsts
                .iter()
                .all(|(first, _)| processes[*first].table != processes[at].table)
            {
                let more = listing.descriptors.iter().map(|one| one.has_extra_lines);
                firsts.push((at, more.collect()));
            }
        }
        let survey =
            descriptor_listings::survey_from_listings(pids, listings, &snapshot.fdinfo_cache)
                .ok()?;
        let open_files = SurveyedOpenFiles::new(&survey);
        let ids = matching_ids(snapshot, &survey, &open_files)?;
        let watches = expected_digests(snapshot, &survey, &open_files, &ids);
        let firsts = firsts.into_iter();
        let tables = firsts
            .map(|(at, more)| {
                PredictedTable::new(
                    (&survey, &open_files, &watches),
                    (at, processes[at].pid),
                    &more,
                )
            })
            .collect::<Option<_>>()?;
        Some(Self {
            expected: Arc::clone(expected),
            processes,
            tables,
            reads: RequiredReads::new(snapshot, &open_files, (&ids, &watches), expected),
            open_files: (survey, open_files, ids),
        })
    }

    /// Returns true if the prediction was made for the same processes and expected sockets.
    pub fn covers(&self, pids: &[i32], expected: &Arc<BTreeSet<FileId>>) -> bool {
        Arc::ptr_eq(&self.expected, expected) && are_processes_of(&self.processes, pids)
    }

    /// Updates the prediction from a listing made since the tree was stopped. Returns false, and the prediction is
    /// unusable, if anything differs except positions, flags, and the lines of `fdinfo` for a file's kind.
    pub fn update(&mut self, listings: &[DescriptorListing], kept: &FdInfoCache) -> bool {
        let current = listings.iter().map(PredictedProcess::from_listing);
        if !current.eq(self.processes.iter().map(|process| Some(*process))) {
            return false;
        }
        let (survey, open_files, _) = &mut self.open_files;
        for table in &self.tables {
            let listed = &listings[table.listing].descriptors;
            let renewed = survey.get_mut(&table.number).and_then(|seen| {
                let changed = table.compare(&seen.descriptors, listed)?;
                table.update(
                    (seen, open_files, &mut self.reads),
                    (listed, &changed),
                    kept,
                )
            });
            if renewed.is_none() {
                return false;
            }
        }
        self.reads.required.sort_unstable();
        true
    }

    /// Takes out the open files; [`Self::put_back`] returns them.
    pub fn take_open_files(&mut self) -> GroupedFiles {
        std::mem::take(&mut self.open_files)
    }

    /// Puts the open files back, so that they live as long as the prediction.
    pub fn put_back(&mut self, open: GroupedFiles) {
        self.open_files = open;
    }

    /// Returns the indices of the open files that the freeze must read, in order.
    pub fn required_reads(&self) -> &[usize] {
        &self.reads.required
    }
}

impl PredictedProcess {
    /// Returns the process, or `None` if it has more than one descriptor table.
    fn from_listing(listing: &DescriptorListing) -> Option<Self> {
        let table = listing.table.filter(|_| !listing.thread_tables)?;
        Some(Self {
            pid: listing.pid,
            inner_pid: live_inner_pid(listing.pid)?,
            table,
        })
    }
}

fn are_processes_of(processes: &[PredictedProcess], pids: &[i32]) -> bool {
    processes
        .iter()
        .map(|process| process.pid)
        .eq(pids.iter().copied())
}

/// Returns the files snapshot's numbers of all open files; `None` if the files snapshot's descriptors differ from these in any way.
fn matching_ids(
    snapshot: &FilesSnapshot,
    survey: &DescriptorSurvey,
    open_files: &SurveyedOpenFiles,
) -> Option<Vec<FileId>> {
    let mut ids: Vec<Option<FileId>> = vec![None; open_files.list.len()];
    let mut seen_pids = HashSet::new();
    for (number, seen) in survey {
        let table = snapshot.image.tables.get(number)?;
        let pids: BTreeSet<i32> = seen.holders.iter().map(|holder| holder.inner_pid).collect();
        if table.pids != pids || table.slots.len() != seen.descriptors.len() {
            return None;
        }
        for descriptor in &seen.descriptors {
            let (before, file) = snapshot.numbers.files.get(&(*number, descriptor.number))?;
            let slot = DescriptorSlot {
                file: *file,
                close_on_exec: descriptor.info.close_on_exec,
            };
            let id = &mut ids[open_files.index_at(*number, descriptor.number)?];
            let is_same = id.map_or_else(|| seen_pids.insert(*file), |id| id == *file);
            *id = Some(*file);
            if !is_same
                || *before != file_key(&descriptor.info)
                || table.slots.get(&descriptor.number) != Some(&slot)
            {
                return None;
            }
        }
    }
    let is_complete = snapshot.image.tables.len() == survey.len()
        && snapshot.image.files.len() == seen_pids.len();
    ids.into_iter()
        .collect::<Option<_>>()
        .filter(|_| is_complete)
}

/// Returns the files snapshot's digests of the epoll sets among the open files; `None` for a set that watches a file which no
/// process has open.
fn expected_digests(
    snapshot: &FilesSnapshot,
    survey: &DescriptorSurvey,
    open_files: &SurveyedOpenFiles,
    ids: &[FileId],
) -> Vec<Option<EpollDigest>> {
    let watches_of = |id: &FileId| match &snapshot.image.files.get(id)?.kind {
        OpenFileKind::Epoll { watches } => Some(watches),
        _ => None,
    };
    if ids.iter().all(|id| watches_of(id).is_none()) {
        return vec![None; ids.len()];
    }
    let mut files = HashMap::new();
    for (number, seen) in survey {
        for descriptor in &seen.descriptors {
            let index = open_files.index_at(*number, descriptor.number);
            files.extend(
                index
                    .zip(descriptor.file_identity)
                    .map(|(index, file)| (ids[index], file)),
            );
        }
    }
    let entry = |watch: &EpollWatch| {
        let file = files.get(&watch.file)?;
        Some((*file, watch.fd, watch.events, watch.data))
    };
    let watches = |id| {
        let entries: Option<Vec<_>> = watches_of(id)?.iter().map(entry).collect();
        entries.map(EpollDigest::from_entries)
    };
    ids.iter().map(watches).collect()
}

impl PredictedTable {
    fn new(
        (survey, open_files, watches): (
            &DescriptorSurvey,
            &SurveyedOpenFiles,
            &[Option<EpollDigest>],
        ),
        (listing, pid): (usize, i32),
        extra_lines: &[bool],
    ) -> Option<Self> {
        let mut tables = survey.iter();
        let (number, seen) =
            tables.find(|(_, seen)| seen.holders.iter().any(|holder| holder.pid == pid))?;
        let slots = seen
            .descriptors
            .iter()
            .zip(extra_lines)
            .map(|(one, has_more)| {
                let index = open_files.index_at(*number, one.number)?;
                Some(PredictedSlot {
                    open_file_index: index,
                    has_extra_lines: *has_more,
                    epoll_digest: watches[index],
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
    fn compare(
        &self,
        seen: &[ScannedDescriptor],
        listed: &[ListedDescriptor],
    ) -> Option<Vec<usize>> {
        if listed.len() != seen.len() {
            return None;
        }
        let mut changed = Vec::new();
        for (at, ((before, now), known)) in seen.iter().zip(listed).zip(&self.slots).enumerate() {
            let (was, is) = (&before.info, &now.info);
            let is_same_file = before.number == now.number
                && before.file_identity == Some(now.file)
                && known.has_extra_lines == now.has_extra_lines
                && (was.mount, was.inode, was.close_on_exec)
                    == (is.mount, is.inode, is.close_on_exec);
            if !is_same_file {
                return None;
            }
            let is_unchanged =
                (was.flags, was.has_owner, was.offset) == (is.flags, is.has_owner, is.offset);
            if !(is_unchanged && known.has_same_extra_lines(now)) {
                changed.push(at);
            }
        }
        Some(changed)
    }

    fn update(
        &self,
        (seen, open_files, required_reads): (
            &mut ScannedDescriptorTable,
            &mut SurveyedOpenFiles,
            &mut RequiredReads,
        ),
        (listed, changed): (&[ListedDescriptor], &[usize]),
        fdinfo_cache: &FdInfoCache,
    ) -> Option<()> {
        let mut details = DetailReader::new(seen.holders[0].pid, fdinfo_cache);
        for &at in changed {
            let (one, known) = (&mut seen.descriptors[at], self.slots[at]);
            let info = match known.has_extra_lines {
                true => FdInfo {
                    has_owner: listed[at].info.has_owner,
                    ..details.read(one.number).ok()?
                },
                false => listed[at].info.clone(),
            };
            // Only the lines of `fdinfo` distinguish one eventfd from another.
            if file_key(&info) != file_key(&one.info) {
                return None;
            }
            let open_file = &mut open_files.list[known.open_file_index];
            let shown =
                (open_file.info.flags, open_file.info.has_owner) == (info.flags, info.has_owner);
            let has_news = !shown || !known.has_same_extra_lines(&listed[at]);
            required_reads.set_required(known.open_file_index, has_news);
            if open_file.slots.first() == Some(&(self.number, one.number)) {
                open_file.info.clone_from(&info);
            } else {
                copy_shared_fields(&mut open_file.info, &info);
            }
            one.info = info;
        }
        Some(())
    }
}

/// Copies the fields that all descriptors of an open file share.
fn copy_shared_fields(info: &mut FdInfo, now: &FdInfo) {
    (info.flags, info.has_owner, info.offset) = (now.flags, now.has_owner, now.offset);
}

impl RequiredReads {
    fn new(
        snapshot: &FilesSnapshot,
        open_files: &SurveyedOpenFiles,
        (ids, watches): (&[FileId], &[Option<EpollDigest>]),
        expected: &BTreeSet<FileId>,
    ) -> Self {
        let known = ids.iter().zip(watches);
        let quiet = open_files
            .list
            .iter()
            .zip(known)
            .map(|(open_file, (id, watches))| {
                let (Some(before), &FdSource::Process(pid, fd)) =
                    (snapshot.image.files.get(id), &open_file.source)
                else {
                    return false;
                };
                let is_expected_socket = || {
                    expected.contains(id)
                        && snapshot.socket_fds.get(id) == Some(&(pid, fd))
                        && inet_sockets::is_unchanged(&open_file.info, before)
                };
                let is_plain_set = || {
                    let sends_no_signals =
                        before.owner.is_none() && !open_file.info.has_signal_receiver();
                    watches.is_some() && sends_no_signals && before.locks.is_empty()
                };
                let is_as_in_snapshot =
                    open_file.has_identity && before.flags == open_file.info.flags;
                is_as_in_snapshot && (is_expected_socket() || is_plain_set())
            });
        let quiet: Vec<bool> = quiet.collect();
        let loud = (0..quiet.len()).filter(|index| !quiet[*index]).collect();
        Self {
            skippable: quiet,
            required: loud,
        }
    }

    fn set_required(&mut self, index: usize, news: bool) {
        if news && self.skippable[index] {
            self.skippable[index] = false;
            self.required.push(index);
        }
    }
}
