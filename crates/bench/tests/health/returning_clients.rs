//! Clients that end their connections by a reset and connect again from the same ports.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};
use holdfast_lab::Lab;
use holdfast_testbed::connection_load::open_connections;
use socket2::{Domain, SockRef, Socket, Type};

/// Message of each client.
const MESSAGE: &[u8] = b"here again";

/// Clients with an idle connection each.
#[derive(Debug)]
pub struct ReturningClients {
    service: SocketAddr,
    connections: Vec<TcpStream>,
}

impl ReturningClients {
    /// Connects `count` clients from a host of a lab.
    ///
    /// # Errors
    /// A connection fails.
    pub fn connect(
        lab: &Lab,
        host: &str,
        service: SocketAddr,
        count: usize,
    ) -> Result<ReturningClients> {
        let connections = open_connections(lab, host, service, count)?;
        Ok(ReturningClients {
            service,
            connections,
        })
    }

    /// Returns the clients' own ports.
    ///
    /// # Errors
    /// The system does not know a socket's address.
    pub fn ports(&self) -> io::Result<Vec<u16>> {
        let addresses = self.connections.iter().map(TcpStream::local_addr);
        addresses.map(|address| Ok(address?.port())).collect()
    }

    /// Resets all connections, and connects again from the same ports, one client after another. Returns the ports of the
    /// clients whose message is not echoed within `limit`.
    ///
    /// # Errors
    /// The system refuses an option or a port.
    pub fn return_all(self, lab: &Lab, host: &str, limit: Duration) -> Result<Vec<u16>> {
        let mut addresses = Vec::new();
        for connection in self.connections {
            addresses.push(connection.local_addr()?);
            // A connection that does not linger ends by a reset, and its port is free at once.
            SockRef::from(&connection).set_linger(Some(Duration::ZERO))?;
        }
        let service = self.service;
        let unanswered = lab.run_in_net_namespace(host, || {
            let mut unanswered = Vec::new();
            for from in addresses {
                let socket = bound_socket(from, limit)?;
                if ask(socket, service).is_err() {
                    unanswered.push(from.port());
                }
            }
            Ok::<_, io::Error>(unanswered)
        })?;
        unanswered.context("connect again from the same ports")
    }
}

fn bound_socket(from: SocketAddr, limit: Duration) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(from), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&from.into())?;
    socket.set_read_timeout(Some(limit))?;
    Ok(socket)
}

fn ask(socket: Socket, service: SocketAddr) -> io::Result<()> {
    let limit = socket.read_timeout()?.unwrap_or_default();
    socket.connect_timeout(&service.into(), limit)?;
    let mut stream = TcpStream::from(socket);
    stream.write_all(MESSAGE)?;
    stream.read_exact(&mut [0; MESSAGE.len()])
}
