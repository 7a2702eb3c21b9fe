//! Which descriptors the processes of a tree have, and which of them are the same open file.

use super::error::{At, Blocker, FilesError, Reason};
use super::fdinfo::FdInfo;
use super::raw::{self, Ordering};
use crate::process::procfs::Stat;
use rustix::fs::{Mode, OFlags, RawDir, openat};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};

/// A process and the descriptor table it has.
#[derive(Clone, Debug)]
pub struct Holder {
    /// As the caller sees it.
    pub pid: i32,
    /// As it sees itself.
    pub inner: i32,
}

/// A descriptor table.
#[derive(Debug)]
pub struct TableSeen {
    /// Its processes; the first is asked about it.
    pub holders: Vec<Holder>,
    /// Its descriptors, by number.
    pub descriptors: Vec<DescriptorSeen>,
}

/// A descriptor.
#[derive(Debug)]
pub struct DescriptorSeen {
    /// Its number.
    pub number: u32,
    /// `fdinfo`.
    pub info: FdInfo,
    /// Identity of the open file, where that is known without asking.
    pub file: Option<u64>,
}

/// The descriptor tables of a tree by the lowest inner PID that has each.
pub type Survey = BTreeMap<u32, TableSeen>;

/// Looks at all descriptors of `pids`. Zombies have none.
///
/// # Errors
/// [`FilesError::Blocked`] for a thread with a table of its own; [`FilesError::Kernel`].
pub fn survey(pids: &[i32]) -> Result<Survey, FilesError> {
    let mut tables: Vec<Vec<Holder>> = Vec::new();
    for &pid in pids {
        let Some(inner) = inner_pid(pid) else {
            continue;
        };
        match check_threads(pid) {
            Err(_) if inner_pid(pid).is_none() => continue,
            other => other?,
        }
        let holder = Holder { pid, inner };
        let found = tables.binary_search_by(|table| {
            raw::compare_tables(table[0].pid, pid).unwrap_or(Ordering::Less)
        });
        match found {
            Ok(at) => tables[at].push(holder),
            Err(at) => tables.insert(at, vec![holder]),
        }
    }
    let mut survey = Survey::new();
    for mut holders in tables {
        holders.sort_by_key(|holder| holder.inner);
        let Some(descriptors) = descriptors_of(&mut holders)? else {
            continue;
        };
        let table = TableSeen {
            descriptors,
            holders,
        };
        survey.insert(table.holders[0].inner as u32, table);
    }
    Ok(survey)
}

/// The descriptors of processes that share them; those that have ended meanwhile are left out.
fn descriptors_of(holders: &mut Vec<Holder>) -> Result<Option<Vec<DescriptorSeen>>, FilesError> {
    while let Some(first) = holders.first() {
        match descriptors(first.pid) {
            Err(_) if inner_pid(first.pid).is_none() => drop(holders.remove(0)),
            found => return found.map(Some),
        }
    }
    Ok(None)
}

/// For each process the first of them that has the same descriptor table, if that is another.
pub(crate) fn shared_tables(pids: &[i32]) -> Vec<Option<usize>> {
    let mut tables: Vec<usize> = Vec::new();
    let same = |at: usize| {
        let order =
            |table: &usize| raw::compare_tables(pids[*table], pids[at]).unwrap_or(Ordering::Less);
        match tables.binary_search_by(order) {
            Ok(found) => Some(tables[found]),
            Err(place) => {
                tables.insert(place, at);
                None
            }
        }
    };
    (0..pids.len()).map(same).collect()
}

/// The PID as the process sees it itself; `None` for a zombie or one that is gone.
pub fn inner_pid(pid: i32) -> Option<i32> {
    let status = status(pid)?;
    if status_line(&status, "State:")?.starts_with(['Z', 'X']) {
        return None;
    }
    last_pid(&status)
}

/// The PID as the process sees, or saw, it itself; `None` for one that is gone.
pub fn status_inner_pid(pid: i32) -> Option<i32> {
    last_pid(&status(pid)?)
}

