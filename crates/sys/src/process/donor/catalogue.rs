//! Files and shared memory that the mappings of a tree refer to, each inspected once.

use crate::process::error::Error;
use crate::process::error::{Context, Result};
use crate::process::files::image::ContentForm;
use crate::process::identity;
use crate::process::image::{Backing, BackingFile, Mapping, POSIX_MEMORY, Shared, SharedKind};
use crate::process::inspect::{
    Blocker, Class, Obstacle, classify, former_name, map_file, present_name,
};
use crate::process::procfs::{self, MapLine};
use crate::process::system_v::{Seen, Table, attachments};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

/// Device and inode.
type Identity = ((u32, u32), u64);

/// Pseudo-device for System V memory. No real device has these numbers.
const SEGMENTS: (u32, u32) = (0xfff, 0xf_ffff);

/// Objects that mappings refer to, by index.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    pub files: Vec<BackingFile>,
    pub shared: Vec<Shared>,
    file_index: HashMap<(Identity, Vec<u8>), u32>,
    shared_index: HashMap<Identity, u32>,
    /// An open handle of each shared memory object.
    handles: Vec<File>,
    /// Opened at its first use.
    segments: Option<Table>,
}

impl Catalogue {
    /// Returns the mapping that a line describes; `None` for a mapping that is not the process's own.
    pub fn mapping(&mut self, pid: i32, map: &MapLine) -> Result<Option<Mapping>> {
        let backing = match classify(map) {
            Class::Nothing => return Ok(None),
            Class::Blocked(obstacle) => {
                return Err(Error::Blocked(vec![Blocker { pid, obstacle }]));
            }
            Class::Kernel(name) => Backing::Kernel(name),
            Class::Anonymous(name) => Backing::Anonymous(name),
            // Another mapping writes the file, so its content changes while it is read.
            Class::File if map.shared && self.is_object(map) => self.shared_file(pid, map)?,
            Class::File => Backing::File {
                file: self.file(pid, map)?,
                offset: map.offset,
                shared: map.shared,
            },
            Class::SharedAnonymous => self.object(pid, map, SharedKind::Anonymous)?,
            Class::Memfd(name) => self.object(pid, map, SharedKind::Memfd(name))?,
            Class::SharedFile | Class::RenamedFile => self.shared_file(pid, map)?,
            Class::SystemV(id) => self.segment(pid, map, id)?,
        };
        Ok(Some(Mapping {
            start: map.start,
            end: map.end,
            protection: map.protection,
            advice: map.advice.unwrap_or_default().0,
            backing,
        }))
    }

    /// Adds a file that is written through mappings.
    fn shared_file(&mut self, pid: i32, map: &MapLine) -> Result<Backing> {
        if self.is_object(map) {
            return self.object(pid, map, SharedKind::Anonymous);
        }
        let name = match classify(map) {
            Class::RenamedFile => present_name(pid, map, &open(pid, map)?)?,
            _ => Some(map.name.clone()),
        };
        let access = || -> Result<(u32, u32, u32)> {
            let found = open(pid, map)?.metadata();
            let found = found.context(|| "owner of shared memory".to_owned())?;
            Ok((found.uid(), found.gid(), found.mode() & 0o7777))
        };
        let kind = match name {
            Some(path) if path.starts_with(POSIX_MEMORY) => SharedKind::Posix {
                path,
                access: access()?,
            },
            Some(path) => SharedKind::File(path),
            None => SharedKind::Deleted {
                form: ContentForm::of_removed(former_name(&map.name), map.inode),
                access: access()?,
            },
        };
        self.object(pid, map, kind)
    }

    fn segment(&mut self, pid: i32, map: &MapLine, id: i32) -> Result<Backing> {
        // Segment IDs may equal inode numbers of other memory.
        let map = MapLine {
            device: SEGMENTS,
            ..map.clone()
        };
        if self.is_object(&map) {
            return self.object(pid, &map, SharedKind::Anonymous);
        }
        let all = self.segments(pid)?;
        // The segment may have been removed already.
        let seen = all.iter().find(|seen| seen.segment.id == id);
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let seen = seen.ok_or_else(missing);
        let segment = seen.context(|| format!("System V memory {id}"))?.segment;
        self.object(pid, &map, SharedKind::SystemV(segment))
    }

    fn segments(&mut self, pid: i32) -> Result<Vec<Seen>> {
        if self.segments.is_none() {
            self.segments = Some(Table::of(pid)?);
        }
        self.segments.as_ref().map_or(Ok(Vec::new()), Table::read)
    }

