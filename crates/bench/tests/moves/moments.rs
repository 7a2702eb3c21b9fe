//! Connections that begin or end in the moment of a move.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::MigrationOutcome;
use holdfast_bench::cluster::Family;
use holdfast_bench::load::connect;
use rustix::net::{self, AddressFamily, SocketType};

use crate::clients::{CLIENTS, pid, serving};
use crate::common::{PATIENCE, PORT};
use crate::world::World;

/// How long a daemon waits at a step: long enough to connect, and to end connections.
const PAUSE_MS: u32 = 400;

/// More than a client's kernel takes for it, and less than the server's does.
const MUCH: usize = 24_000;
/// How much the kernel of a client takes that does not read, about.
const LITTLE: usize = 4_096;

/// A server closes connections after the last round, with data that clients have not taken: the data and the end come all the same.
pub fn ends(name: &str) -> Result<()> {
    let (world, folder) = serving(name)?;
    let mut clients = slow_clients(&world)?;
    let said: Vec<u8> = (0..MUCH).map(|at| (at * 31) as u8).collect();
    for client in &mut clients {
        client.write_all(&said)?;
    }
    let file = world.cluster.run_file("n2", "fault")?;
    std::fs::write(&file, format!("move-freeze before pause {PAUSE_MS}"))?;
    let id = world.begin(pid(&folder)?, "n2", "n3")?;
    world.wait("it did not come so far", || Ok(!file.exists()))?;
    for client in &clients {
        client.shutdown(Shutdown::Write)?;
    }
    world.wait("the server does not close them", || {
        Ok(closing(&world, "n2")? == clients.len())
    })?;
    let status = world.ended("n2", id)?;
    ensure!(status.outcome == MigrationOutcome::Moved, "{status:?}");
    for (number, client) in clients.iter_mut().enumerate() {
        let mut back = Vec::new();
        let read = client.read_to_end(&mut back);
        read.with_context(|| format!("client {number}, after {} bytes", back.len()))?;
        ensure!(back == said, "client {number}: wrong bytes");
    }
    world.nothing_is_in_transit()?;
    // Nothing of them is left where the server is: the clients' ports are free.
    world.wait("flows are left at n3", || {
        Ok(flows(&world, "n3")? == 0 && flows(&world, "n1")? == 0)
    })
}

/// Clients connect by the node to which their server is on its way, when all of it is there; the move is given up.
pub fn begin_before_it_stays(name: &str) -> Result<()> {
    let (world, folder) = serving(name)?;
    world.move_to(pid(&folder)?, "n2", "n3")?;
    let server = world.residents("n3")?[0].pid;
    let file = world.cluster.run_file("n2", "fault")?;
    std::fs::write(&file, format!("move-restore after pause {PAUSE_MS}"))?;
    let id = world.begin(server, "n3", "n2")?;
    world.wait("it did not come so far", || Ok(!file.exists()))?;
    let mut clients = clients(&world)?;
    for client in &mut clients {
        client.write_all(b"early")?;
    }
    let control = world.cluster.control_blocking("n3")?;
    control.run(async |client| client.cancel_migration(id).await)?;
    let status = world.ended("n3", id)?;
    let is_kept = matches!(status.outcome, MigrationOutcome::Kept { .. });
    ensure!(is_kept, "{status:?}");
    for (number, client) in clients.iter_mut().enumerate() {
        let mut back = [0; 5];
        let read = client.read_exact(&mut back);
        read.with_context(|| format!("client {number}"))?;
        ensure!(back == *b"early", "client {number}: wrong bytes");
    }
    Ok(())
}

fn clients(world: &World) -> Result<Vec<TcpStream>> {
    let service = SocketAddr::new(world.cluster.service_address(Family::V4), PORT);
    let streams = connect(world.cluster.lab(), "c1", service, CLIENTS)?;
    for stream in &streams {
        stream.set_read_timeout(Some(PATIENCE))?;
    }
    Ok(streams)
}

/// Clients for which little can wait.
fn slow_clients(world: &World) -> Result<Vec<TcpStream>> {
    let service = SocketAddr::new(world.cluster.service_address(Family::V4), PORT);
    let slow = || -> Result<TcpStream> {
        let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
        // Before it connects: what it has offered to take it takes.
        net::sockopt::set_socket_recv_buffer_size(&socket, LITTLE)?;
        net::connect(&socket, &service)?;
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(stream)
    };
    let all = || (0..CLIENTS).map(|_| slow()).collect();
    world.cluster.lab().in_net("c1", all)?
}

/// Connections that a node's server has closed, and whose data or end are not acknowledged.
fn closing(world: &World, node: &str) -> Result<usize> {
    let mut command = world.cluster.lab().command(node)?;
    command.args(["ss", "-Htn", "state", "last-ack", "sport", "="]);
    let output = command
        .arg(format!(":{PORT}"))
        .stdin(Stdio::null())
        .output()?;
    ensure!(output.status.success(), "ss: {output:?}");
    Ok(output.stdout.iter().filter(|byte| **byte == b'\n').count())
}

/// Flows of connections that a node knows.
fn flows(world: &World, node: &str) -> Result<u64> {
    let control = world.cluster.control_blocking(node)?;
    let query = holdfast_api::control::FlowQuery {
        protocol: Some(holdfast_api::Protocol::Tcp),
        ..Default::default()
    };
    Ok(control
        .run(async |client| client.flows(&query).await)?
        .total)
}
