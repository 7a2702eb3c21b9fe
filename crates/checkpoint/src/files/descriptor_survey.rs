//! Survey of the descriptors of a tree, and of descriptors that refer to the same open file.

use super::error::{BlockReason, DescriptorBlocker, FilesError, StepContext};
use super::fdinfo::FdInfo;
use super::syscalls::{self, Ordering};
use crate::procfs::ProcStat;
use rustix::fs::{Mode, OFlags, RawDir, openat};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};

/// A process and its descriptor table.
#[derive(Clone, Debug)]
pub struct DescriptorTableHolder {
    /// PID as the caller sees it.
    pub pid: i32,
    /// PID as the process itself sees it.
    pub inner_pid: i32,
}

/// A descriptor table.
#[derive(Debug)]
pub struct ScannedDescriptorTable {
    /// Processes that have the table; the first is queried for its content.
    pub holders: Vec<DescriptorTableHolder>,
    /// Descriptors in the order of their numbers.
    pub descriptors: Vec<ScannedDescriptor>,
}

/// A descriptor of a table.
#[derive(Debug)]
pub struct ScannedDescriptor {
    /// Descriptor number.
    pub number: u32,
    /// Fields of `fdinfo`.
    pub info: FdInfo,
    /// Identity of the open file, if known without comparing files.
    pub file_identity: Option<u64>,
}

/// The descriptor tables of a tree, by the lowest inner PID that has each table.
pub type DescriptorSurvey = BTreeMap<u32, ScannedDescriptorTable>;

/// Reads all descriptors of `pids`. Zombies have none.
///
/// # Errors
/// [`FilesError::Blocked`] for a thread with a table of its own; [`FilesError::Kernel`].
pub fn survey_descriptors(pids: &[i32]) -> Result<DescriptorSurvey, FilesError> {
    let mut tables: Vec<Vec<DescriptorTableHolder>> = Vec::new();
    for &pid in pids {
        let Some(inner) = live_inner_pid(pid) else {
            continue;
        };
        match check_threads(pid) {
            Err(_) if live_inner_pid(pid).is_none() => continue,
            other => other?,
        }
        let holder = DescriptorTableHolder {
            pid,
            inner_pid: inner,
        };
        let found = tables.binary_search_by(|table| {
            syscalls::compare_tables(table[0].pid, pid).unwrap_or(Ordering::Less)
        });
        match found {
            Ok(at) => tables[at].push(holder),
            Err(at) => tables.insert(at, vec![holder]),
        }
    }
    let mut survey = DescriptorSurvey::new();
    for mut holders in tables {
        holders.sort_by_key(|holder| holder.inner_pid);
        let Some(descriptors) = descriptors_of(&mut holders)? else {
            continue;
        };
        let table = ScannedDescriptorTable {
            descriptors,
            holders,
        };
        survey.insert(table.holders[0].inner_pid as u32, table);
    }
    Ok(survey)
}

/// Reads the descriptors of processes that share a table; processes that have ended meanwhile are removed from
/// `holders`.
fn descriptors_of(
    holders: &mut Vec<DescriptorTableHolder>,
) -> Result<Option<Vec<ScannedDescriptor>>, FilesError> {
    while let Some(first) = holders.first() {
        match read_descriptors(first.pid) {
            Err(_) if live_inner_pid(first.pid).is_none() => drop(holders.remove(0)),
            found => return found.map(Some),
        }
    }
    Ok(None)
}

/// Returns, for each process, the index of the first process with the same descriptor table, or `None` for that first
/// process.
pub(crate) fn shared_tables(pids: &[i32]) -> Vec<Option<usize>> {
    let mut tables: Vec<usize> = Vec::new();
    let first_with_same_table = |at: usize| {
        let order = |table: &usize| {
            syscalls::compare_tables(pids[*table], pids[at]).unwrap_or(Ordering::Less)
        };
        match tables.binary_search_by(order) {
            Ok(found) => Some(tables[found]),
            Err(place) => {
                tables.insert(place, at);
                None
            }
        }
    };
    (0..pids.len()).map(first_with_same_table).collect()
}

/// Returns the PID as the process itself sees it; `None` for a zombie or a process that does not exist.
pub fn live_inner_pid(pid: i32) -> Option<i32> {
    let status = status(pid)?;
    if status_line(&status, "State:")?.starts_with(['Z', 'X']) {
        return None;
    }
    innermost_pid(&status)
}

/// Returns the PID as the process itself sees or saw it; `None` for a process that does not exist.
pub fn status_inner_pid(pid: i32) -> Option<i32> {
    innermost_pid(&status(pid)?)
}

