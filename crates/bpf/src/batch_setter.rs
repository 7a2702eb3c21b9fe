//! Batched changes of flows and records (`c/batch_setter.h`), in place: about five times as fast as the map's own batch
//! call, which allocates a new element for each entry and frees the old one.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use libbpf_rs::libbpf_sys::{bpf_prog_test_run_opts, bpf_test_run_opts};
use libbpf_rs::{MapHandle, Object};
use zerocopy::{FromZeros, Immutable, IntoBytes};

use crate::mapped_array::MappedArray;
use crate::shared_with_c::FlowKey;
use crate::{Error, program};

/// Most changes in one batch.
const CHANGES_MAX: usize = 1024;

/// One flow or record to be set.
#[repr(C)]
#[derive(Clone, Copy, FromZeros)]
pub(crate) struct MapChange {
    key: FlowKey,
    /// A [`FlowValue`](crate::shared::FlowValue) or a [`Record`](crate::shared::Record).
    value: [u8; 16],
}

/// Number of changes in a batch, and its result.
#[repr(C)]
struct BatchHeader {
    /// Number of changes, from the first on.
    count: u32,
    /// Number of entries that did not fit in the map.
    failed: u32,
}

const _: () = assert!(size_of::<MapChange>() == 56 && size_of::<BatchHeader>() == 8);

/// Shared memory in which changes are written for the programs: one batch at a time.
pub(crate) type ChangeBuffer = Mutex<MappedArray<MapChange>>;

/// Maps the array of changes.
pub(crate) fn map_change_buffer(map: &MapHandle) -> Result<Arc<ChangeBuffer>, Error> {
    let changes = MappedArray::map(map, "changes")?;
    assert_eq!(changes.len(), CHANGES_MAX);
    Ok(Arc::new(Mutex::new(changes)))
}

/// Setter of entries of one map.
pub(crate) struct BatchSetter {
    batch: Arc<ChangeBuffer>,
    program: OwnedFd,
    name: &'static str,
}

impl BatchSetter {
    /// Makes a setter that uses the program `program_name` for the map `name`.
    pub(crate) fn new(
        object: &Object,
        batch: &Arc<ChangeBuffer>,
        program_name: &str,
        name: &'static str,
    ) -> Result<Self, Error> {
        let program = program(object, program_name)?.try_clone_to_owned();
        Ok(Self {
            batch: Arc::clone(batch),
            program: program.map_err(|error| Error::Load(error.to_string()))?,
            name,
        })
    }

    /// Sets an entry of the map for each key, with few system calls.
    ///
    /// # Errors
    /// The table is full, or the kernel refuses; some entries may have been set.
    pub(crate) fn set<V: IntoBytes + Immutable>(
        &self,
        keys: &[FlowKey],
        values: &[V],
    ) -> Result<(), Error> {
        // The lock is held to the end, because otherwise another caller's changes could replace these.
        let batch = self.batch.lock();
        let batch = batch.unwrap_or_else(PoisonError::into_inner);
        let batches = keys.chunks(CHANGES_MAX).zip(values.chunks(CHANGES_MAX));
        let mut failed = 0;
        for (keys, values) in batches {
            for (index, (key, value)) in keys.iter().zip(values).enumerate() {
                let mut change = MapChange::new_zeroed();
                change.key = *key;
                change.value[..size_of::<V>()].copy_from_slice(value.as_bytes());
                // SAFETY: the lock keeps other writers from the mapping.
                unsafe { batch.value_ptr(index).write(change) };
            }
            failed += self.run(keys.len())?;
        }
        match failed {
            0 => Ok(()),
            failed => Err(self.error(format!("no room for {failed} of {} entries", keys.len()))),
        }
    }

    /// Runs the program on the first `count` changes; returns the number of entries that did not fit in the map.
    fn run(&self, count: usize) -> Result<u32, Error> {
        let mut header = BatchHeader {
            count: u32::try_from(count).unwrap_or(0),
            failed: 0,
        };
        let mut options = bpf_test_run_opts {
            sz: size_of::<bpf_test_run_opts>() as _,
            ctx_in: (&raw mut header).cast(),
            ctx_size_in: size_of::<BatchHeader>() as u32,
            ..bpf_test_run_opts::default()
        };
        // SAFETY: the options and the data that they point to outlive the call, and are writable.
        let result = unsafe { bpf_prog_test_run_opts(self.program.as_raw_fd(), &raw mut options) };
        match result {
            0 => Ok(header.failed),
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
