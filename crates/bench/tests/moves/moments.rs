//! Connections that begin or end during a move.

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

/// Time in milliseconds for which a daemon waits at a step: long enough to open and to close connections.
const PAUSE_MS: u32 = 400;

/// Number of bytes that exceeds the receive buffer of a slow client, and fits into the server's send buffer.
const MUCH: usize = 24_000;
/// Receive buffer of a client that does not read, about.
const LITTLE: usize = 4_096;

/// A server closes connections after the last pre-copy round, with unread data in flight: clients still receive the
/// data and the end.
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
    // No flow is left at the server's node, so the clients' ports are free.
    world.wait("flows are left at n3", || {
        Ok(flows(&world, "n3")? == 0 && flows(&world, "n1")? == 0)
    })
}

/// Clients connect through the node that their server moves to, when the server is complete there; then the move is
/// cancelled.
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

/// Opens connections of clients with a small receive buffer.
fn slow_clients(world: &World) -> Result<Vec<TcpStream>> {
    let service = SocketAddr::new(world.cluster.service_address(Family::V4), PORT);
    let slow = || -> Result<TcpStream> {
        let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
        // The size must be set before the connection: a window once offered cannot be taken back.
        net::sockopt::set_socket_recv_buffer_size(&socket, LITTLE)?;
        net::connect(&socket, &service)?;
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(stream)
    };
    let all = || (0..CLIENTS).map(|_| slow()).collect();
    world.cluster.lab().in_net("c1", all)?
}

/// Counts the connections that a node's server has closed, with data or FIN not acknowledged yet.
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

/// Counts the TCP flows that a node knows.
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
