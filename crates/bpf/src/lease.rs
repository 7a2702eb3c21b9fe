//! The contact node's lease, which the programs test (`struct lease` of `c/shared.h`), in a pinned and mapped array: a
//! lease ends in the kernel also when the daemon is dead.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libbpf_rs::libbpf_sys::BPF_F_MMAPABLE;
use libbpf_rs::{MapHandle, MapInfo};

use crate::Error;
use crate::mapped_array::MappedArray;

/// Time of [`LeaseWriter::set_until_ns`] for a lease without end.
pub const LEASE_WITHOUT_END: u64 = u64::MAX;

const MAP_NAME: &str = "lease";

/// `struct lease` of `c/shared.h`.
#[repr(C)]
struct RawLease {
    until_ns: AtomicU64,
    table_ready: AtomicU64,
    table_epoch: AtomicU64,
    contact: AtomicU64,
}

// The C side asserts the same size in `c/shared.h`.
const _: () = assert!(size_of::<RawLease>() == 32);

/// The lease of this node.
pub struct Lease {
    raw: Arc<MappedArray<RawLease>>,
}

/// Sets the end of the lease from any thread, so that a busy event loop does not delay a renewal.
#[derive(Clone)]
pub struct LeaseWriter {
    raw: Arc<MappedArray<RawLease>>,
}

impl Lease {
    pub(crate) fn map(map: &MapHandle) -> Result<Self, Error> {
        let raw = MappedArray::map(map, MAP_NAME)?;
        Ok(Self { raw: Arc::new(raw) })
    }

    /// Opens the lease that an earlier daemon pinned below `pins`, while that daemon's programs go on; none if there is no
    /// such lease, or one of a release with another layout.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open_pinned(pins: &Path) -> Result<Option<Self>, Error> {
        let path = pins.join(MAP_NAME);
        if !path.exists() {
            return Ok(None);
        }
        let map_error = |error: libbpf_rs::Error| Error::Map {
            name: MAP_NAME,
            reason: error.to_string(),
        };
        let map = MapHandle::from_pinned_path(path).map_err(map_error)?;
        let info = MapInfo::new(map.as_fd()).map_err(map_error)?.info;
        let has_layout = info.value_size as usize == size_of::<RawLease>()
            && info.max_entries > 0
            && info.map_flags & BPF_F_MMAPABLE != 0;
        match has_layout {
            true => Self::map(&map).map(Some),
            false => Ok(None),
        }
    }

    fn raw(&self) -> &RawLease {
        raw_lease(&self.raw)
    }

    /// Returns a writer of the lease's end.
    #[must_use]
    pub fn writer(&self) -> LeaseWriter {
        LeaseWriter {
            raw: self.raw.clone(),
        }
    }

    /// Sets whether the steering table has enough records to place new flows. Without them no lease counts.
    pub fn set_table_ready(&self, is_ready: bool) {
        let ready = u64::from(is_ready);
        self.raw().table_ready.store(ready, Ordering::Release);
    }

    /// Returns the end of the lease in nanoseconds since boot.
    #[must_use]
    pub fn until_ns(&self) -> u64 {
        self.raw().until_ns.load(Ordering::Acquire)
    }

    /// Sets the epoch of the newest view for which the steering table is complete; 0 for an incomplete table.
    pub fn set_table_epoch(&self, epoch: u64) {
        self.raw().table_epoch.store(epoch, Ordering::Release);
    }

    /// Returns the epoch of the newest view for which the steering table is complete; 0 for an incomplete table.
    #[must_use]
    pub fn table_epoch(&self) -> u64 {
        self.raw().table_epoch.load(Ordering::Acquire)
    }

    /// Returns true if the steering table serves for the view of `epoch`, in which the local node is contact node. The local
    /// node was contact node of the view for which the table is complete. The next view cannot hide the term of another
    /// contact node.
    #[must_use]
    pub fn has_table_for(&self, epoch: u64) -> bool {
        let views_since = epoch.checked_sub(self.table_epoch());
        views_since.is_some_and(|views| views <= 1)
    }

    /// Sets the node to which a former holder forwards packets without a record; 0 for none.
    pub fn set_contact(&self, node: u16) {
        self.raw().contact.store(u64::from(node), Ordering::Release);
    }
}

impl LeaseWriter {
    /// Sets the end of the lease in nanoseconds since boot (`CLOCK_BOOTTIME`): 0 for no lease, [`LEASE_WITHOUT_END`] for
    /// a group whose contact node is configured.
    pub fn set_until_ns(&self, until_ns: u64) {
        raw_lease(&self.raw)
            .until_ns
            .store(until_ns, Ordering::Release);
    }
}

fn raw_lease(raw: &MappedArray<RawLease>) -> &RawLease {
    // SAFETY: the mapping lives as long as the borrow; the programs only read the value.
    unsafe { raw.value_ptr(0).as_ref() }
}
