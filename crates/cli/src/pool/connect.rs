//! `holdfast pool connect`: a terminal session with a pool, served by one element at a time.

mod unanswered_data;

use std::io::{BufRead, ErrorKind, Read, StdinLock, Write};
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use holdfast_api::pool::{
    DATA_BYTES_MAX, PoolSession, SelectionRule, SessionEvent, SessionOptions,
};

use super::temporary_daemon::PoolDaemonArgs;
use unanswered_data::UnansweredData;

/// Maximum number of received messages not yet written: slow output slows the element down, as far as its transport
/// can.
const EVENTS_QUEUED_MAX: usize = 16;

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
    daemon: PoolDaemonArgs,
    /// The pool's handle
    handle: String,
    /// Rule for choosing the element: registrar, by the pool's policy; p2c, of two drawn at random the one that has
    /// answered this host's users sooner; or prequal, by requests in progress and latency as reported by a few probed
    /// elements
    #[arg(long, value_enum, default_value_t)]
    choose: ChooseArg,
    /// Seconds to wait for further messages of the element after the end of the input
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    linger: f64,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum ChooseArg {
    #[default]
    Registrar,
    P2c,
    Prequal,
}

/// State shared by the thread that reads the input and the one that receives from the element.
#[derive(Default)]
struct SharedConnectState {
    state: Mutex<ConnectState>,
    changed: Condvar,
}

#[derive(Default)]
struct ConnectState {
    /// Number of the current connection with an element.
    connection: Option<u64>,
    is_over: bool,
    input_ended: bool,
    /// None until the first element is connected.
    unanswered: Option<UnansweredData>,
}

impl SharedConnectState {
    fn lock(&self) -> MutexGuard<'_, ConnectState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change_and_notify<T>(&self, change: impl FnOnce(&mut ConnectState) -> T) -> T {
        let changed = change(&mut self.lock());
        self.changed.notify_all();
        changed
    }

    /// Waits for a connected element, then runs `take`; none when the session is over.
    fn with_connection<T>(&self, take: impl FnOnce(u64, &mut UnansweredData) -> T) -> Option<T> {
        let waits = |state: &mut ConnectState| state.connection.is_none() && !state.is_over;
        let state = self.changed.wait_while(self.lock(), waits);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let connection = state.connection.filter(|_| !state.is_over)?;
        Some(take(connection, state.unanswered.as_mut()?))
    }

    /// Waits for a connected element, then sends. Returns false if the session is over.
    fn send(&self, session: &PoolSession, bytes: &[u8]) -> bool {
        let noted = |connection, unanswered: &mut UnansweredData| {
            unanswered.on_sent(bytes);
            connection
        };
        // Do not hold the lock: sending may block until the element reads, and the element may block until its messages
        // are received. If the connection ends meanwhile, this message is dropped, and sent again with the other
        // unanswered ones.
        self.with_connection(noted)
            .is_some_and(|connection| session.send(connection, bytes).is_ok())
    }
}

/// An event for the main thread.
enum MainThreadEvent {
    Event(SessionEvent),
    InputEnded,
    ChannelError(std::io::Error),
    ChannelEnded,
}

/// Runs `holdfast pool connect`.
///
/// # Errors
/// The pool does not exist, none of its elements could be reached in time, or something was not answered.
pub fn run(args: &ConnectArgs) -> Result<()> {
    let linger = Duration::try_from_secs_f64(args.linger).context("--linger")?;
    let daemon = args.daemon.find_or_start()?;
    let options = SessionOptions {
        rule: match args.choose {
            ChooseArg::Registrar => SelectionRule::Registrar,
            ChooseArg::P2c => SelectionRule::PowerOfTwoChoices,
            ChooseArg::Prequal => SelectionRule::Prequal,
        },
        ..SessionOptions::default()
    };
    let session = PoolSession::open_with(daemon.program_socket(), &args.handle, options)?;
    let session = Arc::new(session);
    let shared = Arc::new(SharedConnectState::default());
    let (sender, events) = sync_channel(EVENTS_QUEUED_MAX);
    let (session_clone, input) = (session.clone(), sender.clone());
    std::thread::spawn(move || receive_events(&session_clone, &sender));
    let (session_clone, state) = (session.clone(), shared.clone());
    std::thread::spawn(move || {
        read_input(&session_clone, &state);
        let _ = input.send(MainThreadEvent::InputEnded);
    });
    let ended = run_session(args, linger, &session, &shared, &events);
    shared.change_and_notify(|state| state.is_over = true);
    ended
}

fn receive_events(session: &PoolSession, to: &SyncSender<MainThreadEvent>) {
    loop {
        let event = match session.next_event() {
            Ok(Some(event)) => MainThreadEvent::Event(event),
            Ok(None) => MainThreadEvent::ChannelEnded,
            Err(error) => MainThreadEvent::ChannelError(error),
        };
        let last = !matches!(event, MainThreadEvent::Event(_));
        if to.send(event).is_err() || last {
            return;
        }
    }
}

