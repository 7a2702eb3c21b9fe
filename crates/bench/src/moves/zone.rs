//! The zone server of paper 002, section VI C, in a group of nodes that migrate the server: connections, changing
//! memory, and a probe.

use std::fs::File;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::Protocol;
use holdfast_api::control::SocketsWay;
use holdfast_lab::Topology;

use super::{Group, HOMES, Move, PostCopy};
use crate::cluster::{ClusterSpec, Family, Service, find_program};
use crate::handoff::counts::Counts;
use crate::handoff::probe::{Gaps, Span, Trip, control, ping_pong};
use crate::load::{Load, connect, interval};
use crate::zone::{DATABASE_PORT, Status, database};

/// Host of the database.
const DATABASE: &str = "n1";
const PORT: u16 = 7100;
const STATUS_PORT: u16 = 7101;
/// Time limit for the server's status.
const ANSWER: Duration = Duration::from_secs(20);
/// Time under load before each move.
const PAUSE: Duration = Duration::from_millis(300);

/// Parameters of a zone server and its load.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    /// Name of the lab.
    pub name: String,
    /// Links of the lab.
    pub topology: Topology,
    /// Client connections; one of them is the probe.
    pub connections: usize,
    /// Memory of the server, MiB.
    pub memory_mib: usize,
    /// Rate at which the server writes its memory, MiB per second.
    pub dirty_mib_per_s: u64,
    /// True if the server has a session to a database (MariaDB) on a third node.
    pub database: bool,
    /// Post-copy settings; `None` forbids post-copy.
    pub post_copy: Option<PostCopy>,
}

/// A zone server that is moved while its clients exchange messages.
pub struct Loaded {
    group: Group,
    folder: tempfile::TempDir,
    load: Load,
    probe: JoinHandle<Result<Vec<Trip>>>,
    before: Counts,
    pid: i32,
    moves: Vec<Move>,
    controls: Vec<Span>,
}

/// Results of the moves.
#[derive(Debug)]
pub struct Seen {
    /// All moves.
    pub moves: Vec<Move>,
    /// Gaps of the probe around each move, and in the control periods.
    pub gaps: Gaps,
    /// Resets and retransmissions of all hosts.
    pub network: Counts,
    /// Bytes that differed or never arrived, and the bytes of memory pages with wrong content.
    pub bytes_wrong: u64,
    /// Transactions of the database session with the expected result.
    pub queries: u64,
    /// Transactions with another result.
    pub query_errors: u64,
}

impl Loaded {
    /// Starts the server at the first of [`HOMES`], and its clients; returns when every connection has exchanged a
    /// message.
    ///
    /// # Errors
    /// The machine lacks a requirement, or the server does not start; the text contains the server's output.
    pub fn begin(spec: &LoadSpec) -> Result<Loaded> {
        ensure!(spec.connections > 0, "at least one connection: the probe");
        let mut cluster = ClusterSpec::new(&spec.name);
        cluster.topology = spec.topology.clone();
        cluster.log = "warn".into();
        cluster.services = [("zone", PORT), ("status", STATUS_PORT)]
            .map(|(pool, port)| Service::new(pool, Protocol::Tcp, port))
            .into();
        let mut group = Group::up(cluster)?;
        group.post_copy = spec.post_copy;
        let folder = tempfile::tempdir()?;
        let address = group.cluster().service_address(Family::V4);
        let mut words = vec![
            find_program("zone")?.display().to_string(),
            format!("--listen={address}:{PORT}"),
            format!("--status={address}:{STATUS_PORT}"),
            format!("--memory-mib={}", spec.memory_mib),
            format!("--dirty-mib-per-s={}", spec.dirty_mib_per_s),
        ];
        if spec.database {
            words.push(format!(
                "--database={}",
                start_database(&group, folder.path())?
            ));
        }
        let started = group.start(folder.path(), &words);
        let pid = group.with_output(started, folder.path())?;
        let up = group.until("the zone server answers", || status(&group).ok());
        group.with_output(up, folder.path())?;
        let service = SocketAddr::new(address, PORT);
        let mut streams = connect(group.cluster().lab(), "c1", service, spec.connections)?;
        let probe = streams.pop().context("at least one connection")?;
        let load = Load::start(streams, interval(spec.connections))?;
        group.until("every connection exchanges", || {
            let mut members = load.members().iter();
            members.all(|member| member.turns() > 0).then_some(())
        })?;
        let compared = load.compared.clone();
        let probe = std::thread::spawn(move || ping_pong(probe, &compared));
        let before = Counts::read(group.cluster())?;
        Ok(Loaded {
            group,
            folder,
            load,
            probe,
            before,
            pid,
            moves: Vec::new(),
            controls: Vec::new(),
        })
    }

