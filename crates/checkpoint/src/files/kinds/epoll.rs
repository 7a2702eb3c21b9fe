//! Epoll sets.

use crate::files::acceptor::FdStore;
use crate::files::donor::{FileBeingSaved, OpenFileSaver, SaveResult};
use crate::files::error::{BlockReason, FilesError};
use crate::files::fdinfo::EpollLine;
use crate::files::image::changes::PreviousValues;
use crate::files::image::{EpollWatch, FileId, OpenFile, OpenFileKind};
use crate::files::syscalls;
use holdfast_sys::sockopt::check;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::os::fd::RawFd;

/// `EPOLLONESHOT`, and all bits that are modes and not events (`EP_PRIVATE_BITS`).
const EPOLLONESHOT: u32 = 1 << 30;
const MODE_BITS: u32 = 0xf000_0000;

/// Saves a set. A watched file is searched by descriptor number first, because most numbers still refer to the same
/// file.
pub fn save(saver: &mut OpenFileSaver<'_>, source: &FileBeingSaved) -> SaveResult<OpenFileKind> {
    let mut occurrences: HashMap<u32, u32> = HashMap::new();
    let mut watches = Vec::new();
    for line in source.info.epoll() {
        let nth = occurrences.entry(line.fd).or_default();
        let watched = find_watched(saver, source, &line, *nth);
        *nth += 1;
        let Some(watched) = watched else {
            // A running process may have just closed the file.
            if saver.frozen {
                return Err(BlockReason::WatchedFileClosed(line.fd).into());
            }
            continue;
        };
        watches.push(EpollWatch {
            fd: line.fd,
            file: saver.file_id(watched),
            events: line.events,
            data: line.data,
        });
    }
    Ok(OpenFileKind::Epoll { watches })
}

fn find_watched(
    saver: &OpenFileSaver<'_>,
    source: &FileBeingSaved,
    line: &EpollLine,
    nth: u32,
) -> Option<usize> {
    let open_files = &saver.open_files;
    let set = &open_files.list[source.open_file_index];
    let by_number = set
        .slots
        .iter()
        .filter_map(|(table, _)| open_files.index_at(*table, line.fd));
    let same_inode = by_number.filter(|index| open_files.list[*index].info.inode == line.inode);
    let same_inode_any_number = open_files.with_inode(line.inode);
    for index in same_inode.chain(same_inode_any_number.iter().copied()) {
        let candidate = &open_files.list[index];
        // No other file has this inode, which is not the shared inode of all anonymous files: the kernel need not be
        // asked.
        if same_inode_any_number.len() == 1 && line.inode != set.info.inode {
            return Some(index);
        }
        let (file, set) = (candidate.source.process_fd(), set.source.process_fd());
        if syscalls::is_watched(file, set, line.fd, nth).unwrap_or(false) {
            return Some(index);
        }
    }
    None
}

/// Brings all sets from their former entries to their new ones. `remade` lists the files that were made anew.
pub fn update_sets(
    store: &mut FdStore,
    former: &PreviousValues,
    remade: &BTreeSet<FileId>,
) -> Result<(), FilesError> {
    let watches = |file: &OpenFile| match &file.kind {
        OpenFileKind::Epoll { watches } => Some(watches.clone()),
        _ => None,
    };
    let may_differ = |id: &FileId| !remade.is_empty() || former.files.contains_key(id);
    let sets: Vec<_> = (store.image.files.iter())
        .filter(|(id, _)| may_differ(id))
        .filter_map(|(id, file)| {
            let old = former.file(*id, file).filter(|_| !remade.contains(id));
            Some((*id, old.and_then(watches), watches(file)?))
        })
        .collect();
    for (set, old, watches) in sets {
        let mut current = old.unwrap_or_default();
        current.retain(|watch| !remade.contains(&watch.file));
        update_set(store, set, &current, &watches)?;
    }
    Ok(())
}

fn update_set(
    store: &mut FdStore,
    set: FileId,
    old: &[EpollWatch],
    new: &[EpollWatch],
) -> Result<(), FilesError> {
    // A set without changes has the right order of entries too.
    if old == new {
        return Ok(());
    }
    let old_watches: HashSet<EpollWatch> = old.iter().copied().collect();
    // A one-shot entry is brought to its fired state while the set is otherwise empty.
    let empty_first = new
        .iter()
        .any(|watch| has_fired(watch) && !old_watches.contains(watch));
    let new_watches: HashSet<EpollWatch> = new.iter().copied().collect();
    for watch in old {
        if store.contains(watch.file) && (empty_first || !new_watches.contains(watch)) {
            change_entry(store, set, watch, libc::EPOLL_CTL_DEL)?;
        }
    }
    let mut ordered: Vec<&EpollWatch> = new.iter().collect();
    ordered.sort_by_key(|watch| !has_fired(watch));
    for watch in ordered {
        if store.contains(watch.file) && (empty_first || !old_watches.contains(watch)) {
            change_entry(store, set, watch, libc::EPOLL_CTL_ADD)?;
        }
    }
    Ok(())
}

/// Returns true if a one-shot entry has fired, and waits to be armed again by the program.
fn has_fired(watch: &EpollWatch) -> bool {
    watch.events & EPOLLONESHOT != 0 && watch.events & !MODE_BITS == 0
}

/// Adds or removes an entry. The kernel identifies the entry by open file and number, so the file is at the number
/// during the call.
fn change_entry(
    store: &mut FdStore,
    set: FileId,
    watch: &EpollWatch,
    operation: i32,
) -> Result<(), FilesError> {
    let set = store.raw_fd(set)?;
    store.with_fd_at(watch.fd, watch.file, |number| {
        if operation == libc::EPOLL_CTL_ADD && has_fired(watch) {
            return add_fired(set, number, watch);
        }
        epoll_ctl(set, operation, number, watch.events, watch.data)
    })
}

/// Adds an entry that has fired. Such an entry has no events, not even errors, and only firing creates this state: the
/// entry is armed for all events, and the event is consumed, if the file has any to report. Otherwise the entry stays
/// armed for errors, which the kernel adds to every entry.
fn add_fired(set: RawFd, fd: RawFd, watch: &EpollWatch) -> io::Result<()> {
    let all = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLPRI | libc::EPOLLRDHUP) as u32;
    epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, watch.events | all, watch.data)?;
    let mut found = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: `found` has space for the one event that is requested.
    let fired = unsafe { libc::epoll_wait(set, &raw mut found, 1, 0) };
    check(fired)?;
    if fired == 0 {
        epoll_ctl(set, libc::EPOLL_CTL_MOD, fd, watch.events, watch.data)?;
    }
    Ok(())
}

fn epoll_ctl(set: RawFd, operation: i32, fd: RawFd, events: u32, data: u64) -> io::Result<()> {
    let mut event = libc::epoll_event { events, u64: data };
    // SAFETY: `event` is a valid event and outlives the call.
    check(unsafe { libc::epoll_ctl(set, operation, fd, &raw mut event) })
}
