//! Migrations of a process with a session to a database on another host: the session goes on, from the address where it
//! began.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{FlowQuery, FlowState, MigrationStatus};
use holdfast_bench::cluster::Family;

use crate::clients::pid;
use crate::faults::nothing_is_written;
use crate::world::{Counter, World, compile};

/// Port of the database.
pub const PORT: u16 = 3306;

/// Starts a database on a host that echoes its requests. If the host is a node, the node's daemon does not know of the
/// database.
pub fn database(world: &World, host: &str) -> Result<SocketAddr> {
    let address = SocketAddr::new(world.cluster.address(host, Family::V4)?, PORT);
    serve(world, host, address)?;
    Ok(address)
}

/// Starts the same database at one address of that host.
pub fn serve(world: &World, host: &str, address: SocketAddr) -> Result<()> {
    let listener = world
        .cluster
        .lab()
        .in_net(host, || TcpListener::bind(address))??;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || answer(stream));
        }
    });
    Ok(())
}

fn answer(mut stream: std::net::TcpStream) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        if stream.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
}

pub fn client(world: &World, node: &str, database: SocketAddr) -> Result<Counter> {
    let (address, port) = (database.ip().to_string(), database.port().to_string());
    world.start_program(node, &[], "session", &[&address, &port])
}

/// Moves the client around the group, with the session to each kind of host.
pub fn goes_round(world: &World) -> Result<()> {
    for host in ["c1", "n1", "n3"] {
        let counter = client(world, "n2", database(world, host)?)?;
        for (from, to) in [("n2", "n3"), ("n3", "n1"), ("n1", "n2"), ("n2", "n1")] {
            let moved = world
                .migrate(&counter, from, to)
                .with_context(|| format!("with a session to {host}"))?;
            told(&moved, host == "c1")?;
            eprintln!(
                "{from} to {to}, session to {host}: {:?} us",
                moved.freeze_us
            );
            if (host, to) == ("c1", "n1") {
                learnt(world, "n2", "n1")?;
                world.goes_on(&counter, to)?;
            }
        }
        world.end(&counter)?;
        world.wait("something is left", || nothing_is_written(world))?;
    }
    Ok(())
}

/// Waits until the node that forwards the session knows where the process is, by whichever way it moved there.
fn learnt(world: &World, home: &str, wanted: &str) -> Result<()> {
    let address = world.cluster.address(home, Family::V4)?;
    let control = world.cluster.control_blocking(home)?;
    world.wait("the session is forwarded to where it was", || {
        let query = FlowQuery::default();
        let flows = control
            .run(async |client| client.flows(&query).await)?
            .flows;
        let mut of_session = flows.iter().filter(|of| of.flow.local().ip() == address);
        let there = FlowState::Owned {
            owner: wanted.to_owned(),
        };
        Ok(of_session.any(|of| of.state == there))
    })
}

/// Asserts that the session is reported as forwarded if the database's host has no daemon.
fn told(moved: &MigrationStatus, forwarded: bool) -> Result<()> {
    let named = moved
        .forwarded
        .iter()
        .filter(|flow| flow.starts_with("tcp:"))
        .count();
    ensure!(named == usize::from(forwarded), "{:?}", moved.forwarded);
    Ok(())
}

/// A daemon dies at a step of the move: the session goes on, and its process is at one node.
pub fn survives(world: &World, points: &[(&str, &str)]) -> Result<()> {
    for host in ["c1", "n1"] {
        let database = database(world, host)?;
        let counter = client(world, "n2", database)?;
        let (mut at, mut to) = ("n2", "n3");
        for (role, command) in points {
            let victim = match *role {
                "donor" => at,
                "acceptor" => to,
                _ => "n1",
            };
            kill_at(world, &counter, (at, to), (victim, command))
                .with_context(|| format!("{role} at {command}, {at} to {to}, session to {host}"))?;
            world.wait("something is written down", || nothing_is_written(world))?;
            world.wait("it is nowhere, or at two places", || {
                let places = [world.runs("n2", "session")?, world.runs("n3", "session")?];
                Ok(places == [1, 0] || places == [0, 1])
            })?;
            if world.runs(to, "session")? == 1 {
                (at, to) = (to, at);
            }
            world.goes_on(&counter, at)?;
            eprintln!("{role} killed at {command}, session to {host}: it is on {at}");
        }
        world.end(&counter)?;
    }
    Ok(())
}

