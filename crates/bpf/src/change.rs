//! Flows and records set many at once (`c/change.h`), in place: some five times as fast as the map's own call, which makes a new
//! element for each and frees the old one.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use libbpf_rs::libbpf_sys::{bpf_prog_test_run_opts, bpf_test_run_opts};
use libbpf_rs::{MapHandle, Object};
use zerocopy::{FromZeros, Immutable, IntoBytes};

use crate::mapped::Mapped;
use crate::shared::FlowKey;
use crate::{Error, program};

/// Changes that are carried out at once at most.
const CHANGES_MAX: usize = 1024;

/// A flow or a record to be set, with many others.
#[repr(C)]
#[derive(Clone, Copy, FromZeros)]
pub(crate) struct Change {
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
pub(crate) type Batch = Mutex<Mapped<Change>>;

/// Maps the array.
pub(crate) fn batch(map: &MapHandle) -> Result<Arc<Batch>, Error> {
    let changes = Mapped::map(map, "changes")?;
    assert_eq!(changes.len(), CHANGES_MAX);
    Ok(Arc::new(Mutex::new(changes)))
}

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
        let batch = self.batch.lock();
        let batch = batch.unwrap_or_else(PoisonError::into_inner);
        let batches = keys.chunks(CHANGES_MAX).zip(values.chunks(CHANGES_MAX));
        let mut failed = 0;
        for (keys, values) in batches {
            for (at, (key, value)) in keys.iter().zip(values).enumerate() {
                let mut change = Change::new_zeroed();
                change.key = *key;
                change.value[..size_of::<V>()].copy_from_slice(value.as_bytes());
                // SAFETY: the lock keeps others from the mapping.
                unsafe { batch.at(at).write(change) };
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
