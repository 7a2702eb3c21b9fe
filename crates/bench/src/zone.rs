//! Load of figures 5b and 5c of paper 002: clients of a zone server that has a session to a database on another host
//! and changes its memory all the time.
//!
//! The server is the example `zone`, an ordinary program without our library; the database is Debian's MariaDB.

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_lab::{Spec, Topology};
use serde::Deserialize;

use crate::cluster::find_program;
use crate::load::{Load, connect, interval};
use crate::pools::{PoolLab, system_program, words};

/// Host of the zone server; `n2` is left free as a migration target.
pub const HOME: &str = "n1";
/// Host of the database.
pub const DATABASE: &str = "n3";
/// Host of the clients.
pub const CLIENTS: &str = "c1";

const PORT: u16 = 7100;
const STATUS_PORT: u16 = 7101;
pub(crate) const DATABASE_PORT: u16 = 3306;
/// Time limit for the start of either server.
const START: Duration = Duration::from_secs(60);

/// Parameters of a zone server and its load.
#[derive(Clone, Debug)]
pub struct ZoneSpec {
    /// Name of the lab.
    pub name: String,
    /// Links of the lab.
    pub topology: Topology,
    /// Number of client connections.
    pub connections: usize,
    /// Memory of the server, MiB.
    pub memory_mib: usize,
    /// Rate at which the server writes its memory, MiB per second.
    pub dirty_mib_per_s: u64,
    /// True if the server has a session to a database.
    pub database: bool,
}

/// A zone server with its clients, which exchange messages until this value is dropped.
pub struct Zone {
    /// The client connections.
    pub load: Load,
    lab: PoolLab,
}

/// Status that the zone server reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Status {
    /// Open connections.
    pub connections: u64,
    /// Bytes sent back to clients.
    pub bytes: u64,
    /// Transactions with the expected result.
    pub queries: u64,
    /// Transactions with another result; the first one ends the session.
    pub query_errors: u64,
    /// Pages written.
    pub pages: u64,
    /// Pages whose content differed from the last write.
    pub pages_wrong: u64,
}

impl Zone {
    /// Starts the servers and the clients; returns when every connection is established.
    ///
    /// # Errors
    /// The machine lacks a requirement, or a server does not start; the text contains the servers' output.
    pub fn up(spec: &ZoneSpec) -> Result<Self> {
        let hosts = Spec::new(&spec.name)
            .nodes(3)
            .clients(1)
            .topology(spec.topology.clone())
            .program(find_program("holdfast")?);
        let mut lab = PoolLab::with(&hosts)?;
        let mut arguments = vec![
            format!("--listen={}", SocketAddr::new(lab.address(HOME)?, PORT)),
            format!(
                "--status={}",
                SocketAddr::new(lab.address(HOME)?, STATUS_PORT)
            ),
            format!("--memory-mib={}", spec.memory_mib),
            format!("--dirty-mib-per-s={}", spec.dirty_mib_per_s),
        ];
        if spec.database {
            arguments.push(format!("--database={}", start_database(&mut lab)?));
        }
        lab.run(HOME, "zone", &find_program("zone")?, &arguments)?;
        lab.until("the zone server answers", START, || status(&lab).ok())?;
        let service = SocketAddr::new(lab.address(HOME)?, PORT);
        let streams = connect(lab.lab(), CLIENTS, service, spec.connections)?;
        let load = Load::start(streams, interval(spec.connections))?;
        let all = spec.connections as u64;
        lab.until("every connection is accepted", START, || {
            (status(&lab).ok()?.connections == all).then_some(())
        })?;
        Ok(Self { load, lab })
    }

    /// Returns the lab.
    #[must_use]
    pub fn lab(&self) -> &PoolLab {
        &self.lab
    }

    /// Asks the server for its status.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn status(&self) -> Result<Status> {
        status(&self.lab)
    }

    /// Checks that no client connection, no transaction and no memory page has an error.
    ///
    /// # Errors
    /// At least one has; the text has the counts.
    pub fn check(&self) -> Result<()> {
        let broken = self.load.members().iter();
        let broken = broken.filter(|member| member.is_broken()).count();
        let wrong = self.load.compared.wrong_bytes();
        let status = self.status()?;
        if broken as u64 + wrong + status.query_errors + status.pages_wrong > 0 {
            bail!("{broken} connections broken, {wrong} bytes wrong, {status:?}");
        }
        Ok(())
    }

    /// Waits until every client has had `turns` more answers.
    ///
    /// # Errors
    /// [`check`](Self::check) fails, or the wait takes longer than `limit`.
    pub fn wait_for_turns(&self, turns: u64, limit: Duration) -> Result<()> {
        let members = self.load.members();
        let wanted: Vec<u64> = members
            .iter()
            .map(|member| member.turns() + turns)
            .collect();
        let deadline = Instant::now() + limit;
        loop {
            self.check()?;
            let mut pairs = members.iter().zip(&wanted);
            if pairs.all(|(member, wanted)| member.turns() >= *wanted) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("exceeded time: not every client had {turns} answers in {limit:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Zone {
    fn drop(&mut self) {
        // The thread of the load ends by itself.
        self.load.compared.stop.store(true, Ordering::Relaxed);
    }
}

fn status(lab: &PoolLab) -> Result<Status> {
    let address = SocketAddr::new(lab.address(HOME)?, STATUS_PORT);
    let mut stream = lab
        .lab()
        .in_net(CLIENTS, || TcpStream::connect(address))??;
    stream.set_read_timeout(Some(START))?;
    let mut line = String::new();
    stream.read_to_string(&mut line)?;
    serde_json::from_str(&line).context("the zone server's status")
}

/// Starts a database below the lab's folder that accepts every user without a password; returns its address once it
/// accepts connections.
fn start_database(lab: &mut PoolLab) -> Result<SocketAddr> {
    let data = lab.directory().join("database");
    let address = SocketAddr::new(lab.address(DATABASE)?, DATABASE_PORT);
    let (program, arguments) = database(&data, address)?;
    lab.run(DATABASE, "mariadb", &program, &arguments)?;
    lab.until("the database accepts", START, || {
        let tried = lab.lab().in_net(HOME, || TcpStream::connect(address));
        tried.ok()?.ok()
    })?;
    Ok(address)
}

/// Returns the command of a database at `address` that accepts every user without a password, and creates `data` for
/// its files.
pub(crate) fn database(data: &Path, address: SocketAddr) -> Result<(PathBuf, Vec<String>)> {
    let program = system_program("mariadbd", "mariadb-server-core")?;
    std::fs::create_dir_all(data)?;
    let mut arguments = words([
        "--no-defaults",
        "--user=root",
        "--skip-grant-tables",
        "--innodb-log-file-size=8M",
        "--innodb-buffer-pool-size=16M",
    ]);
    arguments.extend([
        format!("--datadir={}", data.display()),
        format!("--socket={}", data.join("socket").display()),
        format!("--pid-file={}", data.join("pid").display()),
        format!("--bind-address={}", address.ip()),
        format!("--port={}", address.port()),
    ]);
    Ok((program, arguments))
}
