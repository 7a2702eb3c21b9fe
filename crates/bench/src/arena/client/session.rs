//! State of a client's connection.

use std::collections::VecDeque;
use std::time::Duration;

use super::super::player;
use super::super::protocol::from_client::{Base, ClientMessage, Head, Secret, cipher};
use super::super::protocol::from_server::{self, GameState, Snapshot};
use super::super::protocol::netchan::{self, Incoming};
use super::super::protocol::scramble::{SERVER_CLEAR, scramble};
use super::super::protocol::{COMMANDS_KEPT, Malformed};
use super::super::trace::{Arrival, Trace};

/// Snapshots kept as a base for later ones.
const REMEMBERED: usize = 32;

/// A connection to a server.
#[derive(Debug)]
pub struct Session {
    number: u16,
    challenge: i32,
    incoming: Incoming,
    heard_at: Duration,
    /// Number of the next message.
    next: u32,
    /// Head of the next message.
    head: Head,
    gamestate: Option<GameState>,
    /// Commands of the server, by number.
    heard: Commands,
    /// Commands of the client, by number.
    said: Commands,
    /// Number of the client's newest command, and of its newest command that the server has executed.
    newest: i32,
    done: i32,
    known: VecDeque<Known>,
    turn: u64,
    clock: Option<Clock>,
}

/// State of the player after a message.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    message: u32,
    command_time_ms: i32,
    place: [f32; 2],
}

/// Clock of the server at the arrival of its newest snapshot.
#[derive(Clone, Copy, Debug)]
struct Clock {
    at: Duration,
    server_time_ms: i32,
    /// Server time of the newest user command.
    told_ms: i32,
}

impl Session {
    /// Creates a connection that the server has just accepted.
    pub fn new(number: u16, challenge: i32, now: Duration) -> Self {
        Self {
            number,
            challenge,
            incoming: Incoming::default(),
            heard_at: now,
            next: 1,
            head: Head::default(),
            gamestate: None,
            heard: Commands::default(),
            said: Commands::default(),
            newest: 0,
            done: 0,
            known: VecDeque::new(),
            turn: 0,
            clock: None,
        }
    }

    /// Returns true if the server sends snapshots.
    pub fn plays(&self) -> bool {
        self.clock.is_some()
    }

    /// Returns the time of the server's last message.
    pub fn heard_at(&self) -> Duration {
        self.heard_at
    }

    /// Returns a datagram with the player's next actions; before the player has entered, the datagram only shows that
    /// the client is alive.
    pub fn act(&mut self, now: Duration, trace: &mut Trace) -> Vec<u8> {
        let moves = self.gamestate.is_some().then(|| {
            let command = player::command(self.number, self.turn, self.reckon(now));
            self.turn += 1;
            if self.plays() && self.newest == self.done {
                self.talk();
            }
            (self.base(), vec![command])
        });
        let unheard = (self.done + 1..=self.newest).map(|n| (n, self.said.get(n).to_owned()));
        let message = ClientMessage {
            head: self.head,
            commands: unheard.collect(),
            moves,
        };
        let command = self.heard.get(self.head.command);
        let checksum_feed = self.gamestate.as_ref().map_or(0, |g| g.checksum_feed);
        let mut bytes = message.write(Secret {
            checksum_feed,
            command,
        });
        cipher(&mut bytes, self.challenge, self.head, command);
        let datagram = netchan::from_client(self.next, self.number, &bytes);
        self.next += 1;
        trace.sent += 1;
        datagram
    }

    /// Names the acknowledged snapshot as base only if it was understood; otherwise no later snapshot could be.
    fn base(&self) -> Base {
        match self.known.back() {
            Some(known) if known.message as i32 == self.head.message => Base::Acknowledged,
            _ => Base::None,
        }
    }

    fn talk(&mut self) {
        if let Some(speech) = player::speech(self.number, self.turn) {
            self.newest += 1;
            self.said.set(self.newest, speech);
        }
    }

