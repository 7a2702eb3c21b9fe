//! Migrations of a server without any support for them, around the group, while clients talk to it.

use std::cell::Cell;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::Protocol;
use holdfast_api::control::{MigrationOutcome, MigrationStatus, SocketsWay};
use holdfast_bench::cluster::{Cluster, ClusterSpec, Family, Service};
use holdfast_bench::handoff::of_host;
use holdfast_bench::load::{Load, connect, interval};

use crate::common::PORT;
use crate::numbered::Datagrams;
use crate::world::{World, compile};

/// Number of clients that send datagrams, and number of connections.
pub const CLIENTS: usize = 8;

/// Shortest time after which a kernel sends a tail-loss probe (4.1 ms, measured).
const PROBE_MIN: Duration = Duration::from_millis(4);
/// Shortest time after which a kernel retransmits unacknowledged data (`TCP_RTO_MIN`).
const TIMEOUT_MIN: Duration = Duration::from_millis(200);

/// Delay of a move before its freeze, in milliseconds: long enough for clients to connect.
const LATE_MS: u32 = 300;

/// Brings up a group with an echo server at n2 over IPv4; the server runs in the background without a terminal.
pub fn serving(name: &str) -> Result<(World, tempfile::TempDir)> {
    serving_over(name, Family::V4)
}

/// Brings up the group of [`serving`] with the server on one address family.
pub fn serving_over(name: &str, family: Family) -> Result<(World, tempfile::TempDir)> {
    serving_by(name, family, ("", "</dev/null"))
}

/// Brings up the group of [`serving_over`] with shell text before and after the server's command.
pub fn serving_by(
    name: &str,
    family: Family,
    around: (&str, &str),
) -> Result<(World, tempfile::TempDir)> {
    serving_program("echo", name, family, around)
}

/// Brings up a group with a program of this folder as the server at n2, started by a shell with text before and after
/// its command. The program takes an address, a port, and a file for its PID.
pub fn serving_program(
    program: &str,
    name: &str,
    family: Family,
    (before, behind): (&str, &str),
) -> Result<(World, tempfile::TempDir)> {
    let mut spec = ClusterSpec::new(format!("m-{name}-{}", std::process::id()));
    spec.migration = true;
    spec.daemon_environment = [("HOLDFAST_TEST_FAULTS".to_owned(), "1".to_owned())].into();
    spec.services = [Protocol::Tcp, Protocol::Udp]
        .map(|protocol| {
            let mut service = Service::new("echo", protocol, PORT);
            service.weights = [("n1", 0), ("n2", 1), ("n3", 0)]
                .map(|(node, weight)| (node.to_owned(), weight))
                .into();
            service
        })
        .into();
    let cluster = Cluster::up(spec)?;
    let folder = tempfile::tempdir()?;
    let world = World { cluster };
    let address = world.cluster.service_address(family).to_string();
    let mut command = world.cluster.lab().command("n2")?;
    command
        .args(["sh", "-c"])
        .arg(format!(
            "{before} setsid \"$0\" \"$@\" {behind} >/dev/null 2>&1 &"
        ))
        .arg(compile(program)?)
        .args([address, PORT.to_string()])
        .arg(folder.path().join("pid"));
    let status = command.stdin(Stdio::null()).status()?;
    ensure!(status.success(), "the server was not started: {status}");
    world.wait("the server does not start", || Ok(pid(&folder).is_ok()))?;
    Ok((world, folder))
}

pub fn pid(folder: &tempfile::TempDir) -> Result<i32> {
    let text = std::fs::read_to_string(folder.path().join("pid"))?;
    text.parse().context("no PID")
}

