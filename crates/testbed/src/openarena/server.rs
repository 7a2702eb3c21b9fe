//! The dedicated server in a host of a lab.

use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use holdfast_lab::LabSpec;

use super::players::Players;
use super::protocol::connectionless::{self, ServerNotice, ServerStatus};
use super::{ClientPhase, ClientSettings};
use crate::cluster::find_program;
use crate::process_lab::ProcessLab;

/// Host of the server.
const SERVER_HOST: &str = "n1";
/// Port of the server.
const SERVER_PORT: u16 = 27960;
/// Time limit for the start of the server, which reads its map.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for an answer to a status request.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(300);
/// Engine, game and maps, at the paths of Debian's packages.
const ENGINE_PATH: &str = "usr/lib/ioquake3/ioq3ded";
const GAME_PATH: &str = "usr/lib/openarena-server";
const MAPS_PATH: &str = "usr/share/games/openarena/baseoa/pak1-maps.pk3";

/// Root folder of the packages, unpacked by `./x` or installed.
#[derive(Clone, Debug)]
pub struct GameFiles {
    root: PathBuf,
}

impl GameFiles {
    /// Searches the folder named by `HOLDFAST_OPENARENA`, then the system.
    ///
    /// # Errors
    /// No server is found; the text says how to get one.
    pub fn find() -> Result<Self> {
        let named = std::env::var_os("HOLDFAST_OPENARENA").map(PathBuf::from);
        let mut roots = named.into_iter().chain([PathBuf::from("/")]);
        let found = roots.find(|root| {
            let parts = [ENGINE_PATH, GAME_PATH, MAPS_PATH];
            parts.iter().all(|part| root.join(part).exists())
        });
        let Some(root) = found else {
            bail!(
                "there is no OpenArena server: `./x demo migrate` fetches it; HOLDFAST_OPENARENA names a folder that has it"
            );
        };
        Ok(Self { root })
    }

    /// Creates the files of a server below `home`, and returns the words of a command (for `env`) that runs the server
    /// with these files. The server does not contact the internet.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn prepare_server(
        &self,
        home: &Path,
        port: u16,
        seats: usize,
        snapshots: u32,
    ) -> Result<Vec<String>> {
        std::fs::create_dir_all(home.join("baseoa"))?;
        // The engine requires this file; its usual content is in packages that only clients need.
        std::fs::write(home.join("baseoa/default.cfg"), "// nothing\n")?;
        let path = |part: &str| self.root.join(part).display().to_string();
        let settings = [
            ("fs_basepath", path(GAME_PATH)),
            ("fs_homepath", home.display().to_string()),
            ("com_basegame", "baseoa".into()),
            // OpenArena's protocol 71 is the engine's legacy protocol.
            ("com_legacyprotocol", "71".into()),
            ("com_protocol", "71".into()),
            ("dedicated", "1".into()),
            ("net_enabled", "1".into()),
            ("net_port", port.to_string()),
            ("sv_maxclients", seats.to_string()),
            ("sv_fps", snapshots.to_string()),
            // Players need no copy of the server's data.
            ("sv_pure", "0".into()),
            // Runs the game as native code, which Debian ships beside the engine.
            ("vm_game", "0".into()),
            ("bot_enable", "0".into()),
            // The game has no end.
            ("fraglimit", "0".into()),
            ("timelimit", "0".into()),
            // Makes the game server log the players' datagrams that it has missed.
            ("showdrop", "1".into()),
            ("ttycon", "0".into()),
        ];
        let mut words = vec![format!("HOME={}", home.display()), path(ENGINE_PATH)];
        for (name, value) in settings {
            words.extend(["+set".into(), name.into(), value]);
        }
        words.extend(["+map".into(), "oa_dm1".into()]);
        Ok(words)
    }
}

/// A lab with a server at `n1`, and a client host for each player.
pub struct ArenaMatch {
    lab: ProcessLab,
    seats: u16,
    snapshots: u32,
}

