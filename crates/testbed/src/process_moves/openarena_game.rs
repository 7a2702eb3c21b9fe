//! OpenArena's dedicated server with its players, in a group of nodes that migrate the server: paper 002, section VI B.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use holdfast_api::Protocol;
use holdfast_api::control::{MigrationPhasesUs, MigrationStepsUs, SocketStrategy};
use serde::Serialize;

use super::{CompletedMove, NodeGroup};
use crate::cluster::{ClusterService, ClusterSpec, IpFamily};
use crate::openarena::{
    ClientPhase, ClientSettings, GameFiles, PlayerReport, Players, parse_missed_datagrams,
    unix_time,
};

const PORT: u16 = 27960;
/// User commands of each player per second.
const COMMANDS_PER_SECOND: u32 = 40;
/// Time without a message after which players give the server up.
const SERVER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit until all play: the server reads its map, and admits players one by one.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// Parameters of a game.
#[derive(Clone, Debug, Serialize)]
pub struct GameSpec {
    /// Name of the lab.
    pub name: String,
    /// Players, each on a host of its own.
    pub players: u16,
    /// Snapshots per second: 20 in the paper and by the server's default.
    pub snapshots: u32,
    /// Playing time before each move; half of it follows the move.
    pub play: Duration,
    /// True if daemons run with real-time priority, if allowed.
    pub realtime: bool,
}

impl Default for GameSpec {
    fn default() -> Self {
        GameSpec {
            name: format!("game-{}", std::process::id()),
            players: 24,
            snapshots: 20,
            play: Duration::from_secs(1),
            realtime: false,
        }
    }
}

/// A running game.
pub struct RunningGame {
    spec: GameSpec,
    group: NodeGroup,
    folder: tempfile::TempDir,
    players: Players,
    pid: i32,
    moves: usize,
    begin: Duration,
}

/// Cost of one move.
#[derive(Clone, Debug, Serialize)]
pub struct GameServerMove {
    /// Donor.
    pub from: &'static str,
    /// Acceptor.
    pub to: &'static str,
    /// Freeze of the server, microseconds.
    pub freeze_us: f64,
    /// Longest wait of any player for a snapshot around the move, minus the server's interval, microseconds.
    pub added_delay_us: f64,
    /// Longest wait of any player for a snapshot in the time before the move, minus the server's interval,
    /// microseconds.
    pub usual_delay_us: f64,
    /// Bytes sent before the freeze.
    pub copied_bytes: u64,
    /// Bytes sent in the freeze.
    pub freeze_bytes: u64,
    /// Duration of each phase.
    pub phases_us: MigrationPhasesUs,
    /// Duration of each step of the freeze.
    pub steps_us: MigrationStepsUs,
    /// Times of the request and of the end of the move, by the clock of traces.
    #[serde(skip)]
    pub span: (Duration, Duration),
}

impl RunningGame {
    /// Starts the server; returns when all players play.
    ///
    /// # Errors
    /// The game is missing, the machine lacks a requirement, or a player is refused. The text contains the server's
    /// output.
    pub fn start(spec: &GameSpec) -> Result<RunningGame> {
        let game = GameFiles::find()?;
        let mut cluster = ClusterSpec::new(&spec.name);
        cluster.clients = spec.players;
        cluster.is_realtime = spec.realtime;
        cluster.services = vec![ClusterService::new("arena", Protocol::Udp, PORT)];
        let group = NodeGroup::up(cluster)?;
        let folder = tempfile::tempdir()?;
        let home = folder.path();
        let address = group.cluster().service_address(IpFamily::V4);
        let mut command =
            game.prepare_server(home, PORT, usize::from(spec.players), spec.snapshots)?;
        command.extend(["+set", "net_ip", &address.to_string()].map(str::to_owned));
        let started = group.start_program(home, &command);
        let pid = group.add_program_output(started, home)?;
        let players = join_players(spec, &group, SocketAddr::new(address, PORT));
        let players = group.add_program_output(players, home)?;
        Ok(RunningGame {
            spec: spec.clone(),
            group,
            folder,
            players,
            pid,
            moves: 0,
            begin: unix_time(),
        })
    }

    /// Returns the time from which all players played.
    #[must_use]
    pub fn playing_since(&self) -> Duration {
        self.begin
    }

    /// Returns the time between two snapshots.
    #[must_use]
    pub fn snapshot_interval(&self) -> Duration {
        Duration::from_secs(1) / self.spec.snapshots
    }

