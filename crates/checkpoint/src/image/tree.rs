//! The shape of a tree, known while the tree runs: processes, threads, mappings.

use super::Credentials;
use super::PageRun;
use crate::address_ranges::AddressRanges;
use crate::files::image::ContentForm;
use crate::procfs::VmFlags;
use serde::{Deserialize, Serialize};

/// A tree of processes, as found at the beginning of a round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeLayout {
    /// The donor's clocks.
    pub clocks: ClockReadings,
    /// Boot ID of the donor's kernel.
    pub boot_id: String,
    /// Content of the pages `[vdso]`, to which pointers of the program refer.
    #[serde(with = "serde_bytes")]
    pub vdso: Vec<u8>,
    /// Features saved in the extended registers (XCR0).
    pub xcr0: u64,
    /// Processes, parents before their children; the first is the root.
    pub processes: Vec<ProcessLayout>,
    /// Mapped files.
    pub files: Vec<BackingFile>,
    /// Memory shared by several mappings; its content is sent too.
    pub shared_memory: Vec<SharedMemory>,
}

/// `CLOCK_MONOTONIC` and `CLOCK_BOOTTIME` at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockReadings {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub monotonic_ns: u64,
    /// `CLOCK_BOOTTIME`, nanoseconds.
    pub boot_ns: u64,
}

/// Layout of a process of the tree: IDs, threads, memory mappings, credentials.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessLayout {
    /// PID of the process.
    pub pid: i32,
    /// Index of the parent in [`TreeLayout::processes`]; `None` for the root.
    pub parent: Option<u32>,
    /// Generation of the process under this PID; another process, or the same one after `exec`, has another number.
    pub generation: u64,
    /// Process group ID.
    pub group: i32,
    /// Session ID.
    pub session: i32,
    /// Signal that the parent gets when this process ends, 0 for none.
    pub exit_signal: i32,
    /// Wait status of a zombie. A zombie has neither threads nor memory.
    pub exit_status: Option<i32>,
    /// Thread IDs, the main thread first.
    pub threads: Vec<i32>,
    /// Index of an earlier process with the same descriptor table.
    pub shares_table_with: Option<u32>,
    /// Index of the executable in [`TreeLayout::files`].
    pub executable: u32,
    /// Mappings in the order of their addresses.
    pub mappings: Vec<MemoryMapping>,
    /// Guard pages (`MADV_GUARD_INSTALL`): first address and first beyond; disjoint, by address.
    pub guards: Vec<(u64, u64)>,
    /// Credentials of the main thread; the securebits are unknown while the process runs.
    pub credentials: Credentials,
    /// `no_new_privs` of the main thread.
    pub no_new_privileges: bool,
    /// Working directory; empty if it could not be read.
    #[serde(with = "serde_bytes")]
    pub directory: Vec<u8>,
}

/// A mapped range of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryMapping {
    /// First address.
    pub start: u64,
    /// First address beyond the mapping.
    pub end: u64,
    /// Protection (`PROT_*`).
    pub protection: i32,
    /// Bits of [`VmFlags`](crate::procfs::VmFlags).
    pub advice: u32,
    /// Object behind the mapping.
    pub backing: MappingBacking,
}

/// Object behind a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MappingBacking {
    /// Private memory, with a name if the program gave it one.
    Anonymous(#[serde(with = "serde_bytes")] Vec<u8>),
    /// A file: index in [`TreeLayout::files`], and offset. Pages of a private mapping that the program changed are sent.
    File {
        /// Index in [`TreeLayout::files`].
        file: u32,
        /// Offset in the file, bytes.
        offset: u64,
        /// True for `MAP_SHARED` mappings that are not writable.
        shared: bool,
    },
    /// Shared memory: index in [`TreeLayout::shared_memory`], and offset.
    Shared {
        /// Index in [`TreeLayout::shared_memory`].
        object: u32,
        /// Offset in the shared memory, bytes.
        offset: u64,
    },
    /// Code or data of the kernel: `[vdso]`, `[vvar]` or the like, by name.
    Kernel(String),
}