fn status(pid: i32) -> Option<String> {
    // Its name may be any bytes.
    let status = fs::read(format!("/proc/{pid}/status")).ok()?;
    Some(String::from_utf8_lossy(&status).into_owned())
}

fn status_line<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    let found = status.lines().find_map(|line| line.strip_prefix(name));
    found.map(str::trim_start)
}

fn last_pid(status: &str) -> Option<i32> {
    let pids = status_line(status, "NSpid:")?;
    pids.split_whitespace().next_back()?.parse().ok()
}

/// No thread has a table of its own.
pub fn check_threads(pid: i32) -> Result<(), FilesError> {
    for entry in fs::read_dir(format!("/proc/{pid}/task"))
        .at("/proc/PID/task")?
        .flatten()
    {
        let Some(thread) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        // A thread that ended meanwhile has no table, nor has one that is ending.
        let order = raw::compare_tables(pid, thread).unwrap_or(Ordering::Equal);
        if thread != pid && order != Ordering::Equal && !is_ending(thread) {
            return Err(FilesError::Blocked(vec![Blocker {
                pid,
                fd: None,
                path: format!("/proc/{pid}/task/{thread}"),
                reason: Reason::ThreadTable(thread),
            }]));
        }
    }
    Ok(())
}

/// Whether a thread is on its way out, or has gone.
fn is_ending(thread: i32) -> bool {
    Stat::read(thread).map_or(true, |stat| stat.is_ending())
}

