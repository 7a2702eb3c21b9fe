//! File locks of a tree, taken as soon as processes have their state. An exclusive lock that the donor still holds on
//! the same file is handed over in steps ([`LockHandoverStep`]).

use super::stub_process::StubProcess;
use super::tree_restoration::TreeRestoration;
use crate::error::{Context, Error, Result};
use crate::files::image::{DescriptorTable, LockHolder};
use crate::files::{
    ContendedLock, FdStore, LockChange, LockHandoverStep, LockedFileIdentity, is_lock_taken,
};
use crate::trace::call_result;
use std::collections::BTreeMap;

/// Most calls of one script.
const CALLS_MAX: usize = 256;

/// A lock of the tree.
#[derive(Clone, Debug)]
struct TreeLock {
    /// Number of the lock's descriptor table in the image.
    table: u32,
    wanted: ContendedLock,
}

/// Exclusive locks that another process holds, most likely one of the donor's.
#[derive(Debug, Default)]
pub(super) struct ContendedLocks(Vec<TreeLock>);

impl ContendedLocks {
    /// Returns true if some are record locks, which only a process itself can take.
    pub fn has_records(&self) -> bool {
        let mut places = self.0.iter();
        places.any(|place| matches!(place.wanted.lock.holder, LockHolder::Table(_)))
    }

    /// Returns the locks that the tree lacks.
    pub fn list(&self) -> Vec<ContendedLock> {
        self.0.iter().map(|place| place.wanted.clone()).collect()
    }
}

impl TreeRestoration {
    /// Takes all locks of the tree except exclusive ones that another process holds.
    ///
    /// # Errors
    /// [`Error::Refused`] if another process's lock excludes a shared lock.
    pub(super) fn take_locks(&mut self) -> Result<()> {
        let places = self.tree_locks()?;
        let whole_lock = |place: &TreeLock| Some(LockChange::for_whole_range(&place.wanted.lock));
        let excluded = self.change_locks(&places, whole_lock)?;
        if let Some(shared) = excluded.iter().find(|place| !place.wanted.lock.write) {
            let (process, fd) = (shared.wanted.process, shared.wanted.fd);
            return Err(Error::Refused(format!(
                "another process has an exclusive lock on the file of descriptor {fd} of process {process}, which \
                 needs a shared one: end that process"
            )));
        }
        self.contended_locks = ContendedLocks(excluded);
        Ok(())
    }

    /// Takes a step of the hand-over after the donor has. Returns the locks of which another process still holds that
    /// part.
    pub(super) fn advance_locks(&self, step: LockHandoverStep) -> Result<Vec<ContendedLock>> {
        let step_change = |place: &TreeLock| {
            let wanted = &place.wanted;
            LockChange::for_acceptor(step, &wanted.lock, wanted.readable)
        };
        let excluded = self.change_locks(&self.contended_locks.0, step_change)?;
        Ok(excluded.into_iter().map(|place| place.wanted).collect())
    }

    /// Takes the contended locks as a whole. Returns the locks that another process holds.
    pub(super) fn take_contended_locks(&self) -> Result<Vec<String>> {
        let whole_lock = |place: &TreeLock| Some(LockChange::for_whole_range(&place.wanted.lock));
        let lost = self.change_locks(&self.contended_locks.0, whole_lock)?;
        let text = |place: &TreeLock| {
            let ContendedLock {
                process, fd, lock, ..
            } = &place.wanted;
            format!("process {process}, descriptor {fd}: {lock:?}")
        };
        Ok(lost.iter().map(text).collect())
    }

