//! Clients of a fleet: connections that stay, clients that come and go, and players, all of which notice every error.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_lab::Lab;
use serde::Serialize;

use super::kinds::{PLAYERS, SNAPSHOTS_PER_S};
use super::{FleetServer, POLL_INTERVAL, ServerFleet, ServerKind, WAIT_TIMEOUT};
use crate::cluster::Cluster;
use crate::connection_load::{
    ConnectionLoad, LoadConnection, RequestProtocol, VerifiedByteCounters, open_connections,
};
use crate::detached_program::output_path;
use crate::longest_waits::LongestWaits;
use crate::new_clients::{NewClientCounters, NewClientLoad, NewClientSpec};
use crate::openarena::{ClientSettings, Players, parse_missed_datagrams, unix_time};
use crate::process_moves::openarena_game::PlayerLosses;

/// Host of all clients.
const CLIENT_HOST: &str = "c1";
/// Time after which a new client gives up: several retransmissions of a SYN fit.
const PATIENCE: Duration = Duration::from_secs(20);
/// User commands of each player per second.
const COMMANDS_PER_S: u32 = 40;
/// Time without a message after which a player gives the server up.
const SERVER_TIMEOUT: Duration = Duration::from_secs(20);
/// Most descriptions of errors.
const DETAILS_MAX: usize = 20;

/// Numbers of clients. A game server has players instead.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ClientPlan {
    /// Connections to each server that stay.
    pub connections: u16,
    /// Time between two requests of such a connection.
    pub interval: Duration,
    /// New clients of each server per second.
    pub new_per_s: u32,
}

/// Errors that clients have seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClientErrors {
    /// Connections that ended or hung.
    pub broken_connections: u64,
    /// New clients without the right answer.
    pub failed_new_clients: u64,
    /// Players that were disconnected, or saw nothing of their game.
    pub lost_players: u64,
    /// Datagrams between players and game servers that were lost, late or malformed.
    pub lost_datagrams: u64,
    /// Bytes of answers that differed from the expected ones, or never arrived.
    pub wrong_bytes: u64,
    /// Descriptions of the first errors.
    pub details: Vec<String>,
}

impl ClientErrors {
    /// Returns the number of errors; wrong bytes are counted apart.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.broken_connections + self.failed_new_clients + self.lost_players + self.lost_datagrams
    }

    fn describe(&mut self, error: String) {
        if self.details.len() < DETAILS_MAX {
            self.details.push(error);
        }
    }
}

/// Longest waits of clients in a period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ClientWaits {
    /// Longest wait of a connection that stays for an answer, milliseconds.
    pub connection_ms: f64,
    /// Longest time between two snapshots of a player, minus the server's interval, milliseconds. Zero without games.
    pub player_ms: f64,
    /// Longest time from the start of a new client to the end of its answer, milliseconds.
    pub new_client_ms: f64,
}

/// Amount of work of all clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClientWork {
    /// Connections that stay.
    pub connections: u64,
    /// Answers to the connections that stay.
    pub answers: u64,
    /// New clients that have ended.
    pub new_clients: u64,
    /// Players of games.
    pub players: u64,
}

/// Running clients of all servers.
pub struct FleetClients {
    kinds: Vec<StayingClients>,
    coming: Vec<ComingClients>,
    games: Vec<Game>,
}

/// Connections to all servers of a kind.
struct StayingClients {
    servers: Vec<String>,
    members: Arc<Vec<LoadConnection>>,
    compared: Arc<VerifiedByteCounters>,
    waits: Arc<LongestWaits>,
    /// None once the load was stopped.
    load: Option<ConnectionLoad>,
}

/// New clients of a server.
struct ComingClients {
    server: String,
    counters: Arc<NewClientCounters>,
    /// None once the load was stopped.
    load: Option<NewClientLoad>,
}

/// Players of a server.
struct Game {
    server: FleetServer,
    players: Players,
    /// Time from which all players played, since the epoch.
    begin: Duration,
}

