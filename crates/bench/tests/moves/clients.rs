//! A server that knows nothing of moves goes round while clients talk to it.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::Protocol;
use holdfast_api::control::{MigrationOutcome, MigrationStatus, SocketsWay};
use holdfast_bench::cluster::{Cluster, ClusterSpec, Family, Service};
use holdfast_bench::load::{Load, connect, interval};

use crate::common::PORT;
use crate::faults::nothing_is_written;
use crate::numbered::Datagrams;
use crate::world::{World, compile};

/// Clients with datagrams, and connections.
pub const CLIENTS: usize = 8;

/// For how long a move is held up before the freeze: long enough to connect.
const LATE_MS: u32 = 300;

/// A group that serves echoes at n2 over IPv4, by a program without a session.
pub fn serving(name: &str) -> Result<(World, tempfile::TempDir)> {
    serving_over(name, Family::V4)
}

/// The same over one family.
pub fn serving_over(name: &str, family: Family) -> Result<(World, tempfile::TempDir)> {
    serving_by(name, family, ("", "</dev/null"))
}

/// The same of a server with this in front of its command and behind it, for a shell.
pub fn serving_by(
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
        .arg(compile("echo")?)
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

/// Moves the server round, its sockets in each way once, and looks at clients after each move.
fn round(world: &World, folder: &tempfile::TempDir, well: impl Fn() -> Result<()>) -> Result<()> {
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
        well().with_context(|| format!("after the move from {from} to {to}, {way:?}"))?;
        world.wait("it is left", || Ok(world.residents(from)?.is_empty()))?;
        let residents = world.residents(to)?;
        ensure!(residents.len() == 1, "{residents:?}");
        pid = residents[0].pid;
    }
    Ok(())
}

/// Both nodes say what took how long, and no more than there was.
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
    round(&world, &folder, || {
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

/// No byte of a connection is wrong, and none ends.
pub fn connections(name: &str) -> Result<()> {
    let (world, folder) = serving(name)?;
    let load = connected(&world, CLIENTS)?;
    all_go_on(&world, &load)?;
    round(&world, &folder, || {
        all_go_on(&world, &load)?;
        // New clients find it too: the weights name the node where it began.
        let new = connected(&world, CLIENTS).context("new clients")?;
        all_go_on(&world, &new).context("new clients")?;
        new.stop()
    })?;
    load.stop()
}

/// Connections that exchange messages all the time.
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

/// A connection that begins after the last round goes along.
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

/// Daemons die while connections are in repair mode: clients go on, wherever the server is.
pub fn killed(name: &str) -> Result<()> {
    let (world, folder) = serving(name)?;
    let load = connected(&world, CLIENTS)?;
    let (mut at, mut to) = ("n2", "n3");
    let mut pid = pid(&folder)?;
    for (command, donors, way) in [
        ("move-freeze after", true, SocketsWay::Collective),
        ("move-restore after", false, SocketsWay::Collective),
        ("move-go before", false, SocketsWay::Incremental),
        ("move-release before", true, SocketsWay::Incremental),
    ] {
        let victim = if donors { at } else { to };
        let before = world.cluster.daemon_starts(victim);
        let file = world.cluster.run_file(victim, "fault")?;
        std::fs::write(&file, format!("{command} die"))?;
        world.begin_by(pid, at, to, way)?;
        world.wait("the daemon did not die", || {
            Ok(world.cluster.daemon_starts(victim) > before)
        })?;
        world.cluster.wait_ready()?;
        all_go_on(&world, &load).with_context(|| format!("{command}, {at} to {to}"))?;
        world.wait("something is written down", || nothing_is_written(&world))?;
        if let [resident] = &world.residents(to)?[..] {
            pid = resident.pid;
            (at, to) = (to, at);
        }
        eprintln!("{command}: it is on {at}");
    }
    load.stop()
}

/// Freezes with as many connections as `HOLDFAST_CONNECTIONS` says (1,024), in each way.
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
