//! Keys in the keyrings of other processes, which no other interface of the kernel reveals (`c/keyrings.bpf.c`).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::Error;
use crate::bpf_iterator::BpfIterator;
use crate::iterator_records::read_all;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/keyrings.bpf.o"));

/// Number of keys of one thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct KeyCounts {
    thread_and_process: u64,
    session: u64,
}

const _: () = assert!(size_of::<KeyCounts>() == 16);

/// A keyring with keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keyring {
    /// Keyring of a thread or of its process.
    ThreadOrProcess,
    /// Session keyring. Keyrings in it, and the key that holds a service's systemd invocation ID, do not count.
    Session,
}

/// Detector of processes with keys.
#[derive(Debug)]
pub struct KeyDetector(BpfIterator);

impl KeyDetector {
    /// Loads the BPF iterator that counts the keys in a process's keyrings.
    ///
    /// # Errors
    /// The kernel refuses the iterator.
    pub fn load() -> Result<Self, Error> {
        let (iterator, _) = BpfIterator::load(OBJECT, "read_keyrings", "keyrings")?;
        Ok(Self(iterator))
    }

    /// Returns the keyring in which a process has keys; `None` for a process without keys, or one that does not exist.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn keyring_with_keys(&self, pid: i32) -> Result<Option<Keyring>, Error> {
        let iter = self.0.over_process(pid)?;
        let threads: Vec<KeyCounts> = read_all(iter).map_err(|error| self.0.error(error))?;
        let any_thread = |has: fn(&KeyCounts) -> bool| threads.iter().any(has);
        Ok(match () {
            () if any_thread(|counts| counts.thread_and_process > 0) => {
                Some(Keyring::ThreadOrProcess)
            }
            () if any_thread(|counts| counts.session > 0) => Some(Keyring::Session),
            () => None,
        })
    }
}
