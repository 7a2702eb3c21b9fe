//! File locks of a tree, taken as soon as processes have their state. An exclusive lock that the donor still holds on
//! the same file is handed over in steps ([`LockStep`]).

use super::husk::Husk;
use super::plan::Restoration;
use crate::process::donor::value;
use crate::process::error::{Context, Error, Result};
use crate::process::files::image::{LockHolder, Table};
use crate::process::files::{
    FileIdentity, LockChange, LockStep, Stock, WantedLock, unless_excluded,
};
use std::collections::BTreeMap;

/// Most calls of one script.
const CALLS: usize = 256;

/// A lock of the tree.
#[derive(Clone, Debug)]
struct Place {
    /// Number of the lock's descriptor table in the image.
    table: u32,
    wanted: WantedLock,
}

/// Exclusive locks that another process holds, most likely one of the donor's.
#[derive(Debug, Default)]
pub(super) struct Contended(Vec<Place>);

impl Contended {
    /// Returns true if some are record locks, which only a process itself can take.
    pub fn has_records(&self) -> bool {
        let mut places = self.0.iter();
        places.any(|place| matches!(place.wanted.lock.holder, LockHolder::Table(_)))
    }

    /// Returns the locks.
    pub fn list(&self) -> Vec<WantedLock> {
        self.0.iter().map(|place| place.wanted.clone()).collect()
    }
}

impl Restoration {
    /// Takes all locks of the tree except exclusive ones that another process holds.
    ///
    /// # Errors
    /// [`Error::Refused`] if another process's lock excludes a shared lock.
    pub(super) fn take_locks(&mut self) -> Result<()> {
        let places = self.places()?;
        let whole = |place: &Place| Some(LockChange::whole(&place.wanted.lock));
        let excluded = self.change_locks(&places, whole)?;
        if let Some(shared) = excluded.iter().find(|place| !place.wanted.lock.write) {
            let (process, fd) = (shared.wanted.process, shared.wanted.fd);
            return Err(Error::Refused(format!(
                "somebody else has an exclusive lock on the file of descriptor {fd} of process {process}, which has a shared one: end \
                 what has it there"
            )));
        }
        self.contended = Contended(excluded);
        Ok(())
    }

    /// Takes a step of the hand-over after the donor has. Returns the locks of which another process still holds that
    /// part.
    pub(super) fn advance_locks(&self, step: LockStep) -> Result<Vec<WantedLock>> {
        let part = |place: &Place| {
            let wanted = &place.wanted;
            LockChange::of_acceptor(step, &wanted.lock, wanted.readable)
        };
        let excluded = self.change_locks(&self.contended.0, part)?;
        Ok(excluded.into_iter().map(|place| place.wanted).collect())
    }

    /// Takes the contended locks as a whole. Returns the locks that another process holds.
    pub(super) fn take_contended(&self) -> Result<Vec<String>> {
        let whole = |place: &Place| Some(LockChange::whole(&place.wanted.lock));
        let missed = self.change_locks(&self.contended.0, whole)?;
        let text = |place: &Place| {
            let WantedLock {
                process, fd, lock, ..
            } = &place.wanted;
            format!("process {process}, descriptor {fd}: {lock:?}")
        };
        Ok(missed.iter().map(text).collect())
    }

    /// Returns the tree's locks, each once.
    fn places(&self) -> Result<Vec<Place>> {
        let mut places: Vec<Place> = Vec::new();
        let Some(stock) = &self.stock else {
            return Ok(places);
        };
        for (number, table) in &stock.image().tables {
            let Some(husk) = self.living().find(|husk| table.pids.contains(&husk.pid)) else {
                continue;
            };
            for (fd, lock) in stock.image().locks(*number) {
                let (file, readable) = open_file(stock, table, fd)?;
                let identity = FileIdentity::of(file);
                let identity = identity.context(|| format!("the file of descriptor {fd}"))?;
                let wanted = WantedLock {
                    process: husk.pid,
                    fd,
                    lock,
                    readable,
                    identity,
                };
                // The kernel lists a process's lock at each descriptor of the file. Prefer one open for
                // reading, which can share the lock.
                let same = places.iter_mut().find(|place| {
                    let known = &place.wanted;
                    matches!(lock.holder, LockHolder::Table(_))
                        && (place.table, &known.lock, &known.identity)
                            == (*number, &lock, &wanted.identity)
                });
                match same {
                    Some(place) if readable && !place.wanted.readable => place.wanted = wanted,
                    Some(_) => {}
                    None => places.push(Place {
                        table: *number,
                        wanted,
                    }),
                }
            }
        }
        Ok(places)
    }

    /// Changes locks. Returns the locks that another process's lock excludes.
    fn change_locks(
        &self,
        places: &[Place],
        what: impl Fn(&Place) -> Option<LockChange>,
    ) -> Result<Vec<Place>> {
        let mut excluded = Vec::new();
        let mut records: BTreeMap<i32, Vec<(&Place, LockChange)>> = BTreeMap::new();
        let Some(stock) = &self.stock else {
            return Ok(excluded);
        };
        for place in places {
            let WantedLock {
                process, fd, lock, ..
            } = &place.wanted;
            let Some(change) = what(place) else {
                continue;
            };
            if let LockHolder::Table(_) = lock.holder {
                records.entry(*process).or_default().push((place, change));
                continue;
            }
            let table = stock.image().tables.get(&place.table);
            let table = table.ok_or(Error::Image("a lock of no table"))?;
            let (file, _) = open_file(stock, table, *fd)?;
            let made = change.make(file, lock.holder);
            if !made.context(|| lock_of(*process))? {
                excluded.push(place.clone());
            }
        }
        for (pid, changes) in records {
            let husk = self.living().find(|husk| husk.pid == pid);
            let husk = husk.ok_or(Error::Gone(pid))?;
            for some in changes.chunks(CALLS) {
                excluded.extend(change_records(husk, some)?);
            }
        }
        Ok(excluded)
    }
}

/// Returns the restorer's file for a descriptor, and true if the file is open for reading.
fn open_file<'a>(
    stock: &'a Stock,
    table: &Table,
    fd: u32,
) -> Result<(std::os::fd::BorrowedFd<'a>, bool)> {
    let slot = table
        .slots
        .get(&fd)
        .ok_or(Error::Image("a lock on no file"))?;
    let file = stock
        .file(slot.file)
        .ok_or(Error::Image("a lock on no file"))?;
    let flags = (stock.image().files.get(&slot.file)).map_or(0, |file| file.flags);
    let readable = flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32;
    Ok((file, readable))
}

/// Calls `F_SETLK` in a process whose descriptor table owns the locks.
fn change_records(husk: &Husk, changes: &[(&Place, LockChange)]) -> Result<Vec<Place>> {
    let mut script = husk.script();
    for (place, change) in changes {
        let at = script.words(&change.words())?;
        let arguments = [u64::from(place.wanted.fd), libc::F_SETLK as u64, at];
        script.attempt(libc::SYS_fcntl, &arguments);
    }
    let mut excluded = Vec::new();
    for ((place, _), result) in changes.iter().zip(husk.run(script)?.results) {
        let made = unless_excluded(value(result).map(drop));
        if !made.context(|| lock_of(husk.pid))? {
            excluded.push((*place).clone());
        }
    }
    Ok(excluded)
}

fn lock_of(pid: i32) -> String {
    format!("a lock of process {pid}")
}
