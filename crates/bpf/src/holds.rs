//! Counters of held packets, shared with the ingress program through a mapped array.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use libbpf_rs::MapHandle;

use crate::shared::MAX_HOLD_SLOTS;

/// How many packets of each hold slot have been diverted and not yet replayed.
pub struct Holds {
    // Array values are padded to 8 bytes.
    base: NonNull<[AtomicU32; 2]>,
}

impl Holds {
    /// Maps the array.
    ///
    /// # Errors
    /// The kernel's refusal of the mapping.
    pub fn map(map: &MapHandle) -> std::io::Result<Self> {
        let length = MAX_HOLD_SLOTS as usize * 8;
        // SAFETY: a new shared mapping of `length` bytes chosen by the kernel; the map has MAX_HOLD_SLOTS values of 8 bytes.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_fd().as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        NonNull::new(base.cast())
            .map(|base| Self { base })
            .ok_or_else(std::io::Error::last_os_error)
    }

    fn slot(&self, slot: u32) -> &AtomicU32 {
        assert!(slot < MAX_HOLD_SLOTS, "hold slot {slot} is out of range");
        // SAFETY: the mapping lives as long as self and has MAX_HOLD_SLOTS values; atomics tolerate the kernel's writes.
        unsafe { &(*self.base.as_ptr().add(slot as usize))[0] }
    }

    /// Packets of `slot` not yet replayed.
    #[must_use]
    pub fn get(&self, slot: u32) -> u32 {
        self.slot(slot).load(Ordering::Acquire)
    }

    /// One packet of `slot` was replayed.
    pub fn replayed(&self, slot: u32) {
        // The counter may have been reset in between: it never wraps below zero.
        let _ = self
            .slot(slot)
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |held| {
                held.checked_sub(1)
            });
    }

    /// The slot holds nothing (again).
    pub fn reset(&self, slot: u32) {
        self.slot(slot).store(0, Ordering::Release);
    }
}

impl Drop for Holds {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length and is not used after this.
        unsafe { libc::munmap(self.base.as_ptr().cast(), MAX_HOLD_SLOTS as usize * 8) };
    }
}

// SAFETY: all access goes through atomics.
unsafe impl Send for Holds {}
// SAFETY: as above.
unsafe impl Sync for Holds {}
