//! Capacity of the flow table, shared with the programs through a mapped array (`c/room.h`).

use std::sync::atomic::{AtomicU32, Ordering};

use libbpf_rs::MapHandle;

use crate::Error;
use crate::mapped::Mapped;
use crate::shared::MAX_SERVICES;

/// Divisor of the table's capacity: one quarter is guaranteed to services, in equal shares.
const GUARANTEED: u32 = 4;

/// `struct room` of `c/shared.h`.
#[repr(C)]
struct Shares {
    flows: [AtomicU32; MAX_SERVICES],
    services: AtomicU32,
    guaranteed: AtomicU32,
    capacity: AtomicU32,
    _pad: u32,
}

// The C side asserts the same size in `c/shared.h`.
const _: () = assert!(size_of::<Shares>() == 272);

/// Number of flows that each service has, and may have.
pub struct Room {
    shares: Mapped<Shares>,
}

impl Room {
    pub(crate) fn map(map: &MapHandle) -> Result<Self, Error> {
        let shares = Mapped::map(map, "room")?;
        Ok(Self { shares })
    }

    fn shares(&self) -> &Shares {
        // SAFETY: the mapping lives as long as self; atomics tolerate the kernel's writes.
        unsafe { self.shares.at(0).as_ref() }
    }

    /// Divides a table of `capacity` flows among `services`.
    pub fn share(&self, services: u32, capacity: u32) {
        let shares = self.shares();
        shares.services.store(services, Ordering::Relaxed);
        let guaranteed = guaranteed(services, capacity);
        shares.guaranteed.store(guaranteed, Ordering::Relaxed);
        shares.capacity.store(capacity, Ordering::Release);
    }

    /// Returns the number of flows of a service, by its row of the placement table.
    #[must_use]
    pub fn flows(&self, service: u16) -> u32 {
        let flows = self.shares().flows.get(usize::from(service));
        flows.map_or(0, |flows| flows.load(Ordering::Relaxed))
    }

    /// Sets the number of flows of a service after a count.
    pub fn counted(&self, service: u16, count: u32) {
        if let Some(flows) = self.shares().flows.get(usize::from(service)) {
            flows.store(count, Ordering::Relaxed);
        }
    }

    /// Records that a flow of a service was removed.
    pub fn freed(&self, service: u16) {
        if let Some(flows) = self.shares().flows.get(usize::from(service)) {
            // The count may have been taken without that flow.
            let less = |count: u32| count.checked_sub(1);
            let _ = flows.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }
}

/// Returns the number of flows guaranteed to each of `services` in a table of `capacity`.
#[must_use]
pub fn guaranteed(services: u32, capacity: u32) -> u32 {
    capacity / GUARANTEED / services.max(1)
}
