//! The descriptors of processes, read from beside them by a BPF iterator (`c/files.bpf.c`): a system call for some 450 of
//! them, where `/proc` takes three for each and does not tell which are the same open file.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::Error;
use crate::iterator::Iterator;
use crate::records::read_all;

/// Bits of [`Descriptor::bits`].
pub mod bits {
    /// `FD_CLOEXEC`.
    pub const CLOSE_ON_EXEC: u32 = 1;
    /// Its kind, or locks on it, add lines to `fdinfo`.
    pub const MORE: u32 = 2;
    /// It is in a table of a thread's own.
    pub const THREAD: u32 = 4;
    /// It is an epoll set, whose digest is known.
    pub const DIGEST: u32 = 8;
    /// Somebody is named who is told by signal (`F_SETOWN`).
    pub const OWNER: u32 = 16;
}

/// A descriptor at one instant.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Descriptor {
    /// Identity of the descriptor table; means nothing but that.
    pub table: u64,
    /// Identity of the open file, likewise.
    pub file: u64,
    /// Position.
    pub position: i64,
    /// Inode.
    pub inode: u64,
    /// Cookie of a socket; otherwise 0.
    pub cookie: u64,
    /// Device of the inode, as the kernel numbers it inside.
    pub device: u32,
    /// Mount.
    pub mount: u32,
    /// Its number.
    pub fd: u32,
    /// Access mode and status flags.
    pub flags: u32,
    /// See [`bits`].
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
    /// What an epoll set watches: the sum of `c/epoll.h` over its entries; otherwise 0.
    pub digest: u64,
}

const _: () = assert!(size_of::<Descriptor>() == 80);

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/files.bpf.o"));

/// Lists descriptors.
pub struct Lister(Iterator);

impl Lister {
    /// Loads the iterator.
    ///
    /// # Errors
    /// The kernel does not take it: it is too old, or has no BTF.
    pub fn load() -> Result<Self, Error> {
        let (iterator, _) = Iterator::load(OBJECT, "list_files", "descriptors")?;
        Ok(Self(iterator))
    }

    /// All descriptors of a process, in the order of their numbers; then those of threads that have tables of their own.
    /// `pid` is the caller's number for it. A process that is not there has none.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn list(&self, pid: i32) -> Result<Vec<Descriptor>, Error> {
        let iter = self.0.over_process(pid)?;
        read_all(iter).map_err(|error| self.0.refused(error))
    }
}
