//! Longest retransmission timeouts of connections, set without their descriptors (`c/timeouts.bpf.c`).

use std::os::fd::{AsRawFd, BorrowedFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::iterator::{Iterator, run_through};
use crate::{Error, handle};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/timeouts.bpf.o"));

/// Setter of timeouts for connections whose descriptors may be closed by then.
#[derive(Debug)]
pub struct Timeouts {
    iterator: Iterator,
    orders: MapHandle,
}

impl Timeouts {
    /// Loads the iterator.
    ///
    /// # Errors
    /// The kernel refuses the iterator: it is too old, or has no BTF.
    pub fn load() -> Result<Self, Error> {
        let (iterator, object) = Iterator::load(OBJECT, "give_back", "connections")?;
        Ok(Self {
            iterator,
            orders: handle(&object, "timeouts")?,
        })
    }

    /// Stores the longest timeout, in milliseconds, that the next [`Timeouts::give_back`] sets on a connection. The
    /// order disappears with the connection.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn order(&self, socket: BorrowedFd<'_>, longest_ms: i32) -> Result<(), Error> {
        let key = socket.as_raw_fd().to_ne_bytes();
        let order = longest_ms.to_ne_bytes();
        let ordered = self.orders.update(&key, &order, MapFlags::ANY);
        ordered.map_err(|e| failed(&e.to_string()))
    }

    /// Sets the stored timeouts of connections in the caller's network namespace.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn give_back(&self) -> Result<(), Error> {
        let iter = self.iterator.over_all()?;
        run_through(iter).map_err(|error| failed(&error.to_string()))
    }
}

fn failed(reason: &str) -> Error {
    Error::Map {
        name: "timeouts",
        reason: reason.to_owned(),
    }
}
