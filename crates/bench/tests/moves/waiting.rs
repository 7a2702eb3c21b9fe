//! Connections that are not accepted yet when their server moves.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::MigrationOutcome;
use holdfast_bench::cluster::Family;
use holdfast_bench::load::connect;

use crate::clients::{CLIENTS, pid, serving, serving_over};
use crate::common::{PATIENCE, PORT};
use crate::world::World;

/// Number of bytes: more than the first segment, less than the initial window.
const MUCH: usize = 20_000;

/// Clients connect and write to a server that does not accept. The server moves twice, to another node each time, and
/// accepts the clients after each move.
pub fn follow(name: &str, family: Family) -> Result<()> {
    let (world, folder) = serving_over(name, family)?;
    let service = SocketAddr::new(world.cluster.service_address(family), PORT);
    let mut pid = pid(&folder)?;
    for (from, to) in [("n2", "n3"), ("n3", "n1")] {
        tell(&world, service, b"wait")?;
        let mut early = clients(&world, service)?;
        world.move_to(pid, from, to)?;
        let mut late = clients(&world, service).context("new clients")?;
        tell(&world, service, b"accept")?;
        for (number, client) in early.iter_mut().chain(&mut late).enumerate() {
            served(client).with_context(|| format!("{from} to {to}: client {number}"))?;
        }
        pid = world.residents(to)?[0].pid;
    }
    Ok(())
}

/// The acceptor's daemon dies before it activates the moved connections; the connections survive.
pub fn survive(name: &str) -> Result<()> {
    let (world, folder) = serving(name)?;
    let service = SocketAddr::new(world.cluster.service_address(Family::V4), PORT);
    let pid = pid(&folder)?;
    tell(&world, service, b"wait")?;
    let mut clients = clients(&world, service)?;
    let before = world.cluster.daemon_starts("n3");
    let file = world.cluster.run_file("n3", "fault")?;
    std::fs::write(&file, "activate before die")?;
    let id = world.begin(pid, "n2", "n3")?;
    let status = world.ended("n2", id)?;
    ensure!(status.outcome == MigrationOutcome::Moved, "{status:?}");
    world.wait("the daemon did not die", || {
        Ok(world.cluster.daemon_starts("n3") > before)
    })?;
    world.cluster.wait_ready()?;
    tell(&world, service, b"accept")?;
    for (number, client) in clients.iter_mut().enumerate() {
        served(client).with_context(|| format!("client {number}"))?;
    }
    Ok(())
}

/// A client, the bytes that it has written, and true if it has shut down its sending side.
type Client = (TcpStream, Vec<u8>, bool);

/// Opens clients that have written nothing, a little, much, and a little followed by FIN.
fn clients(world: &World, service: SocketAddr) -> Result<Vec<Client>> {
    let streams = connect(world.cluster.lab(), "c1", service, CLIENTS)?;
    let mut clients = Vec::new();
    for (number, mut stream) in streams.into_iter().enumerate() {
        stream.set_read_timeout(Some(PATIENCE))?;
        let length = [0, 5, MUCH, 7][number % 4];
        let said: Vec<u8> = (0..length).map(|at| (at * 31 + number) as u8).collect();
        stream.write_all(&said)?;
        let is_all = number % 4 == 3;
        if is_all {
            stream.shutdown(Shutdown::Write)?;
        }
        clients.push((stream, said, is_all));
    }
    Ok(clients)
}

/// Asserts that the server echoes everything, including data written after the move.
fn served((stream, said, is_all): &mut Client) -> Result<()> {
    if !*is_all {
        stream.write_all(b"and now this")?;
        said.extend(b"and now this");
    }
    let mut back = vec![0; said.len()];
    stream.read_exact(&mut back).context("no answer")?;
    ensure!(back == *said, "wrong bytes");
    if *is_all {
        ensure!(stream.read(&mut back)? == 0, "it does not end");
    }
    Ok(())
}

/// Sends a datagram to the server and waits for its answer.
fn tell(world: &World, service: SocketAddr, what: &[u8]) -> Result<()> {
    let socket: UdpSocket = crate::numbered::client(&world.cluster, service);
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    world.wait("the server does not hear", || {
        socket.send(what)?;
        let mut answer = [0; 16];
        Ok(socket
            .recv(&mut answer)
            .is_ok_and(|got| answer[..got] == *what))
    })
}
