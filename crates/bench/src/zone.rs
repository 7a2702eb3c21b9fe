//! The load of figures 5b and 5c of paper 002: clients of a zone server that has a session to a database on another host, and
//! whose memory changes all the while.
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

/// The host of the server; `n2` is left free to become its next one.
pub const HOME: &str = "n1";
/// The host of the database.
pub const DATABASE: &str = "n3";
/// The host of the clients.
pub const CLIENTS: &str = "c1";

const PORT: u16 = 7100;
const STATUS_PORT: u16 = 7101;
pub(crate) const DATABASE_PORT: u16 = 3306;
/// How long either server may take to start.
const START: Duration = Duration::from_secs(60);

/// What is wanted.
#[derive(Clone, Debug)]
pub struct ZoneSpec {
    /// The lab's name.
    pub name: String,
    /// How its links are.
    pub topology: Topology,
    /// Connections of clients.
    pub connections: usize,
    /// The server's memory, MiB.
    pub memory_mib: usize,
    /// How much of it is written, MiB a second.
    pub dirty_mib_per_s: u64,
    /// Whether there is a database.
    pub database: bool,
}

/// A server with its clients, who exchange until this is dropped.
pub struct Zone {
    /// The clients' connections.
    pub load: Load,
    lab: PoolLab,
}

/// What the server tells of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Status {
    /// Connections there are.
    pub connections: u64,
    /// Bytes that were sent back.
    pub bytes: u64,
    /// Transactions that gave what they should.
    pub queries: u64,
    /// Transactions that did not; the first ends the session.
    pub query_errors: u64,
    /// Pages that were written.
    pub pages: u64,
    /// Pages that did not hold what had been written to them.
    pub pages_wrong: u64,
}

impl Zone {
    /// Starts the servers and the clients; returns when every connection is there.
    ///
    /// # Errors
    /// The machine lacks something, or a server does not start; what they said is in the text.
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

    /// The lab.
    #[must_use]
    pub fn lab(&self) -> &PoolLab {
        &self.lab
    }

    /// Asks the server what it has done.
    ///
    /// # Errors
    /// It does not answer.
    pub fn status(&self) -> Result<Status> {
        status(&self.lab)
    }

    /// Whether nothing is wrong with any client, the session or the memory.
    ///
    /// # Errors
    /// What is.
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

    /// Waits until every client has had so many more answers.
    ///
    /// # Errors
    /// Something is wrong, or it takes longer than `limit`.
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
        // Its thread ends by itself.
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

/// A database of its own below the lab's folder, that lets everybody in; gives its address when it accepts.
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

/// The command of a database whose files are in `data`, which is made, and which lets everybody in at `address`.
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
