//! Epoll sets.

use crate::process::files::acceptor::Stock;
use crate::process::files::donor::{Saved, Saver, Subject};
use crate::process::files::error::{FilesError, Reason};
use crate::process::files::fdinfo::EpollLine;
use crate::process::files::image::changes::Former;
use crate::process::files::image::{FileId, Kind, OpenFile, Watch};
use crate::process::files::raw;
use crate::sockopt::check;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::os::fd::RawFd;

/// `EPOLLONESHOT`, and all bits that are modes and not events (`EP_PRIVATE_BITS`).
const ONESHOT: u32 = 1 << 30;
const MODES: u32 = 0xf000_0000;

/// Saves a set. A watched file is searched by descriptor number first, because most numbers still refer to the same
/// file.
pub fn save(saver: &mut Saver<'_>, subject: &Subject) -> Saved<Kind> {
    let mut met: HashMap<u32, u32> = HashMap::new();
    let mut watches = Vec::new();
    for line in subject.info.epoll() {
        let nth = met.entry(line.fd).or_default();
        let watched = find(saver, subject, &line, *nth);
        *nth += 1;
        let Some(watched) = watched else {
            // A running process may have just closed the file.
            if saver.frozen {
                return Err(Reason::WatchesStranger(line.fd).into());
            }
            continue;
        };
        watches.push(Watch {
            fd: line.fd,
            file: saver.id(watched),
            events: line.events,
            data: line.data,
        });
    }
    Ok(Kind::Epoll { watches })
}

fn find(saver: &Saver<'_>, subject: &Subject, line: &EpollLine, nth: u32) -> Option<usize> {
    let pool = &saver.pool;
    let set = &pool.classes[subject.class];
    let by_number = set
        .slots
        .iter()
        .filter_map(|(table, _)| pool.at(*table, line.fd));
    let alike = by_number.filter(|class| pool.classes[*class].info.inode == line.inode);
    let others = pool.with_inode(line.inode);
    for class in alike.chain(others.iter().copied()) {
        let candidate = &pool.classes[class];
        // No other file has this inode, which is not the shared inode of all anonymous files: the kernel need not be
        // asked.
        if others.len() == 1 && line.inode != set.info.inode {
            return Some(class);
        }
        let (file, set) = (candidate.place.address(), set.place.address());
        if raw::is_watched(file, set, line.fd, nth).unwrap_or(false) {
            return Some(class);
        }
    }
    None
}

/// Brings all sets from their former entries to their new ones. `remade` lists the files that were made anew.
pub fn finish(
    stock: &mut Stock,
    former: &Former,
    remade: &BTreeSet<FileId>,
) -> Result<(), FilesError> {
    let watches = |file: &OpenFile| match &file.kind {
        Kind::Epoll { watches } => Some(watches.clone()),
        _ => None,
    };
    let may_differ = |id: &FileId| !remade.is_empty() || former.files.contains_key(id);
    let sets: Vec<_> = (stock.image.files.iter())
        .filter(|(id, _)| may_differ(id))
        .filter_map(|(id, file)| {
            let old = former.file(*id, file).filter(|_| !remade.contains(id));
            Some((*id, old.and_then(watches), watches(file)?))
        })
        .collect();
    for (set, old, watches) in sets {
        let mut there = old.unwrap_or_default();
        there.retain(|watch| !remade.contains(&watch.file));
        bring(stock, set, &there, &watches)?;
    }
    Ok(())
}

fn bring(stock: &mut Stock, set: FileId, old: &[Watch], new: &[Watch]) -> Result<(), FilesError> {
    // A set without changes has the right order of entries too.
    if old == new {
        return Ok(());
    }
    let had: HashSet<Watch> = old.iter().copied().collect();
    // A one-shot entry is brought to its fired state while the set is otherwise empty.
    let empty_first = new
        .iter()
        .any(|watch| is_spent(watch) && !had.contains(watch));
    let wanted: HashSet<Watch> = new.iter().copied().collect();
    for watch in old {
        if stock.has(watch.file) && (empty_first || !wanted.contains(watch)) {
            control(stock, set, watch, libc::EPOLL_CTL_DEL)?;
        }
    }
    let mut ordered: Vec<&Watch> = new.iter().collect();
    ordered.sort_by_key(|watch| !is_spent(watch));
    for watch in ordered {
        if stock.has(watch.file) && (empty_first || !had.contains(watch)) {
            control(stock, set, watch, libc::EPOLL_CTL_ADD)?;
        }
    }
    Ok(())
}

/// Returns true if a one-shot entry has fired, and waits to be armed again by the program.
fn is_spent(watch: &Watch) -> bool {
    watch.events & ONESHOT != 0 && watch.events & !MODES == 0
}

/// Adds or removes an entry. The kernel identifies the entry by open file and number, so the file is at the number
/// during the call.
fn control(stock: &mut Stock, set: FileId, watch: &Watch, what: i32) -> Result<(), FilesError> {
    let set = stock.raw(set)?;
    stock.at_number(watch.fd, watch.file, |number| {
        if what == libc::EPOLL_CTL_ADD && is_spent(watch) {
            return add_spent(set, number, watch);
        }
        epoll_ctl(set, what, number, watch.events, watch.data)
    })
}

/// Adds an entry that has fired. Such an entry has no events, not even errors, and only firing creates this state: the
/// entry is armed for all events, and the event is consumed, if the file has any to report. Otherwise the entry stays
/// armed for errors, which the kernel adds to every entry.
fn add_spent(set: RawFd, fd: RawFd, watch: &Watch) -> io::Result<()> {
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

fn epoll_ctl(set: RawFd, what: i32, fd: RawFd, events: u32, data: u64) -> io::Result<()> {
    let mut event = libc::epoll_event { events, u64: data };
    // SAFETY: `event` is a valid event and outlives the call.
    check(unsafe { libc::epoll_ctl(set, what, fd, &raw mut event) })
}
