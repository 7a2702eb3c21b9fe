//! `holdfast pool connect`: a terminal session with an element of a pool, at one after another if need be.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use holdfast_api::pool::{DATA_BYTES_MAX, PoolSession, SessionEvent};

use super::daemon::PoolDaemon;

/// Have a session with an element of a pool: standard input goes to it, what it says comes out
///
/// When the element fails, the session goes on at another. An element with the session layer has given its state to be kept, and
/// the other element resumes with it; what had no answer is sent again. With any other, the connection is made anew, and what
/// was on its way may be lost. Either is told on the standard error.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast pool connect echo
  printf 'GET / HTTP/1.0\\r\\n\\r\\n' | holdfast pool connect web")]
pub struct ConnectArgs {
    #[command(flatten)]
    daemon: PoolDaemon,
    /// The pool's handle
    handle: String,
    /// Seconds to wait for more of the element after the end of the input
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    linger: f64,
}

/// What the thread that reads the input and the one that hears the element share.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_up: bool,
    over: bool,
    /// What was sent since the last answer.
    unanswered: VecDeque<Vec<u8>>,
}

impl Shared {
    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = change(&mut state);
        self.changed.notify_all();
        changed
    }

    /// Sends as soon as there is an element. False: the session is over.
    fn send(&self, session: &PoolSession, bytes: Vec<u8>) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |state: &mut State| !state.is_up && !state.over;
        let state = self.changed.wait_while(state, waits);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if state.over || session.send(&bytes).is_err() {
            return false;
        }
        state.unanswered.push_back(bytes);
        true
    }
}

/// What is heard.
enum Heard {
    Event(SessionEvent),
    InputEnded,
    Broken(std::io::Error),
    Ended,
}

/// Carries out `holdfast pool connect`.
///
/// # Errors
/// There is no such pool, or no element of it could be reached for too long.
pub fn run(args: &ConnectArgs) -> Result<()> {
    let linger = Duration::try_from_secs_f64(args.linger).context("--linger")?;
    let daemon = args.daemon.reach()?;
    let session = Arc::new(PoolSession::open(daemon.programs(), &args.handle)?);
    let shared = Arc::new(Shared::default());
    let (sender, heard) = channel();
    let (own, input) = (session.clone(), sender.clone());
    std::thread::spawn(move || hear(&own, &sender));
    let (own, state) = (session.clone(), shared.clone());
    std::thread::spawn(move || {
        read_input(&own, &state);
        let _ = input.send(Heard::InputEnded);
    });
    let ended = follow(args, linger, &session, &shared, &heard);
    shared.with(|state| state.over = true);
    ended
}

fn hear(session: &PoolSession, to: &Sender<Heard>) {
    loop {
        let heard = match session.next() {
            Ok(Some(event)) => Heard::Event(event),
            Ok(None) => Heard::Ended,
            Err(error) => Heard::Broken(error),
        };
        let last = !matches!(heard, Heard::Event(_));
        if to.send(heard).is_err() || last {
            return;
        }
    }
}

fn read_input(session: &PoolSession, shared: &Shared) {
    let mut input = std::io::stdin().lock();
    let mut buffer = vec![0; DATA_BYTES_MAX];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => {
                if !shared.send(session, buffer[..length].to_vec()) {
                    return;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    // Where there is no session any more, that is told otherwise.
    let _ = session.finish();
}

fn follow(
    args: &ConnectArgs,
    linger: Duration,
    session: &PoolSession,
    shared: &Shared,
    heard: &Receiver<Heard>,
) -> Result<()> {
    let mut input_ended = false;
    let mut out = std::io::stdout().lock();
    loop {
        // A session that has not begun yet, or has lost its element, is waited for.
        let quiet = input_ended && shared.with(|state| state.is_up);
        let next = match quiet {
            true => heard.recv_timeout(linger),
            false => heard.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(Heard::Event(SessionEvent::Data { bytes })) => {
                shared.with(|state| state.unanswered.clear());
                match out.write_all(&bytes).and_then(|()| out.flush()) {
                    // Nobody reads any more: the end, as with any program.
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                    written => written?,
                }
            }
            Ok(Heard::Event(SessionEvent::Finished)) => return Ok(()),
            Ok(Heard::Event(SessionEvent::Failed { reason })) => {
                bail!("{}: {reason}", args.handle)
            }
            Ok(Heard::Event(event)) => told(args, session, shared, event)?,
            Ok(Heard::InputEnded) => input_ended = true,
            Ok(Heard::Broken(error)) => return Err(error).context("the pool daemon"),
            Ok(Heard::Ended) => bail!("the pool daemon has ended"),
            Err(RecvTimeoutError::Timeout) => return Ok(()),
            Err(RecvTimeoutError::Disconnected) => bail!("the session has ended"),
        }
    }
}

fn told(
    args: &ConnectArgs,
    session: &PoolSession,
    shared: &Shared,
    event: SessionEvent,
) -> Result<()> {
    let handle = &args.handle;
    match event {
        SessionEvent::Up {
            element,
            transport,
            addresses,
            resumed,
        } => {
            let at = addresses.iter().map(SocketAddr::to_string);
            let at = at.collect::<Vec<_>>().join(" ");
            let how = if resumed {
                ", which has the session's state"
            } else {
                ""
            };
            eprintln!("holdfast: {handle}: element {element} at {transport} {at}{how}");
            shared.with(|state| -> Result<()> {
                let again = match transport == "sctp" {
                    true => std::mem::take(&mut state.unanswered),
                    false => VecDeque::new(),
                };
                state.unanswered.clear();
                for bytes in again {
                    session.send(&bytes)?;
                    state.unanswered.push_back(bytes);
                }
                state.is_up = true;
                Ok(())
            })?;
        }
        SessionEvent::Broken { element } => {
            let unanswered = shared.with(|state| {
                state.is_up = false;
                !state.unanswered.is_empty()
            });
            let lost = if unanswered {
                "; what it has not answered is sent again if the next one has the session layer"
            } else {
                ""
            };
            eprintln!("holdfast: {handle}: element {element} is lost, going on at another{lost}");
        }
        SessionEvent::Data { .. } | SessionEvent::Finished | SessionEvent::Failed { .. } => {}
    }
    Ok(())
}