    /// Returns the tree's locks, each once.
    fn tree_locks(&self) -> Result<Vec<TreeLock>> {
        let mut places: Vec<TreeLock> = Vec::new();
        let Some(store) = &self.fd_store else {
            return Ok(places);
        };
        for (number, table) in &store.image().tables {
            let Some(stub_process) = self
                .living_processes()
                .find(|stub_process| table.pids.contains(&stub_process.pid))
            else {
                continue;
            };
            for (fd, lock) in store.image().locks(*number) {
                let (file, readable) = restorer_file(store, table, fd)?;
                let identity = LockedFileIdentity::of(file);
                let identity = identity.context(|| format!("the file of descriptor {fd}"))?;
                let wanted = ContendedLock {
                    process: stub_process.pid,
                    fd,
                    lock,
                    readable,
                    identity,
                };
                // The kernel lists a process's lock at each descriptor of the file. Prefer one open for
                // reading, which can share the lock.
                let known_place = places.iter_mut().find(|place| {
                    let known = &place.wanted;
                    matches!(lock.holder, LockHolder::Table(_))
                        && (place.table, &known.lock, &known.identity)
                            == (*number, &lock, &wanted.identity)
                });
                match known_place {
                    Some(place) if readable && !place.wanted.readable => place.wanted = wanted,
                    Some(_) => {}
                    None => places.push(TreeLock {
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
        places: &[TreeLock],
        change_of: impl Fn(&TreeLock) -> Option<LockChange>,
    ) -> Result<Vec<TreeLock>> {
        let mut excluded = Vec::new();
        let mut records: BTreeMap<i32, Vec<(&TreeLock, LockChange)>> = BTreeMap::new();
        let Some(store) = &self.fd_store else {
            return Ok(excluded);
        };
        for place in places {
            let ContendedLock {
                process, fd, lock, ..
            } = &place.wanted;
            let Some(change) = change_of(place) else {
                continue;
            };
            if let LockHolder::Table(_) = lock.holder {
                records.entry(*process).or_default().push((place, change));
                continue;
            }
            let table = store.image().tables.get(&place.table);
            let table = table.ok_or(Error::Image("a lock of an unknown descriptor table"))?;
            let (file, _) = restorer_file(store, table, *fd)?;
            let made = change.apply(file, lock.holder);
            if !made.context(|| describe_lock(*process))? {
                excluded.push(place.clone());
            }
        }
        for (pid, changes) in records {
            let stub_process = self
                .living_processes()
                .find(|stub_process| stub_process.pid == pid);
            let stub_process = stub_process.ok_or(Error::ProcessEnded(pid))?;
            for chunk in changes.chunks(CALLS_MAX) {
                excluded.extend(change_records(stub_process, chunk)?);
            }
        }
        Ok(excluded)
    }
}

/// Returns the restorer's file for a descriptor, and true if the file is open for reading.
fn restorer_file<'a>(
    store: &'a FdStore,
    table: &DescriptorTable,
    fd: u32,
) -> Result<(std::os::fd::BorrowedFd<'a>, bool)> {
    let slot = table
        .slots
        .get(&fd)
        .ok_or(Error::Image("a lock on an unknown file"))?;
    let file = store
        .file(slot.file)
        .ok_or(Error::Image("a lock on an unknown file"))?;
    let flags = (store.image().files.get(&slot.file)).map_or(0, |file| file.flags);
    let readable = flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32;
    Ok((file, readable))
}

/// Calls `F_SETLK` in a process whose descriptor table owns the locks.
fn change_records(
    stub_process: &StubProcess,
    changes: &[(&TreeLock, LockChange)],
) -> Result<Vec<TreeLock>> {
    let mut script = stub_process.script();
    for (place, change) in changes {
        let at = script.add_words(&change.flock_words())?;
        let arguments = [u64::from(place.wanted.fd), libc::F_SETLK as u64, at];
        script.add_optional_call(libc::SYS_fcntl, &arguments);
    }
    let mut excluded = Vec::new();
    for ((place, _), result) in changes.iter().zip(stub_process.run_script(script)?.results) {
        let made = is_lock_taken(call_result(result).map(drop));
        if !made.context(|| describe_lock(stub_process.pid))? {
            excluded.push((*place).clone());
        }
    }
    Ok(excluded)
}

fn describe_lock(pid: i32) -> String {
    format!("changing a lock of process {pid}")
}
