//! A server that knows nothing of moves goes round while clients talk to it.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::Protocol;
use holdfast_api::control::MigrationOutcome;
use holdfast_bench::cluster::{Cluster, ClusterSpec, Family, Service};
use holdfast_bench::load::{Load, connect};

use crate::common::PORT;
use crate::numbered::Datagrams;
use crate::world::{World, compile};

/// Clients with datagrams, and connections.
const CLIENTS: usize = 8;

/// A group that serves echoes at n2, by a program without a session.
pub fn serving(name: &str) -> Result<(World, tempfile::TempDir)> {
    let mut spec = ClusterSpec::new(format!("m-{name}-{}", std::process::id()));
    spec.migration = true;
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
    let address = world.cluster.service_address(Family::V4).to_string();
    let mut command = world.cluster.lab().command("n2")?;
    command
        .args([
            "sh",
            "-c",
            "setsid \"$0\" \"$@\" </dev/null >/dev/null 2>&1 &",
        ])
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

/// Moves the server round, and looks at clients after each move.
fn round(world: &World, folder: &tempfile::TempDir, well: impl Fn() -> Result<()>) -> Result<()> {
    let mut pid = pid(folder)?;
    for (from, to) in [("n2", "n3"), ("n3", "n1"), ("n1", "n2")] {
        let id = world.begin(pid, from, to)?;
        let status = world.ended(from, id)?;
        ensure!(
            status.outcome == MigrationOutcome::Moved,
            "from {from} to {to}: {:?}",
            status.outcome
        );
        eprintln!(
            "{from} to {to}: {:?} us, {:?}",
            status.freeze_us, status.phases_us
        );
        well().with_context(|| format!("after the move from {from} to {to}"))?;
        world.wait("it is left", || Ok(world.residents(from)?.is_empty()))?;
        let residents = world.residents(to)?;
        ensure!(residents.len() == 1, "{residents:?}");
        pid = residents[0].pid;
    }
    Ok(())
}

/// No datagram of a client is lost.
pub fn datagrams(name: &str) -> Result<()> {
    let (world, folder) = serving(name)?;
    let load = Datagrams::start(&world.cluster, Family::V4, CLIENTS);
    load.all_answered_again();
    round(&world, &folder, || {
        load.all_answered_again();
        Ok(())
    })?;
    let counts = load.end(name);
    ensure!(counts.lost.is_empty(), "{counts:?}");
    Ok(())
}

/// No byte of a connection is wrong, and none ends.
pub fn connections(name: &str) -> Result<()> {
    let (world, folder) = serving(name)?;
    let service = SocketAddr::new(world.cluster.service_address(Family::V4), PORT);
    let streams = connect(world.cluster.lab(), "c1", service, CLIENTS)?;
    let load = Load::start(streams, Duration::from_millis(20))?;
    let all_go_on = || {
        let before: Vec<u64> = load.members().iter().map(|member| member.turns()).collect();
        world.wait("connections are silent", || {
            let mut members = load.members().iter().zip(&before);
            Ok(members.all(|(member, before)| member.turns() >= before + 3))
        })?;
        ensure!(load.compared.wrong_bytes() == 0, "bytes are wrong");
        Ok(())
    };
    all_go_on()?;
    round(&world, &folder, all_go_on)?;
    load.stop()
}
