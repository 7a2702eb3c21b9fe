//! The shape of a tree: processes, threads, mappings. Known while it runs.

use super::Credentials;
use super::Run;
use crate::process::files::image::ContentForm;
use crate::process::procfs::Advice;
use crate::process::ranges::Ranges;
use serde::{Deserialize, Serialize};

/// A tree of processes, as it was at the beginning of a round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tree {
    /// The donor's clocks.
    pub clocks: Clocks,
    /// Tells the run of the donor's kernel from all others.
    pub boot_id: String,
    /// The pages `[vdso]`, whose addresses are in pointers of the program.
    #[serde(with = "serde_bytes")]
    pub vdso: Vec<u8>,
    /// Features in the extended registers (XCR0).
    pub register_features: u64,
    /// Parents before their children; the first is the root.
    pub processes: Vec<Process>,
    /// Files that are mapped.
    pub files: Vec<BackingFile>,
    /// Memory that several mappings share, with its content.
    pub shared: Vec<Shared>,
}

/// `CLOCK_MONOTONIC` and `CLOCK_BOOTTIME` at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clocks {
    /// Nanoseconds.
    pub monotonic_ns: u64,
    /// Nanoseconds.
    pub boot_ns: u64,
}

/// A process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its PID.
    pub pid: i32,
    /// Index of its parent; none for the root.
    pub parent: Option<u32>,
    /// Counts what began under a PID: another process, or the same after `exec`, has another number.
    pub generation: u64,
    /// Process group.
    pub group: i32,
    /// Session.
    pub session: i32,
    /// The signal that its parent gets when it ends, 0 for none.
    pub exit_signal: i32,
    /// For a zombie what `wait` will tell; it has nothing else.
    pub exit_status: Option<i32>,
    /// Threads, the first one first.
    pub threads: Vec<i32>,
    /// Index of an earlier process whose descriptor table it shares.
    pub table_of: Option<u32>,
    /// Index of the executable in [`Tree::files`].
    pub executable: u32,
    /// By address.
    pub mappings: Vec<Mapping>,
    /// Guard pages (`MADV_GUARD_INSTALL`): first address and first beyond; disjoint, by address.
    pub guards: Vec<(u64, u64)>,
    /// Who its first thread is; of the securebits nothing is known while it runs.
    pub credentials: Credentials,
    /// `no_new_privs` of its first thread.
    pub no_new_privileges: bool,
    /// Working directory; empty if it could not be read.
    #[serde(with = "serde_bytes")]
    pub directory: Vec<u8>,
}

/// A range of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// First address beyond.
    pub end: u64,
    /// `PROT_*`.
    pub protection: i32,
    /// Bits of [`Advice`](crate::process::procfs::Advice).
    pub advice: u32,
    /// What is behind it.
    pub backing: Backing,
}

/// What is behind a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
    /// Private memory, with the name that the program gave it.
    Anonymous(#[serde(with = "serde_bytes")] Vec<u8>),
    /// A file: index in [`Tree::files`], offset. Private: pages that the program changed travel.
    File {
        /// Index.
        file: u32,
        /// Bytes.
        offset: u64,
        /// `MAP_SHARED`, and not writable.
        shared: bool,
    },
    /// Shared memory: index in [`Tree::shared`], offset.
    Shared {
        /// Index.
        object: u32,
        /// Bytes.
        offset: u64,
    },
    /// Code and data of the kernel: `[vdso]`, `[vvar]` and the like, by name.
    Kernel(String),
}

/// A file that must be at the acceptor too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingFile {
    /// Where.
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    /// Bytes.
    pub size: u64,
    /// The linker's number for its content, if it has one.
    #[serde(with = "serde_bytes")]
    pub build_id: Vec<u8>,
    /// SHA-256 of the content where there is no build id.
    #[serde(with = "serde_bytes")]
    pub digest: Vec<u8>,
}

/// Memory that several mappings, or a mapping and a descriptor, share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    /// What makes it.
    pub kind: SharedKind,
    /// Bytes.
    pub size: u64,
    /// Device (major, minor) and inode at the donor: what descriptors of the same memory are told by.
    pub identity: (u32, u32, u64),
}

/// The directory of POSIX shared memory and of named semaphores (`shm_open(3)`, `sem_open(3)`).
pub(crate) const POSIX_MEMORY: &[u8] = b"/dev/shm/";

/// What makes shared memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SharedKind {
    /// `MAP_SHARED | MAP_ANONYMOUS`.
    Anonymous,
    /// `memfd_create` with this name.
    Memfd(#[serde(with = "serde_bytes")] Vec<u8>),
    /// A file that is there under this path at the acceptor too; the mapped pages travel.
    File(#[serde(with = "serde_bytes")] Vec<u8>),
    /// POSIX shared memory or a named semaphore: made where it is not there.
    Posix {
        /// Below the folder of POSIX shared memory.
        #[serde(with = "serde_bytes")]
        path: Vec<u8>,
        /// Owner, group and permissions.
        access: (u32, u32, u32),
    },
    /// A file whose name was removed.
    Deleted {
        /// Where it was.
        form: ContentForm,
        /// Owner, group and permissions.
        access: (u32, u32, u32),
    },
    /// A segment of System V.
    SystemV(Segment),
}

/// A segment of System V shared memory (`shmctl(2)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// The number by which programs attach it.
    pub id: i32,
    /// The key by which it is found, 0 for none.
    pub key: i32,
    /// Bytes.
    pub size: u64,
    /// Permissions.
    pub mode: u32,
    /// It goes with the last who has it.
    pub removed: bool,
    /// It stays in memory.
    pub locked: bool,
    /// It is no more.
    pub gone: bool,
    /// User and group.
    pub owner: (u32, u32),
    /// User and group of who made it.
    pub creator: (u32, u32),
}

