//! The descriptors of processes, read from beside them by a BPF iterator (`c/files.bpf.c`): a system call for some 450 of
//! them, where `/proc` takes three for each and does not tell which are the same open file.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use libbpf_rs::ObjectBuilder;
use libbpf_rs::libbpf_sys::{
    BPF_TRACE_ITER, bpf_iter_create, bpf_iter_link_info, bpf_link_create, bpf_link_create_opts,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::Error;
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
pub struct Lister {
    program: OwnedFd,
}

impl Lister {
    /// Loads the iterator.
    ///
    /// # Errors
    /// The kernel does not take it: it is too old, or has no BTF.
    pub fn load() -> Result<Self, Error> {
        let refused = |e: libbpf_rs::Error| Error::Load(format!("{e:#}"));
        let open = ObjectBuilder::default()
            .open_memory(OBJECT)
            .map_err(refused)?;
        let object = open.load().map_err(refused)?;
        let program = object.progs().find(|one| one.name() == "list_files");
        let program = program.ok_or_else(|| Error::Load("program list_files is missing".into()))?;
        let program = program.as_fd().try_clone_to_owned();
        let program = program.map_err(|error| Error::Load(error.to_string()))?;
        Ok(Self { program })
    }

    /// All descriptors of a process, in the order of their numbers; then those of threads that have tables of their own.
    /// `pid` is the caller's number for it. A process that is not there has none.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn list(&self, pid: i32) -> Result<Vec<Descriptor>, Error> {
        let link = self.attach(pid)?;
        // SAFETY: no pointers are passed.
        let iter = owned(unsafe { bpf_iter_create(link.as_raw_fd()) })?;
        read_all(std::fs::File::from(iter)).map_err(refused)
    }

    /// The iterator for one process. The library has no options for that.
    fn attach(&self, pid: i32) -> Result<OwnedFd, Error> {
        let mut info = bpf_iter_link_info::default();
        info.task.pid = pid.cast_unsigned();
        let options = bpf_link_create_opts {
            sz: size_of::<bpf_link_create_opts>() as _,
            iter_info: &raw mut info,
            iter_info_len: size_of::<bpf_iter_link_info>() as u32,
            ..bpf_link_create_opts::default()
        };
        // SAFETY: the options and what they point to outlive the call.
        let link = unsafe {
            bpf_link_create(
                self.program.as_raw_fd(),
                0,
                BPF_TRACE_ITER,
                &raw const options,
            )
        };
        owned(link)
    }
}

/// A new descriptor, or what a call of the library's left in `errno`.
pub(crate) fn owned(fd: i32) -> Result<OwnedFd, Error> {
    if fd < 0 {
        return Err(refused(std::io::Error::from_raw_os_error(-fd)));
    }
    // SAFETY: the call succeeded, so this is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn refused(source: std::io::Error) -> Error {
    Error::Attach {
        what: "the iterator over descriptors".into(),
        source,
    }
}
