//! Detection of processes in a Landlock domain, which no other interface of the kernel reveals (`c/landlock.bpf.c`).
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
use crate::bpf_iterator::BpfIterator;
use crate::iterator_records::read_all;

/// Number of words inspected, more than security modules use.
const BLOB_WORDS: usize = 31;
/// Number of threads that enter a domain to find the offset.
const SAMPLES: usize = 4;
/// Lowest address of the kernel.
const KERNEL_START: u64 = 1 << 63;
/// `LANDLOCK_CREATE_RULESET_VERSION`.
const CREATE_RULESET_VERSION: u64 = 1;
/// `LANDLOCK_ACCESS_FS_EXECUTE`, a right that each version of Landlock knows.
const ACCESS_FS_EXECUTE: u64 = 1;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/landlock.bpf.o"));

/// Data of security modules beside the credentials of a thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct SecurityBlob {
    /// Address of the words in the kernel; 0 if they cannot be read.
    address: u64,
    words: [u64; BLOB_WORDS],
}

const _: () = assert!(size_of::<SecurityBlob>() == 256);

/// Detector of processes in a Landlock domain.
#[derive(Debug)]
pub struct LandlockDomains {
    iterator: BpfIterator,
    /// Index of the word that holds the domain; `None` if the kernel has no Landlock.
    word_index: Option<usize>,
    /// The caller's own domain, or 0.
    own_domain: u64,
}

impl LandlockDomains {
    /// Loads the iterator and finds the domain's offset.
    ///
    /// # Errors
    /// The kernel refuses the iterator, or the offset was not found.
    pub fn load() -> Result<Self, Error> {
        let (iterator, _) = BpfIterator::load(OBJECT, "read_security_blob", "domains")?;
        let mut domains = Self {
            iterator,
            word_index: None,
            own_domain: 0,
        };
        if has_landlock() {
            let mut samples = Vec::new();
            for _ in 0..SAMPLES {
                samples.push(domains.sample_domain_entry()?);
            }
            let domain_at = |at: usize| samples[0].0.words[at];
            let is_domain_index = |at: &usize| {
                samples.iter().all(|(before, inside)| {
                    before.words[*at] == domain_at(*at) && became_domain(before, inside, *at)
                })
            };
            // Unrelated data follows the security modules' words, so the first match is the right one.
            let word_index = (0..BLOB_WORDS).find(is_domain_index).ok_or_else(|| {
                Error::Load("cannot find the Landlock domain in the credentials".to_owned())
            })?;
            (domains.word_index, domains.own_domain) = (Some(word_index), domain_at(word_index));
        }
        Ok(domains)
    }

    /// Returns true if a thread of a process is in a Landlock domain that the caller is not in. A process that does not
    /// exist is in none.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn is_confined(&self, pid: i32) -> Result<bool, Error> {
        let Some(word_index) = self.word_index else {
            return Ok(false);
        };
        let threads = self.read_security_blobs(self.iterator.over_process(pid)?)?;
        Ok(threads
            .iter()
            .any(|kept| kept.words[word_index] != 0 && kept.words[word_index] != self.own_domain))
    }

    fn read_security_blobs(&self, iter: File) -> Result<Vec<SecurityBlob>, Error> {
        let kept: Vec<SecurityBlob> = read_all(iter).map_err(|error| self.iterator.error(error))?;
        match kept.iter().all(|kept| kept.address != 0) {
            true => Ok(kept),
            false => Err(self.error(io::ErrorKind::PermissionDenied)),
        }
    }

    /// Returns the words of a new thread before and after it enters a domain. The thread then ends.
    fn sample_domain_entry(&self) -> Result<(SecurityBlob, SecurityBlob), Error> {
        let (step_sender, step_receiver) = mpsc::channel();
        let (continue_sender, continue_receiver) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let thread_body = move || {
                // SAFETY: no pointers are passed.
                let tid = unsafe { libc::gettid() };
                for step in [&(|| Ok(())) as &dyn Fn() -> io::Result<()>, &enter_domain] {
                    let sent = step_sender.send(step().map(|()| tid));
                    // The caller has taken its snapshot, or has stopped.
                    if sent.is_err() || continue_receiver.recv().is_err() {
                        return;
                    }
                }
            };
            let builder = std::thread::Builder::new().name("domain".to_owned());
            let iterator_error = |error| self.iterator.error(error);
            builder
                .spawn_scoped(scope, thread_body)
                .map_err(iterator_error)?;
            let take_sample = || -> Result<SecurityBlob, Error> {
                let channel_closed = |_| self.error(io::ErrorKind::BrokenPipe);
                let tid = step_receiver
                    .recv()
                    .map_err(channel_closed)?
                    .map_err(iterator_error)?;
                let blobs = self.read_security_blobs(self.iterator.over_thread(tid)?)?;
                let missing = || self.error(io::ErrorKind::NotFound);
                blobs.first().copied().ok_or_else(missing)
            };
            let before = take_sample()?;
            let _ = continue_sender.send(());
            let inside = take_sample()?;
            drop(continue_sender);
            Ok((before, inside))
        })
    }

    fn error(&self, kind: io::ErrorKind) -> Error {
        self.iterator.error(kind.into())
    }
}

/// Returns true if a word holds the domain: it became a kernel pointer that does not point into the words themselves.
fn became_domain(before: &SecurityBlob, inside: &SecurityBlob, at: usize) -> bool {
    let (old, new) = (before.words[at], inside.words[at]);
    let blob_range = inside.address..inside.address + size_of::<SecurityBlob>() as u64;
    new != old
        && new >= KERNEL_START
        && !blob_range.contains(&new)
        && (old == 0 || old >= KERNEL_START)
}

fn has_landlock() -> bool {
    // SAFETY: nothing is read through the null pointer, as the length is 0.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u64>(),
            0,
            CREATE_RULESET_VERSION,
        )
    };
    version > 0
}

/// Puts the calling thread into a domain for the rest of its life.
fn enter_domain() -> io::Result<()> {
    let check = |outcome: libc::c_long| match outcome < 0 {
        true => Err(io::Error::last_os_error()),
        false => Ok(outcome),
    };
    let handled_access = ACCESS_FS_EXECUTE;
    // SAFETY: `handled_access` is the attribute of the first version, has the given length, and outlives the call.
    let ruleset = check(unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            &raw const handled_access,
            size_of_val(&handled_access),
            0,
        )
    })?;
    // SAFETY: the call succeeded, so the result is a new descriptor that nothing else owns.
    let ruleset = unsafe { OwnedFd::from_raw_fd(ruleset as i32) };
    // SAFETY: no pointers are passed; both concern this thread alone.
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
        check(libc::syscall(
            libc::SYS_landlock_restrict_self,
            ruleset.as_raw_fd(),
            0,
        ))?;
    }
    Ok(())
}
