//! A donor that holds descriptors and is stopped, and an acceptor that restores them.

use crate::listing::list_descriptors;
use holdfast_checkpoint::files::image::{FileId, OpenFileKind};
use holdfast_checkpoint::files::{
    FdStore, FilesError, FilesImage, FilesImageChanges, FilesSnapshot, FrozenFiles, ProvidedFiles,
    SaveLimits,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A process that has stopped itself.
pub struct Donor {
    pub pid: Pid,
    /// Sockets that the last snapshot expects to read without a copy of the descriptor.
    expected_sockets: Mutex<Arc<BTreeSet<FileId>>>,
}

impl Donor {
    /// Forks a process that has only `/dev/null` as descriptors and runs `hold`, which ends with [`stop_self`].
    pub fn new(open_descriptors: impl FnOnce()) -> Self {
        let _alone = lift_lock();
        Self::start(open_descriptors, None)
    }

    /// Forks a process that keeps a descriptor of the test as number 10.
    pub fn with_inherited(fd: impl FnOnce() -> OwnedFd) -> Self {
        let fd = fd();
        let _alone = lift_lock();
        FdStore::raise_limit().expect("limit");
        let inherited = FdStore::move_caller_fd_up(fd).expect("lifted");
        let number = inherited.as_raw_fd();
        Self::start(
            || {
                put_at(borrow_fd(number).try_clone_to_owned().expect("dup"), 10);
                close_number(number);
                stop_self();
            },
            Some(inherited),
        )
    }

    fn start(hold: impl FnOnce(), kept: Option<OwnedFd>) -> Self {
        let pid = match fork_child() {
            None => run_child(hold, kept.map(OwnedFd::into_raw_fd).and(None)),
            Some(pid) => pid,
        };
        let donor = Self {
            pid,
            expected_sockets: Mutex::default(),
        };
        donor.wait_until_stopped();
        donor
    }

    fn wait_until_stopped(&self) {
        let status = waitpid(Some(self.pid), WaitOptions::UNTRACED).expect("waited");
        let (_, status) = status.expect("a status");
        assert!(status.stopped(), "the donor ended: {status:?}");
    }

    /// Lets the process run to its next [`stop_self`].
    pub fn continue_to_next_stop(&self) {
        kill_process(self.pid, Signal::CONT).expect("continued");
        self.wait_until_stopped();
    }

    /// Returns a copy of one of the process's descriptors.
    pub fn copy(&self, number: u32) -> OwnedFd {
        let mut copier = holdfast_checkpoint::files::DescriptorCopier::default();
        let address = (self.pid.as_raw_nonzero().get(), number);
        copier.copy(address).expect("copied")
    }

    /// Returns the PIDs of the process's tree.
    pub fn pids(&self) -> Vec<i32> {
        let mut pids = vec![self.pid.as_raw_nonzero().get()];
        let mut at = 0;
        while at < pids.len() {
            let pid = pids[at];
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            let children = children.unwrap_or_default();
            pids.extend(
                children
                    .split_whitespace()
                    .map(|pid| pid.parse::<i32>().expect("a pid")),
            );
            at += 1;
        }
        pids
    }

    /// Takes a snapshot, as before a freeze of a running process, and prepares the freeze.
    pub fn snapshot(&self) -> FilesSnapshot {
        let snapshot = FilesSnapshot::save(&self.pids(), &SaveLimits::default());
        let snapshot = snapshot.unwrap_or_else(|error| panic!("{error}"));
        let expected = Arc::new(snapshot.socket_fds.keys().copied().collect());
        snapshot.predict_freeze(&self.pids(), list_descriptors(&self.pids()), &expected);
        *self.expected_sockets.lock().expect("an unpoisoned lock") = expected;
        snapshot
    }

    /// Saves the process with no change between snapshot and freeze.
    pub fn save_unchanged(&self) -> SavedDescriptors {
        self.freeze(&self.snapshot())
    }

    /// Saves the process against a second snapshot, with the changes since the first.
    pub fn freeze_again(&self, first: &FilesSnapshot) -> SavedDescriptors {
        let snapshot = FilesSnapshot::take(|| self.pids(), &SaveLimits::default(), Some(first));
        let snapshot = snapshot.unwrap_or_else(|error| panic!("{error}"));
        let expected = Arc::new(snapshot.socket_fds.keys().copied().collect());
        snapshot.predict_freeze(&self.pids(), list_descriptors(&self.pids()), &expected);
        *self.expected_sockets.lock().expect("an unpoisoned lock") = expected;
        SavedDescriptors {
            image: first.image.clone(),
            snapshot_changes: Some(snapshot.image.changes_since(&first.image)),
            ..self.freeze(&snapshot)
        }
    }

    /// Saves the process against an earlier snapshot. Transferred data is encoded and decoded.
    pub fn freeze(&self, snapshot: &FilesSnapshot) -> SavedDescriptors {
        self.freeze_with_prepared_flag(snapshot).0
    }

    /// Saves the process like [`Self::freeze`]; the flag is true if the prepared descriptors were used. All ways of
    /// reading must give the same result.
    pub fn freeze_with_prepared_flag(&self, snapshot: &FilesSnapshot) -> (SavedDescriptors, bool) {
        let frozen = snapshot
            .save_frozen(&self.pids())
            .unwrap_or_else(|error| panic!("{error}"));
        let expected = Arc::clone(&self.expected_sockets.lock().expect("an unpoisoned lock"));
        let freeze_listed = || {
            let found = snapshot.save_frozen_from_listings(
                &self.pids(),
                list_descriptors(&self.pids()),
                &expected,
            );
            found.unwrap_or_else(|error| panic!("{error}"))
        };
        let (first, second) = (freeze_listed(), freeze_listed());
        let were_prepared_used = first.socket_fds.is_from_prediction();
        assert!(
            !second.socket_fds.is_from_prediction(),
            "a prediction is used once"
        );
        let image = |found: &FrozenFiles| {
            let mut image = snapshot.image.clone();
            (image.apply(found.changes.clone())).expect("an image");
            image
        };
        assert_eq!(first.sockets.len(), second.sockets.len());
        for mut found in [first, second] {
            assert_eq!(stable_part(image(&found)), stable_part(image(&frozen)));
            assert_eq!(found.closed_sockets, frozen.closed_sockets);
            assert_eq!(
                found.socket_fds.all(snapshot),
                frozen.socket_fds.all(snapshot)
            );
            let unseen: Vec<FileId> = expected.iter().copied().collect();
            snapshot
                .copy_missing_sockets(&mut found, &unseen)
                .expect("copied");
            let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).expect("stat").st_ino;
            let sockets = |found: &FrozenFiles| -> BTreeMap<FileId, u64> {
                found
                    .sockets
                    .iter()
                    .map(|(id, fd)| (*id, inode(fd)))
                    .collect()
            };
            assert_eq!(sockets(&found), sockets(&frozen));
            assert_eq!(found.statics, frozen.statics);
        }
        let before = postcard::to_stdvec(&snapshot.image).expect("coded");
        let changes = postcard::to_stdvec(&frozen.changes).expect("coded");
        let saved = SavedDescriptors {
            image: FilesImage::decode(&before).expect("decoded"),
            snapshot_changes: None,
            changes: FilesImageChanges::decode(&changes).expect("decoded"),
            frozen: image(&frozen),
        };
        (saved, were_prepared_used)
    }

    pub fn blockers(&self) -> Vec<String> {
        let found = holdfast_checkpoint::files::find_descriptor_blockers(
            &self.pids(),
            &SaveLimits::default(),
        );
        let found = found.unwrap_or_else(|error| panic!("{error}"));
        found
            .iter()
            .map(|blocker| format!("{:?} {blocker}", blocker.reason))
            .collect()
    }
}

