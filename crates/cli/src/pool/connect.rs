//! `holdfast pool connect`: a terminal session with an element of a pool, at one after another if need be.

mod unanswered;

use std::io::{BufRead, ErrorKind, Read, StdinLock, Write};
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use holdfast_api::pool::{Choose, DATA_BYTES_MAX, PoolSession, SessionEvent, SessionOptions};

use super::daemon::PoolDaemon;
use unanswered::Unanswered;

/// What was heard and is not written yet: whoever reads slowly slows the element, as far as its transport can.
const HEARD_MAX: usize = 16;

/// Have a session with an element of a pool: standard input goes to it, what it says comes out
///
/// When the element fails or ends the session, that goes on at another, which is told on the standard error. With elements over
/// SCTP each line is a message, and each message of the element the answer to one: lines that have no answer are sent to the next
/// element again. One that has the session layer has given its state to be kept, and the next resumes with it; a line that was in
/// that state already, its answer lost, is taken twice. Over TCP and UDP the connection is made anew, and what had no answer is
/// lost; an element over UDP that is silent counts as there.
///
/// The exit status is 0 if all had an answer: over SCTP each line, over TCP and UDP anything that was sent to an element.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast pool connect echo
  printf 'GET / HTTP/1.0\\r\\n\\r\\n' | holdfast pool connect web")]
