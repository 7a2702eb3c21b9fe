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
use holdfast_api::control::SocketStrategy;
use holdfast_lab::Topology;

use super::{CompletedMove, NodeGroup, PostCopyCondition, SERVER_NODES};
use crate::cluster::{ClusterService, ClusterSpec, IpFamily, find_program};
use crate::connection_load::{ConnectionLoad, message_interval, open_connections};
use crate::latency_probe::{ProbeGaps, RoundTrip, TimeSpan, ping_pong, run_control_period};
use crate::network_counters::NetworkCounters;
use crate::zone_server_lab::{DATABASE_PORT, ZoneStatus, database_command};

/// Host of the database.
const DATABASE_HOST: &str = "n1";
const PORT: u16 = 7100;
const STATUS_PORT: u16 = 7101;
/// Time limit for the server's status.
const STATUS_TIMEOUT: Duration = Duration::from_secs(20);
/// Time under load before each move.
const LOAD_PAUSE: Duration = Duration::from_millis(300);

/// Parameters of a zone server and its load.
#[derive(Clone, Debug)]
pub struct MigratingZoneSpec {
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
    pub post_copy: Option<PostCopyCondition>,
}

/// A zone server that is moved while its clients exchange messages.
pub struct MigratingZone {
    group: NodeGroup,
    folder: tempfile::TempDir,
    load: ConnectionLoad,
    probe: JoinHandle<Result<Vec<RoundTrip>>>,
    counters_before: NetworkCounters,
    pid: i32,
    moves: Vec<CompletedMove>,
    controls: Vec<TimeSpan>,
}

/// Results of the moves.
#[derive(Debug)]
pub struct MoveResults {
    /// All moves.
    pub moves: Vec<CompletedMove>,
    /// Gaps of the probe around each move, and in the control periods.
    pub gaps: ProbeGaps,
    /// Resets and retransmissions of all hosts.
    pub network: NetworkCounters,
    /// Bytes that differed or never arrived, and the bytes of memory pages with wrong content.
    pub bytes_wrong: u64,
    /// Transactions of the database session with the expected result.
    pub queries: u64,
    /// Transactions with another result.
    pub query_errors: u64,
}

impl MigratingZone {
    /// Starts the server at the first of [`SERVER_NODES`], and its clients; returns when every connection has exchanged a
    /// message.
    ///
    /// # Errors
    /// The machine lacks a requirement, or the server does not start; the text contains the server's output.
    pub fn start(spec: &MigratingZoneSpec) -> Result<MigratingZone> {
        ensure!(
            spec.connections > 0,
            "at least one connection is needed, for the probe"
        );
        let mut cluster = ClusterSpec::new(&spec.name);
        cluster.topology = spec.topology.clone();
        cluster.log = "warn".into();
        cluster.services = [("zone", PORT), ("status", STATUS_PORT)]
            .map(|(pool, port)| ClusterService::new(pool, Protocol::Tcp, port))
            .into();
        let mut group = NodeGroup::up(cluster)?;
        group.post_copy = spec.post_copy;
        let folder = tempfile::tempdir()?;
        let address = group.cluster().service_address(IpFamily::V4);
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
        let started = group.start_program(folder.path(), &words);
        let pid = group.add_program_output(started, folder.path())?;
        let up = group.wait_for("the zone server answers", || read_status(&group).ok());
        group.add_program_output(up, folder.path())?;
        let service = SocketAddr::new(address, PORT);
        let mut streams = open_connections(group.cluster().lab(), "c1", service, spec.connections)?;
        let probe = streams.pop().context("at least one connection")?;
        let load = ConnectionLoad::start(streams, message_interval(spec.connections))?;
        group.wait_for("every connection exchanges data", || {
            let mut members = load.connections().iter();
            members
                .all(|member| member.answers_received() > 0)
                .then_some(())
        })?;
        let compared = load.compared.clone();
        let probe = std::thread::spawn(move || ping_pong(probe, &compared));
        let before = NetworkCounters::read(group.cluster())?;
        Ok(MigratingZone {
            group,
            folder,
            load,
            probe,
            counters_before: before,
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
    pub fn move_server(&mut self, sockets: SocketStrategy) -> Result<&CompletedMove> {
        std::thread::sleep(LOAD_PAUSE);
        let moved = self.group.migrate(self.pid, self.moves.len(), sockets);
        let moved = self.group.add_program_output(moved, self.folder.path())?;
        self.pid = moved.pid;
        self.controls.push(run_control_period(moved.span));
        self.moves.push(moved);
        self.moves.last().context("no move was recorded")
    }

    /// Ends the load, after an even number of moves: new connections go to the first node, so the server can report its
    /// status only from there.
    ///
    /// # Errors
    /// The server does not report its status.
    ///
    /// # Panics
    /// A thread of the load panicked.
    pub fn end(self) -> Result<MoveResults> {
        ensure!(
            self.moves.len().is_multiple_of(SERVER_NODES.len()),
            "the server is not at its first node; make an even number of moves"
        );
        std::thread::sleep(LOAD_PAUSE);
        let network = NetworkCounters::read(self.group.cluster())?.since(&self.counters_before);
        let status = self
            .group
            .wait_for("the zone server reports its counters", || {
                read_status(&self.group).ok()
            });
        let status = self.group.add_program_output(status, self.folder.path())?;
        let compared = self.load.compared.clone();
        self.load.stop()?;
        let trips = self.probe.join().expect("the probe does not panic")?;
        let spans = self.moves.iter().map(|of| of.span);
        Ok(MoveResults {
            gaps: ProbeGaps::from_round_trips(&trips, spans, &self.controls),
            network,
            bytes_wrong: compared.wrong_bytes() + 4096 * status.pages_wrong,
            queries: status.queries,
            query_errors: status.query_errors,
            moves: self.moves,
        })
    }
}

/// Starts a database on the node that the server never moves to; the database ends with the lab.
fn start_database(group: &NodeGroup, folder: &Path) -> Result<SocketAddr> {
    let cluster = group.cluster();
    let address = SocketAddr::new(cluster.address(DATABASE_HOST, IpFamily::V4)?, DATABASE_PORT);
    let (program, arguments) = database_command(&folder.join("database"), address)?;
    let log = File::create(folder.join("database.log"))?;
    let mut command = cluster.lab().command(DATABASE_HOST)?;
    command.arg(program).args(arguments);
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    command.spawn().context("start the database")?;
    group.wait_for("the database accepts connections", || {
        let connected = cluster
            .lab()
            .run_in_net_namespace(SERVER_NODES[0], || TcpStream::connect(address));
        connected.ok()?.ok()
    })?;
    Ok(address)
}

fn read_status(group: &NodeGroup) -> Result<ZoneStatus> {
    let address = group.cluster().service_address(IpFamily::V4);
    let address = SocketAddr::new(address, STATUS_PORT);
    let connect = || TcpStream::connect_timeout(&address, STATUS_TIMEOUT);
    let mut stream = group
        .cluster()
        .lab()
        .run_in_net_namespace("c1", connect)??;
    stream.set_read_timeout(Some(STATUS_TIMEOUT))?;
    let mut line = String::new();
    stream.read_to_string(&mut line)?;
    serde_json::from_str(&line).context("read the zone server's status")
}
