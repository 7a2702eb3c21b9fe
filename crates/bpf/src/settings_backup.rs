//! Contents of the maps that a start writes, to be written back if the start fails.

use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::kernel_map::BatchReader;
use crate::{Dataplane, Error, map_handle};

/// Maps that have the node's settings. The programs only read them.
const SETTINGS: [&str; 5] = ["config", "services", "nodes", "peers", "placement"];

/// Contents of the maps with the node's settings.
pub struct SettingsBackup {
    maps: Vec<MapBackup>,
}

struct MapBackup {
    map: MapHandle,
    keys: Vec<u8>,
    values: Vec<u8>,
}

impl Dataplane {
    /// Reads the maps with the node's settings.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn back_up_settings(&self) -> Result<SettingsBackup, Error> {
        let back_up = |name: &'static str| {
            let map = map_handle(&self.object, name)?;
            let (keys, values) = read_entries(&map).map_err(|error| Error::Map {
                name,
                reason: error.to_string(),
            })?;
            Ok(MapBackup { map, keys, values })
        };
        let maps = SETTINGS.into_iter().map(back_up);
        Ok(SettingsBackup {
            maps: maps.collect::<Result<_, Error>>()?,
        })
    }
}

impl SettingsBackup {
    /// Writes the contents back; entries that were added are removed.
    ///
    /// # Errors
    /// The kernel's error; the other maps have their contents.
    pub fn restore(&self) -> std::io::Result<()> {
        let mut outcome = Ok(());
        for map in &self.maps {
            outcome = outcome.and(map.restore());
        }
        outcome
    }
}

impl MapBackup {
    fn restore(&self) -> std::io::Result<()> {
        let key_size = self.map.key_size() as usize;
        if self.map.map_type().is_hash_map() {
            let (present, _) = read_entries(&self.map)?;
            for key in present.chunks_exact(key_size) {
                if !self.keys.chunks_exact(key_size).any(|kept| kept == key) {
                    self.map.delete(key).map_err(std::io::Error::other)?;
                }
            }
        }
        let count = u32::try_from(self.keys.len() / key_size).unwrap_or(u32::MAX);
        if count == 0 {
            return Ok(());
        }
        let any = MapFlags::ANY;
        let updated = (self.map).update_batch(&self.keys, &self.values, count, any, any);
        updated.map_err(std::io::Error::other)
    }
}

/// Returns the keys and the values of all entries, one after the other.
fn read_entries(map: &MapHandle) -> std::io::Result<(Vec<u8>, Vec<u8>)> {
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    let mut batch = BatchReader::of(map);
    loop {
        let (count, is_last) = batch.read_next(map)?;
        for (key, value) in batch.entries(count) {
            keys.extend_from_slice(key);
            values.extend_from_slice(value);
        }
        if is_last {
            return Ok((keys, values));
        }
    }
}
