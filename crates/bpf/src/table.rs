//! Typed access to a kernel map.

use std::marker::PhantomData;

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::Error;

/// More than a bucket of a kernel's hash map ever has.
const ENTRIES_AT_ONCE: u32 = 4096;

/// A kernel map from `K` to `V`.
pub struct Table<K, V> {
    map: MapHandle,
    name: &'static str,
    types: PhantomData<(K, V)>,
}

impl<K: IntoBytes + FromBytes + Immutable + Copy, V: IntoBytes + FromBytes + Immutable + Copy>
    Table<K, V>
{
    pub(crate) fn new(map: MapHandle, name: &'static str) -> Self {
        Self {
            map,
            name,
            types: PhantomData,
        }
    }

    /// The value of `key`, if it has one.
    ///
    /// # Errors
    /// The kernel's refusal.
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

    /// Sets many values with one system call.
    ///
    /// # Errors
    /// The table is full, or the kernel refuses; some may have been set.
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

    /// Removes `key`; that it was not there is no error.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn remove(&self, key: &K) -> Result<(), Error> {
        match self.map.delete(key.as_bytes()) {
            Err(e) if e.kind() != libbpf_rs::ErrorKind::NotFound => Err(self.error(&e)),
            _ => Ok(()),
        }
    }

    /// All entries as they are met; the table may change meanwhile. Some thousand come with each system call.
    pub fn entries(&self) -> Vec<(K, V)> {
        let batches = self
            .map
            .lookup_batch(ENTRIES_AT_ONCE, MapFlags::ANY, MapFlags::ANY);
        let read = |(key, value): (Vec<u8>, Vec<u8>)| {
            Some((
                K::read_from_bytes(&key).ok()?,
                V::read_from_bytes(&value).ok()?,
            ))
        };
        batches.into_iter().flatten().filter_map(read).collect()
    }

    fn error(&self, source: &libbpf_rs::Error) -> Error {
        Error::Map {
            name: self.name,
            reason: source.to_string(),
        }
    }
}