impl ArenaMatch {
    /// Starts a server with `seats` seats in a lab with `nodes` nodes, and waits until the server answers.
    ///
    /// # Errors
    /// The machine lacks a requirement, or the server does not start; the text contains the server's output.
    pub fn up(
        name: &str,
        game: &GameFiles,
        nodes: u16,
        seats: u16,
        snapshots: u32,
    ) -> Result<Self> {
        let spec = LabSpec::new(name)
            .nodes(nodes)
            .clients(seats)
            .program(find_program("holdfast")?);
        let mut lab = ProcessLab::from_spec(&spec)?;
        let home = lab.directory().join("openarena");
        let words = game.prepare_server(&home, SERVER_PORT, usize::from(seats), snapshots)?;
        lab.run(SERVER_HOST, "openarena", Path::new("env"), &words)?;
        let arena_match = Self {
            lab,
            seats,
            snapshots,
        };
        arena_match
            .lab
            .wait_for("the server answers", START_TIMEOUT, || {
                arena_match.status("c1").ok()
            })?;
        Ok(arena_match)
    }

    /// Returns the lab of the server and the players.
    #[must_use]
    pub fn lab(&self) -> &ProcessLab {
        &self.lab
    }

    /// Returns the server's address.
    ///
    /// # Errors
    /// None while the lab is up.
    pub fn address(&self) -> Result<SocketAddr> {
        Ok(SocketAddr::new(self.lab.address(SERVER_HOST)?, SERVER_PORT))
    }

    /// Returns the time between two snapshots.
    #[must_use]
    pub fn snapshot_interval(&self) -> Duration {
        Duration::from_secs(1) / self.snapshots
    }

    /// Lets a player join from each client host with `commands` user commands per second, and waits until all play.
    ///
    /// # Errors
    /// A player is refused, or not all get in within the time limit.
    pub fn join(&self, commands: u32, silence: Duration) -> Result<Players> {
        let hosts: Vec<String> = (1..=self.seats)
            .map(|number| format!("c{number}"))
            .collect();
        let settings = |number| ClientSettings {
            name: format!("player{number}"),
            number,
            interval: Duration::from_secs(1) / commands,
            snapshots: self.snapshots,
            server_timeout: silence,
        };
        let players = Players::join_all(self.lab.lab(), &hosts, self.address()?, settings)?;
        let joined = players.wait_until_all_play(START_TIMEOUT);
        joined.with_context(|| self.lab.log_tails())?;
        Ok(players)
    }

    /// Asks the server for its settings and players.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn status(&self, host: &str) -> Result<ServerStatus> {
        let socket = self
            .lab
            .lab()
            .run_in_net_namespace(host, || UdpSocket::bind("0.0.0.0:0"))??;
        socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        socket.connect(self.address()?)?;
        socket.send(&connectionless::status_request())?;
        let mut buffer = [0; 16384];
        let length = socket.recv(&mut buffer)?;
        match connectionless::parse(&buffer[..length]) {
            Some(ServerNotice::Status(status)) => Ok(status),
            other => bail!("received {other:?} instead of a status"),
        }
    }

    /// Returns the number of player datagrams that the server has missed, by the gaps in their numbers in its log.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn missed_datagrams(&self) -> Result<u64> {
        let log = self
            .lab
            .directory()
            .join(format!("{SERVER_HOST}.openarena.log"));
        Ok(parse_missed_datagrams(&std::fs::read_to_string(log)?))
    }

    /// Returns true if all players play.
    #[must_use]
    pub fn are_all_playing(players: &Players) -> bool {
        let reports = players.reports();
        reports
            .iter()
            .all(|report| report.phase == ClientPhase::Playing)
    }
}

/// Returns the number of missed datagrams in a server's log, from lines such as
/// `10.80.0.201:40123:Dropped 2 packets at 77`.
#[must_use]
pub fn parse_missed_datagrams(log: &str) -> u64 {
    let counts = log.lines().filter_map(|line| {
        let (_, rest) = line.split_once(":Dropped ")?;
        let (count, _) = rest.split_once(" packets at ")?;
        count.parse::<u64>().ok()
    });
    counts.sum()
}

#[cfg(test)]
mod tests {
    #[test]
    fn missed_datagrams_are_counted_from_the_log() {
        let log = "say: Dropped by\n10.80.0.201:40123:Dropped 2 packets at 77\n\
                   10.80.0.202:40124:Dropped 1 packets at 9\n";
        assert_eq!(super::parse_missed_datagrams(log), 3);
    }
}
