//! Longest retransmission timeouts of connections, set without their descriptors (`c/rto_max.bpf.c`).

use std::os::fd::{AsRawFd, BorrowedFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::bpf_iterator::{BpfIterator, drain};
use crate::{Error, map_handle};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rto_max.bpf.o"));

/// Setter of timeouts for connections whose descriptors may be closed by then.
#[derive(Debug)]
pub struct RtoMaxSetter {
    iterator: BpfIterator,
    stored: MapHandle,
}

impl RtoMaxSetter {
    /// Loads the BPF iterator that sets timeouts of connections.
    ///
    /// # Errors
    /// The kernel refuses the iterator: it is too old, or has no BTF.
    pub fn load() -> Result<Self, Error> {
        let (iterator, object) = BpfIterator::load(OBJECT, "restore_rto_max", "connections")?;
        Ok(Self {
            iterator,
            stored: map_handle(&object, "stored_rto_max")?,
        })
    }

    /// Stores the longest timeout, in milliseconds, that the next [`RtoMaxSetter::restore`] sets on a connection. The
    /// order disappears with the connection.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn store(&self, socket: BorrowedFd<'_>, rto_max_ms: i32) -> Result<(), Error> {
        let key = socket.as_raw_fd().to_ne_bytes();
        let value = rto_max_ms.to_ne_bytes();
        let stored = self.stored.update(&key, &value, MapFlags::ANY);
        stored.map_err(|e| map_error(&e.to_string()))
    }

    /// Sets the stored timeouts of connections in the caller's network namespace.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn restore(&self) -> Result<(), Error> {
        let iter = self.iterator.over_all()?;
        drain(iter).map_err(|error| map_error(&error.to_string()))
    }
}

fn map_error(reason: &str) -> Error {
    Error::Map {
        name: "stored_rto_max",
        reason: reason.to_owned(),
    }
}
