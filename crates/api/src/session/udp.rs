//! UDP: many associations share one socket, so a handoff moves no socket. It moves the program's state and the datagrams
//! of the association that the program has not read.
//!
//! Datagrams of an association wait here from the handoff's begin until it is known where they belong: if the
//! association moves, those that came before the diversion travel with it ([`UdpTable::collect`]); if it stays, the
//! program reads them. At the acceptor, datagrams that overtake the daemon's word wait until the association is there.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::shared::Shared;
use super::{Cell, Queue, lock};
use crate::{Destination, FlowText, Protocol};

/// One client of a UDP service: a cheap handle, clones are the same association.
#[derive(Clone, Debug)]
pub struct Association {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    flow: FlowText,
    /// With the scope that a link-local address needs.
    remote: SocketAddr,
    cell: Arc<Cell>,
}

impl Association {
    fn new(flow: FlowText, remote: SocketAddr, cell: Arc<Cell>) -> Self {
        Self {
            inner: Arc::new(Inner { flow, remote, cell }),
        }
    }

    /// Its flow.
    pub fn flow(&self) -> FlowText {
        self.inner.flow
    }

    /// The client's address.
    pub fn remote(&self) -> SocketAddr {
        self.inner.remote
    }

    /// Where the operator wants it, if so. It stays asked until a handoff is tried or declined.
    pub fn asked(&self) -> Option<Destination> {
        self.inner.cell.asked()
    }

    pub(crate) fn cell(&self) -> &Arc<Cell> {
        &self.inner.cell
    }
}

/// What a UDP service brings.
#[derive(Debug)]
pub enum UdpEvent {
    /// A datagram of a client, new or known.
    Datagram {
        /// From whom.
        association: Association,
        /// The datagram.
        data: Vec<u8>,
    },
    /// Another node handed an association over. Its unread datagrams follow.
    HandedOff {
        /// The association.
        association: Association,
        /// What the program on the donor said about it.
        state: Vec<u8>,
    },
    /// The operator wants the association elsewhere.
    Asked {
        /// The association.
        association: Association,
        /// Where to.
        destination: Destination,
    },
}

struct Entry {
    association: Association,
    leaving: bool,
    /// While leaving: what came meanwhile.
    held: Vec<Vec<u8>>,
    last_heard: Instant,
}

#[derive(Default)]
struct Tables {
    entries: HashMap<FlowText, Entry>,
    /// Announced, not there: what came for them already.
    arriving: HashMap<FlowText, Vec<Vec<u8>>>,
}

/// The socket of a service and who talks to it.
pub(crate) struct UdpTable {
    socket: UdpSocket,
    local: SocketAddr,
    service: std::sync::OnceLock<u32>,
    tables: Mutex<Tables>,
    ready: Queue<UdpEvent>,
}

/// No datagram is longer.
const DATAGRAM_BYTES_MAX: usize = 65_535;
/// Read at most so many datagrams for one collection, so that a flood cannot hold up a handoff forever. More than any
/// socket's queue holds by default (208 KiB at 768 bytes and more each).
const COLLECT_MAX: usize = 4096;

