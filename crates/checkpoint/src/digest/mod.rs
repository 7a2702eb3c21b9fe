//! Checksums of a stopped tree: registers, memory and descriptors. The donor computes them of the original, the
//! acceptor of the restored tree; if both agree, nothing differs.
//!
//! Contents are hashed by CRC-32C, which detects accidental errors. The channel keeps attackers out.

mod descriptors;
mod locks;
mod memory;
mod pipe_and_socket_data;
mod registers;
mod shared_open_files;

use super::error::{Error, Result};
use super::files::image::FileLock;
use super::image::{ProcessLayout, ProcessState, Validate};
use super::procfs::MapLine;
use super::trace::ProcessMemory;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

pub(crate) use locks::planned_locks;
pub(crate) use memory::checksum_file;
pub(crate) use registers::checksum_thread;

/// Most differences that an error names.
const NAMED_MAX: usize = 8;

/// Checksums of all parts of a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeDigest {
    parts: BTreeMap<DigestedPart, u32>,
}

/// A part of a tree. Processes and threads are identified by the IDs that they see themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum DigestedPart {
    /// A mapping and its properties.
    Mapping { process: i32, start: u64, end: u64 },
    /// The private content of a mapping.
    Content { process: i32, start: u64, end: u64 },
    /// Addresses of guard pages.
    Guards { process: i32 },
    /// Registers of a thread.
    Thread { process: i32, thread: i32 },
    /// Name under which a descriptor was opened, if the file still has that name.
    Name { process: i32, number: u32 },
    /// Properties with which a descriptor is open.
    Descriptor { process: i32, number: u32 },
    /// The content of shared memory, by index in the tree.
    Shared(u32),
    /// Data that waits in a pipe or a Unix socket.
    Queue { process: i32, number: u32 },
    /// Open file of a descriptor, if the file has other descriptors too.
    Sharing { process: i32, number: u32 },
    /// Locks on files that a process has.
    Locks { process: i32 },
}

impl fmt::Display for DigestedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mapping {
                process,
                start,
                end,
            } => write!(f, "mapping {start:x}-{end:x} of process {process}"),
            Self::Content {
                process,
                start,
                end,
            } => write!(f, "memory {start:x}-{end:x} of process {process}"),
            Self::Guards { process } => write!(f, "guard pages of process {process}"),
            Self::Thread { process, thread } => {
                write!(f, "registers of thread {thread} of process {process}")
            }
            Self::Name { process, number } | Self::Descriptor { process, number } => {
                write!(f, "descriptor {number} of process {process}")
            }
            Self::Queue { process, number } => {
                write!(f, "queued data of descriptor {number} of process {process}")
            }
            Self::Sharing { process, number } => write!(
                f,
                "sharing of the open file of descriptor {number} of process {process}"
            ),
            Self::Locks { process } => write!(f, "locks of process {process}"),
            Self::Shared(index) => write!(f, "shared memory {index}"),
        }
    }
}

impl TreeDigest {
    pub(crate) fn insert(&mut self, part: DigestedPart, checksum: u32) {
        self.parts.insert(part, checksum);
    }

    /// Adds all parts of a process except its registers, which the donor knows and the acceptor reads back.
    pub(crate) fn add_process(
        &mut self,
        process: &ProcessLayout,
        stopped: &DigestedProcess<'_>,
    ) -> Result<()> {
        memory::add_mappings(self, process, &stopped.lines);
        memory::add_content(self, process, stopped)?;
        descriptors::add(self, process.pid, stopped)
    }

    /// Adds the groups of descriptors that refer to one open file. A process is given by the PID that it sees itself,
    /// and the PID that the caller sees.
    pub(crate) fn add_sharing(&mut self, processes: &[(i32, i32)]) -> Result<()> {
        shared_open_files::add(self, processes)
    }

    /// Compares the digests of the original and of the restored tree.
    ///
    /// # Errors
    /// [`Error::Refused`] names the parts that differ.
    pub fn compare(&self, other: &Self) -> Result<()> {
        let differing = self.parts.iter();
        let differs =
            |(part, checksum): &(&DigestedPart, &u32)| other.parts.get(*part) != Some(*checksum);
        // A deleted file may have another name at the acceptor.
        let only_in_other = (other.parts.keys()).filter(|part| {
            !matches!(part, DigestedPart::Name { .. }) && !self.parts.contains_key(part)
        });
        let mut parts: Vec<DigestedPart> = (differing.filter(differs).map(|(part, _)| *part))
            .chain(only_in_other.copied())
            .collect();
        parts.sort_unstable();
        if parts.is_empty() {
            return Ok(());
        }
        let (named, rest) = parts.split_at(parts.len().min(NAMED_MAX));
        let named: Vec<String> = named.iter().map(ToString::to_string).collect();
        let rest = match rest.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let text = format!(
            "the restored tree differs from the original: {}{rest}",
            named.join(", ")
        );
        Err(Error::Refused(text))
    }
}

impl Validate for TreeDigest {
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// A stopped process whose checksums are computed.
#[derive(Debug)]
pub(crate) struct DigestedProcess<'a> {
    /// PID as the caller sees it.
    pub pid: i32,
    /// Mappings of the process, without the mappings that Holdfast added.
    pub lines: Vec<MapLine>,
    pub memory: &'a ProcessMemory,
    pub state: &'a ProcessState,
    /// Locks that the process will get, by descriptor; `None` if it has them already.
    pub locks: Option<Vec<(u32, FileLock)>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(parts: &[(DigestedPart, u32)]) -> TreeDigest {
        TreeDigest {
            parts: parts.iter().copied().collect(),
        }
    }

    #[test]
    fn comparison_names_differences_in_either_order() {
        let thread = DigestedPart::Thread {
            process: 7,
            thread: 8,
        };
        let descriptor = DigestedPart::Descriptor {
            process: 7,
            number: 3,
        };
        let complete = digest(&[(thread, 1), (descriptor, 2)]);
        assert!(complete.compare(&complete).is_ok());
        let partial = digest(&[(thread, 1)]);
        for (one, other) in [(&complete, &partial), (&partial, &complete)] {
            let error = one.compare(other).unwrap_err().to_string();
            assert!(
                error.ends_with("original: descriptor 3 of process 7"),
                "{error}"
            );
        }
        let other = digest(&[(thread, 9), (descriptor, 2)]);
        let error = complete.compare(&other).unwrap_err().to_string();
        assert!(
            error.ends_with("registers of thread 8 of process 7"),
            "{error}"
        );
    }

    #[test]
    fn many_differences_are_counted() {
        let parts: Vec<(DigestedPart, u32)> = (0..20)
            .map(|index| (DigestedPart::Shared(index), 1))
            .collect();
        let error = digest(&parts).compare(&TreeDigest::default()).unwrap_err();
        assert!(
            error.to_string().ends_with("shared memory 7 and 12 more"),
            "{error}"
        );
    }
}