    /// Updates the System V segments of the tree of `root`. For a stopped tree, `stopped` gives the tree's number of
    /// mappings of each segment, and the processes that may have created one.
    pub fn follow_segments(
        &mut self,
        root: i32,
        stopped: Option<(&HashMap<i32, u64>, &[i32])>,
    ) -> Result<()> {
        let all = self.segments(root)?;
        let mut known = BTreeSet::new();
        for object in &mut self.shared {
            if let SharedKind::SystemV(segment) = &mut object.kind {
                let id = segment.id;
                known.insert(id);
                match all.iter().find(|seen| seen.segment.id == id) {
                    Some(seen) => *segment = seen.segment,
                    None => segment.gone = true,
                }
            }
        }
        let Some((count, pids)) = stopped else {
            return Ok(());
        };
        for seen in all {
            let id = seen.segment.id;
            let why = match count.get(&id) {
                Some(ours) if *ours == seen.attached => continue,
                Some(_) => "that others have attached too",
                None if seen.attached > 0 => continue,
                None if known.contains(&id) || pids.contains(&seen.creator) => "that nobody has",
                None => continue,
            };
            let obstacle = Obstacle::SystemV(format!("memory, id {id}, {why}"));
            return Err(Error::Blocked(vec![Blocker {
                pid: root,
                obstacle,
            }]));
        }
        Ok(())
    }

    /// Checks that System V segments are attached as a whole.
    pub fn check_segments(&self, pid: i32, lines: &[MapLine]) -> Result<()> {
        for part in attachments(lines) {
            let segments = self.shared.iter().filter_map(Shared::segment);
            let size = segments
                .filter(|of| of.id == part.id)
                .map(|of| of.size)
                .next();
            if size.is_some_and(|size| !part.is_whole(size)) {
                let text = format!("a part of System V memory {}", part.id);
                let obstacle = Obstacle::OddMapping(text);
                return Err(Error::Blocked(vec![Blocker { pid, obstacle }]));
            }
        }
        Ok(())
    }

    /// Adds the files written through these mappings, so that other mappings of the same files count as shared memory
    /// too.
    pub fn enter_written(&mut self, pid: i32, lines: &[MapLine]) -> Result<()> {
        for line in lines {
            if matches!(classify(line), Class::SharedFile | Class::RenamedFile) {
                self.shared_file(pid, line)?;
            }
        }
        Ok(())
    }

    fn is_object(&self, map: &MapLine) -> bool {
        self.shared_index.contains_key(&(map.device, map.inode))
    }

    /// Returns the index of a process's executable.
    pub fn executable(&mut self, pid: i32) -> Result<u32> {
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
        self.files.push(identity::of_file(bytes, &file)?);
        Ok(self.files.len() as u32 - 1)
    }

    /// Returns device and inode of memory that moves with its mappings.
    pub fn memory(&self) -> BTreeSet<(u64, u64)> {
        let moved = self
            .shared
            .iter()
            .filter(|shared| !matches!(shared.kind, SharedKind::File(_) | SharedKind::SystemV(_)));
        moved.map(Shared::device_and_inode).collect()
    }

    /// Returns the handle of a shared memory object, by index.
    pub fn handle(&self, index: usize) -> &File {
        &self.handles[index]
    }

    fn file(&mut self, pid: i32, map: &MapLine) -> Result<u32> {
        let key = ((map.device, map.inode), map.name.clone());
        if let Some(index) = self.file_index.get(&key) {
            return Ok(*index);
        }
        let file = identity::of_file(&map.name, &open(pid, map)?)?;
        let known = self.files.iter().position(|known| *known == file);
        let index = known.unwrap_or_else(|| {
            self.files.push(file);
            self.files.len() - 1
        });
        self.file_index.insert(key, index as u32);
        Ok(index as u32)
    }

    fn object(&mut self, pid: i32, map: &MapLine, kind: SharedKind) -> Result<Backing> {
        let key = (map.device, map.inode);
        let offset = map.offset;
        if let Some(object) = self.shared_index.get(&key) {
            return Ok(Backing::Shared {
                object: *object,
                offset,
            });
        }
        let handle = open(pid, map)?;
        let size = handle
            .metadata()
            .context(|| "size of shared memory".to_owned())?
            .size();
        let object = self.shared.len() as u32;
        self.shared.push(Shared {
            kind,
            size,
            identity: (map.device.0, map.device.1, map.inode),
        });
        self.handles.push(handle);
        self.shared_index.insert(key, object);
        Ok(Backing::Shared { object, offset })
    }
}

/// Opens the file behind a mapping, even if no path leads to it.
fn open(pid: i32, map: &MapLine) -> Result<File> {
    let link = map_file(pid, map);
    File::open(&link).context(|| format!("{link} ({})", String::from_utf8_lossy(&map.name)))
}
