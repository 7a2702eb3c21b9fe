//! Files and shared memory that the mappings of a tree refer to, each inspected once.

use crate::error::Error;
use crate::error::{Context, Result};
use crate::file_identity;
use crate::files::image::ContentForm;
use crate::image::{
    BackingFile, MappingBacking, MemoryMapping, POSIX_MEMORY_DIRECTORY, SharedMemory,
    SharedMemoryKind,
};
use crate::inspect::{
    Blocker, MappingClass, Obstacle, classify, current_name, former_name, map_files_path,
};
use crate::procfs::{self, MapLine};
use crate::system_v_memory::{ListedSegment, SystemVSegmentReader, attachments};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

/// Device and inode.
type DeviceInode = ((u32, u32), u64);

/// Pseudo-device for System V memory. No real device has these numbers.
const SYSTEM_V_DEVICE: (u32, u32) = (0xfff, 0xf_ffff);

/// Objects that mappings refer to, by index.
#[derive(Debug, Default)]
pub(super) struct MappedObjectCatalogue {
    pub files: Vec<BackingFile>,
    pub shared: Vec<SharedMemory>,
    file_index: HashMap<(DeviceInode, Vec<u8>), u32>,
    shared_index: HashMap<DeviceInode, u32>,
    /// An open handle of each shared memory object.
    handles: Vec<File>,
    /// Opened at its first use.
    segment_table: Option<SystemVSegmentReader>,
}

impl MappedObjectCatalogue {
    /// Returns the mapping that a line describes; `None` for a mapping that is not the process's own.
    pub fn mapping(&mut self, pid: i32, map: &MapLine) -> Result<Option<MemoryMapping>> {
        let backing = match classify(map) {
            MappingClass::NotOfProcess => return Ok(None),
            MappingClass::Blocked(obstacle) => {
                return Err(Error::Blocked(vec![Blocker { pid, obstacle }]));
            }
            MappingClass::Kernel(name) => MappingBacking::Kernel(name),
            MappingClass::Anonymous(name) => MappingBacking::Anonymous(name),
            // Another mapping writes the file, so its content changes while it is read.
            MappingClass::File if map.shared && self.is_shared_object(map) => {
                self.shared_file_backing(pid, map)?
            }
            MappingClass::File => MappingBacking::File {
                file: self.file_index_of(pid, map)?,
                offset: map.offset,
                shared: map.shared,
            },
            MappingClass::SharedAnonymous => {
                self.shared_object(pid, map, SharedMemoryKind::Anonymous)?
            }
            MappingClass::Memfd(name) => {
                self.shared_object(pid, map, SharedMemoryKind::Memfd(name))?
            }
            MappingClass::SharedFile | MappingClass::RenamedFile => {
                self.shared_file_backing(pid, map)?
            }
            MappingClass::SystemV(id) => self.segment_backing(pid, map, id)?,
        };
        Ok(Some(MemoryMapping {
            start: map.start,
            end: map.end,
            protection: map.protection,
            advice: map.vm_flags.unwrap_or_default().0,
            backing,
        }))
    }

    /// Adds a file that is written through mappings.
    fn shared_file_backing(&mut self, pid: i32, map: &MapLine) -> Result<MappingBacking> {
        if self.is_shared_object(map) {
            return self.shared_object(pid, map, SharedMemoryKind::Anonymous);
        }
        let name = match classify(map) {
            MappingClass::RenamedFile => current_name(pid, map, &open_mapped_file(pid, map)?)?,
            _ => Some(map.name.clone()),
        };
        let access = || -> Result<(u32, u32, u32)> {
            let found = open_mapped_file(pid, map)?.metadata();
            let found = found.context(|| "reading the owner of shared memory".to_owned())?;
            Ok((found.uid(), found.gid(), found.mode() & 0o7777))
        };
        let kind = match name {
            Some(path) if path.starts_with(POSIX_MEMORY_DIRECTORY) => SharedMemoryKind::Posix {
                path,
                access: access()?,
            },
            Some(path) => SharedMemoryKind::File(path),
            None => SharedMemoryKind::Deleted {
                form: ContentForm::from_removed_path(former_name(&map.name), map.inode),
                access: access()?,
            },
        };
        self.shared_object(pid, map, kind)
    }

    fn segment_backing(&mut self, pid: i32, map: &MapLine, id: i32) -> Result<MappingBacking> {
        // Segment IDs may equal inode numbers of other memory.
        let map = MapLine {
            device: SYSTEM_V_DEVICE,
            ..map.clone()
        };
        if self.is_shared_object(&map) {
            return self.shared_object(pid, &map, SharedMemoryKind::Anonymous);
        }
        let all = self.read_segments(pid)?;
        // The segment may have been removed already.
        let found = all.iter().find(|seen| seen.segment.id == id);
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let seen = found.ok_or_else(missing);
        let segment = seen
            .context(|| format!("inspecting System V memory {id}"))?
            .segment;
        self.shared_object(pid, &map, SharedMemoryKind::SystemV(segment))
    }

    fn read_segments(&mut self, pid: i32) -> Result<Vec<ListedSegment>> {
        if self.segment_table.is_none() {
            self.segment_table = Some(SystemVSegmentReader::open(pid)?);
        }
        self.segment_table
            .as_ref()
            .map_or(Ok(Vec::new()), SystemVSegmentReader::read)
    }

