//! An element with the paper's application: processes its requests by processor sharing, simulated by waiting as long
//! as the work would take.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use holdfast_api::control::PolicyDetail;
use holdfast_api::pool::{Element, ElementEvent, ElementService, RegistrationRequest};
use holdfast_sim::Time;
use holdfast_sim::server_capacity::SharedCapacityServer;

use super::clock::{VirtualClock, raise_priority};

/// First byte of an element's message.
pub(super) const ACCEPTED: u8 = 1;
pub(super) const COMPLETED: u8 = 2;
/// Longest single wait if no request is in progress.
const IDLE_WAIT: Duration = Duration::from_secs(1);

/// Parameters of an element.
#[derive(Clone, Debug)]
pub(super) struct ElementPlan {
    /// Socket of the pool daemon on the element's host.
    pub(super) socket: PathBuf,
    pub(super) handle: String,
    /// Policy without its load.
    pub(super) policy: PolicyDetail,
    pub(super) load_per_request: f64,
    pub(super) capacity: f64,
}

/// A running pool element of the live experiment.
pub(super) struct RunningElement {
    element: Arc<Element>,
    shared: Arc<SharedElementState>,
}

struct SharedElementState {
    state: Mutex<ElementState>,
    changed: Condvar,
}

struct ElementState {
    server: SharedCapacityServer<u64>,
    is_stopped: bool,
}

impl RunningElement {
    /// Registers the element; returns when a registrar has accepted it.
    ///
    /// # Errors
    /// There is no daemon, or no registrar accepts the element.
    pub(super) fn start(plan: &ElementPlan, clock: VirtualClock) -> Result<RunningElement> {
        let service = ElementService::Sessions {
            addresses: Vec::new(),
            port: 0,
        };
        let mut registration = RegistrationRequest::new(&plan.handle, service);
        registration.policy = PolicyDetail {
            load: Some(0.0),
            ..plan.policy.clone()
        };
        let element = Element::register(&plan.socket, registration)
            .with_context(|| format!("register at the pool daemon at {}", plan.socket.display()))?;
        loop {
            match element.next_event()? {
                Some(ElementEvent::Registered { .. }) => break,
                Some(ElementEvent::Refused { reason }) => bail!("{}: {reason}", plan.handle),
                Some(_) => {}
                None => bail!("{}: the daemon has ended", plan.handle),
            }
        }
        let element = Arc::new(element);
        let state = ElementState {
            server: SharedCapacityServer::new(plan.capacity),
            is_stopped: false,
        };
        let shared = Arc::new(SharedElementState {
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let worker = ElementWorker {
            element: element.clone(),
            shared: shared.clone(),
            plan: plan.clone(),
            clock,
        };
        let listener = worker.clone();
        std::thread::spawn(move || listener.run_receiver());
        std::thread::spawn(move || worker.run_completer());
        Ok(RunningElement { element, shared })
    }

    /// Removes the element from its pool; its users change to others.
    pub(super) fn stop(&self) {
        // If the daemon has ended, the registration has ended, too.
        let _ = self.element.deregister();
        self.shared
            .change_and_notify(|state| state.is_stopped = true);
    }
}

impl SharedElementState {
    fn change_and_notify<T>(&self, change: impl FnOnce(&mut ElementState) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = change(&mut state);
        self.changed.notify_all();
        changed
    }
}

#[derive(Clone)]
struct ElementWorker {
    element: Arc<Element>,
    shared: Arc<SharedElementState>,
    plan: ElementPlan,
    clock: VirtualClock,
}

impl ElementWorker {
    /// Receives the requests of users: each is its size, as the eight bytes of a number, and takes time in proportion.
    fn run_receiver(&self) {
        raise_priority();
        while let Ok(Some(event)) = self.element.next_event() {
            if let ElementEvent::Data { session, bytes } = event
                && let Ok(size) = <[u8; 8]>::try_from(bytes.as_slice())
            {
                let size = f64::from_be_bytes(size);
                let jobs = self.shared.change_and_notify(|state| {
                    state.server.add(self.clock.now(), session, size);
                    state.server.jobs()
                });
                let sent = self.element.send(session, &[ACCEPTED]);
                if sent.and_then(|()| self.report_load(jobs)).is_err() {
                    break;
                }
            }
        }
        self.shared
            .change_and_notify(|state| state.is_stopped = true);
    }

    /// Reports requests as done at their time.
    fn run_completer(&self) {
        raise_priority();
        while let Some((done, jobs)) = self.wait_for_completion() {
            if let Some(session) = done {
                let sent = self.element.send(session, &[COMPLETED]);
                if sent.and_then(|()| self.report_load(jobs)).is_err() {
                    return;
                }
            }
        }
    }

    /// Waits for the end of a request; returns its session and the number of requests left. Returns none if the element
    /// has stopped.
    fn wait_for_completion(&self) -> Option<(Option<u64>, usize)> {
        let state = self.shared.state.lock();
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        loop {
            if state.is_stopped {
                return None;
            }
            let now = self.clock.now();
            if let Some(session) = state.server.pop(now) {
                return Some((Some(session), state.server.jobs()));
            }
            let next: Option<Time> = state.server.next_end();
            let wait = next.map_or(IDLE_WAIT, |next| self.clock.wall_time_until(next));
            let waited = self.shared.changed.wait_timeout(state, wait);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn report_load(&self, jobs: usize) -> io::Result<()> {
        let load = (jobs as f64 * self.plan.load_per_request).min(1.0);
        self.element.set_policy(PolicyDetail {
            load: Some(load),
            ..self.plan.policy.clone()
        })
    }
}