/// Moves the server around the group, once in each socket transfer mode, and checks the clients after each move.
fn round(
    world: &World,
    folder: &tempfile::TempDir,
    well: impl Fn(&MigrationStatus) -> Result<()>,
) -> Result<()> {
    let mut pid = pid(folder)?;
    for (from, to, way) in [
        ("n2", "n3", SocketsWay::Incremental),
        ("n3", "n1", SocketsWay::Collective),
        ("n1", "n3", SocketsWay::Iterative),
        ("n3", "n2", SocketsWay::Incremental),
    ] {
        let status = world
            .move_by(pid, from, to, way)
            .with_context(|| format!("{way:?}"))?;
        eprintln!(
            "{from} to {to}, {way:?}: {:?} us, {} bytes, {:?}",
            status.freeze_us, status.freeze_bytes, status.phases_us
        );
        steps_are_told(&status);
        well(&status).with_context(|| format!("after the move from {from} to {to}, {way:?}"))?;
        world.wait("it is left", || Ok(world.residents(from)?.is_empty()))?;
        let residents = world.residents(to)?;
        ensure!(residents.len() == 1, "{residents:?}");
        pid = residents[0].pid;
    }
    Ok(())
}

/// Asserts that both nodes report the duration of their steps, and that the donor's steps fit into the freeze.
fn steps_are_told(status: &MigrationStatus) {
    let steps = &status.steps_us;
    assert!(!steps.donor.is_empty() && !steps.acceptor.is_empty());
    let sum: u32 = steps.donor.iter().map(|step| step.us).sum();
    let freeze = status.freeze_us.unwrap_or_default();
    assert!(f64::from(sum) <= freeze, "{sum} of {freeze}: {steps:?}");
}

/// No datagram of a client is lost.
pub fn datagrams(name: &str) -> Result<()> {
    let (world, folder) = serving(name)?;
    let load = Datagrams::start(&world.cluster, Family::V4, CLIENTS);
    load.all_answered_again();
    round(&world, &folder, |_| {
        load.all_answered_again();
        let new = Datagrams::start(&world.cluster, Family::V4, CLIENTS);
        new.all_answered_again();
        let counts = new.end(name);
        ensure!(counts.lost.is_empty(), "of new clients: {counts:?}");
        Ok(())
    })?;
    let counts = load.end(name);
    ensure!(counts.lost.is_empty(), "{counts:?}");
    Ok(())
}

/// No byte of a connection is wrong, no connection ends, and packets that arrive during a move need no retransmission.
pub fn connections(name: &str) -> Result<()> {
    let (world, folder) = serving(name)?;
    let load = connected(&world, CLIENTS)?;
    all_go_on(&world, &load)?;
    let again = Again::begin(&world)?;
    round(&world, &folder, |status| {
        all_go_on(&world, &load)?;
        again.judge(status)?;
        // New clients find the server too, although the weights name the node where it began.
        let new = connected(&world, CLIENTS).context("new clients")?;
        all_go_on(&world, &new).context("new clients")?;
        new.stop()?;
        again.begin_again()
    })?;
    ensure!(
        again.clean.get() > 0,
        "in each move something was sent again"
    );
    load.stop()
}

/// Retransmissions of the clients' kernel.
struct Again<'a> {
    world: &'a World,
    /// Retransmissions and timeouts at the beginning of a move.
    before: Cell<[u64; 2]>,
    /// Number of moves without retransmissions.
    clean: Cell<u32>,
}

