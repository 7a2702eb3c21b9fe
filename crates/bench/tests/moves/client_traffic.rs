//! Migrations of a server without any support for them, around the group, while clients talk to it.

use std::cell::Cell;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::Protocol;
use holdfast_api::control::{MigrationOutcome, MigrationStatus, SocketStrategy};
use holdfast_testbed::cluster::{Cluster, ClusterService, ClusterSpec, IpFamily};
use holdfast_testbed::connection_load::{ConnectionLoad, message_interval, open_connections};
use holdfast_testbed::network_counters::read_host;

use crate::common::PORT;
use crate::numbered_datagrams::DatagramLoad;
use crate::world::{MigrationGroup, compile_program};

/// Number of clients that send datagrams, and number of connections.
pub const CLIENTS: usize = 8;

/// Shortest time after which a kernel sends a tail-loss probe (4.1 ms, measured).
const PROBE_MIN: Duration = Duration::from_millis(4);
/// Shortest time after which a kernel retransmits unacknowledged data (`TCP_RTO_MIN`).
const TIMEOUT_MIN: Duration = Duration::from_millis(200);

/// Delay of a move before its freeze, in milliseconds: long enough for clients to connect.
const FREEZE_DELAY_MS: u32 = 300;

/// Brings up a group with an echo server at n2 over IPv4; the server runs in the background without a terminal.
pub fn start_group(name: &str) -> Result<(MigrationGroup, tempfile::TempDir)> {
    start_group_over(name, IpFamily::V4)
}

/// Brings up the group of [`start_group`] with the server on one address family.
pub fn start_group_over(
    name: &str,
    family: IpFamily,
) -> Result<(MigrationGroup, tempfile::TempDir)> {
    start_group_with_shell(name, family, ("", "</dev/null"))
}

/// Brings up the group of [`start_group_over`] with shell text before and after the server's command.
pub fn start_group_with_shell(
    name: &str,
    family: IpFamily,
    shell_text: (&str, &str),
) -> Result<(MigrationGroup, tempfile::TempDir)> {
    start_group_with_program("echo", name, family, shell_text)
}

/// Brings up a group with a program of this folder as the server at n2, started by a shell with text before and after
/// its command. The program takes an address, a port, and a file for its PID.
pub fn start_group_with_program(
    program: &str,
    name: &str,
    family: IpFamily,
    shell_text: (&str, &str),
) -> Result<(MigrationGroup, tempfile::TempDir)> {
    let cluster = Cluster::up(server_group_spec(name))?;
    start_server(cluster, program, family, shell_text)
}

/// Returns the parameters of a group whose clients connect to a server at n2.
pub fn server_group_spec(name: &str) -> ClusterSpec {
    let mut spec = ClusterSpec::new(format!("m-{name}-{}", std::process::id()));
    spec.migration = true;
    spec.daemon_environment = [("HOLDFAST_TEST_FAULTS".to_owned(), "1".to_owned())].into();
    spec.services = [Protocol::Tcp, Protocol::Udp]
        .map(|protocol| {
            let mut service = ClusterService::new("echo", protocol, PORT);
            service.weights = [("n1", 0), ("n2", 1), ("n3", 0)]
                .map(|(node, weight)| (node.to_owned(), weight))
                .into();
            service
        })
        .into();
    spec
}

/// Starts a program of this folder as the server at n2, as [`start_group_with_program`] does.
pub fn start_server(
    cluster: Cluster,
    program: &str,
    family: IpFamily,
    (before, suffix): (&str, &str),
) -> Result<(MigrationGroup, tempfile::TempDir)> {
    let folder = tempfile::tempdir()?;
    let world = MigrationGroup { cluster };
    let address = world.cluster.service_address(family).to_string();
    let mut command = world.cluster.lab().command("n2")?;
    command
        .args(["sh", "-c"])
        .arg(format!(
            "{before} setsid \"$0\" \"$@\" {suffix} >/dev/null 2>&1 &"
        ))
        .arg(compile_program(program)?)
        .args([address, PORT.to_string()])
        .arg(folder.path().join("pid"));
    let status = command.stdin(Stdio::null()).status()?;
    ensure!(status.success(), "the server was not started: {status}");
    world.wait(
        "the server does not start",
        || Ok(read_pid(&folder).is_ok()),
    )?;
    Ok((world, folder))
}

pub fn read_pid(folder: &tempfile::TempDir) -> Result<i32> {
    let text = std::fs::read_to_string(folder.path().join("pid"))?;
    text.parse().context("no PID")
}

