//! The dedicated server in a host of a lab.

use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use holdfast_lab::Spec;

use super::players::Players;
use super::protocol::connectionless::{self, Said, Status};
use super::{Phase, Settings};
use crate::cluster::find_program;
use crate::pools::PoolLab;

/// The host of the server.
const HOME: &str = "n1";
/// Its port.
const PORT: u16 = 27960;
/// How long it may take to read its map.
const START: Duration = Duration::from_secs(60);
/// How long an answer may take until it is asked again.
const ANSWER: Duration = Duration::from_millis(300);
/// Engine, game and maps, as Debian's packages have them.
const ENGINE: &str = "usr/lib/ioquake3/ioq3ded";
const GAME: &str = "usr/lib/openarena-server";
const MAPS: &str = "usr/share/games/openarena/baseoa/pak1-maps.pk3";

/// Where the packages are: those that `./x` has unpacked, or installed ones.
#[derive(Clone, Debug)]
pub struct Game {
    root: PathBuf,
}

impl Game {
    /// Looks in the folder named by `HOLDFAST_OPENARENA`, then in the system.
    ///
    /// # Errors
    /// It is nowhere; the text says how to get it.
    pub fn find() -> Result<Self> {
        let named = std::env::var_os("HOLDFAST_OPENARENA").map(PathBuf::from);
        let mut roots = named.into_iter().chain([PathBuf::from("/")]);
        let found = roots.find(|root| {
            let parts = [ENGINE, GAME, MAPS];
            parts.iter().all(|part| root.join(part).exists())
        });
        let Some(root) = found else {
            bail!(
                "there is no OpenArena server: `./x demo migrate` fetches it; HOLDFAST_OPENARENA names a folder that has it"
            );
        };
        Ok(Self { root })
    }

    /// The words of a command (for `env`) that runs it, with what it writes below `home`. It neither asks nor tells the
    /// internet.
    #[must_use]
    pub fn words(&self, home: &Path, port: u16, seats: usize, snapshots: u32) -> Vec<String> {
        let path = |part: &str| self.root.join(part).display().to_string();
        let settings = [
            ("fs_basepath", path(GAME)),
            ("fs_homepath", home.display().to_string()),
            ("com_basegame", "baseoa".into()),
            // What OpenArena calls 71 is the older form of the protocol.
            ("com_legacyprotocol", "71".into()),
            ("com_protocol", "71".into()),
            ("dedicated", "1".into()),
            ("net_enabled", "1".into()),
            ("net_port", port.to_string()),
            ("sv_maxclients", seats.to_string()),
            ("sv_fps", snapshots.to_string()),
            // Players need no copy of its data.
            ("sv_pure", "0".into()),
            // The game as the machine's own code, which Debian has beside the engine.
            ("vm_game", "0".into()),
            ("bot_enable", "0".into()),
            // The game goes on, whoever wins.
            ("fraglimit", "0".into()),
            ("timelimit", "0".into()),
            // It says which datagrams it has missed.
            ("showdrop", "1".into()),
            ("ttycon", "0".into()),
        ];
        let mut words = vec![format!("HOME={}", home.display()), path(ENGINE)];
        for (name, value) in settings {
            words.extend(["+set".into(), name.into(), value]);
        }
        words.extend(["+map".into(), "oa_dm1".into()]);
        words
    }
}

/// A lab with a server at `n1`, and a client host for each player.
pub struct Match {
    lab: PoolLab,
    seats: u16,
    snapshots: u32,
}

impl Match {
    /// Starts the server with as many seats, in a lab with so many nodes, and waits until it answers.
    ///
    /// # Errors
    /// The machine lacks something, or the server does not start; what it said is in the text.
    pub fn up(name: &str, game: &Game, nodes: u16, seats: u16, snapshots: u32) -> Result<Self> {
        let spec = Spec::new(name)
            .nodes(nodes)
            .clients(seats)
            .program(find_program("holdfast")?);
        let mut lab = PoolLab::with(&spec)?;
        let home = lab.directory().join("openarena");
        std::fs::create_dir_all(home.join("baseoa"))?;
        // The engine wants it; its content is in packages that only clients need.
        std::fs::write(home.join("baseoa/default.cfg"), "// nothing\n")?;
        let words = game.words(&home, PORT, usize::from(seats), snapshots);
        lab.run(HOME, "openarena", Path::new("env"), &words)?;
        let up = Self {
            lab,
            seats,
            snapshots,
        };
        up.lab
            .until("the server answers", START, || up.status("c1").ok())?;
        Ok(up)
    }

    /// The lab.
    #[must_use]
    pub fn lab(&self) -> &PoolLab {
        &self.lab
    }

    /// The server's address.
    ///
    /// # Errors
    /// Never while the lab is up.
    pub fn address(&self) -> Result<SocketAddr> {
        Ok(SocketAddr::new(self.lab.address(HOME)?, PORT))
    }

    /// The time from one snapshot to the next.
    #[must_use]
    pub fn interval(&self) -> Duration {
        Duration::from_secs(1) / self.snapshots
    }

    /// Lets a player join from each client host, each with so many user commands a second, and waits until all play.
    ///
    /// # Errors
    /// A player is refused, or they do not all get in.
    pub fn join(&self, commands: u32, silence: Duration) -> Result<Players> {
        let hosts: Vec<String> = (1..=self.seats)
            .map(|number| format!("c{number}"))
            .collect();
        let settings = |number| Settings {
            name: format!("player{number}"),
            number,
            interval: Duration::from_secs(1) / commands,
            snapshots: self.snapshots,
            silence,
        };
        let players = Players::join(self.lab.lab(), &hosts, self.address()?, settings)?;
        let joined = players.wait_until_all_play(START);
        joined.with_context(|| self.lab.logs())?;
        Ok(players)
    }

    /// Asks the server for its settings and players.
    ///
    /// # Errors
    /// It does not answer.
    pub fn status(&self, host: &str) -> Result<Status> {
        let socket = self
            .lab
            .lab()
            .in_net(host, || UdpSocket::bind("0.0.0.0:0"))??;
        socket.set_read_timeout(Some(ANSWER))?;
        socket.connect(self.address()?)?;
        socket.send(&connectionless::get_status())?;
        let mut buffer = [0; 16384];
        let length = socket.recv(&mut buffer)?;
        match connectionless::parse(&buffer[..length]) {
            Some(Said::Status(status)) => Ok(status),
            other => bail!("no status but {other:?}"),
        }
    }

    /// How many datagrams of its players the server has missed: gaps in their numbers, which it tells.
    ///
    /// # Errors
    /// Its log cannot be read.
    pub fn missed(&self) -> Result<u64> {
        let log = self.lab.directory().join(format!("{HOME}.openarena.log"));
        Ok(missed(&std::fs::read_to_string(log)?))
    }

    /// Whether everybody plays.
    #[must_use]
    pub fn all_play(players: &Players) -> bool {
        let reports = players.reports();
        reports.iter().all(|report| report.phase == Phase::Playing)
    }
}

/// How many datagrams of its players a server has missed, by its log: lines such as
/// `10.80.0.201:40123:Dropped 2 packets at 77`.
#[must_use]
pub fn missed(log: &str) -> u64 {
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
    fn what_the_server_missed_is_read_from_its_log() {
        let log = "say: Dropped by\n10.80.0.201:40123:Dropped 2 packets at 77\n\
                   10.80.0.202:40124:Dropped 1 packets at 9\n";
        assert_eq!(super::missed(log), 3);
    }
}