/// A mapped file, which must exist at the acceptor too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingFile {
    /// Path of the file.
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    /// Size, bytes.
    pub size: u64,
    /// Build ID, the linker's identifier of the content, if the file has one.
    #[serde(with = "serde_bytes")]
    pub build_id: Vec<u8>,
    /// SHA-256 of the content, if the file has no build ID.
    #[serde(with = "serde_bytes")]
    pub digest: Vec<u8>,
}

/// Memory that several mappings, or a mapping and a descriptor, share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedMemory {
    /// Kind of shared memory, which determines how the acceptor creates it.
    pub kind: SharedMemoryKind,
    /// Size, bytes.
    pub size: u64,
    /// Device (major, minor) and inode at the donor, by which descriptors of the same memory are recognised.
    pub identity: (u32, u32, u64),
}

/// The directory of POSIX shared memory and of named semaphores (`shm_open(3)`, `sem_open(3)`).
pub(crate) const POSIX_MEMORY_DIRECTORY: &[u8] = b"/dev/shm/";

/// Kind of shared memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SharedMemoryKind {
    /// Anonymous shared memory (`MAP_SHARED | MAP_ANONYMOUS`).
    Anonymous,
    /// A memory file (`memfd_create(2)`) with this name.
    Memfd(#[serde(with = "serde_bytes")] Vec<u8>),
    /// A file that exists under this path at the acceptor too; the mapped pages are sent.
    File(#[serde(with = "serde_bytes")] Vec<u8>),
    /// POSIX shared memory or a named semaphore, created if absent.
    Posix {
        /// Path below `/dev/shm`.
        #[serde(with = "serde_bytes")]
        path: Vec<u8>,
        /// Owner, group and permissions.
        access: (u32, u32, u32),
    },
    /// A file that was unlinked.
    Deleted {
        /// Former place of the file.
        form: ContentForm,
        /// Owner, group and permissions.
        access: (u32, u32, u32),
    },
    /// A segment of System V shared memory.
    SystemV(SystemVSegment),
}

/// A segment of System V shared memory (`shmctl(2)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemVSegment {
    /// Identifier by which programs attach the segment.
    pub id: i32,
    /// Key by which programs find the segment, 0 for none.
    pub key: i32,
    /// Size, bytes.
    pub size: u64,
    /// Permissions.
    pub mode: u32,
    /// True if the segment is destroyed at its last detach (`SHM_DEST`).
    pub is_marked_removed: bool,
    /// True if the segment is locked in memory (`SHM_LOCKED`).
    pub is_locked: bool,
    /// True if the segment no longer exists.
    pub is_gone: bool,
    /// Owner: user and group.
    pub owner: (u32, u32),
    /// Creator: user and group.
    pub creator: (u32, u32),
}

impl SharedMemory {
    /// Returns the System V segment, if the shared memory is one.
    #[must_use]
    pub fn segment(&self) -> Option<&SystemVSegment> {
        match &self.kind {
            SharedMemoryKind::SystemV(segment) => Some(segment),
            _ => None,
        }
    }

    /// Returns device and inode as `stat` reports them at the donor.
    #[must_use]
    pub fn device_and_inode(&self) -> (u64, u64) {
        let (major, minor, inode) = self.identity;
        (libc::makedev(major, minor), inode)
    }
}

impl MemoryMapping {
    /// Returns true if both are parts of one mapping, so that equal addresses hold equal content.
    #[must_use]
    pub fn is_same_mapping(&self, other: &Self) -> bool {
        let base_offset = |mapping: &Self, offset: u64| offset.wrapping_sub(mapping.start);
        match (&self.backing, &other.backing) {
            (MappingBacking::Anonymous(_), MappingBacking::Anonymous(_)) => true,
            (
                MappingBacking::File {
                    file,
                    offset,
                    shared,
                },
                MappingBacking::File {
                    file: other_file,
                    offset: other_offset,
                    shared: other_shared,
                },
            ) => {
                file == other_file
                    && shared == other_shared
                    && base_offset(self, *offset) == base_offset(other, *other_offset)
            }
            (
                MappingBacking::Shared { object, offset },
                MappingBacking::Shared {
                    object: other_object,
                    offset: other_offset,
                },
            ) => {
                object == other_object
                    && base_offset(self, *offset) == base_offset(other, *other_offset)
            }
            (MappingBacking::Kernel(name), MappingBacking::Kernel(other_name)) => {
                name == other_name && self.start == other.start && self.end == other.end
            }
            _ => false,
        }
    }

