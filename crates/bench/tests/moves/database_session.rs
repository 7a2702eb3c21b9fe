//! Migrations of a process with a session to a database on another host: the session goes on, from the address where it
//! began.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{FlowListQuery, FlowState, MigrationStatus};
use holdfast_testbed::cluster::IpFamily;

use crate::client_traffic::read_pid;
use crate::faults::no_move_records_left;
use crate::world::{CountingProgram, MigrationGroup, compile_program};

/// Port of the database.
pub const PORT: u16 = 3306;

/// Starts a database on a host that echoes its requests. If the host is a node, the node's daemon does not know of the
/// database.
pub fn start_database(world: &MigrationGroup, host: &str) -> Result<SocketAddr> {
    let address = SocketAddr::new(world.cluster.address(host, IpFamily::V4)?, PORT);
    start_database_at(world, host, address)?;
    Ok(address)
}

/// Starts the same database at one address of that host.
pub fn start_database_at(world: &MigrationGroup, host: &str, address: SocketAddr) -> Result<()> {
    let listener = world
        .cluster
        .lab()
        .run_in_net_namespace(host, || TcpListener::bind(address))??;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || echo_requests(stream));
        }
    });
    Ok(())
}

fn echo_requests(mut stream: std::net::TcpStream) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        if stream.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
}

pub fn start_client(
    world: &MigrationGroup,
    node: &str,
    database: SocketAddr,
) -> Result<CountingProgram> {
    let (address, port) = (database.ip().to_string(), database.port().to_string());
    world.start_program(node, &[], "session", &[&address, &port])
}

/// Moves the client around the group, with the session to each kind of host.
pub fn migrate_client_around_group(world: &MigrationGroup) -> Result<()> {
    for host in ["c1", "n1", "n3"] {
        let counter = start_client(world, "n2", start_database(world, host)?)?;
        for (from, to) in [("n2", "n3"), ("n3", "n1"), ("n1", "n2"), ("n2", "n1")] {
            let moved = world
                .migrate_counter(&counter, from, to)
                .with_context(|| format!("with a session to {host}"))?;
            assert_forwarded_reported(&moved, host == "c1")?;
            eprintln!(
                "{from} to {to}, session to {host}: {:?} us",
                moved.freeze_us
            );
            if (host, to) == ("c1", "n1") {
                wait_until_forwarder_knows(world, "n2", "n1")?;
                world.assert_goes_on(&counter, to)?;
            }
        }
        world.end(&counter)?;
        world.wait("records of the move are left in a run directory", || {
            no_move_records_left(world)
        })?;
    }
    Ok(())
}

/// Waits until the node that forwards the session knows where the process is, by whichever way it moved there.
fn wait_until_forwarder_knows(
    world: &MigrationGroup,
    database_node: &str,
    wanted: &str,
) -> Result<()> {
    let address = world.cluster.address(database_node, IpFamily::V4)?;
    let control = world.cluster.blocking_control_client(database_node)?;
    world.wait(
        "the session is still forwarded to its previous node",
        || {
            let query = FlowListQuery::default();
            let flows = control
                .run(async |client| client.flows(&query).await)?
                .flows;
            let mut session_flows = flows.iter().filter(|of| of.flow.local().ip() == address);
            let owned_there = FlowState::Owned {
                owner: wanted.to_owned(),
            };
            Ok(session_flows.any(|of| of.state == owned_there))
        },
    )
}

/// Asserts that the session is reported as forwarded if the database's host has no daemon.
fn assert_forwarded_reported(moved: &MigrationStatus, forwarded: bool) -> Result<()> {
    let reported_flows = moved
        .forwarded
        .iter()
        .filter(|flow| flow.starts_with("tcp:"))
        .count();
    ensure!(
        reported_flows == usize::from(forwarded),
        "{:?}",
        moved.forwarded
    );
    Ok(())
}

