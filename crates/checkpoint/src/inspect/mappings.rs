//! Check for mappings that cannot move.

use super::{Blocker, InspectionReport, Obstacle};
use crate::donor::scan_guards;
use crate::error::{Context, Error, Result};
use crate::image::{ADDRESS_END, are_guards_within_limits};
use crate::procfs::{self, DELETED_SUFFIX, MapLine, VmFlags};
use crate::system_v_memory;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::Path;

/// Class of a mapping, by its line in procfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MappingClass {
    /// A mapping that does not belong to the process: `[vsyscall]`.
    NotOfProcess,
    /// Code or data of the kernel: `[vdso]` and the like.
    Kernel(String),
    /// Private memory, with its name.
    Anonymous(Vec<u8>),
    /// A file that is only read through this mapping, or copied on write.
    File,
    /// Shared memory without a name.
    SharedAnonymous,
    /// Memory of `memfd_create`, with its name.
    Memfd(Vec<u8>),
    /// A file that may be written through this mapping.
    SharedFile,
    /// A file that may be written through this mapping, and has lost the name that is shown.
    RenamedFile,
    /// A segment of System V shared memory, by its identifier.
    SystemV(i32),
    /// A mapping that cannot move.
    Blocked(Obstacle),
}

/// Returns the class of a mapping.
pub(crate) fn classify(map: &MapLine) -> MappingClass {
    let name = map.name.as_slice();
    let text = || String::from_utf8_lossy(name).into_owned();
    if name == b"[vsyscall]" {
        return MappingClass::NotOfProcess;
    }
    if let Some(obstacle) = find_obstacle(map) {
        return MappingClass::Blocked(obstacle);
    }
    match name {
        b"[vdso]" | b"[vvar]" | b"[vvar_vclock]" => MappingClass::Kernel(text()),
        b"[heap]" | b"[stack]" | b"" | b"/dev/zero" if !map.shared => {
            MappingClass::Anonymous(Vec::new())
        }
        b"/dev/zero (deleted)" if map.shared => MappingClass::SharedAnonymous,
        _ => classify_named(map, name, text()),
    }
}

fn classify_named(map: &MapLine, name: &[u8], text: String) -> MappingClass {
    let between = |prefix: &[u8], suffix: &[u8]| {
        name.strip_prefix(prefix)
            .and_then(|rest| rest.strip_suffix(suffix))
            .map(<[u8]>::to_vec)
    };
    if let Some(given) = between(b"[anon:", b"]") {
        return MappingClass::Anonymous(given);
    }
    if between(b"[anon_shmem:", b"]").is_some() {
        return MappingClass::SharedAnonymous;
    }
    if let Some(given) = between(b"/memfd:", DELETED_SUFFIX) {
        return if map.shared {
            MappingClass::Memfd(given)
        } else {
            MappingClass::Blocked(Obstacle::UnrestorableMapping(text))
        };
    }
    let blocked = match name {
        _ if map.shared
            && between(system_v_memory::MAPPED_NAME_PREFIX, DELETED_SUFFIX).is_some() =>
        {
            return MappingClass::SystemV(map.inode as i32);
        }
        b"/[aio] (deleted)" => Obstacle::AsyncIo,
        // Memory of memfd_secret(2), which no other process can read.
        b"/secretmem (deleted)" => Obstacle::KernelObject(text),
        _ if name.ends_with(DELETED_SUFFIX) && !has_shown_name(map) => {
            if map.shared && may_be_written(map) {
                return MappingClass::RenamedFile;
            }
            Obstacle::DeletedFile(text)
        }
        _ if !name.starts_with(b"/") || map.inode == 0 => Obstacle::KernelObject(text),
        _ if map.shared && may_be_written(map) => return MappingClass::SharedFile,
        _ => return MappingClass::File,
    };
    MappingClass::Blocked(blocked)
}

/// Returns true if the file of a mapping still has the name that is shown.
fn has_shown_name(map: &MapLine) -> bool {
    let found = std::fs::symlink_metadata(OsStr::from_bytes(&map.name));
    found.is_ok_and(|found| {
        let device = (libc::major(found.dev()), libc::minor(found.dev()));
        (device, found.ino()) == (map.device, map.inode)
    })
}

