//! Typed access to a kernel map.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd};

use libbpf_rs::libbpf_sys::{bpf_map_batch_opts, bpf_map_lookup_batch};
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::Error;

/// Number of entries read with one system call; more if a single bucket of the kernel's hash map has more.
const ENTRIES_AT_ONCE: usize = 4096;

/// A kernel map from `K` to `V`.
pub struct KernelMap<K, V> {
    map: MapHandle,
    name: &'static str,
    types: PhantomData<(K, V)>,
}

impl<K: IntoBytes + FromBytes + Immutable + Copy, V: IntoBytes + FromBytes + Immutable + Copy>
    KernelMap<K, V>
{
    pub(crate) fn new(map: MapHandle, name: &'static str) -> Self {
        Self {
            map,
            name,
            types: PhantomData,
        }
    }

    /// Returns the value of `key`, if it has one.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn get(&self, key: &K) -> Result<Option<V>, Error> {
        let found = self
            .map
            .lookup(key.as_bytes(), MapFlags::ANY)
            .map_err(|e| self.error(&e))?;
        Ok(found.and_then(|bytes| V::read_from_bytes(&bytes).ok()))
    }

    /// Sets the value of `key`.
    ///
    /// # Errors
    /// The table is full, or the kernel refuses.
    pub fn set(&self, key: &K, value: &V) -> Result<(), Error> {
        self.map
            .update(key.as_bytes(), value.as_bytes(), MapFlags::ANY)
            .map_err(|e| self.error(&e))
    }

    /// Sets the value of a key that exists. Returns false if there is no such key.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn replace(&self, key: &K, value: &V) -> Result<bool, Error> {
        let (key, value) = (key.as_bytes(), value.as_bytes());
        match self.map.update(key, value, MapFlags::EXIST) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == libbpf_rs::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(self.error(&e)),
        }
    }

    /// Sets many values with one system call.
    ///
    /// # Errors
    /// The table is full, or the kernel refuses; some values may have been set.
    pub fn set_many(&self, keys: &[K], values: &[V]) -> Result<(), Error> {
        if keys.is_empty() {
            return Ok(());
        }
        let count = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        self.map
            .update_batch(
                keys.as_bytes(),
                values.as_bytes(),
                count,
                MapFlags::ANY,
                MapFlags::ANY,
            )
            .map_err(|e| self.error(&e))
    }

    /// Removes `key`. A key that does not exist is no error.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove(&self, key: &K) -> Result<(), Error> {
        match self.map.delete(key.as_bytes()) {
            Err(e) if e.kind() != libbpf_rs::ErrorKind::NotFound => Err(self.error(&e)),
            _ => Ok(()),
        }
    }

    /// Removes many keys, with one system call for several thousand. Keys that do not exist are no error.
    ///
    /// # Errors
    /// The kernel's error; some keys may have been removed.
    pub fn remove_many(&self, keys: &[K]) -> Result<(), Error> {
        for chunk in keys.chunks(ENTRIES_AT_ONCE) {
            let count = u32::try_from(chunk.len()).unwrap_or(u32::MAX);
            let removed =
                self.map
                    .delete_batch(chunk.as_bytes(), count, MapFlags::ANY, MapFlags::ANY);
            // The kernel ends a batch at the first key that does not exist.
            if removed.is_err() {
                for key in chunk {
                    self.remove(key)?;
                }
            }
        }
        Ok(())
    }

    /// Returns all entries of a hash map; the table may change meanwhile. One system call reads several thousand
    /// entries.
    ///
    /// The kernel returns whole buckets, so an answer with fewer entries than requested is not the last one. (The
    /// iterator of libbpf-rs 0.27 takes it for the last.) An error of the kernel ends the list, as the end of the table
    /// does.
    pub fn entries(&self) -> Vec<(K, V)> {
        let mut found = Vec::new();
        let mut batch = BatchReader::of(&self.map);
        loop {
            let (count, is_last) = match batch.read_next(&self.map) {
                Ok(of_batch) => of_batch,
                Err(_) => return found,
            };
            let read = |(key, value)| {
                Some((
                    K::read_from_bytes(key).ok()?,
                    V::read_from_bytes(value).ok()?,
                ))
            };
            found.extend(batch.entries(count).filter_map(read));
            if is_last {
                return found;
            }
        }
    }

    fn error(&self, source: &libbpf_rs::Error) -> Error {
        Error::Map {
            name: self.name,
            reason: source.to_string(),
        }
    }
}

/// State of a walk through a hash map or an array.
pub(crate) struct BatchReader {
    key_size: usize,
    value_size: usize,
    keys: Vec<u8>,
    values: Vec<u8>,
    /// Bucket at which the next call begins; `None` for the first.
    position: Option<u32>,
}

impl BatchReader {
    /// Returns a walk from the first entry on.
    pub(crate) fn of(map: &MapHandle) -> Self {
        let (key_size, value_size) = (map.key_size() as usize, map.value_size() as usize);
        Self {
            key_size,
            value_size,
            keys: vec![0; ENTRIES_AT_ONCE * key_size],
            values: vec![0; ENTRIES_AT_ONCE * value_size],
            position: None,
        }
    }

    /// Returns the length of a key, bytes.
    pub(crate) fn key_size(&self) -> usize {
        self.key_size
    }

    /// Returns the keys and values that [`BatchReader::read_next`] has read.
    pub(crate) fn entries(&self, count: usize) -> impl Iterator<Item = (&[u8], &[u8])> {
        let keys = self.keys.chunks_exact(self.key_size);
        keys.zip(self.values.chunks_exact(self.value_size))
            .take(count)
    }

    /// Reads the next entries; returns their number, and true if no others follow.
    pub(crate) fn read_next(&mut self, map: &MapHandle) -> io::Result<(usize, bool)> {
        let options = bpf_map_batch_opts {
            sz: size_of::<bpf_map_batch_opts>() as u64,
            ..bpf_map_batch_opts::default()
        };
        loop {
            let capacity = self.keys.len() / self.key_size;
            let mut count = u32::try_from(capacity).unwrap_or(u32::MAX);
            let mut next = 0u32;
            let from = self
                .position
                .as_mut()
                .map_or(std::ptr::null_mut(), std::ptr::from_mut);
            // SAFETY: the positions of hash maps and arrays are 4 bytes; `keys` and `values` fit `count` keys and values of the map.
            let outcome = unsafe {
                bpf_map_lookup_batch(
                    map.as_fd().as_raw_fd(),
                    from.cast(),
                    (&raw mut next).cast(),
                    self.keys.as_mut_ptr().cast(),
                    self.values.as_mut_ptr().cast(),
                    &raw mut count,
                    &raw const options,
                )
            };
            let error = io::Error::from_raw_os_error(-outcome);
            match error.raw_os_error() {
                Some(0) => {
                    self.position = Some(next);
                    return Ok((count as usize, false));
                }
                Some(libc::ENOENT) => return Ok((count as usize, true)),
                Some(libc::EINTR) => {}
                // One bucket has more entries than fit.
                Some(libc::ENOSPC) => {
                    self.keys.resize(2 * capacity * self.key_size, 0);
                    self.values.resize(2 * capacity * self.value_size, 0);
                }
                _ => return Err(error),
            }
        }
    }
}
