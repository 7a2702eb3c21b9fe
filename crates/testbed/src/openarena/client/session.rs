//! State of a client's connection.

use std::collections::VecDeque;
use std::time::Duration;

use super::super::player_actions;
use super::super::protocol::client_message::{
    GameClientMessage, KeyInputs, MessageHead, SnapshotBase, scramble_message,
};
use super::super::protocol::netchan::{self, Reassembly};
use super::super::protocol::scramble::{SERVER_CLEAR_BYTES, scramble};
use super::super::protocol::server_message::{self, GameSnapshot, GameState};
use super::super::protocol::{COMMANDS_RETAINED, Malformed};
use super::super::trace::{PlayerTrace, SnapshotArrival};

/// Snapshots kept as a base for later ones.
const SNAPSHOTS_RETAINED: usize = 32;

/// A connection to a server.
#[derive(Debug)]
pub struct GameSession {
    number: u16,
    challenge: i32,
    incoming: Reassembly,
    last_message_at: Duration,
    /// Number of the next message.
    next_message: u32,
    /// Head of the next message.
    head: MessageHead,
    gamestate: Option<GameState>,
    /// Commands of the server, by number.
    server_commands: CommandRing,
    /// Commands of the client, by number.
    client_commands: CommandRing,
    /// Number of the client's newest command, and of its newest command that the server has executed.
    newest_command: i32,
    newest_executed: i32,
    player_states: VecDeque<PlayerState>,
    user_command_count: u64,
    clock: Option<ServerClock>,
}

/// State of the player after a message.
#[derive(Clone, Copy, Debug, Default)]
struct PlayerState {
    message: u32,
    command_time_ms: i32,
    position: [f32; 2],
}

/// Clock of the server at the arrival of its newest snapshot.
#[derive(Clone, Copy, Debug)]
struct ServerClock {
    at: Duration,
    server_time_ms: i32,
    /// Server time of the newest user command.
    newest_command_ms: i32,
}

impl GameSession {
    /// Creates a connection that the server has just accepted.
    pub fn new(number: u16, challenge: i32, now: Duration) -> Self {
        Self {
            number,
            challenge,
            incoming: Reassembly::default(),
            last_message_at: now,
            next_message: 1,
            head: MessageHead::default(),
            gamestate: None,
            server_commands: CommandRing::default(),
            client_commands: CommandRing::default(),
            newest_command: 0,
            newest_executed: 0,
            player_states: VecDeque::new(),
            user_command_count: 0,
            clock: None,
        }
    }

    /// Returns true if the server sends snapshots.
    pub fn is_playing(&self) -> bool {
        self.clock.is_some()
    }

    /// Returns the time of the server's last message.
    pub fn last_message_at(&self) -> Duration {
        self.last_message_at
    }

    /// Returns a datagram with the player's next actions; before the player has entered, the datagram only shows that
    /// the client is alive.
    pub fn next_datagram(&mut self, now: Duration, trace: &mut PlayerTrace) -> Vec<u8> {
        let moves = self.gamestate.is_some().then(|| {
            let command = player_actions::player_command(
                self.number,
                self.user_command_count,
                self.estimate_server_time(now),
            );
            self.user_command_count += 1;
            if self.is_playing() && self.newest_command == self.newest_executed {
                self.queue_chat_line();
            }
            (self.snapshot_base(), vec![command])
        });
        let unacknowledged = (self.newest_executed + 1..=self.newest_command)
            .map(|n| (n, self.client_commands.get(n).to_owned()));
        let message = GameClientMessage {
            head: self.head,
            commands: unacknowledged.collect(),
            moves,
        };
        let command = self.server_commands.get(self.head.command);
        let checksum_feed = self.gamestate.as_ref().map_or(0, |g| g.checksum_feed);
        let mut bytes = message.write(KeyInputs {
            checksum_feed,
            command,
        });
        scramble_message(&mut bytes, self.challenge, self.head, command);
        let datagram = netchan::client_datagram(self.next_message, self.number, &bytes);
        self.next_message += 1;
        trace.sent += 1;
        datagram
    }

    /// Names the acknowledged snapshot as base only if it was understood; otherwise no later snapshot could be.
    fn snapshot_base(&self) -> SnapshotBase {
        match self.player_states.back() {
            Some(known) if known.message as i32 == self.head.message => SnapshotBase::Acknowledged,
            _ => SnapshotBase::None,
        }
    }

    fn queue_chat_line(&mut self) {
        if let Some(speech) = player_actions::chat_line(self.number, self.user_command_count) {
            self.newest_command += 1;
            self.client_commands.set(self.newest_command, speech);
        }
    }