/// Returns the present name of a mapped file that is shown by a former name: none, or another name in the same
/// directory. Named semaphores get their names by such a rename, and programs unlink them soon after.
pub(crate) fn current_name(pid: i32, map: &MapLine, file: &File) -> Result<Option<Vec<u8>>> {
    let shown = || String::from_utf8_lossy(&map.name).into_owned();
    let metadata = file.metadata().context(shown)?;
    let former = Path::new(OsStr::from_bytes(former_name(&map.name)));
    // Paths are resolved below the process's root: its mounts may differ from this daemon's.
    let find_in = |directory: &Path| {
        let below = directory.strip_prefix("/").unwrap_or(directory);
        Path::new(&format!("/proc/{pid}/root")).join(below)
    };
    // Descriptors of the same file are recognised by device and inode of `stat`.
    let (major, minor) = map.device;
    let is_plain = metadata.dev() == libc::makedev(major, minor);
    let is_current = |directory: &&Path| {
        let found = std::fs::metadata(find_in(directory));
        is_plain && found.is_ok_and(|found| found.dev() == metadata.dev())
    };
    if let Some(directory) = former.parent().filter(is_current) {
        if metadata.nlink() == 0 {
            return Ok(None);
        }
        let entries = std::fs::read_dir(find_in(directory));
        let mut entries = entries.into_iter().flatten().flatten();
        let is_same_file = |entry: &std::fs::DirEntry| {
            let found = (entry.ino() == metadata.ino()).then(|| entry.metadata());
            found.is_some_and(|found| found.is_ok_and(|found| found.dev() == metadata.dev()))
        };
        if let Some(entry) = entries.find(is_same_file) {
            let path = directory.join(entry.file_name());
            return Ok(Some(path.into_os_string().into_vec()));
        }
    }
    let obstacle = Obstacle::DeletedFile(shown());
    Err(Error::Blocked(vec![Blocker { pid, obstacle }]))
}

/// Removes the suffix that the kernel appends to the name of an unlinked file.
pub(crate) fn former_name(name: &[u8]) -> &[u8] {
    name.strip_suffix(DELETED_SUFFIX).unwrap_or(name)
}

/// Returns true if the mapping is writable, or can become writable by `mprotect`.
fn may_be_written(map: &MapLine) -> bool {
    let may_write = map.vm_flags.unwrap_or_default().has_any(VmFlags::MAY_WRITE);
    may_write || map.protection & libc::PROT_WRITE != 0
}

fn is_executable_only(map: &MapLine) -> bool {
    map.protection & (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) == libc::PROT_EXEC
}

fn find_obstacle(map: &MapLine) -> Option<Obstacle> {
    let text = || String::from_utf8_lossy(&map.name).into_owned();
    let advice = map.vm_flags.unwrap_or_default();
    // The kernel's own pages have device flags and may be sealed.
    if map.name.starts_with(b"[v") {
        return None;
    }
    if map.end > ADDRESS_END {
        return Some(Obstacle::HighMemory);
    }
    let found = |bits| advice.has_any(bits);
    match () {
        () if found(VmFlags::DEVICE) => Some(Obstacle::Device(text())),
        () if found(VmFlags::HUGETLB) => Some(Obstacle::HugeTlb(text())),
        // The kernel itself assigns a protection key to execute-only memory, and does so again at the acceptor.
        () if found(VmFlags::KEY) && !is_executable_only(map) => Some(Obstacle::ProtectionKey),
        () if found(VmFlags::SEALED) => Some(Obstacle::UnrestorableMapping(text())),
        () if found(VmFlags::SHADOW_STACK) => Some(Obstacle::ShadowStack),
        () => None,
    }
}

pub(super) fn check(pid: i32, report: &mut InspectionReport) -> Result<()> {
    let maps = procfs::mappings_with_vm_flags(pid)?;
    report.mappings += maps.len();
    for map in &maps {
        match classify(map) {
            MappingClass::Blocked(obstacle) => report.block(pid, obstacle),
            MappingClass::RenamedFile => {
                // A mapping that has disappeared by now is no obstacle.
                let file = File::open(map_files_path(pid, map));
                match file.map(|file| current_name(pid, map, &file)) {
                    Ok(Err(Error::Blocked(blockers))) => report.blockers.extend(blockers),
                    Ok(other) => drop(other?),
                    Err(_) => {}
                }
            }
            _ => {}
        }
    }
    // The donor's own tracker uses userfaultfd too, but starts only after a report.
    if maps.iter().any(|map| {
        map.vm_flags
            .is_some_and(|advice| advice.has_any(VmFlags::USERFAULT))
    }) {
        report.block(pid, Obstacle::UserFault);
    }
    let path = format!("/proc/{pid}/pagemap");
    let pagemap = File::open(&path).context(|| path)?;
    let own_mappings = maps.iter().filter(|map| !map.name.starts_with(b"[v"));
    let guards = scan_guards(&pagemap, own_mappings.map(|map| (map.start, map.end)));
    let guards: Vec<(u64, u64)> = guards
        .context(|| format!("reading guard pages of process {pid}"))?
        .iter()
        .collect();
    match check_guards(pid, &guards) {
        Err(Error::Blocked(blockers)) => report.blockers.extend(blockers),
        other => other?,
    }
    Ok(())
}

