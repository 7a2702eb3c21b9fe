//! Descriptors of processes, read without stopping them by a BPF iterator (`c/descriptors.bpf.c`): one system call returns
//! about 450 descriptors, while `/proc` takes three calls for each and does not reveal shared open files.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::Error;
use crate::bpf_iterator::BpfIterator;
use crate::iterator_records::read_all;

/// Bits of [`Descriptor::bits`].
pub mod descriptor_flags {
    /// `FD_CLOEXEC`.
    pub const CLOSE_ON_EXEC: u32 = 1;
    /// The descriptor's kind, or locks on it, add lines to `fdinfo`.
    pub const HAS_FDINFO: u32 = 2;
    /// The descriptor is in a thread's own table.
    pub const THREAD_TABLE: u32 = 4;
    /// The descriptor is an epoll set with a known digest.
    pub const HAS_DIGEST: u32 = 8;
    /// The file has an owner that gets its signals (`F_SETOWN`).
    pub const HAS_OWNER: u32 = 16;
}

/// Snapshot of a descriptor.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Descriptor {
    /// Identity of the descriptor table, for comparison only.
    pub table: u64,
    /// Identity of the open file, for comparison only.
    pub file: u64,
    /// File position.
    pub position: i64,
    /// Inode number.
    pub inode: u64,
    /// Cookie of a socket; otherwise 0.
    pub cookie: u64,
    /// Device of the inode, in the kernel's internal numbering.
    pub device: u32,
    /// Mount ID.
    pub mount: u32,
    /// Descriptor number.
    pub fd: u32,
    /// Access mode and status flags.
    pub flags: u32,
    /// Bits of [`descriptor_flags`].
    pub bits: u32,
    /// Type and permissions of the inode.
    pub mode: u16,
    /// Address family of a socket; otherwise 0.
    pub family: u16,
    /// Type of a socket.
    pub socket_type: u16,
    /// Protocol of a socket.
    pub protocol: u16,
    /// Zero.
    pub pad: u32,
    /// Digest of an epoll set's entries: the sum in `c/epoll.h`; otherwise 0.
    pub digest: u64,
}

const _: () = assert!(size_of::<Descriptor>() == 80);

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bpf.o"));

/// Lister of the descriptors of any process.
pub struct DescriptorLister(BpfIterator);

impl DescriptorLister {
    /// Loads the BPF iterator that lists the descriptors of a process.
    ///
    /// # Errors
    /// The kernel refuses the iterator: it is too old, or has no BTF.
    pub fn load() -> Result<Self, Error> {
        let (iterator, _) = BpfIterator::load(OBJECT, "list_descriptors", "descriptors")?;
        Ok(Self(iterator))
    }

    /// Returns all descriptors of a process in the order of their numbers, then the descriptors of threads with tables
    /// of their own. `pid` is a number in the caller's PID namespace. A process that does not exist has none.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn list(&self, pid: i32) -> Result<Vec<Descriptor>, Error> {
        let iter = self.0.over_process(pid)?;
        read_all(iter).map_err(|error| self.0.error(error))
    }
}