impl UdpTable {
    pub(crate) fn new(socket: UdpSocket) -> io::Result<Arc<Self>> {
        let local = socket.local_addr()?;
        if local.ip().is_unspecified() {
            let text = "a UDP service behind Holdfast is bound to its service address: one socket for each address";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        socket.set_nonblocking(true)?;
        let service = std::sync::OnceLock::new();
        Ok(Arc::new(Self {
            socket,
            local,
            service,
            tables: Mutex::default(),
            ready: Queue::new()?,
        }))
    }

    /// Names the session's number for this service, once.
    pub(crate) fn set_service(&self, service: u32) {
        let _ = self.service.set(service);
    }

    pub(crate) fn service(&self) -> u32 {
        self.service.get().copied().unwrap_or_default()
    }

    pub(crate) fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// Events that did not come from the socket.
    pub(crate) fn ready(&self) -> &Queue<UdpEvent> {
        &self.ready
    }

    /// The next event for the program, without waiting.
    pub(crate) fn receive(&self, shared: &Shared) -> io::Result<UdpEvent> {
        // The lock is held from reading to sorting: `collect` must not overtake a datagram between the two.
        // What waits in `ready` is older than what is in the socket.
        let mut tables = lock(&self.tables);
        if let Some(event) = self.ready.take() {
            return Ok(event);
        }
        loop {
            let (data, remote) = self.read()?;
            if let Some(event) = self.sort(&mut tables, shared, data, remote) {
                return Ok(event);
            }
        }
    }

    fn read(&self) -> io::Result<(Vec<u8>, SocketAddr)> {
        let mut buffer = [0; DATAGRAM_BYTES_MAX];
        let (length, remote) = self.socket.recv_from(&mut buffer)?;
        Ok((buffer[..length].to_vec(), remote))
    }

    fn sort(
        &self,
        tables: &mut Tables,
        shared: &Shared,
        data: Vec<u8>,
        remote: SocketAddr,
    ) -> Option<UdpEvent> {
        let flow = FlowText::new(Protocol::Udp, self.local, remote).ok()?;
        if let Some(entry) = tables.entries.get_mut(&flow) {
            entry.last_heard = Instant::now();
            if entry.leaving {
                entry.held.push(data);
                return None;
            }
            return Some(UdpEvent::Datagram {
                association: entry.association.clone(),
                data,
            });
        }
        if let Some(held) = tables.arriving.get_mut(&flow) {
            held.push(data);
            return None;
        }
        let association = Association::new(flow, remote, Arc::default());
        shared
            .with_core(|core| core.accepted(self.service(), flow, Arc::clone(association.cell())));
        tables.entries.insert(flow, Entry::new(association.clone()));
        Some(UdpEvent::Datagram { association, data })
    }

    /// Begins a handoff, or says at once why not.
    pub(crate) fn leave(
        &self,
        shared: &Shared,
        association: &Association,
        destination: &Destination,
        state: Vec<u8>,
    ) -> Result<(), String> {
        let mut tables = lock(&self.tables);
        let entry = tables
            .entries
            .get_mut(&association.flow())
            .ok_or("the service no longer has this association")?;
        shared.with_core(|core| core.hand_off(association.flow(), destination, state, None))?;
        entry.leaving = true;
        // A collection for another association may have read datagrams of this one, which the program has not had.
        entry.held = self.ready.extract(|event| match event {
            UdpEvent::Datagram {
                association: of,
                data,
            } if of.flow() == association.flow() => Ok(data),
            other => Err(other),
        });
        Ok(())
    }

    /// Whether the program may send: the association is here, and not on its way.
    pub(crate) fn may_send(&self, association: &Association) -> bool {
        lock(&self.tables)
            .entries
            .get(&association.flow())
            .is_some_and(|entry| !entry.leaving)
    }

    /// Everything that the socket has for a flow that is diverted. Kept here too, in case it stays after all.
    pub(super) fn collect(&self, shared: &Shared, flow: FlowText) -> Vec<Vec<u8>> {
        let mut tables = lock(&self.tables);
        for _ in 0..COLLECT_MAX {
            let Ok((data, remote)) = self.read() else {
                break;
            };
            let event = self.sort(&mut tables, shared, data, remote);
            self.ready.put(event);
        }
        tables
            .entries
            .get(&flow)
            .map(|entry| entry.held.clone())
            .unwrap_or_default()
    }

    pub(super) fn asked(&self, flow: FlowText, destination: Destination) {
        if let Some(entry) = lock(&self.tables).entries.get(&flow) {
            self.ready.put([UdpEvent::Asked {
                association: entry.association.clone(),
                destination,
            }]);
        }
    }

    pub(super) fn arriving(&self, flow: FlowText) {
        lock(&self.tables).arriving.insert(flow, Vec::new());
    }

    pub(super) fn cancelled(&self, flow: FlowText) {
        lock(&self.tables).arriving.remove(&flow);
    }

    pub(super) fn arrived(
        &self,
        flow: FlowText,
        cell: Arc<Cell>,
        state: Vec<u8>,
        unread: Vec<Vec<u8>>,
    ) {
        let mut tables = lock(&self.tables);
        let association = Association::new(flow, flow.remote(), cell);
        let overtook = tables.arriving.remove(&flow).unwrap_or_default();
        tables.entries.insert(flow, Entry::new(association.clone()));
        let datagrams = unread.into_iter().chain(overtook);
        let datagrams = datagrams.map(|data| UdpEvent::Datagram {
            association: association.clone(),
            data,
        });
        let first = UdpEvent::HandedOff {
            association: association.clone(),
            state,
        };
        self.ready.put(std::iter::once(first).chain(datagrams));
    }

    pub(super) fn moved(&self, flow: FlowText) {
        lock(&self.tables).entries.remove(&flow);
    }

    pub(super) fn kept(&self, flow: FlowText) {
        let mut tables = lock(&self.tables);
        let Some(entry) = tables.entries.get_mut(&flow) else {
            return;
        };
        entry.leaving = false;
        let association = entry.association.clone();
        let held = std::mem::take(&mut entry.held).into_iter();
        self.ready.put(held.map(|data| UdpEvent::Datagram {
            association: association.clone(),
            data,
        }));
    }

    /// Forgets associations, and tells the daemon.
    pub(crate) fn forget(
        &self,
        shared: &Shared,
        mut which: impl FnMut(&Association, Duration) -> bool,
    ) -> usize {
        let now = Instant::now();
        let mut tables = lock(&self.tables);
        let before = tables.entries.len();
        tables.entries.retain(|flow, entry| {
            let idle = now.saturating_duration_since(entry.last_heard);
            let keep = entry.leaving || !which(&entry.association, idle);
            if !keep {
                shared.with_core(|core| core.closed(*flow, entry.association.cell()));
            }
            keep
        });
        before - tables.entries.len()
    }
}

impl Entry {
    fn new(association: Association) -> Self {
        Self {
            association,
            leaving: false,
            held: Vec::new(),
            last_heard: Instant::now(),
        }
    }
}
