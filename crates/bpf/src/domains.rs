//! Detection of processes in a Landlock domain, which no other interface of the kernel reveals (`c/domains.bpf.c`).
//!
//! The kernel keeps a thread's domain as a pointer in the security modules' data beside its credentials, at an
//! offset that differs between machines. To find the offset, threads of the caller enter domains; the domain's offset
//! is the one at which a new pointer appears each time.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::Error;
use crate::iterator::Iterator;
use crate::records::read_all;

/// Number of words inspected, more than security modules use.
const WORDS: usize = 31;
/// Number of threads that enter a domain to find the offset.
const TRIES: usize = 4;
/// Lowest address of the kernel.
const KERNEL: u64 = 1 << 63;
/// `LANDLOCK_CREATE_RULESET_VERSION`.
const VERSION: u64 = 1;
/// `LANDLOCK_ACCESS_FS_EXECUTE`, a right that each version of Landlock knows.
const EXECUTE: u64 = 1;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/domains.bpf.o"));

/// Data of security modules beside the credentials of a thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Kept {
    /// Address of the words in the kernel; 0 if they cannot be read.
    address: u64,
    words: [u64; WORDS],
}

const _: () = assert!(size_of::<Kept>() == 256);

/// Detector of processes in a Landlock domain.
#[derive(Debug)]
pub struct Domains {
    iterator: Iterator,
    /// Index of the word that holds the domain; `None` if the kernel has no Landlock.
    place: Option<usize>,
    /// The caller's own domain, or 0.
    own: u64,
}

impl Domains {
    /// Loads the iterator and finds the domain's offset.
    ///
    /// # Errors
    /// The kernel refuses the iterator, or the offset was not found.
    pub fn load() -> Result<Self, Error> {
        let (iterator, _) = Iterator::load(OBJECT, "read_kept", "domains")?;
        let mut domains = Self {
            iterator,
            place: None,
            own: 0,
        };
        if has_landlock() {
            let mut seen = Vec::new();
            for _ in 0..TRIES {
                seen.push(domains.enter()?);
            }
            let own = |at: usize| seen[0].0.words[at];
            let is_place = |at: &usize| {
                seen.iter().all(|(before, inside)| {
                    before.words[*at] == own(*at) && is_place(before, inside, *at)
                })
            };
            // Unrelated data follows the security modules' words, so the first match is the right one.
            let place = (0..WORDS).find(is_place).ok_or_else(|| {
                Error::Load("no word beside credentials shows Landlock domains".to_owned())
            })?;
            (domains.place, domains.own) = (Some(place), own(place));
        }
        Ok(domains)
    }

    /// Returns true if a thread of a process is in a Landlock domain that the caller is not in. A process that does not
    /// exist is in none.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn has(&self, pid: i32) -> Result<bool, Error> {
        let Some(place) = self.place else {
            return Ok(false);
        };
        let threads = self.read(self.iterator.over_process(pid)?)?;
        Ok(threads
            .iter()
            .any(|kept| kept.words[place] != 0 && kept.words[place] != self.own))
    }

    fn read(&self, iter: File) -> Result<Vec<Kept>, Error> {
        let kept: Vec<Kept> = read_all(iter).map_err(|error| self.iterator.refused(error))?;
        match kept.iter().all(|kept| kept.address != 0) {
            true => Ok(kept),
            false => Err(self.refused(io::ErrorKind::PermissionDenied)),
        }
    }

    /// Returns the words of a new thread before and after it enters a domain. The thread then ends.
    fn enter(&self) -> Result<(Kept, Kept), Error> {
        let (say, said) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let apart = move || {
                // SAFETY: no pointers are passed.
                let tid = unsafe { libc::gettid() };
                for step in [&(|| Ok(())) as &dyn Fn() -> io::Result<()>, &enter_domain] {
                    let sent = say.send(step().map(|()| tid));
                    // The caller has taken its snapshot, or has stopped.
                    if sent.is_err() || wait.recv().is_err() {
                        return;
                    }
                }
            };
            let builder = std::thread::Builder::new().name("domain".to_owned());
            let refused = |error| self.iterator.refused(error);
            builder.spawn_scoped(scope, apart).map_err(refused)?;
            let look = || -> Result<Kept, Error> {
                let gone = |_| self.refused(io::ErrorKind::BrokenPipe);
                let tid = said.recv().map_err(gone)?.map_err(refused)?;
                let found = self.read(self.iterator.over_thread(tid)?)?;
                let missing = || self.refused(io::ErrorKind::NotFound);
                found.first().copied().ok_or_else(missing)
            };
            let before = look()?;
            let _ = go.send(());
            let inside = look()?;
            drop(go);
            Ok((before, inside))
        })
    }

    fn refused(&self, kind: io::ErrorKind) -> Error {
        self.iterator.refused(kind.into())
    }
}

/// Returns true if a word holds the domain: it became a kernel pointer that does not point into the words themselves.
fn is_place(before: &Kept, inside: &Kept, at: usize) -> bool {
    let (old, new) = (before.words[at], inside.words[at]);
    let own = inside.address..inside.address + size_of::<Kept>() as u64;
    new != old && new >= KERNEL && !own.contains(&new) && (old == 0 || old >= KERNEL)
}

fn has_landlock() -> bool {
    // SAFETY: nothing is read through the null pointer, as the length is 0.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u64>(),
            0,
            VERSION,
        )
    };
    version > 0
}

/// Puts the calling thread into a domain for the rest of its life.
fn enter_domain() -> io::Result<()> {
    let done = |outcome: libc::c_long| match outcome < 0 {
        true => Err(io::Error::last_os_error()),
        false => Ok(outcome),
    };
    let handled = EXECUTE;
    // SAFETY: `handled` is the attribute of the first version, has the given length, and outlives the call.
    let ruleset = done(unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            &raw const handled,
            size_of_val(&handled),
            0,
        )
    })?;
    // SAFETY: the call succeeded, so the result is a new descriptor that nothing else owns.
    let ruleset = unsafe { OwnedFd::from_raw_fd(ruleset as i32) };
    // SAFETY: no pointers are passed; both concern this thread alone.
    unsafe {
        done(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
        done(libc::syscall(
            libc::SYS_landlock_restrict_self,
            ruleset.as_raw_fd(),
            0,
        ))?;
    }
    Ok(())
}