/// Removes the parts in which two readings of a stopped tree may differ: running clocks, and empty messages, which the
/// kernel shows to the first peek only.
fn stable_part(mut image: FilesImage) -> FilesImage {
    for file in image.files.values_mut() {
        match &mut file.kind {
            OpenFileKind::Timer(timer) => (timer.value_ns, timer.ticks) = (0, 0),
            OpenFileKind::Unix(socket) => socket
                .queue
                .retain(|message| !message.bytes.0.is_empty() || !message.files.is_empty()),
            _ => {}
        }
    }
    image
}

impl Drop for Donor {
    fn drop(&mut self) {
        for pid in self.pids().into_iter().rev() {
            let pid = Pid::from_raw(pid).expect("a pid");
            kill_process(pid, Signal::KILL).expect("killed");
        }
        waitpid(Some(self.pid), WaitOptions::empty()).expect("reaped");
    }
}

/// Data that an acceptor gets.
pub struct SavedDescriptors {
    pub image: FilesImage,
    /// Changes from `image` to the last snapshot, if that is another snapshot.
    pub snapshot_changes: Option<FilesImageChanges>,
    pub changes: FilesImageChanges,
    pub frozen: FilesImage,
}

impl SavedDescriptors {
    /// Restores the image in a new process and runs `check` there once for each table, with the index of the table.
    pub fn restore_and_check(self, check: impl Fn(usize)) {
        self.restore_in_and_check(|| {}, check);
    }

    /// Restores the image like [`Self::restore_and_check`], after `enter` has created namespaces for the acceptor.
    pub fn restore_in_and_check(self, enter: impl FnOnce(), check: impl Fn(usize)) {
        let outcome = self.accept_in_child(enter, check);
        assert!(outcome.is_empty(), "the acceptor failed: {outcome}");
    }

    /// Returns the reason with which the acceptor refuses.
    pub fn refusal(self) -> String {
        self.accept_in_child(|| {}, |_| {})
    }

    fn accept_in_child(self, enter: impl FnOnce(), check: impl Fn(usize)) -> String {
        panic_message_of_child(|| {
            enter();
            self.restore_here(check);
        })
    }