/// Moves the server around the group, once in each socket transfer mode, and checks the clients after each move.
fn migrate_around_group(
    world: &MigrationGroup,
    folder: &tempfile::TempDir,
    check_status: impl Fn(&MigrationStatus) -> Result<()>,
) -> Result<()> {
    let mut pid = read_pid(folder)?;
    for (from, to, socket_mode) in [
        ("n2", "n3", SocketStrategy::Incremental),
        ("n3", "n1", SocketStrategy::Collective),
        ("n1", "n3", SocketStrategy::Iterative),
        ("n3", "n2", SocketStrategy::Incremental),
    ] {
        let status = world
            .move_with_sockets(pid, from, to, socket_mode)
            .with_context(|| format!("{socket_mode:?}"))?;
        eprintln!(
            "{from} to {to}, {socket_mode:?}: {:?} us, {} bytes, {:?}",
            status.freeze_us, status.freeze_bytes, status.phases_us
        );
        assert_steps_reported(&status);
        check_status(&status)
            .with_context(|| format!("after the move from {from} to {to}, {socket_mode:?}"))?;
        world.wait("the process is left at the donor", || {
            Ok(world.residents(from)?.is_empty())
        })?;
        let residents = world.residents(to)?;
        ensure!(residents.len() == 1, "{residents:?}");
        pid = residents[0].pid;
    }
    Ok(())
}

/// Asserts that both nodes report the duration of their steps, and that the donor's steps fit into the freeze.
fn assert_steps_reported(status: &MigrationStatus) {
    let steps = &status.steps_us;
    assert!(!steps.donor.is_empty() && !steps.acceptor.is_empty());
    let sum: u32 = steps.donor.iter().map(|step| step.duration_us).sum();
    let freeze = status.freeze_us.unwrap_or_default();
    assert!(f64::from(sum) <= freeze, "{sum} of {freeze}: {steps:?}");
}

/// No datagram of a client is lost.
pub fn datagrams_survive(name: &str) -> Result<()> {
    let (world, folder) = start_group(name)?;
    let load = DatagramLoad::start(&world.cluster, IpFamily::V4, CLIENTS);
    load.wait_until_all_answered();
    migrate_around_group(&world, &folder, |_| {
        load.wait_until_all_answered();
        let new = DatagramLoad::start(&world.cluster, IpFamily::V4, CLIENTS);
        new.wait_until_all_answered();
        let counts = new.finish(name);
        ensure!(
            counts.lost.is_empty(),
            "datagrams of new clients were lost: {counts:?}"
        );
        Ok(())
    })?;
    let counts = load.finish(name);
    ensure!(counts.lost.is_empty(), "{counts:?}");
    Ok(())
}

/// No byte of a connection is wrong, no connection ends, and packets that arrive during a move need no retransmission.
pub fn connections_survive(name: &str) -> Result<()> {
    let (world, folder) = start_group(name)?;
    let load = connect_clients(&world, CLIENTS)?;
    assert_all_go_on(&world, &load)?;
    let retransmissions = Retransmissions::start(&world)?;
    migrate_around_group(&world, &folder, |status| {
        assert_all_go_on(&world, &load)?;
        retransmissions.check_move(status)?;
        // New clients find the server too, although the weights name the node where it began.
        let new = connect_clients(&world, CLIENTS).context("new clients")?;
        assert_all_go_on(&world, &new).context("new clients")?;
        new.stop()?;
        retransmissions.take_baseline()
    })?;
    ensure!(
        retransmissions.clean_moves.get() > 0,
        "every move had a retransmission"
    );
    load.stop()
}

/// Retransmissions of the clients' kernel.
struct Retransmissions<'a> {
    world: &'a MigrationGroup,
    /// Retransmissions and timeouts at the beginning of a move.
    before: Cell<[u64; 2]>,
    /// Number of moves without retransmissions.
    clean_moves: Cell<u32>,
}

