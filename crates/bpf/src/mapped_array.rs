//! Array maps whose values are memory shared with the programs.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

use libbpf_rs::{MapCore, MapHandle};

use crate::Error;

/// A mapping of an array map with values of type `T`.
pub(crate) struct MappedArray<T> {
    base: NonNull<T>,
    count: usize,
}

impl<T> MappedArray<T> {
    /// Maps an array that was made with `BPF_F_MMAPABLE`.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn map(map: &MapHandle, name: &'static str) -> Result<Self, Error> {
        let map_error = |reason: std::io::Error| Error::Map {
            name,
            reason: reason.to_string(),
        };
        // The kernel pads values to 8 bytes.
        let padded = map.value_size().next_multiple_of(8) as usize;
        assert_eq!(padded, size_of::<T>(), "values of {name}");
        let count = map.max_entries() as usize;
        // SAFETY: a new shared mapping chosen by the kernel; the map has `count` values of that size.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                count * size_of::<T>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_fd().as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(map_error(std::io::Error::last_os_error()));
        }
        let base = NonNull::new(base.cast());
        let base = base.ok_or_else(|| map_error(std::io::ErrorKind::OutOfMemory.into()))?;
        Ok(Self { base, count })
    }

    /// Returns the number of values.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Returns a pointer to a value, valid during the mapping's life. The programs may write to the value at any time.
    ///
    /// # Panics
    /// Panics if `index` is not less than the number of values.
    pub(crate) fn value_ptr(&self, index: usize) -> NonNull<T> {
        assert!(index < self.count, "value {index} of {}", self.count);
        // SAFETY: the mapping has that value.
        unsafe { self.base.add(index) }
    }
}

impl<T> Drop for MappedArray<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length and is not used after this.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.count * size_of::<T>()) };
    }
}

// SAFETY: the mapping belongs to no thread; it only hands out pointers.
unsafe impl<T> Send for MappedArray<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for MappedArray<T> {}
