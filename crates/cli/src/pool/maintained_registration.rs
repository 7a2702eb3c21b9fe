//! Keeps an element registered across failures of daemons and registrars, on its own thread: the program neither waits
//! nor ends because of a failure.

use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::{Error, Result, anyhow};
use holdfast_api::control::PolicyDetail;
use holdfast_api::pool::{DeregistrationResult, Element, ElementEvent, RegistrationRequest};
use tokio::sync::mpsc;

use super::temporary_daemon::{PoolDaemonArgs, RunningDaemon};

/// Delays before the next attempt: after the daemon ended, and after a registrar refused an element that another had
/// accepted.
const RETRY_DELAY: Duration = Duration::from_secs(1);
const REFUSED_DELAY: Duration = Duration::from_secs(10);

/// A report about an element.
#[derive(Debug)]
pub enum ElementReport {
    /// An event of the element.
    Event(ElementEvent),
    /// The element is not registered, for this reason; registration is retried.
    Retrying(String),
    /// The first registration failed, and is not retried.
    Failed(Error),
}

/// An element that is kept registered.
pub struct MaintainedRegistration {
    shared: Arc<SharedRegistration>,
    reports: mpsc::UnboundedReceiver<ElementReport>,
}

struct SharedRegistration(Mutex<RegistrationState>);

struct RegistrationState {
    registration: RegistrationRequest,
    /// None while there is no daemon.
    element: Option<Arc<Element>>,
    is_leaving: bool,
}

impl MaintainedRegistration {
    /// Starts with a running daemon; if that ends, another one is found or started.
    pub fn start(
        daemon: PoolDaemonArgs,
        running: RunningDaemon,
        registration: RegistrationRequest,
    ) -> MaintainedRegistration {
        let state = RegistrationState {
            registration,
            element: None,
            is_leaving: false,
        };
        let shared = Arc::new(SharedRegistration(Mutex::new(state)));
        let (sender, reports) = mpsc::unbounded_channel();
        let thread = RegistrationThread {
            daemon,
            running: Some(running),
            shared: shared.clone(),
            sender,
            was_registered: false,
        };
        spawn(move || thread.run());
        MaintainedRegistration { shared, reports }
    }

    /// Waits for the next report; forever after a final failure.
    pub async fn next_report(&mut self) -> ElementReport {
        match self.reports.recv().await {
            Some(told) => told,
            None => std::future::pending().await,
        }
    }

    /// Sets the element's policy figures, for the present and later registrations.
    pub fn set_policy(&self, policy: &PolicyDetail) {
        let mut state = self.shared.state();
        state.registration.policy = policy.clone();
        if let Some(element) = &state.element {
            // If the daemon has ended, its events report that.
            let _ = element.set_policy(policy.clone());
        }
    }

    /// Leaves the pool; returns the result, or none if the element was in no pool.
    pub async fn leave(mut self) -> Option<DeregistrationResult> {
        let element = {
            let mut state = self.shared.state();
            state.is_leaving = true;
            state.element.clone()?
        };
        element.deregister().ok()?;
        loop {
            match self.reports.recv().await? {
                ElementReport::Event(ElementEvent::Deregistered(departure)) => {
                    return Some(departure);
                }
                ElementReport::Event(_) => {}
                ElementReport::Retrying(_) | ElementReport::Failed(_) => {
                    return Some(DeregistrationResult::TimedOut);
                }
            }
        }
    }
}

impl SharedRegistration {
    fn state(&self) -> MutexGuard<'_, RegistrationState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State of the thread that keeps an element registered.
struct RegistrationThread {
    daemon: PoolDaemonArgs,
    running: Option<RunningDaemon>,
    shared: Arc<SharedRegistration>,
    sender: mpsc::UnboundedSender<ElementReport>,
    /// True if the element was registered at least once.
    was_registered: bool,
}

/// The reason that a registration ended.
enum RegistrationEnd {
    Left,
    DaemonLost,
    Refused(String),
}

impl RegistrationThread {
    fn run(mut self) {
        loop {
            let over = self.register_and_follow();
            self.shared.state().element = None;
            let (report, pause) = match over {
                Ok(RegistrationEnd::Left) => return,
                Ok(RegistrationEnd::DaemonLost) => {
                    let problem = "the pool daemon has ended".to_owned();
                    (ElementReport::Retrying(problem), RETRY_DELAY)
                }
                Ok(RegistrationEnd::Refused(why)) if self.was_registered => {
                    (ElementReport::Retrying(why), REFUSED_DELAY)
                }
                Ok(RegistrationEnd::Refused(why)) => {
                    (ElementReport::Failed(anyhow!(why)), RETRY_DELAY)
                }
                Err(error) => (ElementReport::Retrying(format!("{error:#}")), RETRY_DELAY),
            };
            let failed = matches!(report, ElementReport::Failed(_));
            if self.sender.send(report).is_err() || failed {
                return;
            }
            sleep(pause);
        }
    }

    /// Registers once and follows the registration until it ends.
    fn register_and_follow(&mut self) -> Result<RegistrationEnd> {
        if !self.running.as_mut().is_some_and(RunningDaemon::is_running) {
            self.running = None;
            self.running = Some(self.daemon.find_or_start()?);
        }
        let Some(running) = &self.running else {
            return Ok(RegistrationEnd::DaemonLost);
        };
        let element = {
            let mut state = self.shared.state();
            if state.is_leaving {
                return Ok(RegistrationEnd::Left);
            }
            let element = Element::register(running.program_socket(), state.registration.clone())?;
            state.element.insert(Arc::new(element)).clone()
        };
        loop {
            let event = match element.next_event() {
                Ok(Some(ElementEvent::Refused { reason })) => {
                    return Ok(RegistrationEnd::Refused(reason));
                }
                Ok(Some(event)) => event,
                Ok(None) => return Ok(RegistrationEnd::DaemonLost),
                Err(error) => return Ok(end_from_error(&error)),
            };
            self.was_registered |= matches!(event, ElementEvent::Registered { .. });
            let has_left = matches!(event, ElementEvent::Deregistered(_));
            if self.sender.send(ElementReport::Event(event)).is_err() || has_left {
                return Ok(RegistrationEnd::Left);
            }
        }
    }
}

/// Interprets a channel's error: a broken channel means that the daemon ended; any other error is the daemon's refusal
/// of a request.
fn end_from_error(error: &io::Error) -> RegistrationEnd {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => RegistrationEnd::DaemonLost,
        _ => RegistrationEnd::Refused(error.to_string()),
    }
}
