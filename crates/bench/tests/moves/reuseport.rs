//! Servers with sockets that share a port (`SO_REUSEPORT`): each UDP client keeps reaching the socket that knows it,
//! wherever the server is, and a reuseport program goes on selecting the socket.

use std::io::Read;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_testbed::cluster::IpFamily;
use holdfast_testbed::connection_load::open_connections;

use crate::client_traffic::{read_pid, start_group_with_program};
use crate::common::PORT;
use crate::numbered_datagrams::client_socket;
use crate::world::MigrationGroup;

/// Number of clients, enough for each of four sockets to have some.
const CLIENTS: usize = 40;
/// Number of attempts: datagrams may be lost while the machine is busy, but a client without any answer shows a fault.
const TRIES_MAX: usize = 30;
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// A client, with the number of its socket at the server and the count that the socket reported.
struct RelayClient {
    socket: UdpSocket,
    relay: usize,
    count: u64,
}

impl RelayClient {
    fn new(world: &MigrationGroup) -> Result<RelayClient> {
        let service = SocketAddr::new(world.cluster.service_address(IpFamily::V4), PORT);
        let socket = client_socket(&world.cluster, service);
        socket.set_read_timeout(Some(ANSWER_MAX))?;
        let mut client = RelayClient {
            socket,
            relay: 0,
            count: 0,
        };
        let (relay, count, _) = client.query()?;
        (client.relay, client.count) = (relay, count);
        Ok(client)
    }

    /// Asks for the socket's number and its count of datagrams. The third value is the number of datagrams sent.
    fn query(&mut self) -> Result<(usize, u64, u64)> {
        for sent in 1..=TRIES_MAX as u64 {
            self.socket.send(b"count")?;
            let mut bytes = [0; 64];
            let Ok(length) = self.socket.recv(&mut bytes) else {
                continue;
            };
            let text = std::str::from_utf8(&bytes[..length])?;
            let (relay, count) = text
                .split_once(' ')
                .context("the answer is not two numbers")?;
            return Ok((relay.parse()?, count.parse()?, sent));
        }
        anyhow::bail!("exceeded time: a client has no answer")
    }

    /// Asserts that the same socket answers, with a count that misses at most the lost datagrams.
    fn assert_same_relay(&mut self) -> Result<()> {
        let (relay, count, sent) = self.query()?;
        let expected = self.count + 1..=self.count + sent;
        ensure!(
            relay == self.relay && expected.contains(&count),
            "socket {relay} answers with count {count} to a client of socket {}, which had {}",
            self.relay,
            self.count
        );
        self.count = count;
        Ok(())
    }
}

/// Clients that connect before or between moves stay with their sockets.
pub fn clients_keep_relays(name: &str) -> Result<()> {
    let (world, folder) =
        start_group_with_program("relays", name, IpFamily::V4, ("", "</dev/null"))?;
    let mut pid = read_pid(&folder)?;
    let mut clients = Vec::new();
    for (from, to) in [("n2", "n3"), ("n3", "n1"), ("n1", "n2")] {
        for _ in 0..CLIENTS {
            clients.push(RelayClient::new(&world)?);
        }
        let has_relay = |relay| clients.iter().any(|client| client.relay == relay);
        ensure!((0..4).all(has_relay), "sockets without clients");
        world.move_to(pid, from, to)?;
        world.wait("the process is left at the donor", || {
            Ok(world.residents(from)?.is_empty())
        })?;
        let residents = world.residents(to)?;
        ensure!(residents.len() == 1, "{residents:?}");
        pid = residents[0].pid;
        for client in &mut clients {
            let relay_check = client.assert_same_relay();
            relay_check.with_context(|| format!("after the move from {from} to {to}"))?;
        }
    }
    Ok(())
}

/// A reuseport program sends all connections to one listener, before and after moves.
pub fn program_selects_after_move(name: &str) -> Result<()> {
    /// Number of the listener that the program selects.
    const SELECTED_LISTENER: &str = "2";
    let (world, folder) =
        start_group_with_program("chosen", name, IpFamily::V4, ("", "</dev/null"))?;
    let service = SocketAddr::new(world.cluster.service_address(IpFamily::V4), PORT);
    let assert_all_selected = || {
        for mut connection in open_connections(world.cluster.lab(), "c1", service, CLIENTS)? {
            let mut reply = String::new();
            connection.set_read_timeout(Some(ANSWER_MAX * TRIES_MAX as u32))?;
            connection.read_to_string(&mut reply)?;
            ensure!(
                reply == SELECTED_LISTENER,
                "listener {reply} was selected for a connection"
            );
        }
        Ok(())
    };
    assert_all_selected().context("before")?;
    let mut pid = read_pid(&folder)?;
    for (from, to) in [("n2", "n3"), ("n3", "n2")] {
        world.move_to(pid, from, to)?;
        let residents = world.residents(to)?;
        ensure!(residents.len() == 1, "{residents:?}");
        pid = residents[0].pid;
        assert_all_selected().with_context(|| format!("after the move from {from} to {to}"))?;
    }
    Ok(())
}
