//! One client, without sockets and without a clock: what came is handled, what is to be sent is asked for.
//!
//! Times are durations since the epoch, by whatever clock the caller has.

mod session;

use std::collections::VecDeque;
use std::time::Duration;

use super::protocol::connectionless::{self, Said};
use super::trace::Trace;
use session::Session;

/// From one request for a connection to the next: a server answers few of them at once, and forgets the others.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// How a client is to be.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its name.
    pub name: String,
    /// Tells clients behind one address apart; also what the player does depends on it.
    pub number: u16,
    /// From one user command to the next.
    pub interval: Duration,
    /// Snapshots it asks for in a second.
    pub snapshots: u32,
    /// How long the server may be silent before it counts as gone.
    pub silence: Duration,
}

/// How far a client is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It asks to be let in.
    Joining,
    /// The server tells it of the world, and carries out what it does.
    Playing,
    /// It was in, and is no longer, or was refused.
    Disconnected(String),
}

/// A client.
#[derive(Debug)]
pub struct Client {
    settings: Settings,
    state: State,
    due: Duration,
    outgoing: VecDeque<Vec<u8>>,
    trace: Trace,
}

#[derive(Debug)]
enum State {
    Challenging,
    Connecting(i32),
    Connected(Box<Session>),
    Disconnected(String),
}

impl Client {
    /// One that asks to be let in at once.
    #[must_use]
    pub fn new(settings: Settings, now: Duration) -> Self {
        Self {
            settings,
            state: State::Challenging,
            due: now,
            outgoing: VecDeque::new(),
            trace: Trace::default(),
        }
    }

    /// How far it is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match &self.state {
            State::Challenging | State::Connecting(_) => Phase::Joining,
            State::Connected(session) if session.plays() => Phase::Playing,
            State::Connected(_) => Phase::Joining,
            State::Disconnected(why) => Phase::Disconnected(why.clone()),
        }
    }

    /// What it saw up to now.
    #[must_use]
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// The next datagram to be sent.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        self.outgoing.pop_front()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout) next; never again when there is none.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Duration> {
        let is_over = matches!(self.state, State::Disconnected(_));
        (!is_over).then_some(self.due)
    }

    /// The time has come, or more.
    pub fn handle_timeout(&mut self, now: Duration) {
        if now < self.due {
            return;
        }
        match &mut self.state {
            State::Challenging => self.ask(now, connectionless::get_challenge()),
            State::Connecting(challenge) => {
                let request = connect(&self.settings, *challenge);
                self.ask(now, request);
            }
            State::Connected(session) => {
                if now.saturating_sub(session.heard_at()) > self.settings.silence {
                    self.end("the server is silent");
                    return;
                }
                self.outgoing.push_back(session.act(now, &mut self.trace));
                // What was missed is not made up for.
                self.due = (self.due + self.settings.interval).max(now);
            }
            State::Disconnected(_) => (),
        }
    }

    /// A datagram of the server's came.
    pub fn handle_datagram(&mut self, now: Duration, datagram: &[u8]) {
        let Some(said) = connectionless::parse(datagram) else {
            return self.handle_message(now, datagram);
        };
        match (said, &self.state) {
            (Said::Challenge(challenge), State::Challenging) => {
                self.state = State::Connecting(challenge);
                self.due = now;
            }
            (Said::Connected, State::Connecting(challenge)) => {
                let session = Session::new(self.settings.number, *challenge, now);
                self.state = State::Connected(Box::new(session));
                self.due = now;
            }
            (Said::Print(text), State::Connecting(_)) => self.end(&format!("refused: {text}")),
            (Said::Disconnect, State::Connected(_)) => self.end("the server has forgotten it"),
            _ => (),
        }
    }

    fn handle_message(&mut self, now: Duration, datagram: &[u8]) {
        let State::Connected(session) = &mut self.state else {
            return;
        };
        match session.hear(now, datagram, &mut self.trace) {
            Ok(None) => (),
            Ok(Some(why)) => self.end(&why),
            Err(_) => self.trace.malformed += 1,
        }
    }

    fn ask(&mut self, now: Duration, request: Vec<u8>) {
        self.outgoing.push_back(request);
        self.due = now + ASK_AGAIN;
    }

    fn end(&mut self, why: &str) {
        self.state = State::Disconnected(why.to_owned());
    }
}

/// Asks to be connected. The rate is the protocol's highest.
fn connect(settings: &Settings, challenge: i32) -> Vec<u8> {
    let own = [
        ("snaps", settings.snapshots.to_string()),
        ("qport", settings.number.to_string()),
        ("challenge", challenge.to_string()),
        // The game knows players again by it.
        ("cl_guid", format!("{:032X}", settings.number)),
    ];
    let mut user = vec![
        ("protocol", "71"),
        ("name", &settings.name),
        ("rate", "90000"),
        ("model", "sarge"),
        ("headmodel", "sarge"),
        ("handicap", "100"),
        ("cl_anonymous", "0"),
    ];
    user.extend(own.iter().map(|(name, value)| (*name, value.as_str())));
    connectionless::connect(&user)
}