    /// Returns the estimated server clock, always later than the estimate before.
    fn estimate_server_time(&mut self, now: Duration) -> i32 {
        let Some(clock) = &mut self.clock else {
            return 0;
        };
        let elapsed_ms = now.saturating_sub(clock.at).as_millis() as i32;
        let estimate = clock.server_time_ms.wrapping_add(elapsed_ms);
        clock.newest_command_ms = estimate.max(clock.newest_command_ms.wrapping_add(1));
        clock.newest_command_ms
    }

    /// Handles a datagram; returns the reason if the connection has ended.
    pub fn handle_datagram(
        &mut self,
        now: Duration,
        datagram: &[u8],
        trace: &mut PlayerTrace,
    ) -> Result<Option<String>, Malformed> {
        let message = self.incoming.handle(datagram);
        (trace.lost_messages, trace.late_datagrams) =
            (self.incoming.lost, self.incoming.duplicate_or_late);
        let Some((sequence, mut bytes)) = message? else {
            return Ok(None);
        };
        let command = self
            .client_commands
            .get(server_message::parse_executed_commands(&bytes)?);
        scramble(
            &mut bytes,
            SERVER_CLEAR_BYTES,
            self.challenge ^ sequence as i32,
            command,
        );
        let message = server_message::parse(&bytes)?;
        self.last_message_at = now;
        self.head.message = sequence as i32;
        if (self.newest_executed..=self.newest_command).contains(&message.commands_done) {
            self.newest_executed = message.commands_done;
            trace.commands_done = self.newest_executed as u64;
        }
        for (number, text) in message.commands {
            if let Some(why) = self.on_server_command(number, text, trace) {
                return Ok(Some(why));
            }
        }
        if let Some(gamestate) = message.gamestate {
            self.head.server_id = gamestate.server_id;
            self.head.command = gamestate.commands_until;
            self.gamestate = Some(gamestate);
            self.player_states.clear();
        }
        if let Some(snapshot) = message.snapshot {
            self.on_snapshot(now, sequence, &snapshot, trace);
        }
        Ok(None)
    }

    /// Handles a command of the server; returns the reason if the connection has ended.
    fn on_server_command(
        &mut self,
        number: i32,
        text: String,
        trace: &mut PlayerTrace,
    ) -> Option<String> {
        if number <= self.head.command {
            return None;
        }
        if number != self.head.command.wrapping_add(1) {
            return Some(format!(
                "the server's command {} was lost",
                self.head.command.wrapping_add(1)
            ));
        }
        self.head.command = number;
        trace.server_commands += 1;
        if let Some(why) = text.strip_prefix("disconnect") {
            return Some(format!("disconnected by the server:{why}"));
        }
        if let Some(server_id) = server_message::changed_server_id(&text) {
            self.head.server_id = server_id;
        }
        self.server_commands.set(number, text);
        None
    }

    fn on_snapshot(
        &mut self,
        now: Duration,
        message: u32,
        snapshot: &GameSnapshot,
        trace: &mut PlayerTrace,
    ) {
        let server_time_ms = snapshot.server_time_ms;
        trace.arrivals.push(SnapshotArrival {
            at: now,
            server_time_ms,
        });
        self.clock = Some(ServerClock {
            at: now,
            server_time_ms,
            newest_command_ms: self
                .clock
                .map_or(server_time_ms, |clock| clock.newest_command_ms),
        });
        let before = match snapshot.base_distance {
            0 => Some(PlayerState::default()),
            since => {
                let base = message.wrapping_sub(u32::from(since));
                self.player_states
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
        let place = [0, 1].map(|axis| changes.position[axis].unwrap_or(before.position[axis]));
        let known = PlayerState {
            message,
            command_time_ms: changes.command_time_ms.unwrap_or(before.command_time_ms),
            position: place,
        };
        if self.player_states.len() == SNAPSHOTS_RETAINED {
            self.player_states.pop_front();
        }
        self.player_states.push_back(known);
        trace.command_time_ms = known.command_time_ms;
        trace.record_position(place);
    }
}

/// The newest commands of one side.
#[derive(Debug)]
struct CommandRing(Vec<String>);

impl Default for CommandRing {
    fn default() -> Self {
        Self(vec![String::new(); COMMANDS_RETAINED])
    }
}

impl CommandRing {
    /// Returns the command with this number, or the one that shares its slot.
    fn get(&self, number: i32) -> &str {
        &self.0[number as usize % COMMANDS_RETAINED]
    }

    fn set(&mut self, number: i32, text: String) {
        self.0[number as usize % COMMANDS_RETAINED] = text;
    }
}
