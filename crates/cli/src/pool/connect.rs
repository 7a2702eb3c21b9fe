//! `holdfast pool connect`: a terminal session with a pool, served by one element at a time.

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

/// Maximum number of received messages not yet written: slow output slows the element down, as far as its transport
/// can.
const HEARD_MAX: usize = 16;

/// Open a session with an element of a pool: sends standard input to it and prints its messages
///
/// When the element fails or ends the session, the session continues at another element, as reported on standard error.
/// With elements over SCTP each line is a message, and each message of the element answers one line: lines without an
/// answer are sent to the next element again. An element with the session layer has stored its state with the user, and
/// the next element resumes from it; a line that was already included in that state, with its answer lost, is processed
/// twice. Over TCP and UDP a new connection is made, and unanswered data is lost; a silent element over UDP counts as
/// reachable.
///
/// The exit status is 0 if everything was answered: over SCTP each line, over TCP and UDP anything sent to an element.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast pool connect echo
  printf 'GET / HTTP/1.0\\r\\n\\r\\n' | holdfast pool connect web")]
pub struct ConnectArgs {
    #[command(flatten)]
    daemon: PoolDaemon,
    /// The pool's handle
    handle: String,
    /// Rule for choosing the element: registrar, by the pool's policy; p2c, of two drawn at random the one that has
    /// answered this host's users sooner; or prequal, by requests in progress and latency as reported by a few probed
    /// elements
    #[arg(long, value_enum, default_value_t)]
    choose: Chooser,
    /// Seconds to wait for further messages of the element after the end of the input
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

/// State shared by the thread that reads the input and the one that receives from the element.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of the current connection with an element.
    connection: Option<u64>,
    over: bool,
    input_ended: bool,
    /// None until the first element is connected.
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

    /// Waits for a connected element, then runs `take`; none when the session is over.
    fn when_up<T>(&self, take: impl FnOnce(u64, &mut Unanswered) -> T) -> Option<T> {
        let waits = |state: &mut State| state.connection.is_none() && !state.over;
        let state = self.changed.wait_while(self.lock(), waits);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let connection = state.connection.filter(|_| !state.over)?;
        Some(take(connection, state.unanswered.as_mut()?))
    }

    /// Waits for a connected element, then sends. Returns false if the session is over.
    fn send(&self, session: &PoolSession, bytes: &[u8]) -> bool {
        let noted = |connection, unanswered: &mut Unanswered| {
            unanswered.sent(bytes);
            connection
        };
        // Do not hold the lock: sending may block until the element reads, and the element may block until its messages
        // are received. If the connection ends meanwhile, this message is dropped, and sent again with the other
        // unanswered ones.
        self.when_up(noted)
            .is_some_and(|connection| session.send(connection, bytes).is_ok())
    }
}

/// An event for the main thread.
enum Heard {
    Event(SessionEvent),
    InputEnded,
    Broken(std::io::Error),
    Ended,
}

/// Runs `holdfast pool connect`.
///
/// # Errors
/// The pool does not exist, none of its elements could be reached in time, or something was not answered.
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
        // The end of a session is reported elsewhere.
        let _ = session.finish(connection);
    }
}

/// Reads a line, or its first part if longer than a message. Empty at the end of input.
fn line(input: &mut StdinLock<'_>) -> std::io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let most = DATA_BYTES_MAX as u64;
    input.take(most).read_until(b'\n', &mut line)?;
    Ok(line)
}

/// Reads the available input. Empty at its end.
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
        // Wait without limit for a session that has not started, or has lost its element.
        let quiet = shared.with(|state| state.input_ended && state.connection.is_some());
        let next = match quiet {
            true => heard.recv_timeout(linger),
            false => heard.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let is_over = match next {
            Ok(Heard::Event(SessionEvent::Data { bytes })) => {
                shared.with(|state| state.unanswered.as_mut().map(Unanswered::answered));
                match out.write_all(&bytes).and_then(|()| out.flush()) {
                    // The reader closed the output: end, like any program.
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

/// Handles an event; returns true if the session is over.
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

    /// Handles a lost connection; returns true if the session is over, and the fate of unanswered data in words.
    fn broken(&mut self, in_order: bool) -> (bool, &'static str) {
        self.connection = None;
        let Some(unanswered) = &mut self.unanswered else {
            return (false, "");
        };
        let is_left = unanswered.broken(self.input_ended && !in_order);
        match (unanswered.is_by_message(), is_left) {
            (true, true) => (false, "; lines without an answer are sent again"),
            // Another element would receive no request.
            (_, false) => (self.input_ended, ""),
            (false, true) => (self.input_ended, "; what it has not answered is lost"),
        }
    }
}
