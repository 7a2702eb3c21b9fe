//! Keeps an element registered across failures of daemons and registrars, on its own thread: the program neither waits
//! nor ends because of a failure.

use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::{Error, Result, anyhow};
use holdfast_api::control::PolicyDetail;
use holdfast_api::pool::{Departure, Element, ElementEvent, Registration};
use tokio::sync::mpsc;

use super::daemon::{PoolDaemon, Running};

/// Delays before the next attempt: after the daemon ended, and after a registrar refused an element that another had
/// accepted.
const AGAIN: Duration = Duration::from_secs(1);
const REFUSED: Duration = Duration::from_secs(10);

/// A report about an element.
#[derive(Debug)]
pub enum Told {
    /// An event of the element.
    Event(ElementEvent),
    /// The element is not registered, for this reason; registration is retried.
    Trouble(String),
    /// The first registration failed, and is not retried.
    Failed(Error),
}

/// An element that is kept registered.
pub struct Enrolment {
    shared: Arc<Shared>,
    told: mpsc::UnboundedReceiver<Told>,
}

struct Shared(Mutex<State>);

struct State {
    registration: Registration,
    /// None while there is no daemon.
    element: Option<Arc<Element>>,
    leaving: bool,
}

impl Enrolment {
    /// Starts with a running daemon; if that ends, another one is found or started.
    pub fn begin(daemon: PoolDaemon, running: Running, registration: Registration) -> Enrolment {
        let state = State {
            registration,
            element: None,
            leaving: false,
        };
        let shared = Arc::new(Shared(Mutex::new(state)));
        let (sender, told) = mpsc::unbounded_channel();
        let keeper = Keeper {
            daemon,
            running: Some(running),
            shared: shared.clone(),
            sender,
            registered: false,
        };
        spawn(move || keeper.run());
        Enrolment { shared, told }
    }

    /// Waits for the next report; forever after a final failure.
    pub async fn next(&mut self) -> Told {
        match self.told.recv().await {
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
    pub async fn leave(mut self) -> Option<Departure> {
        let element = {
            let mut state = self.shared.state();
            state.leaving = true;
            state.element.clone()?
        };
        element.deregister().ok()?;
        loop {
            match self.told.recv().await? {
                Told::Event(ElementEvent::Left(departure)) => return Some(departure),
                Told::Event(_) => {}
                Told::Trouble(_) | Told::Failed(_) => return Some(Departure::TimedOut),
            }
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread's state.
struct Keeper {
    daemon: PoolDaemon,
    running: Option<Running>,
    shared: Arc<Shared>,
    sender: mpsc::UnboundedSender<Told>,
    /// True if the element was registered at least once.
    registered: bool,
}

/// The reason that a registration ended.
enum Over {
    Left,
    Gone,
    Refused(String),
}

impl Keeper {
    fn run(mut self) {
        loop {
            let over = self.registered_once();
            self.shared.state().element = None;
            let (told, pause) = match over {
                Ok(Over::Left) => return,
                Ok(Over::Gone) => {
                    let what = "the pool daemon is gone".to_owned();
                    (Told::Trouble(what), AGAIN)
                }
                Ok(Over::Refused(why)) if self.registered => (Told::Trouble(why), REFUSED),
                Ok(Over::Refused(why)) => (Told::Failed(anyhow!(why)), AGAIN),
                Err(error) => (Told::Trouble(format!("{error:#}")), AGAIN),
            };
            let failed = matches!(told, Told::Failed(_));
            if self.sender.send(told).is_err() || failed {
                return;
            }
            sleep(pause);
        }
    }

    /// Registers once and follows the registration until it ends.
    fn registered_once(&mut self) -> Result<Over> {
        if !self.running.as_mut().is_some_and(Running::is_there) {
            self.running = None;
            self.running = Some(self.daemon.reach()?);
        }
        let Some(running) = &self.running else {
            return Ok(Over::Gone);
        };
        let element = {
            let mut state = self.shared.state();
            if state.leaving {
                return Ok(Over::Left);
            }
            let element = Element::register(running.programs(), state.registration.clone())?;
            state.element.insert(Arc::new(element)).clone()
        };
        loop {
            let event = match element.next() {
                Ok(Some(ElementEvent::Refused { reason })) => return Ok(Over::Refused(reason)),
                Ok(Some(event)) => event,
                Ok(None) => return Ok(Over::Gone),
                Err(error) => return Ok(over_by(&error)),
            };
            self.registered |= matches!(event, ElementEvent::Registered { .. });
            let left = matches!(event, ElementEvent::Left(_));
            if self.sender.send(Told::Event(event)).is_err() || left {
                return Ok(Over::Left);
            }
        }
    }
}

/// Interprets a channel's error: a broken channel means that the daemon ended; any other error is the daemon's refusal
/// of a request.
fn over_by(error: &io::Error) -> Over {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Over::Gone,
        _ => Over::Refused(error.to_string()),
    }
}