    /// Updates the System V segments of the tree of `root`. For a stopped tree, `stopped` gives the tree's number of
    /// mappings of each segment, and the processes that may have created one.
    pub fn update_segments(
        &mut self,
        root: i32,
        stopped: Option<(&HashMap<i32, u64>, &[i32])>,
    ) -> Result<()> {
        let all = self.read_segments(root)?;
        let mut known = BTreeSet::new();
        for object in &mut self.shared {
            if let SharedMemoryKind::SystemV(segment) = &mut object.kind {
                let id = segment.id;
                known.insert(id);
                match all.iter().find(|seen| seen.segment.id == id) {
                    Some(seen) => *segment = seen.segment,
                    None => segment.is_gone = true,
                }
            }
        }
        let Some((count, pids)) = stopped else {
            return Ok(());
        };
        for seen in all {
            let id = seen.segment.id;
            let reason = match count.get(&id) {
                Some(ours) if *ours == seen.attached => continue,
                Some(_) => "attached by processes outside the tree too",
                None if seen.attached > 0 => continue,
                None if known.contains(&id) || pids.contains(&seen.creator) => {
                    "attached by no process"
                }
                None => continue,
            };
            let obstacle = Obstacle::SystemV(format!("memory, id {id}, {reason}"));
            return Err(Error::Blocked(vec![Blocker {
                pid: root,
                obstacle,
            }]));
        }
        Ok(())
    }

    /// Checks that System V segments are attached as a whole.
    pub fn check_segments(&self, pid: i32, lines: &[MapLine]) -> Result<()> {
        for attachment in attachments(lines) {
            let segments = self.shared.iter().filter_map(SharedMemory::segment);
            let size = segments
                .filter(|segment| segment.id == attachment.id)
                .map(|segment| segment.size)
                .next();
            if size.is_some_and(|size| !attachment.covers(size)) {
                let text = format!("a part of System V memory {}", attachment.id);
                let obstacle = Obstacle::UnrestorableMapping(text);
                return Err(Error::Blocked(vec![Blocker { pid, obstacle }]));
            }
        }
        Ok(())
    }

    /// Adds the files written through these mappings, so that other mappings of the same files count as shared memory
    /// too.
    pub fn add_written_files(&mut self, pid: i32, lines: &[MapLine]) -> Result<()> {
        for line in lines {
            if matches!(
                classify(line),
                MappingClass::SharedFile | MappingClass::RenamedFile
            ) {
                self.shared_file_backing(pid, line)?;
            }
        }
        Ok(())
    }

    fn is_shared_object(&self, map: &MapLine) -> bool {
        self.shared_index.contains_key(&(map.device, map.inode))
    }

    /// Returns the index of a process's executable.
    pub fn executable_index(&mut self, pid: i32) -> Result<u32> {
        let path = procfs::link_target(pid, "exe")?;
        let bytes = path.as_os_str().as_bytes();
        let known = self.files.iter().position(|file| file.path == bytes);
        if let Some(index) = known {
            return Ok(index as u32);
        }
        if procfs::is_deleted(pid, "exe", &path) {
            let obstacle = Obstacle::DeletedFile(path.display().to_string());
            return Err(Error::Blocked(vec![Blocker { pid, obstacle }]));
        }
        let link = format!("/proc/{pid}/exe");
        let file = File::open(&link).context(|| link)?;
        self.files.push(file_identity::identify(bytes, &file)?);
        Ok(self.files.len() as u32 - 1)
    }

    /// Returns device and inode of memory that moves with its mappings.
    pub fn moved_memory(&self) -> BTreeSet<(u64, u64)> {
        let moved = self.shared.iter().filter(|shared| {
            !matches!(
                shared.kind,
                SharedMemoryKind::File(_) | SharedMemoryKind::SystemV(_)
            )
        });
        moved.map(SharedMemory::device_and_inode).collect()
    }

    /// Returns the handle of a shared memory object, by index.
    pub fn object_handle(&self, index: usize) -> &File {
        &self.handles[index]
    }

    fn file_index_of(&mut self, pid: i32, map: &MapLine) -> Result<u32> {
        let key = ((map.device, map.inode), map.name.clone());
        if let Some(index) = self.file_index.get(&key) {
            return Ok(*index);
        }
        let file = file_identity::identify(&map.name, &open_mapped_file(pid, map)?)?;
        let known = self.files.iter().position(|known| *known == file);
        let index = known.unwrap_or_else(|| {
            self.files.push(file);
            self.files.len() - 1
        });
        self.file_index.insert(key, index as u32);
        Ok(index as u32)
    }

    fn shared_object(
        &mut self,
        pid: i32,
        map: &MapLine,
        kind: SharedMemoryKind,
    ) -> Result<MappingBacking> {
        let key = (map.device, map.inode);
        let offset = map.offset;
        if let Some(object) = self.shared_index.get(&key) {
            return Ok(MappingBacking::Shared {
                object: *object,
                offset,
            });
        }
        let handle = open_mapped_file(pid, map)?;
        let size = handle
            .metadata()
            .context(|| "reading the size of shared memory".to_owned())?
            .size();
        let object = self.shared.len() as u32;
        self.shared.push(SharedMemory {
            kind,
            size,
            identity: (map.device.0, map.device.1, map.inode),
        });
        self.handles.push(handle);
        self.shared_index.insert(key, object);
        Ok(MappingBacking::Shared { object, offset })
    }
}

/// Opens the file behind a mapping, even if no path leads to it.
fn open_mapped_file(pid: i32, map: &MapLine) -> Result<File> {
    let link = map_files_path(pid, map);
    File::open(&link).context(|| format!("{link} ({})", String::from_utf8_lossy(&map.name)))
}
