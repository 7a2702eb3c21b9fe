//! Capacity of the flow table, shared with the programs through a mapped array (`c/flow_quota.h`).

use std::sync::atomic::{AtomicU32, Ordering};

use libbpf_rs::MapHandle;

use crate::Error;
use crate::mapped_array::MappedArray;
use crate::shared_with_c::MAX_SERVICES;

/// Divisor of the table's capacity: one quarter is guaranteed to services, in equal shares.
const GUARANTEED_DIVISOR: u32 = 4;

/// `struct flow_quota` of `c/shared.h`.
#[repr(C)]
struct RawQuota {
    flows: [AtomicU32; MAX_SERVICES],
    services: AtomicU32,
    guaranteed: AtomicU32,
    capacity: AtomicU32,
    _pad: u32,
}

// The C side asserts the same size in `c/shared.h`.
const _: () = assert!(size_of::<RawQuota>() == 272);

/// Number of flows that each service has, and may have.
pub struct FlowQuota {
    raw: MappedArray<RawQuota>,
}

impl FlowQuota {
    pub(crate) fn map(map: &MapHandle) -> Result<Self, Error> {
        let raw = MappedArray::map(map, "room")?;
        Ok(Self { raw })
    }

    fn raw(&self) -> &RawQuota {
        // SAFETY: the mapping lives as long as self; atomics tolerate the kernel's writes.
        unsafe { self.raw.value_ptr(0).as_ref() }
    }

    /// Divides a table of `capacity` flows among `services`.
    pub fn divide(&self, services: u32, capacity: u32) {
        let raw = self.raw();
        raw.services.store(services, Ordering::Relaxed);
        let guaranteed = guaranteed_flows(services, capacity);
        raw.guaranteed.store(guaranteed, Ordering::Relaxed);
        raw.capacity.store(capacity, Ordering::Release);
    }

    /// Returns the number of flows of a service, by its row of the placement table.
    #[must_use]
    pub fn flows(&self, service: u16) -> u32 {
        let flows = self.raw().flows.get(usize::from(service));
        flows.map_or(0, |flows| flows.load(Ordering::Relaxed))
    }

    /// Sets the number of flows of a service after a count.
    pub fn set_count(&self, service: u16, count: u32) {
        if let Some(flows) = self.raw().flows.get(usize::from(service)) {
            flows.store(count, Ordering::Relaxed);
        }
    }

    /// Records that a flow of a service was removed.
    pub fn release_flow(&self, service: u16) {
        if let Some(flows) = self.raw().flows.get(usize::from(service)) {
            // The count may have been taken without that flow.
            let decrement = |count: u32| count.checked_sub(1);
            let _ = flows.fetch_update(Ordering::Relaxed, Ordering::Relaxed, decrement);
        }
    }
}

/// Returns the number of flows guaranteed to each of `services` in a table of `capacity`.
#[must_use]
pub fn guaranteed_flows(services: u32, capacity: u32) -> u32 {
    capacity / GUARANTEED_DIVISOR / services.max(1)
}