    /// Returns the estimated server clock, always later than the estimate before.
    fn reckon(&mut self, now: Duration) -> i32 {
        let Some(clock) = &mut self.clock else {
            return 0;
        };
        let passed = now.saturating_sub(clock.at).as_millis() as i32;
        let reckoned = clock.server_time_ms.wrapping_add(passed);
        clock.told_ms = reckoned.max(clock.told_ms.wrapping_add(1));
        clock.told_ms
    }

    /// Handles a datagram; returns the reason if the connection has ended.
    pub fn hear(
        &mut self,
        now: Duration,
        datagram: &[u8],
        trace: &mut Trace,
    ) -> Result<Option<String>, Malformed> {
        let whole = self.incoming.handle(datagram);
        (trace.lost_in, trace.late_in) = (self.incoming.lost, self.incoming.late);
        let Some((sequence, mut bytes)) = whole? else {
            return Ok(None);
        };
        let said = self.said.get(from_server::commands_done(&bytes)?);
        scramble(
            &mut bytes,
            SERVER_CLEAR,
            self.challenge ^ sequence as i32,
            said,
        );
        let message = from_server::parse(&bytes)?;
        self.heard_at = now;
        self.head.message = sequence as i32;
        if (self.done..=self.newest).contains(&message.commands_done) {
            self.done = message.commands_done;
            trace.commands_done = self.done as u64;
        }
        for (number, text) in message.commands {
            if let Some(why) = self.obey(number, text, trace) {
                return Ok(Some(why));
            }
        }
        if let Some(gamestate) = message.gamestate {
            self.head.server_id = gamestate.server_id;
            self.head.command = gamestate.commands_until;
            self.gamestate = Some(gamestate);
            self.known.clear();
        }
        if let Some(snapshot) = message.snapshot {
            self.see(now, sequence, &snapshot, trace);
        }
        Ok(None)
    }

    /// Handles a command of the server; returns the reason if the connection has ended.
    fn obey(&mut self, number: i32, text: String, trace: &mut Trace) -> Option<String> {
        if number <= self.head.command {
            return None;
        }
        if number != self.head.command.wrapping_add(1) {
            return Some(format!(
                "the server's command {} never came",
                self.head.command.wrapping_add(1)
            ));
        }
        self.head.command = number;
        trace.server_commands += 1;
        if let Some(why) = text.strip_prefix("disconnect") {
            return Some(format!("the server says:{why}"));
        }
        if let Some(server_id) = from_server::new_server_id(&text) {
            self.head.server_id = server_id;
        }
        self.heard.set(number, text);
        None
    }

    fn see(&mut self, now: Duration, message: u32, snapshot: &Snapshot, trace: &mut Trace) {
        let server_time_ms = snapshot.server_time_ms;
        trace.arrivals.push(Arrival {
            at: now,
            server_time_ms,
        });
        self.clock = Some(Clock {
            at: now,
            server_time_ms,
            told_ms: self.clock.map_or(server_time_ms, |clock| clock.told_ms),
        });
        let before = match snapshot.since {
            0 => Some(Known::default()),
            since => {
                let base = message.wrapping_sub(u32::from(since));
                self.known
                    .iter()
                    .find(|known| known.message == base)
                    .copied()
            }
        };
        // A snapshot with an unknown base says nothing about the player.
        let Some(before) = before else {
            return;
        };
        let changes = snapshot.player;
        let place = [0, 1].map(|axis| changes.place[axis].unwrap_or(before.place[axis]));
        let known = Known {
            message,
            command_time_ms: changes.command_time_ms.unwrap_or(before.command_time_ms),
            place,
        };
        if self.known.len() == REMEMBERED {
            self.known.pop_front();
        }
        self.known.push_back(known);
        trace.command_time_ms = known.command_time_ms;
        trace.stands(place);
    }
}

/// The newest commands of one side.
#[derive(Debug)]
struct Commands(Vec<String>);

impl Default for Commands {
    fn default() -> Self {
        Self(vec![String::new(); COMMANDS_KEPT])
    }
}

impl Commands {
    /// Returns the command with this number, or the one that shares its slot.
    fn get(&self, number: i32) -> &str {
        &self.0[number as usize % COMMANDS_KEPT]
    }

    fn set(&mut self, number: i32, text: String) {
        self.0[number as usize % COMMANDS_KEPT] = text;
    }
}