fn status(pid: i32) -> Option<String> {
    // The process name in the text may contain any bytes.
    let status = fs::read(format!("/proc/{pid}/status")).ok()?;
    Some(String::from_utf8_lossy(&status).into_owned())
}

fn status_line<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    let found = status.lines().find_map(|line| line.strip_prefix(name));
    found.map(str::trim_start)
}

fn innermost_pid(status: &str) -> Option<i32> {
    let pids = status_line(status, "NSpid:")?;
    pids.split_whitespace().next_back()?.parse().ok()
}

/// Checks that no thread has a descriptor table of its own.
pub fn check_threads(pid: i32) -> Result<(), FilesError> {
    for entry in fs::read_dir(format!("/proc/{pid}/task"))
        .with_step("/proc/PID/task")?
        .flatten()
    {
        let Some(thread) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        // A thread that has ended meanwhile has no table, and neither has one that is ending.
        let order = syscalls::compare_tables(pid, thread).unwrap_or(Ordering::Equal);
        if thread != pid && order != Ordering::Equal && !is_thread_ending(thread) {
            return Err(FilesError::Blocked(vec![DescriptorBlocker {
                pid,
                fd: None,
                path: format!("/proc/{pid}/task/{thread}"),
                reason: BlockReason::ThreadTable(thread),
            }]));
        }
    }
    Ok(())
}

/// Returns true if a thread is ending or has ended.
fn is_thread_ending(thread: i32) -> bool {
    ProcStat::read(thread).map_or(true, |stat| stat.is_ending())
}

