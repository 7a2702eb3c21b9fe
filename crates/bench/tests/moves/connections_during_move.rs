//! Connections that begin or end during a move.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::MigrationOutcome;
use holdfast_testbed::cluster::IpFamily;
use holdfast_testbed::connection_load::open_connections;
use rustix::net::{self, AddressFamily, SocketType};

use crate::client_traffic::{CLIENTS, read_pid, start_group};
use crate::common::{PATIENCE, PORT};
use crate::world::MigrationGroup;

/// Time in milliseconds for which a daemon waits at a step: long enough to open and to close connections.
const PAUSE_MS: u32 = 400;

/// Number of bytes that exceeds the receive buffer of a slow client, and fits into the server's send buffer.
const REPLY_BYTES: usize = 24_000;
/// Receive buffer of a client that does not read, about.
const CLIENT_BUFFER_BYTES: usize = 4_096;

/// A server closes connections after the last pre-copy round, with unread data in flight: clients still receive the
/// data and the end.
pub fn connections_close_before_freeze(name: &str) -> Result<()> {
    let (world, folder) = start_group(name)?;
    let mut clients = open_slow_clients(&world)?;
    let reply: Vec<u8> = (0..REPLY_BYTES).map(|at| (at * 31) as u8).collect();
    for client in &mut clients {
        client.write_all(&reply)?;
    }
    let file = world.cluster.run_path("n2", "fault")?;
    std::fs::write(&file, format!("move-freeze before pause {PAUSE_MS}"))?;
    let id = world.begin(read_pid(&folder)?, "n2", "n3")?;
    world.wait("the move did not reach the fault point", || {
        Ok(!file.exists())
    })?;
    for client in &clients {
        client.shutdown(Shutdown::Write)?;
    }
    world.wait("the server does not close its connections", || {
        Ok(count_closing(&world, "n2")? == clients.len())
    })?;
    let status = world.wait_for_migration("n2", id)?;
    ensure!(status.outcome == MigrationOutcome::Moved, "{status:?}");
    for (number, client) in clients.iter_mut().enumerate() {
        let mut received = Vec::new();
        let read = client.read_to_end(&mut received);
        read.with_context(|| format!("client {number}, after {} bytes", received.len()))?;
        ensure!(received == reply, "client {number}: wrong bytes");
    }
    world.wait_until_no_transit()?;
    // No flow is left at the server's node, so the clients' ports are free.
    world.wait("flows are left at n3", || {
        Ok(count_flows(&world, "n3")? == 0 && count_flows(&world, "n1")? == 0)
    })
}

/// Clients connect through the node that their server moves to, when the server is complete there; then the move is
/// cancelled.
pub fn connections_open_before_rollback(name: &str) -> Result<()> {
    let (world, folder) = start_group(name)?;
    world.move_to(read_pid(&folder)?, "n2", "n3")?;
    let server = world.residents("n3")?[0].pid;
    let file = world.cluster.run_path("n2", "fault")?;
    std::fs::write(&file, format!("move-restore after pause {PAUSE_MS}"))?;
    let id = world.begin(server, "n3", "n2")?;
    world.wait("the move did not reach the fault point", || {
        Ok(!file.exists())
    })?;
    let mut clients = open_clients(&world)?;
    for client in &mut clients {
        client.write_all(b"early")?;
    }
    let control = world.cluster.blocking_control_client("n3")?;
    control.run(async |client| client.cancel_migration(id).await)?;
    let status = world.wait_for_migration("n3", id)?;
    let is_kept = matches!(status.outcome, MigrationOutcome::Kept { .. });
    ensure!(is_kept, "{status:?}");
    for (number, client) in clients.iter_mut().enumerate() {
        let mut received = [0; 5];
        let read = client.read_exact(&mut received);
        read.with_context(|| format!("client {number}"))?;
        ensure!(received == *b"early", "client {number}: wrong bytes");
    }
    Ok(())
}

fn open_clients(world: &MigrationGroup) -> Result<Vec<TcpStream>> {
    let service = SocketAddr::new(world.cluster.service_address(IpFamily::V4), PORT);
    let streams = open_connections(world.cluster.lab(), "c1", service, CLIENTS)?;
    for stream in &streams {
        stream.set_read_timeout(Some(PATIENCE))?;
    }
    Ok(streams)
}

/// Opens connections of clients with a small receive buffer.
fn open_slow_clients(world: &MigrationGroup) -> Result<Vec<TcpStream>> {
    let service = SocketAddr::new(world.cluster.service_address(IpFamily::V4), PORT);
    let open_slow = || -> Result<TcpStream> {
        let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
        // The size must be set before the connection: a window once offered cannot be taken back.
        net::sockopt::set_socket_recv_buffer_size(&socket, CLIENT_BUFFER_BYTES)?;
        net::connect(&socket, &service)?;
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(stream)
    };
    let all = || (0..CLIENTS).map(|_| open_slow()).collect();
    world.cluster.lab().run_in_net_namespace("c1", all)?
}

/// Counts the connections that a node's server has closed, with data or FIN not acknowledged yet.
fn count_closing(world: &MigrationGroup, node: &str) -> Result<usize> {
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
fn count_flows(world: &MigrationGroup, node: &str) -> Result<u64> {
    let control = world.cluster.blocking_control_client(node)?;
    let query = holdfast_api::control::FlowListQuery {
        protocol: Some(holdfast_api::Protocol::Tcp),
        ..Default::default()
    };
    Ok(control
        .run(async |client| client.flows(&query).await)?
        .total)
}