/// All descriptors of a process; what is closed meanwhile is left out.
fn descriptors(pid: i32) -> Result<Vec<DescriptorSeen>, FilesError> {
    let mut directory = FdInfoDirectory::open(pid)?;
    let numbers = directory.numbers()?;
    let mut found = Vec::with_capacity(numbers.len());
    for number in numbers {
        match directory.read(number) {
            Ok(info) => found.push(DescriptorSeen {
                number,
                info,
                file: None,
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).at(format!("{}/{number}", directory.path)),
        }
    }
    found.sort_by_key(|one| one.number);
    Ok(found)
}

/// `/proc/PID/fdinfo`.
pub struct FdInfoDirectory {
    path: String,
    directory: OwnedFd,
    text: Vec<u8>,
}

impl FdInfoDirectory {
    /// Of a process.
    pub fn open(pid: i32) -> Result<Self, FilesError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let path = format!("/proc/{pid}/fdinfo");
        let directory = rustix::fs::open(&path, flags, Mode::empty()).at(&path)?;
        Ok(Self {
            path,
            directory,
            text: Vec::with_capacity(4096),
        })
    }

    fn numbers(&self) -> Result<Vec<u32>, FilesError> {
        let mut space = vec![MaybeUninit::uninit(); 32 * 1024];
        let mut entries = RawDir::new(&self.directory, &mut space);
        let mut numbers = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry.at(&self.path)?;
            let name = entry.file_name().to_str().ok();
            numbers.extend(name.and_then(|name| name.parse::<u32>().ok()));
        }
        Ok(numbers)
    }

    /// What is said of a descriptor.
    pub fn read(&mut self, number: u32) -> io::Result<FdInfo> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = openat(&self.directory, number.to_string(), flags, Mode::empty())?;
        let text = &mut self.text;
        text.clear();
        loop {
            text.reserve(4096);
            let room = text.capacity() - text.len();
            match rustix::io::read(&file, rustix::buffer::spare_capacity(text)) {
                // The kernel writes the whole text at once: what does not fill the room is its end.
                Ok(length) if length < room => break,
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let text = String::from_utf8_lossy(text);
        FdInfo::parse(&text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }
}

/// A place where an open file can be reached.
#[derive(Debug)]
pub enum Place {
    /// A descriptor of a process of the tree.
    Process(i32, u32),
    /// A copy of our own, of a file that is in flight.
    Own(OwnedFd),
}

impl Place {
    /// Process and descriptor.
    pub fn address(&self) -> (i32, u32) {
        match self {
            Self::Process(pid, fd) => (*pid, *fd),
            Self::Own(fd) => (std::process::id() as i32, fd.as_raw_fd() as u32),
        }
    }
}

/// An open file of the tree.
#[derive(Debug)]
pub struct Class {
    /// Where to reach it.
    pub place: Place,
    /// Its descriptors: table and number.
    pub slots: Vec<(u32, u32)>,
    /// What the first of them showed.
    pub info: FdInfo,
    /// Its identity was known without asking.
    pub listed: bool,
}

/// What files that are the same have in common: mount, inode, and for an eventfd its number.
pub type Key = (u32, u64, u32);

/// The key of a file.
pub fn key(info: &FdInfo) -> Key {
    let event = info.number("eventfd-id").unwrap_or(0);
    (info.mount, info.inode, event)
}

/// All open files of a tree.
#[derive(Debug, Default)]
pub struct Pool {
    /// In the order in which they were found.
    pub classes: Vec<Class>,
    /// Those with the same key, in the order of the kernel where no identity is known.
    by_key: HashMap<Key, Vec<usize>>,
    by_inode: HashMap<u64, Vec<usize>>,
    /// Those whose identity is known.
    by_file: HashMap<u64, usize>,
    by_slot: HashMap<(u32, u32), usize>,
}

impl Pool {
    /// Sorts the descriptors of a survey by what they refer to.
    pub fn new(survey: &Survey) -> Self {
        let mut pool = Self::default();
        for (table, seen) in survey {
            for one in &seen.descriptors {
                let place = Place::Process(seen.holders[0].pid, one.number);
                let class = match one.file {
                    Some(file) => pool.add_listed(place, &one.info, file),
                    None => pool.add(place, &one.info),
                };
                pool.classes[class].slots.push((*table, one.number));
                pool.by_slot.insert((*table, one.number), class);
            }
        }
        pool
    }

    /// The class of a file whose identity is known, which is made if there is none.
    fn add_listed(&mut self, place: Place, info: &FdInfo, file: u64) -> usize {
        if let Some(class) = self.by_file.get(&file) {
            return *class;
        }
        let class = self.make(place, info, true);
        self.by_file.insert(file, class);
        self.by_key.entry(key(info)).or_default().push(class);
        class
    }

    /// The class of a file, which is made if there is none: by key first, then by the order in which the kernel compares
    /// files, so that this costs the logarithm of the number of files with the same key. Those whose identity is known
    /// are in no such order.
    pub fn add(&mut self, place: Place, info: &FdInfo) -> usize {
        let alike = self.by_key.get(&key(info)).map_or(&[][..], Vec::as_slice);
        let compare = |other: usize| {
            // A descriptor that a running process closed meanwhile compares with nothing.
            raw::compare_files(self.classes[other].place.address(), place.address())
                .unwrap_or(Ordering::Less)
        };
        let found = if self.by_file.is_empty() {
            alike.binary_search_by(|other| compare(*other))
        } else {
            let same = alike.iter().position(|other| compare(*other).is_eq());
            same.ok_or(alike.len())
        };
        match found {
            Ok(at) => alike[at],
            Err(at) => {
                let class = self.make(place, info, false);
                self.by_key.entry(key(info)).or_default().insert(at, class);
                class
            }
        }
    }

    fn make(&mut self, place: Place, info: &FdInfo, listed: bool) -> usize {
        let class = self.classes.len();
        self.by_inode.entry(info.inode).or_default().push(class);
        self.classes.push(Class {
            place,
            slots: Vec::new(),
            info: info.clone(),
            listed,
        });
        class
    }

    /// Files with the same key as this one, itself among them.
    pub fn alike(&self, info: &FdInfo) -> &[usize] {
        self.by_key.get(&key(info)).map_or(&[], Vec::as_slice)
    }

    /// Files with this inode, on whatever mount.
    pub fn with_inode(&self, inode: u64) -> &[usize] {
        self.by_inode.get(&inode).map_or(&[], Vec::as_slice)
    }

    /// The file behind a descriptor of a table.
    pub fn at(&self, table: u32, fd: u32) -> Option<usize> {
        self.by_slot.get(&(table, fd)).copied()
    }
}

/// `fdinfo` of a descriptor of our own.
pub fn own_info(fd: &OwnedFd) -> io::Result<FdInfo> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    FdInfo::parse(&text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}