impl FleetClients {
    /// Starts clients of all servers, and waits until all exchange data.
    ///
    /// # Errors
    /// A server takes no client, or the system gives no sockets or threads.
    pub fn start(cluster: &Cluster, fleet: &ServerFleet, plan: ClientPlan) -> Result<FleetClients> {
        let lab = cluster.lab();
        let mut clients = FleetClients {
            kinds: Vec::new(),
            coming: Vec::new(),
            games: Vec::new(),
        };
        let mut kinds: Vec<ServerKind> = fleet.servers().iter().map(|one| one.kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        for kind in kinds {
            let servers = fleet.servers().iter().filter(|one| one.kind == kind);
            let servers: Vec<&FleetServer> = servers.collect();
            match kind.client_protocol() {
                Some(protocol) => clients.start_kind(lab, &servers, protocol, plan)?,
                None => {
                    let games = servers.into_iter().map(|server| Game::start(lab, server));
                    clients.games.extend(games.collect::<Result<Vec<_>>>()?);
                }
            }
        }
        clients.wait_for_progress()?;
        Ok(clients)
    }

    fn start_kind(
        &mut self,
        lab: &Lab,
        servers: &[&FleetServer],
        protocol: RequestProtocol,
        plan: ClientPlan,
    ) -> Result<()> {
        let mut streams = Vec::new();
        for server in servers {
            let count = usize::from(plan.connections);
            let opened = open_connections(lab, CLIENT_HOST, server.address, count);
            streams.extend(opened.with_context(|| format!("connect to {}", server.name))?);
        }
        let load = ConnectionLoad::start_with_protocol(streams, plan.interval, protocol)?;
        self.kinds.push(StayingClients {
            servers: servers.iter().map(|server| server.name.clone()).collect(),
            members: load.shared_connections(),
            compared: load.compared.clone(),
            waits: load.waits.clone(),
            load: Some(load),
        });
        for server in servers.iter().filter(|_| plan.new_per_s > 0) {
            let spec = NewClientSpec {
                service: server.address,
                rate_per_s: plan.new_per_s,
                patience: PATIENCE,
                protocol,
            };
            let load = NewClientLoad::start(lab, CLIENT_HOST, spec)?;
            self.coming.push(ComingClients {
                server: server.name.clone(),
                counters: load.counters.clone(),
                load: Some(load),
            });
        }
        Ok(())
    }

    /// Waits until every connection that has not broken has had an answer to data sent after this call.
    ///
    /// # Errors
    /// The wait takes two minutes.
    pub fn wait_for_progress(&self) -> Result<()> {
        let members = || self.kinds.iter().flat_map(|kind| kind.members.iter());
        let before: Vec<u64> = members().map(LoadConnection::answers_received).collect();
        let deadline = Instant::now() + WAIT_TIMEOUT;
        // One exchange may have been under way already, so two are needed.
        let goes_on = |(member, before): (&LoadConnection, &u64)| {
            member.is_broken() || member.answers_received() >= before + 2
        };
        while !members().zip(&before).all(goes_on) {
            ensure!(
                Instant::now() < deadline,
                "exceeded time: connections do not go on"
            );
            sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the errors that clients have seen so far.
    #[must_use]
    pub fn errors(&self) -> ClientErrors {
        let mut errors = ClientErrors::default();
        for kind in &self.kinds {
            kind.add_errors(&mut errors);
        }
        for clients in &self.coming {
            clients.add_errors(&mut errors);
        }
        for game in &self.games {
            game.add_errors(&mut errors);
        }
        errors
    }

    /// Returns the longest waits that ended between two times.
    #[must_use]
    pub fn waits(&self, begin: Instant, end: Instant) -> ClientWaits {
        let longest = |waits: &mut dyn Iterator<Item = Duration>| {
            waits.max().unwrap_or_default().as_secs_f64() * 1e3
        };
        let staying = self.kinds.iter().map(|kind| &*kind.waits);
        let coming = self.coming.iter().map(|clients| &clients.counters.waits);
        let within = |waits: &LongestWaits| waits.longest_within(begin, end);
        ClientWaits {
            connection_ms: longest(&mut staying.map(within)),
            player_ms: longest(&mut self.games.iter().map(|game| game.added_delay(begin, end))),
            new_client_ms: longest(&mut coming.map(within)),
        }
    }

    /// Returns the amount of work so far.
    #[must_use]
    pub fn work(&self) -> ClientWork {
        let members = || self.kinds.iter().flat_map(|kind| kind.members.iter());
        let ended = |clients: &ComingClients| clients.counters.ended.load(Ordering::Relaxed);
        ClientWork {
            connections: members().count() as u64,
            answers: members().map(LoadConnection::answers_received).sum(),
            new_clients: self.coming.iter().map(ended).sum(),
            players: self.games.len() as u64 * u64::from(PLAYERS),
        }
    }

    /// Ends all clients, after the answers that they wait for. Returns their work and the errors that they have seen.
    ///
    /// # Errors
    /// The system gave the clients no sockets.
    pub fn stop(mut self) -> Result<(ClientWork, ClientErrors)> {
        for clients in &mut self.coming {
            clients
                .load
                .take()
                .map_or(Ok(vec![]), NewClientLoad::stop)?;
        }
        for kind in &mut self.kinds {
            kind.load.take().map_or(Ok(()), ConnectionLoad::stop)?;
        }
        Ok((self.work(), self.errors()))
    }
}

impl StayingClients {
    fn add_errors(&self, errors: &mut ClientErrors) {
        let per_server = (self.members.len() / self.servers.len().max(1)).max(1);
        let broken = self.members.iter().enumerate();
        for (number, member) in broken.filter(|(_, member)| member.is_broken()) {
            errors.broken_connections += 1;
            let server = self
                .servers
                .get(number / per_server)
                .map_or("?", String::as_str);
            let port = member.client.port();
            errors.describe(format!(
                "a connection to {server} ended or hung (port {port})"
            ));
        }
        errors.wrong_bytes += self.compared.wrong_bytes();
    }
}

impl ComingClients {
    fn add_errors(&self, errors: &mut ClientErrors) {
        let failed = self.counters.failed.load(Ordering::Relaxed);
        if failed > 0 {
            errors.failed_new_clients += failed;
            let first = self.counters.first_failure();
            let server = &self.server;
            errors.describe(format!(
                "{failed} new clients of {server} failed; the first: {first}"
            ));
        }
        errors.wrong_bytes += self.counters.wrong_bytes.load(Ordering::Relaxed);
    }
}

impl Game {
    fn start(lab: &Lab, server: &FleetServer) -> Result<Game> {
        let hosts = vec![CLIENT_HOST.to_owned(); usize::from(PLAYERS)];
        let settings = |number| ClientSettings {
            name: format!("player{number}"),
            number,
            interval: Duration::from_secs(1) / COMMANDS_PER_S,
            snapshots: SNAPSHOTS_PER_S,
            server_timeout: SERVER_TIMEOUT,
        };
        let players = Players::join_all(lab, &hosts, server.address, settings)?;
        let joined = players.wait_until_all_play(WAIT_TIMEOUT);
        joined.with_context(|| format!("join the game of {}", server.name))?;
        Ok(Game {
            server: server.clone(),
            players,
            begin: unix_time(),
        })
    }

    fn add_errors(&self, errors: &mut ClientErrors) {
        let losses = PlayerLosses::from_reports(&self.players.reports(), self.begin);
        let output = std::fs::read_to_string(output_path(&self.server.folder)).unwrap_or_default();
        let lost_players = (losses.disconnected + losses.silent) as u64;
        let lost_datagrams = losses.datagrams + parse_missed_datagrams(&output);
        if lost_players + lost_datagrams > 0 {
            let server = &self.server.name;
            errors.describe(format!(
                "{server} lost {lost_players} players and {lost_datagrams} datagrams"
            ));
        }
        errors.lost_players += lost_players;
        errors.lost_datagrams += lost_datagrams;
    }

    /// Returns the longest time between two snapshots of a player, minus the server's interval.
    fn added_delay(&self, begin: Instant, end: Instant) -> Duration {
        let now = unix_time();
        let window = now.saturating_sub(begin.elapsed())..=now.saturating_sub(end.elapsed());
        let interval = Duration::from_secs(1) / SNAPSHOTS_PER_S;
        let reports = self.players.reports().into_iter();
        let delays = reports.filter_map(|one| one.trace.added_delay(window.clone(), interval));
        delays.max().unwrap_or_default()
    }
}