impl Again<'_> {
    fn begin(world: &World) -> Result<Again<'_>> {
        let again = Again {
            world,
            before: Cell::default(),
            clean: Cell::default(),
        };
        again.begin_again()?;
        Ok(again)
    }

    fn begin_again(&self) -> Result<()> {
        self.before.set(self.counts()?);
        Ok(())
    }

    fn counts(&self) -> Result<[u64; 2]> {
        let values = of_host(self.world.cluster.lab(), "c1")?;
        let of = |name: &str| values.get(name).copied().context("no such count");
        Ok([of("Tcp.RetransSegs")?, of("TcpExt.TCPTimeouts")?])
    }

    /// Checks the retransmissions of one move. A packet lost in a move is retransmitted however short the freeze is, so
    /// the caller also requires at least one move without retransmissions. A held packet is only retransmitted if the
    /// hold lasts longer than the kernel waits, and then once, by a probe.
    fn judge(&self, status: &MigrationStatus) -> Result<()> {
        let (before, now) = (self.before.get(), self.counts()?);
        let [again, timeouts] = [0, 1].map(|at| now[at] - before[at]);
        let freeze = Duration::from_secs_f64(status.freeze_us.unwrap_or_default() / 1e6);
        eprintln!("{again} sent again, {timeouts} timeouts in a freeze of {freeze:?}");
        if again == 0 {
            self.clean.set(self.clean.get() + 1);
        }
        let connections = CLIENTS as u64;
        let allowed = if freeze < PROBE_MIN { 0 } else { connections };
        ensure!(
            freeze >= TIMEOUT_MIN || (again <= allowed && timeouts == 0),
            "{again} segments were sent again, {timeouts} after a timeout, in a freeze of {freeze:?}"
        );
        Ok(())
    }
}

/// Opens connections that exchange messages all the time.
pub fn connected(world: &World, count: usize) -> Result<Load> {
    let service = SocketAddr::new(world.cluster.service_address(Family::V4), PORT);
    let streams = connect(world.cluster.lab(), "c1", service, count)?;
    Load::start(streams, Duration::from_millis(20))
}

pub fn all_go_on(world: &World, load: &Load) -> Result<()> {
    let before: Vec<u64> = load.members().iter().map(|member| member.turns()).collect();
    world.wait("connections are silent", || {
        let mut members = load.members().iter().zip(&before);
        Ok(members.all(|(member, before)| member.turns() >= before + 3))
    })?;
    ensure!(load.compared.wrong_bytes() == 0, "bytes are wrong");
    Ok(())
}

/// A connection that begins after the last pre-copy round moves with the server.
pub fn late(name: &str) -> Result<()> {
    let (world, folder) = serving(name)?;
    let early = connected(&world, CLIENTS)?;
    let file = world.cluster.run_file("n2", "fault")?;
    std::fs::write(&file, format!("move-freeze before pause {LATE_MS}"))?;
    let id = world.begin(pid(&folder)?, "n2", "n3")?;
    world.wait("it did not come so far", || Ok(!file.exists()))?;
    let late = connected(&world, CLIENTS)?;
    let status = world.ended("n2", id)?;
    ensure!(
        status.outcome == MigrationOutcome::Moved,
        "{:?}",
        status.outcome
    );
    for load in [early, late] {
        all_go_on(&world, &load)?;
        load.stop()?;
    }
    Ok(())
}

/// Measures freezes with `HOLDFAST_CONNECTIONS` connections (default 1,024), in each socket transfer mode.
pub fn measure(name: &str) -> Result<()> {
    let count = std::env::var("HOLDFAST_CONNECTIONS").map_or(Ok(1024), |count| count.parse())?;
    let (world, folder) = serving(name)?;
    let service = SocketAddr::new(world.cluster.service_address(Family::V4), PORT);
    let streams = connect(world.cluster.lab(), "c1", service, count)?;
    let load = Load::start(streams, interval(count))?;
    let mut pid = pid(&folder)?;
    let ways = [
        SocketsWay::Incremental,
        SocketsWay::Collective,
        SocketsWay::Iterative,
    ];
    for way in ways {
        for turn in 0..6 {
            let (from, to) = [("n2", "n3"), ("n3", "n2")][turn % 2];
            all_go_on(&world, &load)?;
            let status = world.move_by(pid, from, to, way)?;
            eprintln!(
                "{count} {way:?}: {:.0?} us, predicted {:.0?}, {} bytes, {:.0?}",
                status.freeze_us, status.predicted_freeze_us, status.freeze_bytes, status.phases_us
            );
            world.wait("it is left", || Ok(world.residents(from)?.is_empty()))?;
            pid = world.residents(to)?[0].pid;
        }
    }
    load.stop()
}
