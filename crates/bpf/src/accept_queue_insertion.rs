//! Insertion of connections into the queue of a listener (`c/accept_queue.bpf.c`).

use std::os::fd::OwnedFd;
use std::path::Path;

use libbpf_rs::Object;

use crate::shared_with_c::{FlowKey, Handshake};
use crate::{Error, Hook, KernelMap, link, load_object, map_handle, program};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/accept_queue.bpf.o"));

/// Insertion of connections at one interface. A flow in [`AcceptQueue::pending_handshakes`] gets its connection when the packet that
/// completes its handshake arrives, and is then removed from the table.
pub struct AcceptQueue {
    /// Handshake results of the waiting connections.
    pub pending_handshakes: KernelMap<FlowKey, Handshake>,
    _object: Object,
    _link: OwnedFd,
}

impl AcceptQueue {
    /// Attaches the program to a TUN; its map is the one pinned below `pins`.
    ///
    /// # Errors
    /// The kernel's error: the program needs `bpf_sk_assign_tcp_reqsk` (Linux 6.9 with SYN cookies).
    pub fn attach(pins: &Path, ifindex: u32) -> Result<Self, Error> {
        let object = load_object(OBJECT, pins, 1)?;
        let pending_handshakes = KernelMap::new(map_handle(&object, "waiting")?, "waiting");
        let hook = Hook::Ingress(ifindex);
        let link = link::attach_unpinned(program(&object, "holdfast_queue")?, hook)?;
        Ok(Self {
            pending_handshakes,
            _object: object,
            _link: link,
        })
    }
}