/// Reads all descriptors of a process; descriptors that are closed meanwhile are left out.
fn read_descriptors(pid: i32) -> Result<Vec<ScannedDescriptor>, FilesError> {
    let mut directory = FdInfoDirectory::open(pid)?;
    let numbers = directory.read_numbers()?;
    let mut found = Vec::with_capacity(numbers.len());
    for number in numbers {
        match directory.read(number) {
            Ok(info) => found.push(ScannedDescriptor {
                number,
                info,
                file_identity: None,
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_step(format!("{}/{number}", directory.path)),
        }
    }
    found.sort_by_key(|one| one.number);
    Ok(found)
}

/// The open directory `/proc/PID/fdinfo`.
pub struct FdInfoDirectory {
    path: String,
    directory: OwnedFd,
    text: Vec<u8>,
}

impl FdInfoDirectory {
    /// Opens the directory of a process.
    pub fn open(pid: i32) -> Result<Self, FilesError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let path = format!("/proc/{pid}/fdinfo");
        let directory = rustix::fs::open(&path, flags, Mode::empty()).with_step(&path)?;
        Ok(Self {
            path,
            directory,
            text: Vec::with_capacity(4096),
        })
    }

    fn read_numbers(&self) -> Result<Vec<u32>, FilesError> {
        let mut space = vec![MaybeUninit::uninit(); 32 * 1024];
        let mut entries = RawDir::new(&self.directory, &mut space);
        let mut numbers = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry.with_step(&self.path)?;
            let name = entry.file_name().to_str().ok();
            numbers.extend(name.and_then(|name| name.parse::<u32>().ok()));
        }
        Ok(numbers)
    }

    /// Reads the `fdinfo` of a descriptor.
    pub fn read(&mut self, number: u32) -> io::Result<FdInfo> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = openat(&self.directory, number.to_string(), flags, Mode::empty())?;
        let text = &mut self.text;
        text.clear();
        loop {
            text.reserve(4096);
            let room = text.capacity() - text.len();
            match rustix::io::read(&file, rustix::buffer::spare_capacity(text)) {
                // The kernel writes the whole text at once: a text that does not fill the buffer is complete.
                Ok(length) if length < room => break,
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let text = String::from_utf8_lossy(text);
        FdInfo::parse(&text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }
}

/// A descriptor through which an open file can be reached.
#[derive(Debug)]
pub enum FdSource {
    /// A descriptor of a process of the tree.
    Process(i32, u32),
    /// Private copy of a descriptor in flight.
    InFlight(OwnedFd),
}

impl FdSource {
    /// Returns process and descriptor number.
    pub fn process_fd(&self) -> (i32, u32) {
        match self {
            Self::Process(pid, fd) => (*pid, *fd),
            Self::InFlight(fd) => (std::process::id() as i32, fd.as_raw_fd() as u32),
        }
    }
}

/// An open file of the tree.
#[derive(Debug)]
pub struct SurveyedOpenFile {
    /// Descriptor through which the file can be reached.
    pub source: FdSource,
    /// The file's descriptors: table and number.
    pub slots: Vec<(u32, u32)>,
    /// `fdinfo` of the first descriptor.
    pub info: FdInfo,
    /// True if the file's identity was known without comparing files.
    pub has_identity: bool,
}

/// Key that descriptors of the same open file share: mount, inode, and for an eventfd its number.
pub type FileKey = (u32, u64, u32);

/// Returns the key of a file.
pub fn file_key(info: &FdInfo) -> FileKey {
    let event = info.number("eventfd-id").unwrap_or(0);
    (info.mount, info.inode, event)
}

/// All open files of a tree.
#[derive(Debug, Default)]
pub struct SurveyedOpenFiles {
    /// Open files in the order in which they were found.
    pub list: Vec<SurveyedOpenFile>,
    /// Files with the same key, in the kernel's order if no identity is known.
    by_key: HashMap<FileKey, Vec<usize>>,
    by_inode: HashMap<u64, Vec<usize>>,
    /// Files with a known identity.
    by_file: HashMap<u64, usize>,
    by_slot: HashMap<(u32, u32), usize>,
}

impl SurveyedOpenFiles {
    /// Groups the descriptors of a survey by their open files.
    pub fn new(survey: &DescriptorSurvey) -> Self {
        let mut open_files = Self::default();
        for (table, seen) in survey {
            for descriptor in &seen.descriptors {
                let source = FdSource::Process(seen.holders[0].pid, descriptor.number);
                let index = match descriptor.file_identity {
                    Some(file) => open_files.add_identified(source, &descriptor.info, file),
                    None => open_files.add(source, &descriptor.info),
                };
                open_files.list[index]
                    .slots
                    .push((*table, descriptor.number));
                open_files
                    .by_slot
                    .insert((*table, descriptor.number), index);
            }
        }
        open_files
    }

    /// Returns the index of an open file with a known identity, and adds the file if it is new.
    fn add_identified(&mut self, place: FdSource, info: &FdInfo, file: u64) -> usize {
        if let Some(index) = self.by_file.get(&file) {
            return *index;
        }
        let index = self.add_open_file(place, info, true);
        self.by_file.insert(file, index);
        self.by_key.entry(file_key(info)).or_default().push(index);
        index
    }

    /// Returns the index of an open file, and adds the file if it is new. The search goes by key first, then by the
    /// order in which the kernel compares files, so that the cost is logarithmic in the number of files with the same
    /// key. Files with a known identity are not sorted in that order.
    pub fn add(&mut self, place: FdSource, info: &FdInfo) -> usize {
        let same_key = self
            .by_key
            .get(&file_key(info))
            .map_or(&[][..], Vec::as_slice);
        let compare = |other: usize| {
            // Comparison fails for a descriptor that a running process closed meanwhile.
            syscalls::compare_files(self.list[other].source.process_fd(), place.process_fd())
                .unwrap_or(Ordering::Less)
        };
        let found = if self.by_file.is_empty() {
            same_key.binary_search_by(|other| compare(*other))
        } else {
            let position = same_key.iter().position(|other| compare(*other).is_eq());
            position.ok_or(same_key.len())
        };
        match found {
            Ok(at) => same_key[at],
            Err(at) => {
                let index = self.add_open_file(place, info, false);
                self.by_key
                    .entry(file_key(info))
                    .or_default()
                    .insert(at, index);
                index
            }
        }
    }

    fn add_open_file(&mut self, place: FdSource, info: &FdInfo, listed: bool) -> usize {
        let index = self.list.len();
        self.by_inode.entry(info.inode).or_default().push(index);
        self.list.push(SurveyedOpenFile {
            source: place,
            slots: Vec::new(),
            info: info.clone(),
            has_identity: listed,
        });
        index
    }

    /// Returns all files with the key of this file, the file itself included.
    pub fn with_same_key(&self, info: &FdInfo) -> &[usize] {
        self.by_key.get(&file_key(info)).map_or(&[], Vec::as_slice)
    }

    /// Returns all files with this inode, on any mount.
    pub fn with_inode(&self, inode: u64) -> &[usize] {
        self.by_inode.get(&inode).map_or(&[], Vec::as_slice)
    }

    /// Returns the index of the open file of a descriptor in a table.
    pub fn index_at(&self, table: u32, fd: u32) -> Option<usize> {
        self.by_slot.get(&(table, fd)).copied()
    }
}

/// Returns the `fdinfo` of one of this process's own descriptors.
pub fn read_own_fdinfo(fd: &OwnedFd) -> io::Result<FdInfo> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    FdInfo::parse(&text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}
