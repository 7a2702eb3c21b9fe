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
use holdfast_lab::{LabSpec, Topology};
use serde::Deserialize;

use crate::cluster::find_program;
use crate::connection_load::{ConnectionLoad, message_interval, open_connections};
use crate::process_lab::{ProcessLab, command_words, find_system_program};

/// Host of the zone server; `n2` is left free as a migration target.
pub const SERVER_HOST: &str = "n1";
/// Host of the database.
pub const DATABASE_HOST: &str = "n3";
/// Host of the clients.
pub const CLIENT_HOST: &str = "c1";

const PORT: u16 = 7100;
const STATUS_PORT: u16 = 7101;
/// Port of the database.
pub const DATABASE_PORT: u16 = 3306;
/// Time limit for the start of either server.
const START_TIMEOUT: Duration = Duration::from_secs(60);

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
pub struct ZoneServerLab {
    /// The client connections.
    pub load: ConnectionLoad,
    lab: ProcessLab,
}

/// Status that the zone server reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ZoneStatus {
    /// Open connections.
    pub connections: u64,
    /// Bytes sent back to clients.
    pub bytes: u64,
    /// Transactions with the expected result.
    pub queries: u64,
    /// Transactions with another result; the first one ends the session.
    pub query_errors: u64,
    /// Memory pages that the server has written.
    pub pages: u64,
    /// Pages whose content differed from the last write.
    pub pages_wrong: u64,
}

impl ZoneServerLab {
    /// Starts the servers and the clients; returns when every connection is established.
    ///
    /// # Errors
    /// The machine lacks a requirement, or a server does not start; the text contains the servers' output.
    pub fn up(spec: &ZoneSpec) -> Result<Self> {
        let hosts = LabSpec::new(&spec.name)
            .nodes(3)
            .clients(1)
            .topology(spec.topology.clone())
            .program(find_program("holdfast")?);
        let mut lab = ProcessLab::from_spec(&hosts)?;
        let mut arguments = vec![
            format!(
                "--listen={}",
                SocketAddr::new(lab.address(SERVER_HOST)?, PORT)
            ),
            format!(
                "--status={}",
                SocketAddr::new(lab.address(SERVER_HOST)?, STATUS_PORT)
            ),
            format!("--memory-mib={}", spec.memory_mib),
            format!("--dirty-mib-per-s={}", spec.dirty_mib_per_s),
        ];
        if spec.database {
            arguments.push(format!("--database={}", start_database(&mut lab)?));
        }
        lab.run(SERVER_HOST, "zone", &find_program("zone")?, &arguments)?;
        lab.wait_for("the zone server answers", START_TIMEOUT, || {
            read_status(&lab).ok()
        })?;
        let service = SocketAddr::new(lab.address(SERVER_HOST)?, PORT);
        let streams = open_connections(lab.lab(), CLIENT_HOST, service, spec.connections)?;
        let load = ConnectionLoad::start(streams, message_interval(spec.connections))?;
        let all = spec.connections as u64;
        lab.wait_for("every connection is accepted", START_TIMEOUT, || {
            (read_status(&lab).ok()?.connections == all).then_some(())
        })?;
        Ok(Self { load, lab })
    }

    /// Returns the lab of the servers and clients.
    #[must_use]
    pub fn lab(&self) -> &ProcessLab {
        &self.lab
    }

    /// Asks the server for its status.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn status(&self) -> Result<ZoneStatus> {
        read_status(&self.lab)
    }

    /// Checks that no client connection, no transaction and no memory page has an error.
    ///
    /// # Errors
    /// At least one has; the text has the counts.
    pub fn check_errors(&self) -> Result<()> {
        let broken = self.load.connections().iter();
        let broken = broken.filter(|member| member.is_broken()).count();
        let wrong = self.load.compared.wrong_bytes();
        let status = self.status()?;
        if broken as u64 + wrong + status.query_errors + status.pages_wrong > 0 {
            bail!("{broken} connections broken, {wrong} bytes wrong, {status:?}");
        }
        Ok(())
    }

    /// Waits until every client has had `answers` more answers.
    ///
    /// # Errors
    /// [`check_errors`](Self::check_errors) fails, or the wait takes longer than `limit`.
    pub fn wait_for_answers(&self, answers: u64, limit: Duration) -> Result<()> {
        let members = self.load.connections();
        let wanted: Vec<u64> = members
            .iter()
            .map(|member| member.answers_received() + answers)
            .collect();
        let deadline = Instant::now() + limit;
        loop {
            self.check_errors()?;
            let mut pairs = members.iter().zip(&wanted);
            if pairs.all(|(member, wanted)| member.answers_received() >= *wanted) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("exceeded time: not every client had {answers} answers in {limit:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for ZoneServerLab {
    fn drop(&mut self) {
        // The thread of the load ends by itself.
        self.load.compared.stop.store(true, Ordering::Relaxed);
    }
}

fn read_status(lab: &ProcessLab) -> Result<ZoneStatus> {
    let address = SocketAddr::new(lab.address(SERVER_HOST)?, STATUS_PORT);
    let mut stream = lab
        .lab()
        .run_in_net_namespace(CLIENT_HOST, || TcpStream::connect(address))??;
    stream.set_read_timeout(Some(START_TIMEOUT))?;
    let mut line = String::new();
    stream.read_to_string(&mut line)?;
    serde_json::from_str(&line).context("read the zone server's status")
}

/// Starts a database below the lab's folder that accepts every user without a password; returns its address once it
/// accepts connections.
fn start_database(lab: &mut ProcessLab) -> Result<SocketAddr> {
    let data = lab.directory().join("database");
    let address = SocketAddr::new(lab.address(DATABASE_HOST)?, DATABASE_PORT);
    let (program, arguments) = database_command(&data, address)?;
    lab.run(DATABASE_HOST, "mariadb", &program, &arguments)?;
    lab.wait_for("the database accepts connections", START_TIMEOUT, || {
        let connected = lab
            .lab()
            .run_in_net_namespace(SERVER_HOST, || TcpStream::connect(address));
        connected.ok()?.ok()
    })?;
    Ok(address)
}

/// Returns the command of a database at `address` that accepts every user without a password, and creates `data` for
/// its files.
pub fn database_command(data: &Path, address: SocketAddr) -> Result<(PathBuf, Vec<String>)> {
    let program = find_system_program("mariadbd", "mariadb-server-core")?;
    std::fs::create_dir_all(data)?;
    let mut arguments = command_words([
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
