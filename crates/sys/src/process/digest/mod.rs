//! Checksums of a stopped tree: registers, memory and descriptors. The donor computes them of the original, the
//! acceptor of the restored tree; if both agree, nothing differs.
//!
//! Contents are hashed by CRC-32C, which detects accidental errors. The channel keeps attackers out.

mod contents;
mod descriptors;
mod locks;
mod memory;
mod registers;
mod sharing;

use super::error::{Error, Result};
use super::files::image::Lock;
use super::image::{Checked, FrozenProcess, Process};
use super::procfs::MapLine;
use super::trace::Memory;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

pub(crate) use locks::planned as planned_locks;
pub(crate) use memory::of_file;
pub(crate) use registers::of_thread;

/// Most differences that an error names.
const NAMED_MAX: usize = 8;

/// Checksums of all parts of a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digest {
    parts: BTreeMap<Part, u32>,
}

/// A part of a tree. Processes and threads are identified by the IDs that they see themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum Part {
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

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mapping {
                process,
                start,
                end,
            } => write!(f, "what process {process} maps at {start:x}-{end:x}"),
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
                write!(f, "what waits at descriptor {number} of process {process}")
            }
            Self::Sharing { process, number } => write!(
                f,
                "who shares the open file of descriptor {number} of process {process}"
            ),
            Self::Locks { process } => write!(f, "locks of process {process}"),
            Self::Shared(index) => write!(f, "shared memory {index}"),
        }
    }
}

impl Digest {
    pub(crate) fn insert(&mut self, part: Part, checksum: u32) {
        self.parts.insert(part, checksum);
    }

    /// Adds all parts of a process except its registers, which the donor knows and the acceptor reads back.
    pub(crate) fn add_process(&mut self, process: &Process, stands: &Standing<'_>) -> Result<()> {
        memory::add_mappings(self, process, &stands.lines);
        memory::add_content(self, process, stands)?;
        descriptors::add(self, process.pid, stands)
    }

    /// Adds the groups of descriptors that refer to one open file. A process is given by the PID that it sees itself,
    /// and the PID that the caller sees.
    pub(crate) fn add_sharing(&mut self, processes: &[(i32, i32)]) -> Result<()> {
        sharing::add(self, processes)
    }

    /// Compares the digests of the original and of the restored tree.
    ///
    /// # Errors
    /// [`Error::Refused`] names the parts that differ.
    pub fn compare(&self, other: &Self) -> Result<()> {
        let here = self.parts.iter();
        let differs = |(part, checksum): &(&Part, &u32)| other.parts.get(*part) != Some(*checksum);
        // A deleted file may have another name at the acceptor.
        let more = (other.parts.keys())
            .filter(|part| !matches!(part, Part::Name { .. }) && !self.parts.contains_key(part));
        let mut parts: Vec<Part> = (here.filter(differs).map(|(part, _)| *part))
            .chain(more.copied())
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
            "what it made of it differs from the original: {}{rest}",
            named.join(", ")
        );
        Err(Error::Refused(text))
    }
}

impl Checked for Digest {
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// A stopped process.
#[derive(Debug)]
pub(crate) struct Standing<'a> {
    /// PID as the caller sees it.
    pub pid: i32,
    /// Mappings of the process, without the mappings that Holdfast added.
    pub lines: Vec<MapLine>,
    pub memory: &'a Memory,
    pub state: &'a FrozenProcess,
    /// Locks that the process will get, by descriptor; `None` if it has them already.
    pub locks: Option<Vec<(u32, Lock)>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(parts: &[(Part, u32)]) -> Digest {
        Digest {
            parts: parts.iter().copied().collect(),
        }
    }

    #[test]
    fn what_differs_is_named_from_either_side() {
        let thread = Part::Thread {
            process: 7,
            thread: 8,
        };
        let descriptor = Part::Descriptor {
            process: 7,
            number: 3,
        };
        let both = digest(&[(thread, 1), (descriptor, 2)]);
        assert!(both.compare(&both).is_ok());
        let less = digest(&[(thread, 1)]);
        for (one, other) in [(&both, &less), (&less, &both)] {
            let why = one.compare(other).unwrap_err().to_string();
            assert!(
                why.ends_with("original: descriptor 3 of process 7"),
                "{why}"
            );
        }
        let other = digest(&[(thread, 9), (descriptor, 2)]);
        let why = both.compare(&other).unwrap_err().to_string();
        assert!(why.ends_with("registers of thread 8 of process 7"), "{why}");
    }

    #[test]
    fn many_differences_are_counted() {
        let parts: Vec<(Part, u32)> = (0..20).map(|index| (Part::Shared(index), 1)).collect();
        let why = digest(&parts).compare(&Digest::default()).unwrap_err();
        assert!(
            why.to_string().ends_with("shared memory 7 and 12 more"),
            "{why}"
        );
    }
}
