//! The contact node's lease, which the programs test (`struct lease` of `c/shared.h`), in a pinned and mapped array: a
//! lease ends in the kernel also when the daemon is dead.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libbpf_rs::MapHandle;

use crate::Error;
use crate::mapped_array::MappedArray;

/// Time of [`LeaseWriter::set_until_ns`] for a lease without end.
pub const LEASE_WITHOUT_END: u64 = u64::MAX;

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
        let raw = MappedArray::map(map, "lease")?;
        Ok(Self { raw: Arc::new(raw) })
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
