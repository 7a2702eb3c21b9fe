//! A donor that holds descriptors and is stopped, and an acceptor that restores them.

use crate::listing::list;
use holdfast_sys::process::files::image::{FileId, Kind};
use holdfast_sys::process::files::{
    Changes, Draft, FilesError, Frozen, Given, Image, Limits, Stock,
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
    /// Sockets that the last draft expects to read without a copy of the descriptor.
    expected: Mutex<Arc<BTreeSet<FileId>>>,
}

impl Donor {
    /// Forks a process that has only `/dev/null` as descriptors and runs `hold`, which ends with [`stop`].
    pub fn new(hold: impl FnOnce()) -> Self {
        let _alone = lifting();
        Self::start(hold, None)
    }

    /// Forks a process that keeps a descriptor of the test as number 10.
    pub fn keeping(fd: impl FnOnce() -> OwnedFd) -> Self {
        let fd = fd();
        let _alone = lifting();
        Stock::raise_limit().expect("limit");
        let kept = Stock::lift_own(fd).expect("lifted");
        let number = kept.as_raw_fd();
        Self::start(
            || {
                put(at(number).try_clone_to_owned().expect("dup"), 10);
                close(number);
                stop();
            },
            Some(kept),
        )
    }

    fn start(hold: impl FnOnce(), kept: Option<OwnedFd>) -> Self {
        let pid = match fork() {
            None => child(hold, kept.map(OwnedFd::into_raw_fd).and(None)),
            Some(pid) => pid,
        };
        let donor = Self {
            pid,
            expected: Mutex::default(),
        };
        donor.wait_until_stopped();
        donor
    }

    fn wait_until_stopped(&self) {
        let status = waitpid(Some(self.pid), WaitOptions::UNTRACED).expect("waited");
        let (_, status) = status.expect("a status");
        assert!(status.stopped(), "the donor ended: {status:?}");
    }

    /// Lets the process run to its next [`stop`].
    pub fn run_on(&self) {
        kill_process(self.pid, Signal::CONT).expect("continued");
        self.wait_until_stopped();
    }

