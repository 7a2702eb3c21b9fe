//! Connections that are not accepted yet when their server moves.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::MigrationOutcome;
use holdfast_testbed::cluster::IpFamily;
use holdfast_testbed::connection_load::open_connections;

use crate::client_traffic::{CLIENTS, read_pid, start_group, start_group_over};
use crate::common::{PATIENCE, PORT};
use crate::world::MigrationGroup;

/// Number of bytes: more than the first segment, less than the initial window.
const LONG_WRITE_BYTES: usize = 20_000;

/// Clients connect and write to a server that does not accept. The server moves twice, to another node each time, and
/// accepts the clients after each move.
pub fn unaccepted_connections_move(name: &str, family: IpFamily) -> Result<()> {
    let (world, folder) = start_group_over(name, family)?;
    let service = SocketAddr::new(world.cluster.service_address(family), PORT);
    let mut pid = read_pid(&folder)?;
    for (from, to) in [("n2", "n3"), ("n3", "n1")] {
        exchange_datagram(&world, service, b"wait")?;
        let mut early = open_clients(&world, service)?;
        world.move_to(pid, from, to)?;
        let mut late = open_clients(&world, service).context("new clients")?;
        exchange_datagram(&world, service, b"accept")?;
        for (number, client) in early.iter_mut().chain(&mut late).enumerate() {
            assert_echoed(client).with_context(|| format!("{from} to {to}: client {number}"))?;
        }
        pid = world.residents(to)?[0].pid;
    }
    Ok(())
}

/// The queue at the first acceptor is too short for all connections, so some wait in its daemon when the server moves on.
pub fn connections_without_place_follow_server(name: &str) -> Result<()> {
    /// Backlog of listeners at the first acceptor, in connections.
    const BACKLOG: &str = "1";
    let (world, folder) = start_group(name)?;
    let service = SocketAddr::new(world.cluster.service_address(IpFamily::V4), PORT);
    let pid = read_pid(&folder)?;
    let limit = || std::fs::write("/proc/sys/net/core/somaxconn", BACKLOG);
    world.cluster.lab().run_in_net_namespace("n3", limit)??;
    exchange_datagram(&world, service, b"wait")?;
    let mut clients = open_clients(&world, service)?;
    world.move_to(pid, "n2", "n3")?;
    world.move_to(world.residents("n3")?[0].pid, "n3", "n1")?;
    exchange_datagram(&world, service, b"accept")?;
    for (number, client) in clients.iter_mut().enumerate() {
        assert_echoed(client).with_context(|| format!("client {number}"))?;
    }
    Ok(())
}

/// The acceptor's daemon dies before it activates the moved connections; the connections survive.
pub fn unaccepted_connections_survive_crash(name: &str) -> Result<()> {
    let (world, folder) = start_group(name)?;
    let service = SocketAddr::new(world.cluster.service_address(IpFamily::V4), PORT);
    let pid = read_pid(&folder)?;
    exchange_datagram(&world, service, b"wait")?;
    let mut clients = open_clients(&world, service)?;
    let before = world.cluster.daemon_starts("n3");
    let file = world.cluster.run_path("n3", "fault")?;
    std::fs::write(&file, "activate before die")?;
    let id = world.begin(pid, "n2", "n3")?;
    let status = world.wait_for_migration("n2", id)?;
    ensure!(status.outcome == MigrationOutcome::Moved, "{status:?}");
    world.wait("the daemon did not die", || {
        Ok(world.cluster.daemon_starts("n3") > before)
    })?;
    world.cluster.wait_ready()?;
    exchange_datagram(&world, service, b"accept")?;
    for (number, client) in clients.iter_mut().enumerate() {
        assert_echoed(client).with_context(|| format!("client {number}"))?;
    }
    Ok(())
}

/// The donor's daemon dies while it gives up the process, which runs at the acceptor; connections that wait at the donor,
/// or begin meanwhile, follow the process. With post-copy the donor still has pages of the process.
pub fn unaccepted_connections_survive_donor_crash(name: &str, is_post_copy: bool) -> Result<()> {
    let (world, folder) = start_group(name)?;
    let service = SocketAddr::new(world.cluster.service_address(IpFamily::V4), PORT);
    let pid = read_pid(&folder)?;
    exchange_datagram(&world, service, b"wait")?;
    let mut clients = open_clients(&world, service)?;
    let before = world.cluster.daemon_starts("n2");
    let file = world.cluster.run_path("n2", "fault")?;
    std::fs::write(&file, "move-release before die")?;
    if is_post_copy {
        exchange_datagram(&world, service, b"write")?;
        world.begin_post_copy(pid, "n2", "n3")?;
    } else {
        world.begin(pid, "n2", "n3")?;
    }
    world.wait("the process does not run at n3", || {
        Ok(!world.residents("n3")?.is_empty())
    })?;
    world.wait("the daemon did not die", || {
        Ok(world.cluster.daemon_starts("n2") > before)
    })?;
    clients.extend(open_clients(&world, service).context("new clients")?);
    world.cluster.wait_ready()?;
    world.wait("the original is left at n2", || {
        Ok(world.count_processes("n2", "echo")? == 0)
    })?;
    exchange_datagram(&world, service, b"accept")?;
    for (number, client) in clients.iter_mut().enumerate() {
        assert_echoed(client).with_context(|| format!("client {number}"))?;
    }
    Ok(())
}

/// A client, the bytes that it has written, and true if it has shut down its sending side.
type UnacceptedClient = (TcpStream, Vec<u8>, bool);

/// Opens clients that have written nothing, a little, much, and a little followed by FIN.
fn open_clients(world: &MigrationGroup, service: SocketAddr) -> Result<Vec<UnacceptedClient>> {
    let streams = open_connections(world.cluster.lab(), "c1", service, CLIENTS)?;
    let mut clients = Vec::new();
    for (number, mut stream) in streams.into_iter().enumerate() {
        stream.set_read_timeout(Some(PATIENCE))?;
        let length = [0, 5, LONG_WRITE_BYTES, 7][number % 4];
        let written: Vec<u8> = (0..length).map(|at| (at * 31 + number) as u8).collect();
        stream.write_all(&written)?;
        let is_shut_down = number % 4 == 3;
        if is_shut_down {
            stream.shutdown(Shutdown::Write)?;
        }
        clients.push((stream, written, is_shut_down));
    }
    Ok(clients)
}

/// Asserts that the server echoes everything, including data written after the move.
fn assert_echoed((stream, written, is_shut_down): &mut UnacceptedClient) -> Result<()> {
    if !*is_shut_down {
        stream.write_all(b"and now this")?;
        written.extend(b"and now this");
    }
    let mut received = vec![0; written.len()];
    stream.read_exact(&mut received).context("no answer")?;
    ensure!(received == *written, "wrong bytes");
    if *is_shut_down {
        ensure!(
            stream.read(&mut received)? == 0,
            "the server does not close the connection"
        );
    }
    Ok(())
}

/// Sends a datagram to the server and waits for its answer.
fn exchange_datagram(world: &MigrationGroup, service: SocketAddr, what: &[u8]) -> Result<()> {
    let socket: UdpSocket = crate::numbered_datagrams::client_socket(&world.cluster, service);
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    world.wait("the server does not answer", || {
        socket.send(what)?;
        let mut answer = [0; 16];
        Ok(socket
            .recv(&mut answer)
            .is_ok_and(|got| answer[..got] == *what))
    })
}