/// A daemon dies at a step of the move: the session goes on, and its process is at one node.
pub fn survive_daemon_crash(world: &MigrationGroup, points: &[(&str, &str)]) -> Result<()> {
    for host in ["c1", "n1"] {
        let database = start_database(world, host)?;
        let counter = start_client(world, "n2", database)?;
        let (mut current_node, mut other_node) = ("n2", "n3");
        for (role, command) in points {
            let victim = match *role {
                "donor" => current_node,
                "acceptor" => other_node,
                _ => "n1",
            };
            migrate_with_crash(
                world,
                &counter,
                (current_node, other_node),
                (victim, command),
            )
            .with_context(|| {
                format!("{role} at {command}, {current_node} to {other_node}, session to {host}")
            })?;
            world.wait("records of the move are left in a run directory", || {
                no_move_records_left(world)
            })?;
            world.wait("the process runs at no node, or at two", || {
                let running_counts = [
                    world.count_processes("n2", "session")?,
                    world.count_processes("n3", "session")?,
                ];
                Ok(running_counts == [1, 0] || running_counts == [0, 1])
            })?;
            if world.count_processes(other_node, "session")? == 1 {
                (current_node, other_node) = (other_node, current_node);
            }
            world.assert_goes_on(&counter, current_node)?;
            eprintln!(
                "{role} killed at {command}, session to {host}: the process is on {current_node}"
            );
        }
        world.end(&counter)?;
    }
    Ok(())
}

fn migrate_with_crash(
    world: &MigrationGroup,
    counter: &CountingProgram,
    (from, to): (&str, &str),
    (victim, command): (&str, &str),
) -> Result<()> {
    let before = world.cluster.daemon_starts(victim);
    let file = world.cluster.run_path(victim, "fault")?;
    std::fs::write(&file, format!("{command} die"))?;
    world.begin(world.pid_on(from, counter)?, from, to)?;
    world.wait("the daemon did not die", || {
        Ok(world.cluster.daemon_starts(victim) > before)
    })?;
    world.cluster.wait_ready()
}

/// Both ends of a session are processes that move, one after the other.
pub fn migrate_both_ends(world: &MigrationGroup) -> Result<()> {
    let folder = tempfile::tempdir()?;
    start_movable_database(world, &folder)?;
    let address: IpAddr = world.cluster.address("n1", IpFamily::V4)?;
    let counter = start_client(world, "n2", SocketAddr::new(address, PORT))?;
    let mut client_at = ("n2", counter.last_count()?.pid);
    let mut database_at = ("n1", read_pid(&folder)?);
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
    for (process, to) in steps {
        let (from, pid) = match process {
            "client" => client_at,
            _ => database_at,
        };
        let status = world
            .move_to(pid, from, to)
            .with_context(|| format!("the {process}"))?;
        match process {
            "client" => client_at = (to, resident_pid(world, to, "session")?),
            _ => database_at = (to, resident_pid(world, to, "echo")?),
        }
        world
            .assert_goes_on(&counter, client_at.0)
            .with_context(|| format!("after the {process} moved from {from} to {to}"))?;
        eprintln!(
            "the {process} from {from} to {to}: {:?} us",
            status.freeze_us
        );
        // Within this time a node catches up on missed updates; the session must be right afterwards too.
        std::thread::sleep(Duration::from_millis(300));
    }
    std::fs::write(counter.end_file(), "")?;
    world.wait("the client does not end", || {
        Ok(world.count_processes(client_at.0, "session")? == 0)
    })?;
    let mut kill = world.cluster.lab().command(database_at.0)?;
    kill.args(["kill", "-9", &database_at.1.to_string()])
        .status()?;
    Ok(())
}

/// Starts a database that is a movable program, at its node's own address.
fn start_movable_database(world: &MigrationGroup, folder: &tempfile::TempDir) -> Result<()> {
    let mut command = world.cluster.lab().command("n1")?;
    let in_background = "setsid \"$0\" \"$@\" </dev/null >/dev/null 2>&1 &";
    command
        .args(["sh", "-c", in_background])
        .arg(compile_program("echo")?)
        .args(["0.0.0.0", &PORT.to_string()])
        .arg(folder.path().join("pid"));
    let status = command.stdin(Stdio::null()).status()?;
    ensure!(status.success(), "the database was not started: {status}");
    world.wait("the database does not start", || {
        Ok(read_pid(folder).is_ok())
    })
}

/// Returns the PID of a program that has moved to this node.
fn resident_pid(world: &MigrationGroup, node: &str, program: &str) -> Result<i32> {
    let residents = world.residents(node)?;
    let mut found = residents.iter().filter(|of| of.name.starts_with(program));
    let found = found.next().map(|of| of.pid);
    found.with_context(|| format!("{program} did not come to {node}: {residents:?}"))
}
