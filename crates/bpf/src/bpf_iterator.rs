//! BPF iterators: programs that the kernel runs for each of many objects.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys::{
    BPF_TRACE_ITER, bpf_iter_create, bpf_iter_link_info, bpf_link_create, bpf_link_create_opts,
};
use libbpf_rs::{Object, ObjectBuilder};

use crate::{Error, program};

/// A loaded BPF iterator.
#[derive(Debug)]
pub(crate) struct BpfIterator {
    program: OwnedFd,
    objects: &'static str,
}

impl BpfIterator {
    /// Loads an object, and its program `name`. `what` names the iterated objects in errors.
    ///
    /// # Errors
    /// The kernel refuses the program: it is too old, or has no BTF.
    pub(crate) fn load(
        object: &[u8],
        name: &str,
        what: &'static str,
    ) -> Result<(Self, Object), Error> {
        let load_error = |e: libbpf_rs::Error| Error::Load(format!("{e:#}"));
        let open = ObjectBuilder::default()
            .open_memory(object)
            .map_err(load_error)?;
        let object = open.load().map_err(load_error)?;
        Ok((Self::from_object(&object, name, what)?, object))
    }

    /// Makes an iterator from a program of a loaded object.
    ///
    /// # Errors
    /// The object has no such program.
    pub(crate) fn from_object(
        object: &Object,
        name: &str,
        what: &'static str,
    ) -> Result<Self, Error> {
        let program = program(object, name)?.try_clone_to_owned();
        let program = program.map_err(|error| Error::Load(error.to_string()))?;
        Ok(Self {
            program,
            objects: what,
        })
    }

    /// Iterates over all objects of the caller's namespace.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn over_all(&self) -> Result<File, Error> {
        let options = bpf_link_create_opts {
            sz: size_of::<bpf_link_create_opts>() as _,
            ..bpf_link_create_opts::default()
        };
        self.start(&options)
    }

    /// Iterates over the objects of a process, and of its threads with tables of their own. `pid` is a number in the
    /// caller's PID namespace. A process that does not exist has no objects.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn over_process(&self, pid: i32) -> Result<File, Error> {
        let mut info = bpf_iter_link_info::default();
        info.task.pid = pid.cast_unsigned();
        self.over_tasks(info)
    }

    /// Iterates over the objects of one thread, by its number in the caller's PID namespace.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn over_thread(&self, tid: i32) -> Result<File, Error> {
        let mut info = bpf_iter_link_info::default();
        info.task.tid = tid.cast_unsigned();
        self.over_tasks(info)
    }

    fn over_tasks(&self, mut info: bpf_iter_link_info) -> Result<File, Error> {
        self.start(&bpf_link_create_opts {
            sz: size_of::<bpf_link_create_opts>() as _,
            iter_info: &raw mut info,
            iter_info_len: size_of::<bpf_iter_link_info>() as u32,
            ..bpf_link_create_opts::default()
        })
    }

    /// Starts an iteration. Data that the options point to must outlive the call.
    fn start(&self, options: &bpf_link_create_opts) -> Result<File, Error> {
        let program = self.program.as_raw_fd();
        // SAFETY: the options and the data that they point to outlive the call.
        let link = unsafe { bpf_link_create(program, 0, BPF_TRACE_ITER, options) };
        let link = self.own_fd(link)?;
        // SAFETY: no pointers are passed.
        let iter = self.own_fd(unsafe { bpf_iter_create(link.as_raw_fd()) })?;
        Ok(File::from(iter))
    }

    /// Wraps a new descriptor, or returns the error of the library call.
    fn own_fd(&self, fd: i32) -> Result<OwnedFd, Error> {
        if fd < 0 {
            return Err(self.error(io::Error::from_raw_os_error(-fd)));
        }
        // SAFETY: the call succeeded, so this is a new descriptor that nothing else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Makes the error of an iteration that the kernel refused.
    pub(crate) fn error(&self, source: io::Error) -> Error {
        Error::Attach {
            what: format!("the iterator over {}", self.objects),
            source,
        }
    }
}

/// Runs an iterator without records to its end; one read covers all objects.
pub(crate) fn drain(mut iter: File) -> io::Result<()> {
    loop {
        match iter.read(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome.map(drop),
        }
    }
}
