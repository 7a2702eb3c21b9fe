//! The longest retransmission timeouts of connections, set without descriptors of theirs (`c/timeouts.bpf.c`).

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::libbpf_sys::{BPF_TRACE_ITER, bpf_iter_create, bpf_link_create};
use libbpf_rs::{MapCore, MapFlags, MapHandle, ObjectBuilder};

use crate::files::owned;
use crate::{Error, handle};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/timeouts.bpf.o"));

/// Sets timeouts of connections whose descriptors are closed by then.
#[derive(Debug)]
pub struct Timeouts {
    link: OwnedFd,
    orders: MapHandle,
}

impl Timeouts {
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
        let program = object.progs().find(|one| one.name() == "give_back");
        let program = program.ok_or_else(|| Error::Load("program give_back is missing".into()))?;
        let number = program.as_fd().as_raw_fd();
        // SAFETY: there are no options; the program is loaded, and the link keeps it.
        let link = owned(unsafe { bpf_link_create(number, 0, BPF_TRACE_ITER, std::ptr::null()) })?;
        Ok(Self {
            link,
            orders: handle(&object, "timeouts")?,
        })
    }

    /// Remembers the longest timeout, milliseconds, that a connection is to have from the next [`Timeouts::give_back`] on. The order
    /// goes with the connection.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn order(&self, socket: BorrowedFd<'_>, longest_ms: i32) -> Result<(), Error> {
        let key = socket.as_raw_fd().to_ne_bytes();
        let order = longest_ms.to_ne_bytes();
        let ordered = self.orders.update(&key, &order, MapFlags::ANY);
        ordered.map_err(|e| failed(&e.to_string()))
    }

    /// Sets what was ordered for connections of the caller's network namespace.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn give_back(&self) -> Result<(), Error> {
        // SAFETY: no pointers are passed.
        let mut iter = File::from(owned(unsafe { bpf_iter_create(self.link.as_raw_fd()) })?);
        // The iterator gives nothing, and so goes through all at the first read.
        loop {
            match iter.read(&mut [0]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                outcome => {
                    return outcome
                        .map(drop)
                        .map_err(|error| failed(&error.to_string()));
                }
            }
        }
    }
}

fn failed(reason: &str) -> Error {
    Error::Map {
        name: "timeouts",
        reason: reason.to_owned(),
    }
}