    /// Returns the ranges where both lists map the same memory in the same way. Other ranges of `before` were unmapped;
    /// other ranges of `after` are new. Of the parts that a new mapping has in common with older mappings, only the
    /// largest one counts: two mappings that have had pages cannot be merged into one, and programs may call `mremap`
    /// on a mapping as a whole.
    pub(crate) fn stable_ranges(before: &[Self], after: &[Self]) -> AddressRanges {
        let mut found = AddressRanges::default();
        let mut at = 0;
        for new in after {
            at += before[at..]
                .iter()
                .take_while(|old| old.end <= new.start)
                .count();
            let old = before[at..].iter().take_while(|old| old.start < new.end);
            let parts = old
                .filter(|old| old.is_same_mapping(new))
                .map(|old| (old.start.max(new.start), old.end.min(new.end)));
            if let Some((start, end)) = parts.max_by_key(|(start, end)| end - start) {
                found.push(start, end);
            }
        }
        found
    }
}

impl MemoryMapping {
    /// Returns true if private mappings, which are sorted, cover a run of pages without a gap: only there may pages be
    /// written. Pages of the kernel and of the restorer, and shared memory, are not covered by any.
    #[must_use]
    pub fn covers(mappings: &[Self], run: &PageRun) -> bool {
        let Some(end) = run.start.checked_add(run.length) else {
            return false;
        };
        let mut at = run.start;
        let first = mappings.partition_point(|mapping| mapping.end <= at);
        for mapping in &mappings[first..] {
            if mapping.start > at || !mapping.is_private() {
                return false;
            }
            at = mapping.end;
            if at >= end {
                return true;
            }
        }
        false
    }

    /// Returns true for memory of this process alone: changed pages are sent. Memory that the kernel may drop need not
    /// be sent.
    pub(crate) fn is_private(&self) -> bool {
        let private = matches!(
            self.backing,
            MappingBacking::Anonymous(_) | MappingBacking::File { shared: false, .. }
        );
        private && !VmFlags(self.advice).has_any(VmFlags::DROPPABLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{MemorySpace, PageContent};

    fn mapping(start: u64, end: u64, backing: MappingBacking) -> MemoryMapping {
        MemoryMapping {
            start,
            end,
            protection: libc::PROT_READ,
            advice: 0,
            backing,
        }
    }

    #[test]
    fn only_private_mappings_cover_runs() {
        let anonymous = || MappingBacking::Anonymous(Vec::new());
        let object = MappingBacking::Shared {
            object: 0,
            offset: 0,
        };
        let mappings = [
            mapping(0x1000, 0x3000, anonymous()),
            mapping(0x3000, 0x4000, anonymous()),
            mapping(0x5000, 0x6000, object),
            mapping(0x7000, 0x9000, MappingBacking::Kernel("[vdso]".to_owned())),
            mapping(0x9000, 0xa000, anonymous()),
        ];
        let is_covered = |start: u64, end: u64| {
            let run = PageRun {
                space: MemorySpace::Process(0),
                start,
                length: end - start,
                content: PageContent::Bytes,
            };
            MemoryMapping::covers(&mappings, &run)
        };
        assert!(
            is_covered(0x1000, 0x4000) && is_covered(0x2000, 0x4000) && is_covered(0x9000, 0xa000)
        );
        for (start, end) in [
            (0, 0x2000),
            (0x3000, 0x5000),
            (0x4000, 0x5000),
            (0x5000, 0x6000),
            (0x7000, 0x8000),
            (0x8000, 0xa000),
            (0x9000, 0xb000),
            (0x1_4000_0000, 0x1_4000_1000),
        ] {
            assert!(!is_covered(start, end), "{start:#x} to {end:#x}");
        }
        let run = PageRun {
            space: MemorySpace::Process(0),
            start: 0x2000,
            length: u64::MAX - 0xfff,
            content: PageContent::Initial,
        };
        assert!(!MemoryMapping::covers(&mappings, &run));
    }
}
