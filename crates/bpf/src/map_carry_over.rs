//! Carries the entries of pinned maps over to maps of another size or layout, while the programs of the earlier daemon go
//! on.
//!
//! The maps of the data plane are pinned, and the next daemon adopts them. A changed capacity, or a release with longer
//! values, needs other maps: the new ones are made and filled first, then they take the place of the pins, and each link
//! changes to its new program in one step. Until that step the earlier programs use the earlier map, so a last pass
//! copies the entries that changed meanwhile.
//!
//! Fields are only ever appended to the values of pinned maps: a shorter value is padded with zeros, a longer one, of
//! a newer release, loses its end.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapInfo, MapType, Object, OpenObject};

use crate::kernel_map::BatchReader;
use crate::{Error, PINNED_MAPS, map_handle};

/// Maps that may start empty: a cache of the steering table.
const CACHES: [&str; 1] = ["destinations"];
/// End of the name under which a new map is pinned before it takes the place of the earlier one. (bpffs reserves dots.)
const NEXT_SUFFIX: &str = "-next";

/// A pinned map that a start replaces by one of another size or layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapChange {
    /// Name of the map.
    pub name: &'static str,
    /// Size and layout of the pinned map.
    pub before: MapLayout,
    /// Size and layout of the new map.
    pub after: MapLayout,
}

/// Size and layout of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapLayout {
    /// Most entries.
    pub entries_max: u32,
    /// Length of a key, bytes.
    pub key_size: u32,
    /// Length of a value, bytes.
    pub value_size: u32,
    /// Type of the map, a `BPF_MAP_TYPE_*`.
    pub map_type: u32,
    /// Flags of the map, `BPF_F_*`.
    pub flags: u32,
}

impl std::fmt::Display for MapChange {
    fn fmt(&self, text: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (before, after) = (&self.before, &self.after);
        write!(
            text,
            "map {}: {} entries of {} bytes become {} of {} bytes",
            self.name, before.entries_max, before.value_size, after.entries_max, after.value_size
        )
    }
}

/// Meaning of the pinned maps for a start.
#[derive(Default)]
pub(crate) struct MapPlan {
    maps: Vec<PlannedMap>,
    /// Reasons why the maps cannot be used or replaced.
    pub(crate) errors: Vec<Error>,
}

struct PlannedMap {
    change: MapChange,
    earlier: MapHandle,
}

impl MapPlan {
    /// Compares the maps of an object with the maps pinned below `pins`. Changes nothing.
    pub(crate) fn survey(object: &OpenObject, pins: &Path) -> Self {
        let mut plan = Self::default();
        for map in object.maps() {
            let Some(name) = PINNED_MAPS.iter().find(|name| map.name() == **name) else {
                continue;
            };
            let after = MapLayout {
                entries_max: map.max_entries(),
                key_size: map.key_size(),
                value_size: map.value_size(),
                map_type: map.map_type() as u32,
                flags: map.map_flags(),
            };
            match planned_map(name, &pins.join(name), after) {
                Ok(None) => {}
                Ok(Some(planned)) => plan.maps.push(planned),
                Err(error) => plan.errors.push(error),
            }
        }
        plan
    }

    /// Returns the maps that a start replaces, by name.
    pub(crate) fn changes(&self) -> Vec<MapChange> {
        let mut changes: Vec<_> = self.maps.iter().map(|map| map.change.clone()).collect();
        changes.sort_by_key(|change| change.name);
        changes
    }

    /// Returns true if the pinned map of this name stays.
    pub(crate) fn is_adopted(&self, name: &str) -> bool {
        self.maps.iter().all(|map| map.change.name != name)
    }

    /// Copies the entries of the earlier maps into the maps of the loaded object. The pins stay as they are.
    ///
    /// # Errors
    /// The kernel refuses an access, or more entries have come since the survey than fit.
    pub(crate) fn fill(self, object: &Object) -> Result<CarryOver, Error> {
        let hash_state = RandomState::new();
        let mut maps = Vec::with_capacity(self.maps.len());
        for planned in self.maps {
            let name = planned.change.name;
            let mut carried = CarriedMap {
                name,
                next: map_handle(object, name)?,
                earlier: planned.earlier,
                copied: Vec::new(),
            };
            if !CACHES.contains(&name) {
                carried.copy(&hash_state).map_err(map_error(name))?;
            }
            maps.push(carried);
        }
        Ok(CarryOver {
            maps,
            hash_state,
            is_pinned: false,
        })
    }
}

/// Maps that take the place of pinned ones.
#[derive(Default)]
pub(crate) struct CarryOver {
    maps: Vec<CarriedMap>,
    hash_state: RandomState,
    is_pinned: bool,
}

struct CarriedMap {
    name: &'static str,
    earlier: MapHandle,
    next: MapHandle,
    /// Sorted hashes of the entries as they were copied.
    copied: Vec<u64>,
}

impl CarryOver {
    /// Pins the new maps in place of the earlier ones; does so once.
    ///
    /// # Errors
    /// The kernel refuses; the earlier pins are still there.
    pub(crate) fn pin(&mut self, pins: &Path) -> Result<(), Error> {
        if self.is_pinned {
            return Ok(());
        }
        let next_path = |name: &str| pins.join(format!("{name}{NEXT_SUFFIX}"));
        let pin_error = |path: PathBuf| |source: io::Error| Error::Pin { path, source };
        for map in &mut self.maps {
            let path = next_path(map.name);
            // A daemon that died in this function leaves such a pin.
            let _ = std::fs::remove_file(&path);
            let pinned = map.next.pin(&path).map_err(io::Error::other);
            pinned.map_err(pin_error(path))?;
        }
        for map in &self.maps {
            let path = pins.join(map.name);
            std::fs::rename(next_path(map.name), &path).map_err(pin_error(path))?;
        }
        self.is_pinned = true;
        Ok(())
    }

