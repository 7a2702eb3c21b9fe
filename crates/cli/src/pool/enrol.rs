//! Keeps an element registered whatever becomes of daemons and registrars, on a thread of its own: the program is not kept
//! waiting, and does not end for it.

use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::{Error, Result, anyhow};
use holdfast_api::control::PolicyDetail;
use holdfast_api::pool::{Departure, Element, ElementEvent, Registration};
use tokio::sync::mpsc;

use super::daemon::{PoolDaemon, Running};

/// From one attempt to the next where the daemon has gone, and where a registrar refuses what another had taken.
const AGAIN: Duration = Duration::from_secs(1);
const REFUSED: Duration = Duration::from_secs(10);

/// What is told of an element.
#[derive(Debug)]
pub enum Told {
    /// Something happened to it.
    Event(ElementEvent),
    /// It is not registered now, for this reason; it is tried again.
    Trouble(String),
    /// It was never registered, and will not be.
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
    /// Begins at a daemon that runs; where it goes, another is looked for.
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

    /// What is told next; waits for ever once it has failed.
    pub async fn next(&mut self) -> Told {
        match self.told.recv().await {
            Some(told) => told,
            None => std::future::pending().await,
        }
    }

    /// Tells how things stand with the element, now and when it is registered again.
    pub fn set_policy(&self, policy: &PolicyDetail) {
        let mut state = self.shared.state();
        state.registration.policy = policy.clone();
        if let Some(element) = &state.element {
            // If the daemon is gone, its events say so.
            let _ = element.set_policy(policy.clone());
        }
    }

    /// Leaves the pool: how, or none where it was in no pool.
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

/// The thread.
struct Keeper {
    daemon: PoolDaemon,
    running: Option<Running>,
    shared: Arc<Shared>,
    sender: mpsc::UnboundedSender<Told>,
    /// It was registered before.
    registered: bool,
}

/// Why an element is not registered any more.
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

    /// From one registration to its end.
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

/// A channel that breaks has lost its daemon; else it is the daemon that says what was wrong with what was said.
fn over_by(error: &io::Error) -> Over {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Over::Gone,
        _ => Over::Refused(error.to_string()),
    }
}
