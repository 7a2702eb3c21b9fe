//! Servers with sockets that share a port (`SO_REUSEPORT`): each UDP client keeps reaching the socket that knows it,
//! wherever the server is, and a reuseport program goes on selecting the socket.

use std::io::Read;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_bench::cluster::Family;
use holdfast_bench::load::connect;

use crate::clients::{pid, serving_program};
use crate::common::PORT;
use crate::numbered::client;
use crate::world::World;

/// Number of clients, enough for each of four sockets to have some.
const CLIENTS: usize = 40;
/// Number of attempts: datagrams may be lost while the machine is busy, but a client without any answer shows a fault.
const TRIES: usize = 30;
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// A client, with the number of its socket at the server and the count that the socket reported.
struct Client {
    socket: UdpSocket,
    relay: usize,
    count: u64,
}

impl Client {
    fn new(world: &World) -> Result<Client> {
        let service = SocketAddr::new(world.cluster.service_address(Family::V4), PORT);
        let socket = client(&world.cluster, service);
        socket.set_read_timeout(Some(ANSWER_MAX))?;
        let mut client = Client {
            socket,
            relay: 0,
            count: 0,
        };
        let (relay, count, _) = client.ask()?;
        (client.relay, client.count) = (relay, count);
        Ok(client)
    }

    /// Asks for the socket's number and its count of datagrams. The third value is the number of datagrams sent.
    fn ask(&mut self) -> Result<(usize, u64, u64)> {
        for sent in 1..=TRIES as u64 {
            self.socket.send(b"count")?;
            let mut bytes = [0; 64];
            let Ok(length) = self.socket.recv(&mut bytes) else {
                continue;
            };
            let text = std::str::from_utf8(&bytes[..length])?;
            let (relay, count) = text.split_once(' ').context("not two words")?;
            return Ok((relay.parse()?, count.parse()?, sent));
        }
        anyhow::bail!("exceeded time: a client has no answer")
    }

    /// Asserts that the same socket answers, with a count that misses at most the lost datagrams.
    fn is_known(&mut self) -> Result<()> {
        let (relay, count, sent) = self.ask()?;
        let expected = self.count + 1..=self.count + sent;
        ensure!(
            relay == self.relay && expected.contains(&count),
            "socket {relay} has had {count} datagrams of a client of socket {}, which had {}",
            self.relay,
            self.count
        );
        self.count = count;
        Ok(())
    }
}

/// Clients that connect before or between moves stay with their sockets.
pub fn clients_keep_their_sockets(name: &str) -> Result<()> {
    let (world, folder) = serving_program("relays", name, Family::V4, ("", "</dev/null"))?;
    let mut pid = pid(&folder)?;
    let mut clients = Vec::new();
    for (from, to) in [("n2", "n3"), ("n3", "n1"), ("n1", "n2")] {
        for _ in 0..CLIENTS {
            clients.push(Client::new(&world)?);
        }
        let of = |relay| clients.iter().any(|client| client.relay == relay);
        ensure!((0..4).all(of), "sockets without clients");
        world.move_to(pid, from, to)?;
        world.wait("it is left", || Ok(world.residents(from)?.is_empty()))?;
        let residents = world.residents(to)?;
        ensure!(residents.len() == 1, "{residents:?}");
        pid = residents[0].pid;
        for client in &mut clients {
            let known = client.is_known();
            known.with_context(|| format!("after the move from {from} to {to}"))?;
        }
    }
    Ok(())
}

/// A reuseport program sends all connections to one listener, before and after moves.
pub fn groups_choose_as_before(name: &str) -> Result<()> {
    /// Number of the listener that the program selects.
    const CHOSEN: &str = "2";
    let (world, folder) = serving_program("chosen", name, Family::V4, ("", "</dev/null"))?;
    let service = SocketAddr::new(world.cluster.service_address(Family::V4), PORT);
    let all_are_chosen = || {
        for mut connection in connect(world.cluster.lab(), "c1", service, CLIENTS)? {
            let mut said = String::new();
            connection.set_read_timeout(Some(ANSWER_MAX * TRIES as u32))?;
            connection.read_to_string(&mut said)?;
            ensure!(said == CHOSEN, "a connection came to listener {said}");
        }
        Ok(())
    };
    all_are_chosen().context("before")?;
    let mut pid = pid(&folder)?;
    for (from, to) in [("n2", "n3"), ("n3", "n2")] {
        world.move_to(pid, from, to)?;
        let residents = world.residents(to)?;
        ensure!(residents.len() == 1, "{residents:?}");
        pid = residents[0].pid;
        all_are_chosen().with_context(|| format!("after the move from {from} to {to}"))?;
    }
    Ok(())
}
