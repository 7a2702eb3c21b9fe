//! Flows and records set many at once (`c/change.h`), in place: some five times as fast as the map's own call, which makes a new
//! element for each and frees the old one.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use libbpf_rs::libbpf_sys::{bpf_prog_test_run_opts, bpf_test_run_opts};
use libbpf_rs::{MapHandle, Object};
use zerocopy::{FromZeros, Immutable, IntoBytes};

use crate::shared::FlowKey;
use crate::{Error, program};

/// Changes that are carried out at once at most.
const CHANGES_MAX: usize = 1024;

/// A flow or a record to be set, with many others.
#[repr(C)]
#[derive(Clone, Copy, FromZeros)]
struct Change {
    key: FlowKey,
    /// A [`FlowValue`](crate::shared::FlowValue) or a [`Record`](crate::shared::Record).
    value: [u8; 16],
}

/// How many changes there are.
#[repr(C)]
struct ChangeOrder {
    /// From the first on.
    count: u32,
    /// The map did not take so many.
    failed: u32,
}

const _: () = assert!(size_of::<Change>() == 56 && size_of::<ChangeOrder>() == 8);

/// Where changes are written for the programs: one batch at a time.
pub(crate) struct Batch {
    base: Mutex<NonNull<Change>>,
}

const BYTES: usize = CHANGES_MAX * size_of::<Change>();

impl Batch {
    /// Maps the array.
    pub(crate) fn map(map: &MapHandle) -> Result<Arc<Self>, Error> {
        let refused = || Error::Map {
            name: "changes",
            reason: std::io::Error::last_os_error().to_string(),
        };
        // SAFETY: a new shared mapping chosen by the kernel; the map has CHANGES_MAX values of that size.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_fd().as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(refused());
        }
        let base = NonNull::new(base.cast()).ok_or_else(refused)?;
        Ok(Arc::new(Self {
            base: Mutex::new(base),
        }))
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        let base = self.base.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the mapping was made by `map` with this length and is not used after this.
        unsafe { libc::munmap(base.as_ptr().cast(), BYTES) };
    }
}

// SAFETY: the mapping belongs to no thread, and the lock lets one at a time use it.
unsafe impl Send for Batch {}
// SAFETY: as above.
unsafe impl Sync for Batch {}

/// Sets entries of one map.
pub(crate) struct Changer {
    batch: Arc<Batch>,
    program: OwnedFd,
    name: &'static str,
}

impl Changer {
    /// By the program of this name, for the map of that.
    pub(crate) fn new(
        object: &Object,
        batch: &Arc<Batch>,
        by: &str,
        name: &'static str,
    ) -> Result<Self, Error> {
        let program = program(object, by)?.try_clone_to_owned();
        Ok(Self {
            batch: Arc::clone(batch),
            program: program.map_err(|error| Error::Load(error.to_string()))?,
            name,
        })
    }

    /// Sets all of these.
    ///
    /// # Errors
    /// The table is full, or the kernel refuses; some may have been set.
    pub(crate) fn set<V: IntoBytes + Immutable>(
        &self,
        keys: &[FlowKey],
        values: &[V],
    ) -> Result<(), Error> {
        // Held to the end: another's changes would be carried out in place of these.
        let batch = self.batch.base.lock();
        let batch = batch.unwrap_or_else(PoisonError::into_inner);
        let batches = keys.chunks(CHANGES_MAX).zip(values.chunks(CHANGES_MAX));
        let mut failed = 0;
        for (keys, values) in batches {
            for (at, (key, value)) in keys.iter().zip(values).enumerate() {
                let mut change = Change::new_zeroed();
                change.key = *key;
                change.value[..size_of::<V>()].copy_from_slice(value.as_bytes());
                // SAFETY: `at` is below CHANGES_MAX, and the lock keeps others from the mapping.
                unsafe { batch.add(at).write(change) };
            }
            failed += self.run(keys.len())?;
        }
        match failed {
            0 => Ok(()),
            failed => Err(self.error(format!("no room for {failed} of {} entries", keys.len()))),
        }
    }

    /// Has the program carry out the first `count` changes; how many the map did not take.
    fn run(&self, count: usize) -> Result<u32, Error> {
        let mut order = ChangeOrder {
            count: u32::try_from(count).unwrap_or(0),
            failed: 0,
        };
        let mut options = bpf_test_run_opts {
            sz: size_of::<bpf_test_run_opts>() as _,
            ctx_in: (&raw mut order).cast(),
            ctx_size_in: size_of::<ChangeOrder>() as u32,
            ..bpf_test_run_opts::default()
        };
        // SAFETY: the options and what they point to outlive the call, and are writable.
        let outcome = unsafe { bpf_prog_test_run_opts(self.program.as_raw_fd(), &raw mut options) };
        match outcome {
            0 => Ok(order.failed),
            error => Err(self.error(std::io::Error::from_raw_os_error(-error).to_string())),
        }
    }

    fn error(&self, reason: String) -> Error {
        Error::Map {
            name: self.name,
            reason,
        }
    }
}