impl Retransmissions<'_> {
    fn start(world: &MigrationGroup) -> Result<Retransmissions<'_>> {
        let retransmissions = Retransmissions {
            world,
            before: Cell::default(),
            clean_moves: Cell::default(),
        };
        retransmissions.take_baseline()?;
        Ok(retransmissions)
    }

    fn take_baseline(&self) -> Result<()> {
        self.before.set(self.counts()?);
        Ok(())
    }

    fn counts(&self) -> Result<[u64; 2]> {
        let values = read_host(self.world.cluster.lab(), "c1")?;
        let value_of = |name: &str| values.get(name).copied().context("no such counter");
        Ok([
            value_of("Tcp.RetransSegs")?,
            value_of("TcpExt.TCPTimeouts")?,
        ])
    }

    /// Checks the retransmissions of one move. A packet lost in a move is retransmitted however short the freeze is, so
    /// the caller also requires at least one move without retransmissions. A held packet is only retransmitted if the
    /// hold lasts longer than the kernel waits, and then once, by a probe.
    fn check_move(&self, status: &MigrationStatus) -> Result<()> {
        let (before, now) = (self.before.get(), self.counts()?);
        let [retransmitted, timeouts] = [0, 1].map(|at| now[at] - before[at]);
        let freeze = Duration::from_secs_f64(status.freeze_us.unwrap_or_default() / 1e6);
        eprintln!("{retransmitted} retransmissions, {timeouts} timeouts in a freeze of {freeze:?}");
        if retransmitted == 0 {
            self.clean_moves.set(self.clean_moves.get() + 1);
        }
        let connections = CLIENTS as u64;
        let allowed = if freeze < PROBE_MIN { 0 } else { connections };
        ensure!(
            freeze >= TIMEOUT_MIN || (retransmitted <= allowed && timeouts == 0),
            "{retransmitted} segments were sent again, {timeouts} after a timeout, in a freeze of {freeze:?}"
        );
        Ok(())
    }
}

/// Opens connections that exchange messages all the time.
pub fn connect_clients(world: &MigrationGroup, count: usize) -> Result<ConnectionLoad> {
    let service = SocketAddr::new(world.cluster.service_address(IpFamily::V4), PORT);
    let streams = open_connections(world.cluster.lab(), "c1", service, count)?;
    ConnectionLoad::start(streams, Duration::from_millis(20))
}

pub fn assert_all_go_on(world: &MigrationGroup, load: &ConnectionLoad) -> Result<()> {
    let before: Vec<u64> = load
        .connections()
        .iter()
        .map(|member| member.answers_received())
        .collect();
    world.wait("some connections get no answers", || {
        let mut members = load.connections().iter().zip(&before);
        Ok(members.all(|(member, before)| member.answers_received() >= before + 3))
    })?;
    ensure!(load.compared.wrong_bytes() == 0, "bytes are wrong");
    Ok(())
}

/// A connection that begins after the last pre-copy round moves with the server.
pub fn connection_before_freeze(name: &str) -> Result<()> {
    let (world, folder) = start_group(name)?;
    let early_load = connect_clients(&world, CLIENTS)?;
    let file = world.cluster.run_path("n2", "fault")?;
    std::fs::write(&file, format!("move-freeze before pause {FREEZE_DELAY_MS}"))?;
    let id = world.begin(read_pid(&folder)?, "n2", "n3")?;
    world.wait("the move did not reach the fault point", || {
        Ok(!file.exists())
    })?;
    let late_load = connect_clients(&world, CLIENTS)?;
    let status = world.wait_for_migration("n2", id)?;
    ensure!(
        status.outcome == MigrationOutcome::Moved,
        "{:?}",
        status.outcome
    );
    for load in [early_load, late_load] {
        assert_all_go_on(&world, &load)?;
        load.stop()?;
    }
    Ok(())
}

/// Measures freezes with `HOLDFAST_CONNECTIONS` connections (default 1,024), in each socket transfer mode.
pub fn measure_freezes(name: &str) -> Result<()> {
    let count = std::env::var("HOLDFAST_CONNECTIONS").map_or(Ok(1024), |count| count.parse())?;
    let (world, folder) = start_group(name)?;
    let service = SocketAddr::new(world.cluster.service_address(IpFamily::V4), PORT);
    let streams = open_connections(world.cluster.lab(), "c1", service, count)?;
    let load = ConnectionLoad::start(streams, message_interval(count))?;
    let mut pid = read_pid(&folder)?;
    let socket_modes = [
        SocketStrategy::Incremental,
        SocketStrategy::Collective,
        SocketStrategy::Iterative,
    ];
    for socket_mode in socket_modes {
        for turn in 0..6 {
            let (from, to) = [("n2", "n3"), ("n3", "n2")][turn % 2];
            assert_all_go_on(&world, &load)?;
            let status = world.move_with_sockets(pid, from, to, socket_mode)?;
            eprintln!(
                "{count} {socket_mode:?}: {:.0?} us, predicted {:.0?}, {} bytes, {:.0?}",
                status.freeze_us, status.predicted_freeze_us, status.freeze_bytes, status.phases_us
            );
            world.wait("the process is left at the donor", || {
                Ok(world.residents(from)?.is_empty())
            })?;
            pid = world.residents(to)?[0].pid;
        }
    }
    load.stop()
}