fn read_input(session: &PoolSession, shared: &SharedConnectState) {
    let mut input = std::io::stdin().lock();
    while let Some(by_message) = shared.with_connection(|_, unanswered| unanswered.is_by_message())
    {
        let read = match by_message {
            true => read_line(&mut input),
            false => read_available(&mut input),
        };
        match read {
            Ok(bytes) if bytes.is_empty() => break,
            Ok(bytes) if shared.send(session, &bytes) => {}
            Ok(_) => return,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let connection = shared.change_and_notify(|state| {
        state.input_ended = true;
        state.connection
    });
    if let Some(connection) = connection {
        // The end of a session is reported elsewhere.
        let _ = session.finish_sending(connection);
    }
}

/// Reads a line, or its first part if longer than a message. Empty at the end of input.
fn read_line(input: &mut StdinLock<'_>) -> std::io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let most = DATA_BYTES_MAX as u64;
    input.take(most).read_until(b'\n', &mut line)?;
    Ok(line)
}

/// Reads the available input. Empty at its end.
fn read_available(input: &mut StdinLock<'_>) -> std::io::Result<Vec<u8>> {
    let mut piece = vec![0; DATA_BYTES_MAX];
    let length = input.read(&mut piece)?;
    piece.truncate(length);
    Ok(piece)
}

fn run_session(
    args: &ConnectArgs,
    linger: Duration,
    session: &PoolSession,
    shared: &SharedConnectState,
    events: &Receiver<MainThreadEvent>,
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    loop {
        // Wait without limit for a session that has not started, or has lost its element.
        let quiet =
            shared.change_and_notify(|state| state.input_ended && state.connection.is_some());
        let next = match quiet {
            true => events.recv_timeout(linger),
            false => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let is_over = match next {
            Ok(MainThreadEvent::Event(SessionEvent::Data { bytes })) => {
                shared.change_and_notify(|state| {
                    state.unanswered.as_mut().map(UnansweredData::on_answer)
                });
                match out.write_all(&bytes).and_then(|()| out.flush()) {
                    // The reader closed the output: end, like any program.
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                    written => written?,
                }
                false
            }
            Ok(MainThreadEvent::Event(SessionEvent::Finished)) => true,
            Ok(MainThreadEvent::Event(event)) => on_session_event(args, session, shared, event)?,
            Ok(MainThreadEvent::InputEnded) => false,
            Ok(MainThreadEvent::ChannelError(error)) => {
                return Err(error).context("the pool daemon");
            }
            Ok(MainThreadEvent::ChannelEnded) => bail!("the pool daemon has ended"),
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => bail!("the session has ended"),
        };
        if is_over {
            return match shared.change_and_notify(|state| {
                state.unanswered.as_ref().and_then(UnansweredData::describe)
            }) {
                Some(what) => bail!("{}: {what}; --linger waits longer", args.handle),
                None => Ok(()),
            };
        }
    }
}

/// Handles an event; returns true if the session is over.
fn on_session_event(
    args: &ConnectArgs,
    session: &PoolSession,
    shared: &SharedConnectState,
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
            let address_texts = addresses.iter().map(SocketAddr::to_string);
            let address_text = address_texts.collect::<Vec<_>>().join(" ");
            let resumed_note = match resumed {
                true => ", which resumed the session",
                false => "",
            };
            eprintln!(
                "holdfast: {handle}: element {element} at {transport} {address_text}{resumed_note}"
            );
            shared
                .change_and_notify(|state| state.on_up(session, connection, transport == "sctp"))?;
            Ok(false)
        }
        SessionEvent::ElementLost {
            element,
            closed_in_order: in_order,
        } => {
            let (is_over, note) = shared.change_and_notify(|state| state.on_element_lost(in_order));
            let event_text = match in_order {
                true => "has ended the session",
                false => "is lost",
            };
            let next = if is_over {
                ""
            } else {
                ", continuing at another"
            };
            eprintln!("holdfast: {handle}: element {element} {event_text}{next}{note}");
            Ok(is_over)
        }
        SessionEvent::Failed { reason } => bail!("{handle}: {reason}"),
        SessionEvent::Data { .. } | SessionEvent::Finished => Ok(false),
    }
}

impl ConnectState {
    fn on_up(&mut self, session: &PoolSession, connection: u64, by_message: bool) -> Result<()> {
        let unanswered = self.unanswered.take();
        let unanswered = unanswered.filter(|before| before.is_by_message() == by_message);
        let unanswered = unanswered.unwrap_or_else(|| UnansweredData::new(by_message));
        for bytes in unanswered.messages_to_resend() {
            session.send(connection, bytes)?;
        }
        self.unanswered = Some(unanswered);
        self.connection = Some(connection);
        if self.input_ended {
            session.finish_sending(connection)?;
        }
        Ok(())
    }

    /// Handles a lost connection; returns true if the session is over, and the fate of unanswered data in words.
    fn on_element_lost(&mut self, in_order: bool) -> (bool, &'static str) {
        self.connection = None;
        let Some(unanswered) = &mut self.unanswered else {
            return (false, "");
        };
        let is_unanswered = unanswered.on_broken(self.input_ended && !in_order);
        match (unanswered.is_by_message(), is_unanswered) {
            (true, true) => (false, "; lines without an answer are sent again"),
            // Another element would receive no request.
            (_, false) => (self.input_ended, ""),
            (false, true) => (self.input_ended, "; unanswered data is lost"),
        }
    }
}