pub struct ConnectArgs {
    #[command(flatten)]
    daemon: PoolDaemon,
    /// The pool's handle
    handle: String,
    /// Who chooses the element: the registrar, by the pool's policy; p2c, of two drawn by chance the one that has answered this
    /// host's users sooner; or prequal, by what a few elements that are asked say of their requests in flight and latency
    #[arg(long, value_enum, default_value_t)]
    choose: Chooser,
    /// Seconds to wait for more of the element after the end of the input
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    linger: f64,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Chooser {
    #[default]
    Registrar,
    P2c,
    Prequal,
}

/// What the thread that reads the input and the one that hears the element share.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The one with the element that there is.
    connection: Option<u64>,
    over: bool,
    input_ended: bool,
    /// None until there was an element.
    unanswered: Option<Unanswered>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.lock());
        self.changed.notify_all();
        changed
    }

    /// As soon as there is an element; none when the session is over.
    fn when_up<T>(&self, take: impl FnOnce(u64, &mut Unanswered) -> T) -> Option<T> {
        let waits = |state: &mut State| state.connection.is_none() && !state.over;
        let state = self.changed.wait_while(self.lock(), waits);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let connection = state.connection.filter(|_| !state.over)?;
        Some(take(connection, state.unanswered.as_mut()?))
    }

    /// Sends as soon as there is an element. False: the session is over.
    fn send(&self, session: &PoolSession, bytes: &[u8]) -> bool {
        let noted = |connection, unanswered: &mut Unanswered| {
            unanswered.sent(bytes);
            connection
        };
        // Not under the lock: it may have to wait for the element, and that for what it says to be heard. If the connection ends
        // meanwhile, this goes nowhere, and is sent again with the rest.
        self.when_up(noted)
            .is_some_and(|connection| session.send(connection, bytes).is_ok())
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
/// There is no such pool, no element of it could be reached for too long, or something has no answer.
pub fn run(args: &ConnectArgs) -> Result<()> {
    let linger = Duration::try_from_secs_f64(args.linger).context("--linger")?;
    let daemon = args.daemon.reach()?;
    let options = SessionOptions {
        choose: match args.choose {
            Chooser::Registrar => Choose::Registrar,
            Chooser::P2c => Choose::P2c,
            Chooser::Prequal => Choose::Prequal,
        },
        ..SessionOptions::default()
    };
    let session = PoolSession::open_with(daemon.programs(), &args.handle, options)?;
    let session = Arc::new(session);
    let shared = Arc::new(Shared::default());
    let (sender, heard) = sync_channel(HEARD_MAX);
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

fn hear(session: &PoolSession, to: &SyncSender<Heard>) {
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
    while let Some(by_message) = shared.when_up(|_, unanswered| unanswered.is_by_message()) {
        let read = match by_message {
            true => line(&mut input),
            false => piece(&mut input),
        };
        match read {
            Ok(bytes) if bytes.is_empty() => break,
            Ok(bytes) if shared.send(session, &bytes) => {}
            Ok(_) => return,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let connection = shared.with(|state| {
        state.input_ended = true;
        state.connection
    });
    if let Some(connection) = connection {
        // Where there is no session any more, that is told otherwise.
        let _ = session.finish(connection);
    }
}

/// A line, or as much of it as a message takes. Empty: the end.
fn line(input: &mut StdinLock<'_>) -> std::io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let most = DATA_BYTES_MAX as u64;
    input.take(most).read_until(b'\n', &mut line)?;
    Ok(line)
}

/// Whatever is there. Empty: the end.
fn piece(input: &mut StdinLock<'_>) -> std::io::Result<Vec<u8>> {
    let mut piece = vec![0; DATA_BYTES_MAX];
    let length = input.read(&mut piece)?;
    piece.truncate(length);
    Ok(piece)
}

fn follow(
    args: &ConnectArgs,
    linger: Duration,
    session: &PoolSession,
    shared: &Shared,
    heard: &Receiver<Heard>,
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    loop {
        // A session that has not begun yet, or has lost its element, is waited for.
        let quiet = shared.with(|state| state.input_ended && state.connection.is_some());
        let next = match quiet {
            true => heard.recv_timeout(linger),
            false => heard.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let is_over = match next {
            Ok(Heard::Event(SessionEvent::Data { bytes })) => {
                shared.with(|state| state.unanswered.as_mut().map(Unanswered::answered));
                match out.write_all(&bytes).and_then(|()| out.flush()) {
                    // Nobody reads any more: the end, as with any program.
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                    written => written?,
                }
                false
            }
            Ok(Heard::Event(SessionEvent::Finished)) => true,
            Ok(Heard::Event(event)) => told(args, session, shared, event)?,
            Ok(Heard::InputEnded) => false,
            Ok(Heard::Broken(error)) => return Err(error).context("the pool daemon"),
            Ok(Heard::Ended) => bail!("the pool daemon has ended"),
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => bail!("the session has ended"),
        };
        if is_over {
            return match shared.with(|state| state.unanswered.as_ref().and_then(Unanswered::what)) {
                Some(what) => bail!("{}: {what}; --linger waits longer", args.handle),
                None => Ok(()),
            };
        }
    }
}

/// Whether the session is over.
fn told(
    args: &ConnectArgs,
    session: &PoolSession,
    shared: &Shared,
    event: SessionEvent,
) -> Result<bool> {
    let handle = &args.handle;
    match event {
        SessionEvent::Up {
            connection,
            element,
            transport,
            addresses,
            resumed,
        } => {
            let at = addresses.iter().map(SocketAddr::to_string);
            let at = at.collect::<Vec<_>>().join(" ");
            let how = match resumed {
                true => ", which has the session's state",
                false => "",
            };
            eprintln!("holdfast: {handle}: element {element} at {transport} {at}{how}");
            shared.with(|state| state.up(session, connection, transport == "sctp"))?;
            Ok(false)
        }
        SessionEvent::Broken { element, in_order } => {
            let (is_over, note) = shared.with(|state| state.broken(in_order));
            let what = match in_order {
                true => "has ended the session",
                false => "is lost",
            };
            let next = if is_over { "" } else { ", going on at another" };
            eprintln!("holdfast: {handle}: element {element} {what}{next}{note}");
            Ok(is_over)
        }
        SessionEvent::Failed { reason } => bail!("{handle}: {reason}"),
        SessionEvent::Data { .. } | SessionEvent::Finished => Ok(false),
    }
}

impl State {
    fn up(&mut self, session: &PoolSession, connection: u64, by_message: bool) -> Result<()> {
        let unanswered = self.unanswered.take();
        let unanswered = unanswered.filter(|before| before.is_by_message() == by_message);
        let unanswered = unanswered.unwrap_or_else(|| Unanswered::new(by_message));
        for bytes in unanswered.again() {
            session.send(connection, bytes)?;
        }
        self.unanswered = Some(unanswered);
        self.connection = Some(connection);
        if self.input_ended {
            session.finish(connection)?;
        }
        Ok(())
    }

    /// Whether the session is over with that; what becomes of what has no answer.
    fn broken(&mut self, in_order: bool) -> (bool, &'static str) {
        self.connection = None;
        let Some(unanswered) = &mut self.unanswered else {
            return (false, "");
        };
        let is_left = unanswered.broken(self.input_ended && !in_order);
        match (unanswered.is_by_message(), is_left) {
            (true, true) => (false, "; lines without an answer are sent again"),
            // Another element would be asked nothing.
            (_, false) => (self.input_ended, ""),
            (false, true) => (self.input_ended, "; what it has not answered is lost"),
        }
    }
}