fn kill_at(
    world: &World,
    counter: &Counter,
    (from, to): (&str, &str),
    (victim, command): (&str, &str),
) -> Result<()> {
    let before = world.cluster.daemon_starts(victim);
    let file = world.cluster.run_file(victim, "fault")?;
    std::fs::write(&file, format!("{command} die"))?;
    world.begin(world.pid_on(from, counter)?, from, to)?;
    world.wait("the daemon did not die", || {
        Ok(world.cluster.daemon_starts(victim) > before)
    })?;
    world.cluster.wait_ready()
}

/// Both ends of a session are processes that move, one after the other.
pub fn both_ends(world: &World) -> Result<()> {
    let folder = tempfile::tempdir()?;
    start_echo(world, &folder)?;
    let address: IpAddr = world.cluster.address("n1", Family::V4)?;
    let counter = client(world, "n2", SocketAddr::new(address, PORT))?;
    let mut client_at = ("n2", counter.last()?.pid);
    let mut database_at = ("n1", pid(&folder)?);
    // The steps place the ends at each other's homes, at a third node together, and back. After each step the node that
    // an end has left is closed to the other end.
    let steps = [
        ("client", "n3"),
        ("database", "n3"),
        ("client", "n2"),
        ("database", "n2"),
        ("database", "n1"),
        ("client", "n1"),
        ("client", "n3"),
        ("database", "n3"),
        ("database", "n1"),
        ("client", "n2"),
    ];
    for (who, to) in steps {
        let (from, pid) = match who {
            "client" => client_at,
            _ => database_at,
        };
        let status = world
            .move_to(pid, from, to)
            .with_context(|| format!("the {who}"))?;
        match who {
            "client" => client_at = (to, resident(world, to, "session")?),
            _ => database_at = (to, resident(world, to, "echo")?),
        }
        world
            .goes_on(&counter, client_at.0)
            .with_context(|| format!("after the {who} moved from {from} to {to}"))?;
        eprintln!("the {who} from {from} to {to}: {:?} us", status.freeze_us);
        // Within this time a node catches up on missed updates; the session must be right afterwards too.
        std::thread::sleep(Duration::from_millis(300));
    }
    std::fs::write(counter.end_file(), "")?;
    world.wait("the client does not end", || {
        Ok(world.runs(client_at.0, "session")? == 0)
    })?;
    let mut kill = world.cluster.lab().command(database_at.0)?;
    kill.args(["kill", "-9", &database_at.1.to_string()])
        .status()?;
    Ok(())
}

/// Starts a database that is a movable program, at its node's own address.
fn start_echo(world: &World, folder: &tempfile::TempDir) -> Result<()> {
    let mut command = world.cluster.lab().command("n1")?;
    let in_background = "setsid \"$0\" \"$@\" </dev/null >/dev/null 2>&1 &";
    command
        .args(["sh", "-c", in_background])
        .arg(compile("echo")?)
        .args(["0.0.0.0", &PORT.to_string()])
        .arg(folder.path().join("pid"));
    let status = command.stdin(Stdio::null()).status()?;
    ensure!(status.success(), "the database was not started: {status}");
    world.wait("the database does not start", || Ok(pid(folder).is_ok()))
}

/// Returns the PID of a program that has moved to this node.
fn resident(world: &World, node: &str, program: &str) -> Result<i32> {
    let residents = world.residents(node)?;
    let mut found = residents.iter().filter(|of| of.name.starts_with(program));
    let found = found.next().map(|of| of.pid);
    found.with_context(|| format!("{program} did not come to {node}: {residents:?}"))
}