    /// Returns the number of players that play.
    #[must_use]
    pub fn players_playing(&self) -> usize {
        let reports = self.players.reports().into_iter();
        reports
            .filter(|of| of.phase == ClientPhase::Playing)
            .count()
    }

    /// Lets the players play, moves the server to the other node, and lets them play on.
    ///
    /// # Errors
    /// The move failed; the text has the reason.
    pub fn move_server(&mut self) -> Result<GameServerMove> {
        let undisturbed_since = unix_time();
        std::thread::sleep(self.spec.play);
        let requested_at = unix_time();
        let moved = (self.group).migrate(self.pid, self.moves, SocketStrategy::default());
        let moved = self.group.add_program_output(moved, self.folder.path())?;
        let ended = unix_time();
        std::thread::sleep(self.spec.play / 2);
        (self.pid, self.moves) = (moved.pid, self.moves + 1);
        let delays = (
            self.added_delay(undisturbed_since, requested_at),
            self.added_delay(requested_at, unix_time()),
        );
        Ok(game_server_move(&moved, delays, (requested_at, ended)))
    }

    /// Returns the longest wait of any player for a snapshot in this period, minus the server's interval.
    fn added_delay(&self, from: Duration, to: Duration) -> Duration {
        let reports = self.players.reports().into_iter();
        let delays =
            reports.filter_map(|of| of.trace.added_delay(from..=to, self.snapshot_interval()));
        delays.max().unwrap_or_default()
    }

    /// Ends the game; returns the result of each player, and the losses of all together.
    ///
    /// # Errors
    /// A player's socket has failed, or the server's log cannot be read.
    pub fn end(self) -> Result<(Vec<PlayerReport>, PlayerLosses)> {
        std::thread::sleep(self.spec.play);
        let log = std::fs::read_to_string(self.folder.path().join("log"))?;
        let reports = self.players.stop()?;
        let mut losses = PlayerLosses::from_reports(&reports, self.begin);
        losses.datagrams += parse_missed_datagrams(&log);
        Ok((reports, losses))
    }
}

fn join_players(spec: &GameSpec, group: &NodeGroup, server: SocketAddr) -> Result<Players> {
    let hosts: Vec<String> = (1..=spec.players)
        .map(|number| format!("c{number}"))
        .collect();
    let settings = |number| ClientSettings {
        name: format!("player{number}"),
        number,
        interval: Duration::from_secs(1) / COMMANDS_PER_SECOND,
        snapshots: spec.snapshots,
        server_timeout: SERVER_TIMEOUT,
    };
    let players = Players::join_all(group.cluster().lab(), &hosts, server, settings)?;
    let joined = players.wait_until_all_play(START_TIMEOUT);
    joined.context("not all players joined the game")?;
    Ok(players)
}

fn game_server_move(
    migration: &CompletedMove,
    (usual, added): (Duration, Duration),
    span: (Duration, Duration),
) -> GameServerMove {
    let us = |duration: Duration| duration.as_secs_f64() * 1e6;
    GameServerMove {
        from: migration.from,
        to: migration.to,
        freeze_us: migration.status.freeze_us.unwrap_or_default(),
        added_delay_us: us(added),
        usual_delay_us: us(usual),
        copied_bytes: migration.status.copied_bytes,
        freeze_bytes: migration.status.freeze_bytes,
        phases_us: migration.status.phases_us,
        steps_us: migration.status.steps_us.clone(),
        span,
    }
}

/// Losses of all players together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PlayerLosses {
    /// Players that were disconnected.
    pub disconnected: usize,
    /// Datagrams that were lost, late or malformed, in either direction.
    pub datagrams: u64,
    /// Players without any snapshot.
    pub silent: usize,
}

impl PlayerLosses {
    /// Returns the losses of these players since `begin`.
    #[must_use]
    pub fn from_reports(reports: &[PlayerReport], begin: Duration) -> PlayerLosses {
        let mut losses = PlayerLosses::default();
        for PlayerReport { phase, trace } in reports {
            losses.disconnected += usize::from(*phase != ClientPhase::Playing);
            losses.datagrams += trace.lost_messages + trace.late_datagrams + trace.malformed;
            losses.silent += usize::from(trace.median_gap(begin..=unix_time()).is_none());
        }
        losses
    }
}
