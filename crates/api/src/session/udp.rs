//! UDP: many associations share one socket, so a handoff moves no socket, but the program's state and the association's
//! unread datagrams.
//!
//! From the start of a handoff, datagrams of its association wait here until its result is known. If the association
//! moves, the datagrams received before the diversion travel with it ([`UdpServiceState::collect_datagrams`]); if it
//! stays, the program reads them. At the acceptor, datagrams that overtake the daemon's message wait until the
//! association has arrived.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::shared::SessionShared;
use super::{FlowNotifications, ServiceInbox, ServiceSlot, Session, SessionHandle, lock};
use crate::{Destination, FlowText, Kept, Moved, Protocol};

/// One client of a UDP service: a cheap handle, with clones for the same association.
#[derive(Clone, Debug)]
pub struct Association {
    inner: Arc<AssociationInner>,
}

#[derive(Debug)]
struct AssociationInner {
    flow: FlowText,
    /// The client's address, with the scope that a link-local address needs.
    remote: SocketAddr,
    signals: Arc<FlowNotifications>,
}

impl Association {
    fn new(flow: FlowText, remote: SocketAddr, signals: Arc<FlowNotifications>) -> Self {
        Self {
            inner: Arc::new(AssociationInner {
                flow,
                remote,
                signals,
            }),
        }
    }

    /// Returns the association's flow.
    pub fn flow(&self) -> FlowText {
        self.inner.flow
    }

    /// Returns the client's address.
    pub fn remote(&self) -> SocketAddr {
        self.inner.remote
    }

    /// Returns the destination that the operator requests, if any. The request stands until a handoff is tried or
    /// declined.
    pub fn handoff_request(&self) -> Option<Destination> {
        self.inner.signals.handoff_request()
    }
}

/// An event of a UDP service.
#[derive(Debug)]
pub enum UdpEvent {
    /// A datagram of a client, new or known.
    Datagram {
        /// The sender's association.
        association: Association,
        /// Content of the datagram.
        data: Vec<u8>,
    },
    /// Another node handed an association over. Its unread datagrams follow as events.
    HandedOff {
        /// Association that another node handed over.
        association: Association,
        /// The application state from the program on the donor.
        state: Vec<u8>,
    },
    /// The operator requests that the association move.
    HandoffRequested {
        /// Association that the program is asked to hand off.
        association: Association,
        /// Destination that the operator requests.
        destination: Destination,
    },
}

/// A bound UDP socket that is a service of the session; withdrawn when dropped. An interface adds its way of waiting.
pub(crate) struct ManagedUdpSocket {
    state: Arc<UdpServiceState>,
    handle: Arc<SessionHandle>,
}

impl ManagedUdpSocket {
    pub(crate) fn new(socket: UdpSocket, session: &Session, pool: &str) -> io::Result<Self> {
        let state = UdpServiceState::new(socket)?;
        let handle = Arc::clone(&session.handle);
        let slot = ServiceSlot::Udp(Arc::downgrade(&state));
        let service = session.registered_service(pool, Protocol::Udp, state.local);
        let service = handle.shared.serve(service, slot);
        state.set_service(service);
        Ok(Self { state, handle })
    }

    pub(crate) fn socket(&self) -> &UdpSocket {
        &self.state.socket
    }

    /// Returns the queue of events that did not come from the socket.
    pub(crate) fn ready_events(&self) -> &ServiceInbox<UdpEvent> {
        &self.state.ready_events
    }

    /// Returns the next event for the program, without waiting.
    pub(crate) fn receive(&self) -> io::Result<UdpEvent> {
        self.state.receive(&self.handle.shared)
    }

