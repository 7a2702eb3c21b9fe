//! State shared by the program's threads and the session's thread.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

use super::core::{Core, Event, Tag};
use super::{Bell, Cell, Letter, Queue, UdpTable, lock};
use crate::{FlowText, Protocol};

impl Tag for Arc<Cell> {
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(self, other)
    }
}

/// A service of the session, by kind.
pub(crate) enum Slot {
    Tcp(Arc<Queue<Letter>>),
    Udp(Weak<UdpTable>),
}

#[derive(Default)]
struct Opened {
    node: Option<String>,
    /// The reason that the first attempt failed.
    failed: Option<String>,
}

pub(crate) struct Shared {
    core: Mutex<Core<Arc<Cell>>>,
    slots: Mutex<HashMap<u32, Slot>>,
    opened: Mutex<Opened>,
    opened_changed: Condvar,
    /// Wakes the session's thread: a message is queued, or the session stops.
    pub(super) bell: Bell,
    rung: AtomicBool,
    stop: AtomicBool,
}

/// Keeps the session's thread running. Sessions, services and connections own it.
pub(crate) struct Handle {
    pub(crate) shared: Arc<Shared>,
}

impl Handle {
    /// # Panics
    /// When the process cannot create any descriptor: then it could not serve either.
    pub(super) fn new(name: &str) -> Arc<Self> {
        let shared = Shared {
            core: Mutex::new(Core::new(name)),
            slots: Mutex::default(),
            opened: Mutex::default(),
            opened_changed: Condvar::new(),
            bell: Bell::new().expect("an eventfd for the session"),
            rung: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        };
        Arc::new(Self {
            shared: Arc::new(shared),
        })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.ring();
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("node", &self.shared.node())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Runs `act` on the state machine, then wakes the session's thread to send resulting messages.
    pub(crate) fn with_core<R>(&self, act: impl FnOnce(&mut Core<Arc<Cell>>) -> R) -> R {
        let (result, transmit) = {
            let mut core = lock(&self.core);
            let result = act(&mut core);
            (result, core.wants_to_transmit())
        };
        // The session's thread sends, not this one: concurrent calls of many threads become one message.
        if transmit && !self.rung.swap(true, Ordering::AcqRel) {
            self.bell.ring();
        }
        result
    }

    /// Resets the wake-up; the session's thread looks for work after this.
    pub(super) fn awake(&self) {
        self.bell.silence();
        self.rung.store(false, Ordering::Release);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(super) fn core(&self) -> std::sync::MutexGuard<'_, Core<Arc<Cell>>> {
        lock(&self.core)
    }

    pub(crate) fn node(&self) -> Option<String> {
        lock(&self.opened).node.clone()
    }

    /// Registers a service.
    pub(crate) fn serve(
        &self,
        pool: &str,
        protocol: Protocol,
        addresses: Vec<SocketAddr>,
        slot: Slot,
    ) -> u32 {
        // Insert the slot before the daemon can name the service.
        let mut slots = lock(&self.slots);
        let service = self.with_core(|core| core.serve(pool, protocol, addresses));
        slots.insert(service, slot);
        service
    }

    /// Ends a service. Connections handed over and not yet accepted are closed.
    pub(crate) fn withdraw(&self, service: u32) {
        let slot = lock(&self.slots).remove(&service);
        self.with_core(|core| core.withdraw(service));
        if let Some(Slot::Tcp(queue)) = slot {
            while let Some(letter) = queue.take() {
                self.with_core(|core| core.closed(letter.flow, &letter.cell));
            }
        }
    }

    pub(super) fn wait_open(&self, deadline: Instant) -> Result<(), String> {
        let mut opened = lock(&self.opened);
        loop {
            if opened.node.is_some() {
                return Ok(());
            }
            if let Some(reason) = &opened.failed {
                return Err(reason.clone());
            }
            let Some(left) = deadline
                .checked_duration_since(Instant::now())
                .filter(|left| !left.is_zero())
            else {
                return Err("no answer".into());
            };
            opened = self
                .opened_changed
                .wait_timeout(opened, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    pub(super) fn first_attempt_failed(&self, reason: &io::Error) {
        lock(&self.opened)
            .failed
            .get_or_insert_with(|| reason.to_string());
        self.opened_changed.notify_all();
    }

    /// Delivers an event to the program. Called by the session's thread only, without the lock of the state machine,
    /// so that order is kept and a service may in turn use the machine.
    pub(super) fn dispatch(&self, event: Event<Arc<Cell>>) {
        match event {
            Event::Opened { node } => {
                lock(&self.opened).node = Some(node);
                self.opened_changed.notify_all();
            }
            Event::Asked {
                service,
                flow,
                tag,
                destination,
            } => {
                tag.ask(destination.clone());
                self.with_udp(service, |table| table.asked(flow, destination));
            }
            Event::Arriving { service, flow } => {
                self.with_udp(service, |table| table.arriving(flow))
            }
            Event::Cancelled { service, flow } => {
                self.with_udp(service, |table| table.cancelled(flow))
            }
            Event::Arrived {
                service,
                flow,
                tag,
                descriptor: Some(descriptor),
                state,
                ..
            } => {
                self.deliver(
                    service,
                    Letter {
                        flow,
                        cell: tag,
                        descriptor,
                        state,
                    },
                );
            }
            Event::Arrived {
                service,
                flow,
                tag,
                descriptor: None,
                state,
                unread,
            } => {
                self.with_udp(service, |table| table.arrived(flow, tag, state, unread));
            }
            Event::Collect { service, flow } => {
                let mut unread = Vec::new();
                self.with_udp(service, |table| unread = table.collect(self, flow));
                self.with_core(|core| core.collected(flow, unread.iter().map(Vec::as_slice)));
            }
            Event::Moved {
                service,
                flow,
                tag,
                to,
            } => {
                self.with_udp(service, |table| table.moved(flow));
                tag.finish(Ok(to));
            }
            Event::Kept {
                service,
                flow,
                tag,
                reason,
            } => {
                self.with_udp(service, |table| table.kept(flow));
                tag.finish(Err(reason));
            }
            Event::Problem { text } => {
                tracing::warn!(problem = %text, "the daemon reports a problem")
            }
        }
    }

    fn deliver(&self, service: u32, letter: Letter) {
        match lock(&self.slots).get(&service) {
            Some(Slot::Tcp(queue)) => queue.put([letter]),
            _ => self.with_core(|core| core.closed(letter.flow, &letter.cell)),
        }
    }

    fn with_udp(&self, service: u32, act: impl FnOnce(&UdpTable)) {
        let table = match lock(&self.slots).get(&service) {
            Some(Slot::Udp(table)) => table.upgrade(),
            _ => None,
        };
        if let Some(table) = table {
            act(&table);
        }
    }
}

/// Registration of one flow of the program, for either interface.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) flow: FlowText,
    pub(crate) cell: Arc<Cell>,
    pub(crate) handle: Arc<Handle>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.handle
            .shared
            .with_core(|core| core.closed(self.flow, &self.cell));
    }
}