    fn restore_here(self, check: impl Fn(usize)) {
        let store = (|| {
            let mut store = FdStore::prepare(self.image, ProvidedFiles::default())?;
            if let Some(changes) = self.snapshot_changes {
                store.apply_snapshot(changes, ProvidedFiles::default())?;
            }
            store.apply_final(self.changes, ProvidedFiles::default())?;
            store.publish()?;
            Ok::<_, FilesError>(store)
        })();
        let store = store.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(*store.image(), self.frozen);
        let tables: Vec<u32> = store.image().tables.keys().copied().collect();
        let mut children = Vec::new();
        for (at, table) in tables.iter().enumerate().skip(1) {
            match fork_child() {
                Some(pid) => children.push(pid),
                None => {
                    let outcome = catch_unwind(AssertUnwindSafe(|| {
                        take_table(store, *table);
                        check(at);
                    }));
                    exit_child(outcome.is_err());
                }
            }
        }
        take_table(store, tables[0]);
        check(0);
        for pid in children {
            let status = waitpid(Some(pid), WaitOptions::empty()).expect("waited");
            let (_, status) = status.expect("a status");
            assert_eq!(status.exit_status(), Some(0), "another process of the tree");
        }
    }
}

fn take_table(store: FdStore, table: u32) {
    let image = store
        .install_table(table)
        .unwrap_or_else(|error| panic!("{error}"));
    let outcome = image.take_locks(table);
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// Returns a guard, held while a test has lifted descriptors and while a donor is forked, because the donor would
/// inherit them.
pub fn lift_lock() -> MutexGuard<'static, ()> {
    static LIFT_LOCK: Mutex<()> = Mutex::new(());
    // A panic of another test must not fail this one.
    LIFT_LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` in a new process, which inherits the descriptors that the test has lifted, and returns its panic
/// message.
pub fn panic_message_of_child(work: impl FnOnce()) -> String {
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let pid = match fork_child() {
        None => run_child(work, Some(writer.into())),
        Some(pid) => pid,
    };
    drop(writer);
    let mut message = String::new();
    reader.read_to_string(&mut message).expect("read");
    waitpid(Some(pid), WaitOptions::empty()).expect("reaped");
    message
}

/// Stops the calling process until SIGCONT.
pub fn stop_self() {
    rustix::process::kill_process(rustix::process::getpid(), Signal::STOP).expect("stopped");
}

/// Moves a descriptor to a number.
pub fn put_at(fd: impl Into<OwnedFd>, number: RawFd) {
    let fd = fd.into();
    if fd.as_raw_fd() == number {
        let _ = fd.into_raw_fd();
        return;
    }
    // SAFETY: the number is this process's to give, and belongs to nothing else from here on.
    let mut existing = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::dup2(&fd, &mut existing).expect("dup2");
    let _ = existing.into_raw_fd();
}

/// Returns the descriptor with this number.
pub fn borrow_fd(number: RawFd) -> BorrowedFd<'static> {
    // SAFETY: tests name only numbers that they opened or got restored, and that stay open.
    unsafe { BorrowedFd::borrow_raw(number) }
}

/// Closes the descriptor with this number.
pub fn close_number(number: RawFd) {
    // SAFETY: the number belongs to the test, which does not use it again.
    drop(unsafe { OwnedFd::from_raw_fd(number) });
}

/// Reads everything that is available at once.
pub fn read_available(number: RawFd) -> Vec<u8> {
    let mut buffer = vec![0; 1 << 20];
    let length = rustix::io::read(borrow_fd(number), &mut buffer).expect("read");
    buffer.truncate(length);
    buffer
}

/// Forks; returns `None` in the child.
pub fn fork_child() -> Option<Pid> {
    // SAFETY: the child has its own memory, and its calls do not wait for threads that exist only in the parent.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    Pid::from_raw(pid)
}

/// Runs `work` in a forked child that has `/dev/null` as 0 to 2, and reports its panic. Never returns.
fn run_child(work: impl FnOnce(), report: Option<OwnedFd>) -> ! {
    // A lock held by a thread that this process lacks would block forever, so the child has a time limit.
    // SAFETY: no pointers are passed.
    unsafe { libc::alarm(120) };
    FdStore::raise_limit().expect("limit");
    let mut report =
        report.map(|fd| fs::File::from(FdStore::move_caller_fd_up(fd).expect("lifted")));
    let null = fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .expect("null");
    for number in 0..3 {
        put_at(null.try_clone().expect("dup"), number);
    }
    let top = FdStore::caller_fd_floor().expect("floor");
    // SAFETY: nothing of the parent's is used here but the report, which is above.
    unsafe { libc::syscall(libc::SYS_close_range, 3, top - 1, 0) };
    std::mem::forget(null);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    if let (Err(panic), Some(report)) = (&outcome, &mut report) {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or(panic.downcast_ref::<&str>().map(ToString::to_string));
        let _ = report.write_all(text.unwrap_or("a panic".into()).as_bytes());
    }
    exit_child(outcome.is_err());
}

fn exit_child(failed: bool) -> ! {
    // SAFETY: no pointers are passed; nothing of the parent's is flushed or run.
    unsafe { libc::_exit(i32::from(failed)) }
}