    /// Copies the entries that the earlier programs added or changed since the first copy. To be called when no program
    /// uses the earlier maps any more. Returns the number of entries that could not be copied.
    pub(crate) fn finish(&mut self) -> usize {
        let hash_state = self.hash_state.clone();
        self.maps
            .drain(..)
            .filter(|map| map.next.map_type().is_hash_map())
            .map(|map| map.copy_changes(&hash_state))
            .sum()
    }
}

impl CarriedMap {
    /// Copies every entry and remembers its hash.
    fn copy(&mut self, hash_state: &RandomState) -> io::Result<()> {
        if self.earlier.map_type().is_percpu() {
            return self.copy_per_cpu();
        }
        let is_array = self.next.map_type() == MapType::Array;
        let (entries_max, value_size) = (self.next.max_entries(), self.value_size());
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        let mut batch = BatchReader::of(&self.earlier);
        loop {
            let (count, is_last) = batch.read_next(&self.earlier)?;
            keys.clear();
            values.clear();
            for (key, value) in batch.entries(count) {
                if is_array && !is_index_below(key, entries_max) {
                    continue;
                }
                keys.extend_from_slice(key);
                let start = values.len();
                values.extend_from_slice(&value[..value.len().min(value_size)]);
                values.resize(start + value_size, 0);
                self.copied
                    .push(hash_state.hash_one((key, &values[start..])));
            }
            let copied = u32::try_from(keys.len() / batch.key_size()).unwrap_or(u32::MAX);
            if copied > 0 {
                let any = MapFlags::ANY;
                let updated = self.next.update_batch(&keys, &values, copied, any, any);
                updated.map_err(io::Error::other)?;
            }
            if is_last {
                break;
            }
        }
        self.copied.sort_unstable();
        Ok(())
    }

    fn copy_per_cpu(&self) -> io::Result<()> {
        for key in self.earlier.keys() {
            if !is_index_below(&key, self.next.max_entries()) {
                continue;
            }
            let found = self.earlier.lookup_percpu(&key, MapFlags::ANY);
            let mut values = found.map_err(io::Error::other)?.unwrap_or_default();
            for value in &mut values {
                value.resize(self.value_size(), 0);
            }
            let updated = self.next.update_percpu(&key, &values, MapFlags::ANY);
            updated.map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Copies the entries that differ from their first copy, except those that the new programs have changed since.
    /// Returns the number of entries that could not be copied.
    fn copy_changes(&self, hash_state: &RandomState) -> usize {
        let is_copied = |key: &[u8], value: &[u8]| {
            let hash = hash_state.hash_one((key, value));
            self.copied.binary_search(&hash).is_ok()
        };
        let mut lost = 0;
        let mut batch = BatchReader::of(&self.earlier);
        loop {
            let Ok((count, is_last)) = batch.read_next(&self.earlier) else {
                return lost + 1;
            };
            for (key, value) in batch.entries(count) {
                let mut value = value.to_vec();
                value.resize(self.value_size(), 0);
                if is_copied(key, &value) {
                    continue;
                }
                let flags = match self.next.lookup(key, MapFlags::ANY) {
                    Ok(None) => MapFlags::NO_EXIST,
                    Ok(Some(present)) if is_copied(key, &present) => MapFlags::EXIST,
                    _ => continue,
                };
                let updated = self.next.update(key, &value, flags);
                lost += usize::from(updated.is_err());
            }
            if is_last {
                return lost;
            }
        }
    }

    fn value_size(&self) -> usize {
        self.next.value_size() as usize
    }
}

/// Returns the replacement of the map pinned at `path`; `None` if there is no such map, or one of this very layout.
fn planned_map(
    name: &'static str,
    path: &Path,
    after: MapLayout,
) -> Result<Option<PlannedMap>, Error> {
    if !path.exists() {
        return Ok(None);
    }
    let earlier = MapHandle::from_pinned_path(path).map_err(|e| Error::Map {
        name,
        reason: format!("{} cannot be opened: {e}", path.display()),
    })?;
    let info = MapInfo::new(earlier.as_fd()).map_err(|e| map_error(name)(io::Error::other(e)))?;
    let before = MapLayout {
        entries_max: info.info.max_entries,
        key_size: info.info.key_size,
        value_size: info.info.value_size,
        map_type: info.info.type_,
        flags: info.info.map_flags,
    };
    if before == after {
        return Ok(None);
    }
    if before.key_size != after.key_size || before.map_type != after.map_type {
        return Err(Error::OtherLayout {
            path: path.to_owned(),
        });
    }
    let is_hash = earlier.map_type().is_hash_map();
    if is_hash && after.entries_max < before.entries_max {
        let entries = count_entries(&earlier).map_err(map_error(name))?;
        if entries > after.entries_max as usize {
            return Err(Error::TooManyEntries {
                path: path.to_owned(),
                entries,
                capacity: after.entries_max,
            });
        }
    }
    let change = MapChange {
        name,
        before,
        after,
    };
    Ok(Some(PlannedMap { change, earlier }))
}

fn count_entries(map: &MapHandle) -> io::Result<usize> {
    let mut batch = BatchReader::of(map);
    let mut total = 0;
    loop {
        let (count, is_last) = batch.read_next(map)?;
        total += count;
        if is_last {
            return Ok(total);
        }
    }
}

/// Returns true for the key of an array's value whose index is less than `end`.
fn is_index_below(key: &[u8], end: u32) -> bool {
    key.try_into()
        .is_ok_and(|key| u32::from_ne_bytes(key) < end)
}

fn map_error(name: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| Error::Map {
        name,
        reason: error.to_string(),
    }
}
