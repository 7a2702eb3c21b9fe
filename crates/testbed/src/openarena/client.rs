//! One client as a machine without sockets and clock: the caller passes in datagrams, and polls for datagrams to send.
//!
//! Times are durations since the epoch, by the caller's clock.

mod session;

use std::collections::VecDeque;
use std::time::Duration;

use super::protocol::connectionless::{self, ServerNotice};
use super::trace::PlayerTrace;
use session::GameSession;

/// Interval between requests for a connection: a server answers few of them at once, and forgets the others.
const REQUEST_INTERVAL: Duration = Duration::from_millis(500);

/// Settings of a client.
#[derive(Clone, Debug)]
pub struct ClientSettings {
    /// Name of the player.
    pub name: String,
    /// Number that distinguishes clients behind one address, and varies the player's actions.
    pub number: u16,
    /// Interval between user commands.
    pub interval: Duration,
    /// Snapshots requested per second.
    pub snapshots: u32,
    /// Time without a message after which the server counts as lost.
    pub server_timeout: Duration,
}

/// Progress of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientPhase {
    /// The client asks to be admitted.
    Joining,
    /// The client receives snapshots, and the server executes its commands.
    Playing,
    /// The client was disconnected or refused; the text is the reason.
    Disconnected(String),
}

/// A client of an OpenArena server.
#[derive(Debug)]
pub struct GameClient {
    settings: ClientSettings,
    state: State,
    next_action_at: Duration,
    outgoing: VecDeque<Vec<u8>>,
    trace: PlayerTrace,
}

#[derive(Debug)]
enum State {
    Challenging,
    Connecting(i32),
    Connected(Box<GameSession>),
    Disconnected(String),
}

impl GameClient {
    /// Creates a client that asks to be admitted at once.
    #[must_use]
    pub fn new(settings: ClientSettings, now: Duration) -> Self {
        Self {
            settings,
            state: State::Challenging,
            next_action_at: now,
            outgoing: VecDeque::new(),
            trace: PlayerTrace::default(),
        }
    }

    /// Returns the progress of the client.
    #[must_use]
    pub fn phase(&self) -> ClientPhase {
        match &self.state {
            State::Challenging | State::Connecting(_) => ClientPhase::Joining,
            State::Connected(session) if session.is_playing() => ClientPhase::Playing,
            State::Connected(_) => ClientPhase::Joining,
            State::Disconnected(why) => ClientPhase::Disconnected(why.clone()),
        }
    }

    /// Returns the events that the client has seen.
    #[must_use]
    pub fn trace(&self) -> &PlayerTrace {
        &self.trace
    }

    /// Returns the next datagram to send.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        self.outgoing.pop_front()
    }

    /// Returns the time of the next [`handle_timeout`](Self::handle_timeout), or none if no call is needed any more.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Duration> {
        let has_ended = matches!(self.state, State::Disconnected(_));
        (!has_ended).then_some(self.next_action_at)
    }

    /// Handles the passing of time to `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        if now < self.next_action_at {
            return;
        }
        match &mut self.state {
            State::Challenging => self.send_request(now, connectionless::challenge_request()),
            State::Connecting(challenge) => {
                let request = connect_request(&self.settings, *challenge);
                self.send_request(now, request);
            }
            State::Connected(session) => {
                if now.saturating_sub(session.last_message_at()) > self.settings.server_timeout {
                    self.disconnect("no message from the server within the time limit");
                    return;
                }
                self.outgoing
                    .push_back(session.next_datagram(now, &mut self.trace));
                // Missed user commands are not sent later.
                self.next_action_at = (self.next_action_at + self.settings.interval).max(now);
            }
            State::Disconnected(_) => (),
        }
    }

    /// Handles a datagram from the server.
    pub fn handle_datagram(&mut self, now: Duration, datagram: &[u8]) {
        let Some(notice) = connectionless::parse(datagram) else {
            return self.handle_message(now, datagram);
        };
        match (notice, &self.state) {
            (ServerNotice::Challenge(challenge), State::Challenging) => {
                self.state = State::Connecting(challenge);
                self.next_action_at = now;
            }
            (ServerNotice::Connected, State::Connecting(challenge)) => {
                let session = GameSession::new(self.settings.number, *challenge, now);
                self.state = State::Connected(Box::new(session));
                self.next_action_at = now;
            }
            (ServerNotice::Print(text), State::Connecting(_)) => {
                self.disconnect(&format!("the server refused the connection: {text}"))
            }
            (ServerNotice::Disconnect, State::Connected(_)) => {
                self.disconnect("the server does not know the connection")
            }
            _ => (),
        }
    }

    fn handle_message(&mut self, now: Duration, datagram: &[u8]) {
        let State::Connected(session) = &mut self.state else {
            return;
        };
        match session.handle_datagram(now, datagram, &mut self.trace) {
            Ok(None) => (),
            Ok(Some(why)) => self.disconnect(&why),
            Err(_) => self.trace.malformed += 1,
        }
    }

    fn send_request(&mut self, now: Duration, request: Vec<u8>) {
        self.outgoing.push_back(request);
        self.next_action_at = now + REQUEST_INTERVAL;
    }

    fn disconnect(&mut self, why: &str) {
        self.state = State::Disconnected(why.to_owned());
    }
}

/// Returns a request to be connected, with the protocol's highest rate.
fn connect_request(settings: &ClientSettings, challenge: i32) -> Vec<u8> {
    let own_settings = [
        ("snaps", settings.snapshots.to_string()),
        ("qport", settings.number.to_string()),
        ("challenge", challenge.to_string()),
        // The game recognises returning players by this identifier.
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
    user.extend(
        own_settings
            .iter()
            .map(|(name, value)| (*name, value.as_str())),
    );
    connectionless::connect(&user)
}