impl Shared {
    /// The segment of System V, if it is one.
    #[must_use]
    pub fn segment(&self) -> Option<&Segment> {
        match &self.kind {
            SharedKind::SystemV(segment) => Some(segment),
            _ => None,
        }
    }

    /// What `stat` tells at the donor.
    #[must_use]
    pub fn device_and_inode(&self) -> (u64, u64) {
        let (major, minor, inode) = self.identity;
        (libc::makedev(major, minor), inode)
    }
}

impl Mapping {
    /// Whether both are parts of one mapping, so that what one holds at an address the other holds too.
    #[must_use]
    pub fn continues(&self, other: &Self) -> bool {
        let place = |mapping: &Self, offset: u64| offset.wrapping_sub(mapping.start);
        match (&self.backing, &other.backing) {
            (Backing::Anonymous(_), Backing::Anonymous(_)) => true,
            (
                Backing::File {
                    file,
                    offset,
                    shared,
                },
                Backing::File {
                    file: other_file,
                    offset: other_offset,
                    shared: other_shared,
                },
            ) => {
                file == other_file
                    && shared == other_shared
                    && place(self, *offset) == place(other, *other_offset)
            }
            (
                Backing::Shared { object, offset },
                Backing::Shared {
                    object: other_object,
                    offset: other_offset,
                },
            ) => object == other_object && place(self, *offset) == place(other, *other_offset),
            (Backing::Kernel(name), Backing::Kernel(other_name)) => {
                name == other_name && self.start == other.start && self.end == other.end
            }
            _ => false,
        }
    }

    /// Where in both lists the same memory is mapped in the same way. What else was mapped is gone; what else is mapped
    /// is new. Of one mapping only parts of one older mapping stay: two that have had pages can never become one, and programs may
    /// call `mremap` for one.
    pub(crate) fn stable(before: &[Self], after: &[Self]) -> Ranges {
        let mut found = Ranges::default();
        let mut at = 0;
        for new in after {
            at += before[at..]
                .iter()
                .take_while(|old| old.end <= new.start)
                .count();
            let old = before[at..].iter().take_while(|old| old.start < new.end);
            let parts = old
                .filter(|old| old.continues(new))
                .map(|old| (old.start.max(new.start), old.end.min(new.end)));
            if let Some((start, end)) = parts.max_by_key(|(start, end)| end - start) {
                found.push(start, end);
            }
        }
        found
    }
}

impl Mapping {
    /// Whether private mappings, which are in order, cover a run of pages without a gap: only there may pages be written. Where the
    /// kernel's own pages, the restorer's or shared memory are, none covers it.
    #[must_use]
    pub fn cover(mappings: &[Self], run: &Run) -> bool {
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

    /// Memory of this process alone, whose changed pages travel with it. What the kernel may drop need not.
    pub(crate) fn is_private(&self) -> bool {
        let private = matches!(
            self.backing,
            Backing::Anonymous(_) | Backing::File { shared: false, .. }
        );
        private && !Advice(self.advice).has(Advice::DROPPABLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::image::{Content, Space};

    fn mapping(start: u64, end: u64, backing: Backing) -> Mapping {
        Mapping {
            start,
            end,
            protection: libc::PROT_READ,
            advice: 0,
            backing,
        }
    }

    #[test]
    fn pages_lie_in_private_mappings_alone() {
        let anonymous = || Backing::Anonymous(Vec::new());
        let object = Backing::Shared {
            object: 0,
            offset: 0,
        };
        let mappings = [
            mapping(0x1000, 0x3000, anonymous()),
            mapping(0x3000, 0x4000, anonymous()),
            mapping(0x5000, 0x6000, object),
            mapping(0x7000, 0x9000, Backing::Kernel("[vdso]".to_owned())),
            mapping(0x9000, 0xa000, anonymous()),
        ];
        let held = |start: u64, end: u64| {
            let run = Run {
                space: Space::Process(0),
                start,
                length: end - start,
                content: Content::Bytes,
            };
            Mapping::cover(&mappings, &run)
        };
        assert!(held(0x1000, 0x4000) && held(0x2000, 0x4000) && held(0x9000, 0xa000));
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
            assert!(!held(start, end), "{start:#x} to {end:#x}");
        }
        let run = Run {
            space: Space::Process(0),
            start: 0x2000,
            length: u64::MAX - 0xfff,
            content: Content::Fresh,
        };
        assert!(!Mapping::cover(&mappings, &run));
    }
}
