//! State shared by the program's threads and the session's thread.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

use super::session_core::{FlowTag, RegisteredService, SessionCore, SessionCoreEvent};
use super::{
    FlowNotifications, HandedOffConnection, Notifier, ServiceInbox, UdpServiceState, lock,
};
use crate::FlowText;

impl FlowTag for Arc<FlowNotifications> {
    fn is_same_flow(&self, other: &Self) -> bool {
        Arc::ptr_eq(self, other)
    }
}

/// A service of the session, by kind.
pub(crate) enum ServiceSlot {
    Tcp(Arc<ServiceInbox<HandedOffConnection>>),
    Udp(Weak<UdpServiceState>),
}

#[derive(Default)]
struct OpenState {
    node: Option<String>,
    /// The reason that the first attempt failed.
    first_failure: Option<String>,
}

/// The state machine, which stores each flow's notifications.
pub(crate) type SharedSessionCore = SessionCore<Arc<FlowNotifications>>;

pub(crate) struct SessionShared {
    core: Mutex<SharedSessionCore>,
    slots: Mutex<HashMap<u32, ServiceSlot>>,
    open_state: Mutex<OpenState>,
    open_state_changed: Condvar,
    /// Wakes the session's thread: a message is queued, or the session stops.
    pub(super) notifier: Notifier,
    is_notified: AtomicBool,
    is_stopping: AtomicBool,
}

/// Keeps the session's thread running. Sessions, services and connections own it.
pub(crate) struct SessionHandle {
    pub(crate) shared: Arc<SessionShared>,
}

impl SessionHandle {
    /// # Panics
    /// When the process cannot create any descriptor: then it could not serve either.
    pub(super) fn new(name: &str) -> Arc<Self> {
        let shared = SessionShared {
            core: Mutex::new(SessionCore::new(name)),
            slots: Mutex::default(),
            open_state: Mutex::default(),
            open_state_changed: Condvar::new(),
            notifier: Notifier::new().expect("cannot create an eventfd for the session"),
            is_notified: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
        };
        Arc::new(Self {
            shared: Arc::new(shared),
        })
    }
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.notifier.notify();
    }
}

impl fmt::Debug for SessionHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("node", &self.shared.node())
            .finish_non_exhaustive()
    }
}

impl SessionShared {
    /// Runs `action` on the state machine, then wakes the session's thread to send resulting messages.
    pub(crate) fn with_core<R>(&self, action: impl FnOnce(&mut SharedSessionCore) -> R) -> R {
        let (result, transmit) = {
            let mut core = lock(&self.core);
            let result = action(&mut core);
            (result, core.has_transmit())
        };
        // The session's thread sends, not this one: concurrent calls of many threads become one message.
        if transmit && !self.is_notified.swap(true, Ordering::AcqRel) {
            self.notifier.notify();
        }
        result
    }

    /// Resets the wake-up; the session's thread looks for work after this.
    pub(super) fn reset_wakeup(&self) {
        self.notifier.reset();
        self.is_notified.store(false, Ordering::Release);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    pub(super) fn core(&self) -> std::sync::MutexGuard<'_, SharedSessionCore> {
        lock(&self.core)
    }

    pub(crate) fn node(&self) -> Option<String> {
        lock(&self.open_state).node.clone()
    }

    /// Adds a service to the session, and returns the service's number.
    pub(crate) fn serve(&self, service: RegisteredService, slot: ServiceSlot) -> u32 {
        // Insert the slot before the daemon can name the service.
        let mut slots = lock(&self.slots);
        let service = self.with_core(|core| core.serve(service));
        slots.insert(service, slot);
        service
    }

    /// Ends a service. Connections handed over and not yet accepted are closed.
    pub(crate) fn withdraw(&self, service: u32) {
        let slot = lock(&self.slots).remove(&service);
        self.with_core(|core| core.withdraw(service));
        if let Some(ServiceSlot::Tcp(queue)) = slot {
            while let Some(letter) = queue.pop() {
                self.with_core(|core| core.handle_closed(letter.flow, &letter.signals));
            }
        }
    }