    /// Returns an error unless the program may send: the association is here and not in transit.
    pub(crate) fn check_may_send(&self, association: &Association) -> io::Result<()> {
        match self.state.may_send(association) {
            true => Ok(()),
            false => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Hands one association to another node, and waits for the result.
    pub(crate) async fn hand_off(
        &self,
        association: &Association,
        destination: Destination,
        state: Vec<u8>,
    ) -> Result<Moved, Kept<Association>> {
        let notifications = &association.inner.signals;
        notifications.clear_request();
        let shared = &self.handle.shared;
        let started = self
            .state
            .start_handoff(shared, association, &destination, state);
        let outcome = notifications.outcome(started).await;
        outcome.map_err(|reason| Kept {
            connection: association.clone(),
            reason,
        })
    }

    /// Forgets the associations that have been silent for at least `idle_min`; returns their number.
    pub(crate) fn forget_idle(&self, idle_min: Duration) -> usize {
        self.state
            .forget(&self.handle.shared, |idle| idle >= idle_min)
    }
}

impl Drop for ManagedUdpSocket {
    fn drop(&mut self) {
        self.handle.shared.withdraw(self.state.service());
        self.state.forget(&self.handle.shared, |_| true);
    }
}

struct AssociationEntry {
    association: Association,
    is_leaving: bool,
    /// Datagrams received during a handoff.
    held_datagrams: Vec<Vec<u8>>,
    last_heard: Instant,
}

#[derive(Default)]
struct AssociationTables {
    entries: HashMap<FlowText, AssociationEntry>,
    /// Datagrams received for associations that are announced but have not arrived.
    arriving: HashMap<FlowText, Vec<Vec<u8>>>,
}

/// The socket of a service and its associations.
pub(crate) struct UdpServiceState {
    socket: UdpSocket,
    local: SocketAddr,
    service: std::sync::OnceLock<u32>,
    tables: Mutex<AssociationTables>,
    ready_events: ServiceInbox<UdpEvent>,
}

/// Maximum size of a datagram, in bytes.
const DATAGRAM_BYTES_MAX: usize = 65_535;
/// Maximum number of datagrams read for one collection, so that a flood cannot delay a handoff forever. More than any
/// socket's queue holds by default (208 KiB at 768 bytes and more each).
const COLLECT_TIMEOUT: usize = 4096;

impl UdpServiceState {
    fn new(socket: UdpSocket) -> io::Result<Arc<Self>> {
        let local = socket.local_addr()?;
        if local.ip().is_unspecified() {
            let text = "a UDP service behind Holdfast must be bound to its service address; use \
                    one socket for each address";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        socket.set_nonblocking(true)?;
        let service = std::sync::OnceLock::new();
        Ok(Arc::new(Self {
            socket,
            local,
            service,
            tables: Mutex::default(),
            ready_events: ServiceInbox::new()?,
        }))
    }

    /// Sets the session's number for this service, once.
    fn set_service(&self, service: u32) {
        let _ = self.service.set(service);
    }

    fn service(&self) -> u32 {
        self.service.get().copied().unwrap_or_default()
    }

    fn receive(&self, shared: &SessionShared) -> io::Result<UdpEvent> {
        // Hold the lock from reading to sorting: `collect_datagrams` must not overtake a datagram between the two.
        // Events in `ready_events` are older than datagrams in the socket.
        let mut tables = lock(&self.tables);
        if let Some(event) = self.ready_events.pop() {
            return Ok(event);
        }
        loop {
            let (data, remote) = self.read_datagram()?;
            if let Some(event) = self.classify_datagram(&mut tables, shared, data, remote) {
                return Ok(event);
            }
        }
    }

    fn read_datagram(&self) -> io::Result<(Vec<u8>, SocketAddr)> {
        let mut buffer = [0; DATAGRAM_BYTES_MAX];
        let (length, remote) = self.socket.recv_from(&mut buffer)?;
        Ok((buffer[..length].to_vec(), remote))
    }

    fn classify_datagram(
        &self,
        tables: &mut AssociationTables,
        shared: &SessionShared,
        data: Vec<u8>,
        remote: SocketAddr,
    ) -> Option<UdpEvent> {
        let flow = FlowText::new(Protocol::Udp, self.local, remote).ok()?;
        if let Some(entry) = tables.entries.get_mut(&flow) {
            entry.last_heard = Instant::now();
            if entry.is_leaving {
                entry.held_datagrams.push(data);
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
        let signals = Arc::clone(&association.inner.signals);
        shared.with_core(|core| core.register_flow(self.service(), flow, signals));
        tables
            .entries
            .insert(flow, AssociationEntry::new(association.clone()));
        Some(UdpEvent::Datagram { association, data })
    }

    /// Starts a handoff, or returns the reason that it cannot start.
    fn start_handoff(
        &self,
        shared: &SessionShared,
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
        entry.is_leaving = true;
        // A collection for another association may have read datagrams of this one that the program has not received.
        entry.held_datagrams = self.ready_events.extract(|event| match event {
            UdpEvent::Datagram {
                association: of,
                data,
            } if of.flow() == association.flow() => Ok(data),
            other => Err(other),
        });
        Ok(())
    }

    fn may_send(&self, association: &Association) -> bool {
        lock(&self.tables)
            .entries
            .get(&association.flow())
            .is_some_and(|entry| !entry.is_leaving)
    }

    /// Reads all datagrams in the socket for a diverted flow. A copy stays here, in case the flow stays.
    pub(super) fn collect_datagrams(&self, shared: &SessionShared, flow: FlowText) -> Vec<Vec<u8>> {
        let mut tables = lock(&self.tables);
        for _ in 0..COLLECT_TIMEOUT {
            let Ok((data, remote)) = self.read_datagram() else {
                break;
            };
            let event = self.classify_datagram(&mut tables, shared, data, remote);
            self.ready_events.push(event);
        }
        tables
            .entries
            .get(&flow)
            .map(|entry| entry.held_datagrams.clone())
            .unwrap_or_default()
    }

    pub(super) fn on_handoff_requested(&self, flow: FlowText, destination: Destination) {
        if let Some(entry) = lock(&self.tables).entries.get(&flow) {
            self.ready_events.push([UdpEvent::HandoffRequested {
                association: entry.association.clone(),
                destination,
            }]);
        }
    }

    pub(super) fn on_arriving(&self, flow: FlowText) {
        lock(&self.tables).arriving.insert(flow, Vec::new());
    }

    pub(super) fn on_cancelled(&self, flow: FlowText) {
        lock(&self.tables).arriving.remove(&flow);
    }

    pub(super) fn on_arrived(
        &self,
        flow: FlowText,
        signals: Arc<FlowNotifications>,
        state: Vec<u8>,
        unread: Vec<Vec<u8>>,
    ) {
        let mut tables = lock(&self.tables);
        let association = Association::new(flow, flow.remote(), signals);
        let early_datagrams = tables.arriving.remove(&flow).unwrap_or_default();
        tables
            .entries
            .insert(flow, AssociationEntry::new(association.clone()));
        let datagrams = unread.into_iter().chain(early_datagrams);
        let datagram_events = datagrams.map(|data| UdpEvent::Datagram {
            association: association.clone(),
            data,
        });
        let first = UdpEvent::HandedOff {
            association: association.clone(),
            state,
        };
        self.ready_events
            .push(std::iter::once(first).chain(datagram_events));
    }

    pub(super) fn on_moved(&self, flow: FlowText) {
        lock(&self.tables).entries.remove(&flow);
    }

    pub(super) fn on_kept(&self, flow: FlowText) {
        let mut tables = lock(&self.tables);
        let Some(entry) = tables.entries.get_mut(&flow) else {
            return;
        };
        entry.is_leaving = false;
        let association = entry.association.clone();
        let held = std::mem::take(&mut entry.held_datagrams).into_iter();
        self.ready_events.push(held.map(|data| UdpEvent::Datagram {
            association: association.clone(),
            data,
        }));
    }

    /// Forgets the associations whose time of silence `is_selected` selects, and tells the daemon.
    fn forget(&self, shared: &SessionShared, is_selected: impl Fn(Duration) -> bool) -> usize {
        let now = Instant::now();
        let mut tables = lock(&self.tables);
        let count_before = tables.entries.len();
        tables.entries.retain(|flow, entry| {
            let idle = now.saturating_duration_since(entry.last_heard);
            let is_kept = entry.is_leaving || !is_selected(idle);
            if !is_kept {
                let signals = &entry.association.inner.signals;
                shared.with_core(|core| core.handle_closed(*flow, signals));
            }
            is_kept
        });
        count_before - tables.entries.len()
    }
}

impl AssociationEntry {
    fn new(association: Association) -> Self {
        Self {
            association,
            is_leaving: false,
            held_datagrams: Vec::new(),
            last_heard: Instant::now(),
        }
    }
}