    /// Lets the clients exchange messages, moves the server to the other node, and then lets the clients exchange for
    /// as long as the move took.
    ///
    /// # Errors
    /// The move failed; the text has the reason.
    pub fn next_move(&mut self, sockets: SocketsWay) -> Result<&Move> {
        std::thread::sleep(PAUSE);
        let moved = self.group.migrate(self.pid, self.moves.len(), sockets);
        let moved = self.group.with_output(moved, self.folder.path())?;
        self.pid = moved.pid;
        self.controls.push(control(moved.span));
        self.moves.push(moved);
        self.moves.last().context("just moved")
    }

    /// Ends the load, after an even number of moves: new connections go to the first node, so the server can report its
    /// status only from there.
    ///
    /// # Errors
    /// The server does not report its status.
    ///
    /// # Panics
    /// A thread of the load panicked.
    pub fn end(self) -> Result<Seen> {
        ensure!(
            self.moves.len().is_multiple_of(HOMES.len()),
            "the server is not where it began"
        );
        std::thread::sleep(PAUSE);
        let network = Counts::read(self.group.cluster())?.since(&self.before);
        let status = self.group.until("the zone server says what it did", || {
            status(&self.group).ok()
        });
        let status = self.group.with_output(status, self.folder.path())?;
        let compared = self.load.compared.clone();
        self.load.stop()?;
        let trips = self.probe.join().expect("the probe does not panic")?;
        let spans = self.moves.iter().map(|of| of.span);
        Ok(Seen {
            gaps: Gaps::of(&trips, spans, &self.controls),
            network,
            bytes_wrong: compared.wrong_bytes() + 4096 * status.pages_wrong,
            queries: status.queries,
            query_errors: status.query_errors,
            moves: self.moves,
        })
    }
}

/// Starts a database on the node that the server never moves to; the database ends with the lab.
fn start_database(group: &Group, folder: &Path) -> Result<SocketAddr> {
    let cluster = group.cluster();
    let address = SocketAddr::new(cluster.address(DATABASE, Family::V4)?, DATABASE_PORT);
    let (program, arguments) = database(&folder.join("database"), address)?;
    let log = File::create(folder.join("database.log"))?;
    let mut command = cluster.lab().command(DATABASE)?;
    command.arg(program).args(arguments);
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    command.spawn().context("the database")?;
    group.until("the database accepts", || {
        let tried = cluster
            .lab()
            .in_net(HOMES[0], || TcpStream::connect(address));
        tried.ok()?.ok()
    })?;
    Ok(address)
}

fn status(group: &Group) -> Result<Status> {
    let address = group.cluster().service_address(Family::V4);
    let address = SocketAddr::new(address, STATUS_PORT);
    let connect = || TcpStream::connect_timeout(&address, ANSWER);
    let mut stream = group.cluster().lab().in_net("c1", connect)??;
    stream.set_read_timeout(Some(ANSWER))?;
    let mut line = String::new();
    stream.read_to_string(&mut line)?;
    serde_json::from_str(&line).context("the zone server's status")
}