    pub(super) fn wait_open(&self, deadline: Instant) -> Result<(), String> {
        let mut opened = lock(&self.open_state);
        loop {
            if opened.node.is_some() {
                return Ok(());
            }
            if let Some(reason) = &opened.first_failure {
                return Err(reason.clone());
            }
            let Some(left) = deadline
                .checked_duration_since(Instant::now())
                .filter(|left| !left.is_zero())
            else {
                return Err("no answer".into());
            };
            opened = self
                .open_state_changed
                .wait_timeout(opened, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    pub(super) fn set_first_failure(&self, reason: &io::Error) {
        lock(&self.open_state)
            .first_failure
            .get_or_insert_with(|| reason.to_string());
        self.open_state_changed.notify_all();
    }

    /// Delivers an event to the program. Called by the session's thread only, without the lock of the state machine,
    /// so that order is kept and a service may in turn use the machine.
    pub(super) fn dispatch(&self, event: SessionCoreEvent<Arc<FlowNotifications>>) {
        match event {
            SessionCoreEvent::Opened { node } => {
                lock(&self.open_state).node = Some(node);
                self.open_state_changed.notify_all();
            }
            SessionCoreEvent::HandoffRequested {
                service,
                flow,
                tag,
                destination,
            } => {
                tag.request_handoff(destination.clone());
                self.with_udp(service, |table| {
                    table.on_handoff_requested(flow, destination)
                });
            }
            SessionCoreEvent::Arriving { service, flow } => {
                self.with_udp(service, |table| table.on_arriving(flow))
            }
            SessionCoreEvent::Cancelled { service, flow } => {
                self.with_udp(service, |table| table.on_cancelled(flow))
            }
            SessionCoreEvent::Arrived {
                service,
                flow,
                tag,
                descriptor: Some(descriptor),
                state,
                ..
            } => {
                self.deliver(
                    service,
                    HandedOffConnection {
                        flow,
                        signals: tag,
                        descriptor,
                        state,
                    },
                );
            }
            SessionCoreEvent::Arrived {
                service,
                flow,
                tag,
                descriptor: None,
                state,
                unread,
            } => {
                self.with_udp(service, |table| table.on_arrived(flow, tag, state, unread));
            }
            SessionCoreEvent::Collect { service, flow } => {
                let mut unread = Vec::new();
                self.with_udp(service, |table| {
                    unread = table.collect_datagrams(self, flow)
                });
                self.with_core(|core| core.send_collected(flow, unread.iter().map(Vec::as_slice)));
            }
            SessionCoreEvent::Moved {
                service,
                flow,
                tag,
                to,
            } => {
                self.with_udp(service, |table| table.on_moved(flow));
                tag.set_outcome(Ok(to));
            }
            SessionCoreEvent::Kept {
                service,
                flow,
                tag,
                reason,
            } => {
                self.with_udp(service, |table| table.on_kept(flow));
                tag.set_outcome(Err(reason));
            }
            SessionCoreEvent::Problem { text } => {
                tracing::warn!(problem = %text, "the daemon reports a problem")
            }
        }
    }

    fn deliver(&self, service: u32, connection: HandedOffConnection) {
        match lock(&self.slots).get(&service) {
            Some(ServiceSlot::Tcp(queue)) => queue.push([connection]),
            _ => self.with_core(|core| core.handle_closed(connection.flow, &connection.signals)),
        }
    }

    fn with_udp(&self, service: u32, action: impl FnOnce(&UdpServiceState)) {
        let table = match lock(&self.slots).get(&service) {
            Some(ServiceSlot::Udp(table)) => table.upgrade(),
            _ => None,
        };
        if let Some(table) = table {
            action(&table);
        }
    }
}

/// Registration of one flow of the program, for either interface.
#[derive(Debug)]
pub(crate) struct FlowRegistration {
    pub(crate) flow: FlowText,
    pub(crate) signals: Arc<FlowNotifications>,
    pub(crate) handle: Arc<SessionHandle>,
}

impl Drop for FlowRegistration {
    fn drop(&mut self) {
        self.handle
            .shared
            .with_core(|core| core.handle_closed(self.flow, &self.signals));
    }
}