/// Returns the path of the procfs link to the file behind a mapping, which works without a path to the file too.
pub(crate) fn map_files_path(pid: i32, map: &MapLine) -> String {
    format!("/proc/{pid}/map_files/{:x}-{:x}", map.start, map.end)
}

/// Checks that so many guard pages can be created again.
pub(crate) fn check_guards(pid: i32, guards: &[(u64, u64)]) -> Result<()> {
    if are_guards_within_limits(guards) {
        return Ok(());
    }
    let bytes = guards.iter().map(|(start, end)| end - start).sum();
    let obstacle = Obstacle::GuardPages(guards.len() as u64, bytes);
    Err(Error::Blocked(vec![Blocker { pid, obstacle }]))
}

/// Reports memory that a process outside the tree maps too.
pub(super) fn check_outsiders(report: &mut InspectionReport) {
    let mut shared: HashMap<((u32, u32), u64), (i32, String)> = HashMap::new();
    for pid in &report.processes {
        for map in procfs::mappings(*pid).unwrap_or_default() {
            if matches!(
                classify(&map),
                MappingClass::SharedAnonymous
                    | MappingClass::Memfd(_)
                    | MappingClass::SharedFile
                    | MappingClass::RenamedFile
            ) {
                let name = String::from_utf8_lossy(&map.name).into_owned();
                shared.insert((map.device, map.inode), (*pid, name));
            }
        }
    }
    if shared.is_empty() {
        return;
    }
    for outsider in procfs::numeric_entries("/proc", 0).unwrap_or_default() {
        if report.processes.contains(&outsider) {
            continue;
        }
        let maps = match procfs::mappings(outsider) {
            Ok(maps) => maps,
            Err(Error::ProcessEnded(_) | _) => continue,
        };
        let found = maps.iter().find_map(|map| {
            map.shared
                .then(|| shared.remove(&(map.device, map.inode)))?
        });
        if let Some((pid, name)) = found {
            report.block(pid, Obstacle::SharedOutside { name, outsider });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, shared: bool) -> MapLine {
        MapLine {
            start: 0x1000,
            end: 0x2000,
            protection: libc::PROT_READ | libc::PROT_WRITE,
            shared,
            offset: 0,
            device: (8, 1),
            inode: 7,
            name: name.as_bytes().to_vec(),
            vm_flags: None,
        }
    }

    #[test]
    fn mapping_line_determines_its_class() {
        assert_eq!(
            classify(&line("[heap]", false)),
            MappingClass::Anonymous(vec![])
        );
        assert_eq!(
            classify(&line("[anon:x]", false)),
            MappingClass::Anonymous(b"x".to_vec())
        );
        assert_eq!(classify(&line("/usr/lib/a.so", false)), MappingClass::File);
        assert_eq!(classify(&line("/var/a", true)), MappingClass::SharedFile);
        assert_eq!(
            classify(&line("/memfd:a (deleted)", true)),
            MappingClass::Memfd(b"a".to_vec())
        );
        assert_eq!(
            classify(&line("/dev/zero (deleted)", true)),
            MappingClass::SharedAnonymous
        );
        assert_eq!(
            classify(&line("/SYSV00000001 (deleted)", true)),
            MappingClass::SystemV(7)
        );
        assert_eq!(
            classify(&line("/dev/shm/b (deleted)", true)),
            MappingClass::RenamedFile
        );
        let blocked = [
            ("anon_inode:[io_uring]", true),
            ("/lib/b.so (deleted)", false),
            ("socket:[1]", true),
        ];
        for (name, shared) in blocked {
            assert!(
                matches!(classify(&line(name, shared)), MappingClass::Blocked(_)),
                "{name}"
            );
        }
        let device = MapLine {
            vm_flags: Some(VmFlags(VmFlags::DEVICE)),
            ..line("/dev/mem", true)
        };
        assert!(matches!(
            classify(&device),
            MappingClass::Blocked(Obstacle::Device(_))
        ));
    }
}