    /// Returns a copy of one of the process's descriptors.
    pub fn copy(&self, number: u32) -> OwnedFd {
        let mut copier = holdfast_sys::process::files::Copier::default();
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

    /// Takes a draft, as before a freeze of a running process, and prepares the freeze.
    pub fn draft(&self) -> Draft {
        let draft = Draft::save(&self.pids(), &Limits::default());
        let draft = draft.unwrap_or_else(|error| panic!("{error}"));
        let expected = Arc::new(draft.places.keys().copied().collect());
        draft.expect(&self.pids(), list(&self.pids()), &expected);
        *self.expected.lock().expect("no test fails with it") = expected;
        draft
    }

    /// Saves the process with no change between draft and freeze.
    pub fn save(&self) -> Saved {
        self.freeze(&self.draft())
    }

    /// Saves the process against a second draft, with the changes since the first.
    pub fn freeze_again(&self, first: &Draft) -> Saved {
        let draft = Draft::look(|| self.pids(), &Limits::default(), Some(first));
        let draft = draft.unwrap_or_else(|error| panic!("{error}"));
        let expected = Arc::new(draft.places.keys().copied().collect());
        draft.expect(&self.pids(), list(&self.pids()), &expected);
        *self.expected.lock().expect("no test fails with it") = expected;
        Saved {
            image: first.image.clone(),
            followed: Some(draft.image.changes_since(&first.image)),
            ..self.freeze(&draft)
        }
    }

    /// Saves the process against an earlier draft. Transferred data is encoded and decoded.
    pub fn freeze(&self, draft: &Draft) -> Saved {
        self.freeze_either_way(draft).0
    }

    /// Saves the process like [`Self::freeze`]; the flag is true if the prepared descriptors were used. All ways of
    /// reading must give the same result.
    pub fn freeze_either_way(&self, draft: &Draft) -> (Saved, bool) {
        let frozen = draft
            .save_frozen(&self.pids())
            .unwrap_or_else(|error| panic!("{error}"));
        let expected = Arc::clone(&self.expected.lock().expect("no test fails with it"));
        let listed = || {
            let found = draft.save_frozen_listed(&self.pids(), list(&self.pids()), &expected);
            found.unwrap_or_else(|error| panic!("{error}"))
        };
        let (first, second) = (listed(), listed());
        let prepared = first.places.were_prepared();
        assert!(!second.places.were_prepared(), "it serves once");
        let image = |found: &Frozen| {
            let mut image = draft.image.clone();
            (image.apply(found.changes.clone())).expect("an image");
            image
        };
        assert_eq!(first.sockets.len(), second.sockets.len());
        for mut found in [first, second] {
            assert_eq!(lasting(image(&found)), lasting(image(&frozen)));
            assert_eq!(found.gone, frozen.gone);
            assert_eq!(found.places.all(draft), frozen.places.all(draft));
            let unseen: Vec<FileId> = expected.iter().copied().collect();
            draft.copy_unseen(&mut found, &unseen).expect("copied");
            let same = |fd: &OwnedFd| rustix::fs::fstat(fd).expect("stat").st_ino;
            let sockets = |found: &Frozen| -> BTreeMap<FileId, u64> {
                found
                    .sockets
                    .iter()
                    .map(|(id, fd)| (*id, same(fd)))
                    .collect()
            };
            assert_eq!(sockets(&found), sockets(&frozen));
            assert_eq!(found.fixed, frozen.fixed);
        }
        let before = postcard::to_stdvec(&draft.image).expect("coded");
        let changes = postcard::to_stdvec(&frozen.changes).expect("coded");
        let saved = Saved {
            image: Image::decode(&before).expect("decoded"),
            followed: None,
            changes: Changes::decode(&changes).expect("decoded"),
            frozen: image(&frozen),
        };
        (saved, prepared)
    }

    pub fn blockers(&self) -> Vec<String> {
        let found = holdfast_sys::process::files::inspect(&self.pids(), &Limits::default());
        let found = found.unwrap_or_else(|error| panic!("{error}"));
        found
            .iter()
            .map(|blocker| format!("{:?} {blocker}", blocker.reason))
            .collect()
    }
}

/// Removes the parts in which two readings of a stopped tree may differ: running clocks, and empty messages, which the
/// kernel shows to the first peek only.
fn lasting(mut image: Image) -> Image {
    for file in image.files.values_mut() {
        match &mut file.kind {
            Kind::Timer(timer) => (timer.value_ns, timer.ticks) = (0, 0),
            Kind::Unix(socket) => socket
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
pub struct Saved {
    pub image: Image,
    /// Changes from `image` to the last draft, if that is another draft.
    pub followed: Option<Changes>,
    pub changes: Changes,
    pub frozen: Image,
}

impl Saved {
    /// Restores the image in a new process and runs `check` there once for each table, with the index of the table.
    pub fn restored(self, check: impl Fn(usize)) {
        self.restored_in(|| {}, check);
    }

    /// Restores the image like [`Self::restored`], after `enter` has created namespaces for the acceptor.
    pub fn restored_in(self, enter: impl FnOnce(), check: impl Fn(usize)) {
        let outcome = self.accept(enter, check);
        assert!(outcome.is_empty(), "the acceptor says: {outcome}");
    }

    /// Returns the reason with which the acceptor refuses.
    pub fn refused(self) -> String {
        self.accept(|| {}, |_| {})
    }

    fn accept(self, enter: impl FnOnce(), check: impl Fn(usize)) -> String {
        in_child(|| {
            enter();
            self.act(check);
        })
    }

    fn act(self, check: impl Fn(usize)) {
        let stock = (|| {
            let mut stock = Stock::prepare(self.image, Given::default())?;
            if let Some(changes) = self.followed {
                stock.follow(changes, Given::default())?;
            }
            stock.finish(self.changes, Given::default())?;
            stock.publish()?;
            Ok::<_, FilesError>(stock)
        })();
        let stock = stock.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(*stock.image(), self.frozen);
        let tables: Vec<u32> = stock.image().tables.keys().copied().collect();
        let mut children = Vec::new();
        for (at, table) in tables.iter().enumerate().skip(1) {
            match fork() {
                Some(pid) => children.push(pid),
                None => {
                    let outcome = catch_unwind(AssertUnwindSafe(|| {
                        settle(stock, *table);
                        check(at);
                    }));
                    end(outcome.is_err());
                }
            }
        }
        settle(stock, tables[0]);
        check(0);
        for pid in children {
            let status = waitpid(Some(pid), WaitOptions::empty()).expect("waited");
            let (_, status) = status.expect("a status");
            assert_eq!(status.exit_status(), Some(0), "another process of the tree");
        }
    }
}

fn settle(stock: Stock, table: u32) {
    let image = stock
        .arrange(table)
        .unwrap_or_else(|error| panic!("{error}"));
    let outcome = image.take_locks(table);
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// Returns a guard, held while a test has lifted descriptors and while a donor is forked, because the donor would
/// inherit them.
pub fn lifting() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // A panic of another test must not fail this one.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` in a new process, which inherits the descriptors that the test has lifted, and returns its panic
/// message.
pub fn in_child(work: impl FnOnce()) -> String {
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let pid = match fork() {
        None => child(work, Some(writer.into())),
        Some(pid) => pid,
    };
    drop(writer);
    let mut said = String::new();
    reader.read_to_string(&mut said).expect("read");
    waitpid(Some(pid), WaitOptions::empty()).expect("reaped");
    said
}

/// Stops the calling process until SIGCONT.
pub fn stop() {
    rustix::process::kill_process(rustix::process::getpid(), Signal::STOP).expect("stopped");
}

/// Moves a descriptor to a number.
pub fn put(fd: impl Into<OwnedFd>, number: RawFd) {
    let fd = fd.into();
    if fd.as_raw_fd() == number {
        let _ = fd.into_raw_fd();
        return;
    }
    // SAFETY: the number is this process's to give, and belongs to nothing else from here on.
    let mut place = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::dup2(&fd, &mut place).expect("dup2");
    let _ = place.into_raw_fd();
}

/// Returns the descriptor with this number.
pub fn at(number: RawFd) -> BorrowedFd<'static> {
    // SAFETY: tests name only numbers that they opened or got restored, and that stay open.
    unsafe { BorrowedFd::borrow_raw(number) }
}

/// Closes the descriptor with this number.
pub fn close(number: RawFd) {
    // SAFETY: the number belongs to the test, which does not use it again.
    drop(unsafe { OwnedFd::from_raw_fd(number) });
}

/// Reads everything that is available at once.
pub fn read(number: RawFd) -> Vec<u8> {
    let mut buffer = vec![0; 1 << 20];
    let length = rustix::io::read(at(number), &mut buffer).expect("read");
    buffer.truncate(length);
    buffer
}

/// Forks; returns `None` in the child.
pub fn fork() -> Option<Pid> {
    // SAFETY: the child has its own memory, and its calls do not wait for threads that exist only in the parent.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    Pid::from_raw(pid)
}

/// Runs `work` in a forked child that has `/dev/null` as 0 to 2, and reports its panic. Never returns.
fn child(work: impl FnOnce(), report: Option<OwnedFd>) -> ! {
    // A lock held by a thread that this process lacks would block forever, so the child has a time limit.
    // SAFETY: no pointers are passed.
    unsafe { libc::alarm(120) };
    Stock::raise_limit().expect("limit");
    let mut report = report.map(|fd| fs::File::from(Stock::lift_own(fd).expect("lifted")));
    let null = fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .expect("null");
    for number in 0..3 {
        put(null.try_clone().expect("dup"), number);
    }
    let top = Stock::callers_floor().expect("floor");
    // SAFETY: nothing of the parent's is used here but the report, which is above.
    unsafe { libc::syscall(libc::SYS_close_range, 3, top - 1, 0) };
    std::mem::forget(null);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    if let (Err(panic), Some(report)) = (&outcome, &mut report) {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or(panic.downcast_ref::<&str>().map(ToString::to_string));
        let _ = report.write_all(text.unwrap_or("a panic".into()).as_bytes());
    }
    end(outcome.is_err());
}

fn end(failed: bool) -> ! {
    // SAFETY: no pointers are passed; nothing of the parent's is flushed or run.
    unsafe { libc::_exit(i32::from(failed)) }
}
