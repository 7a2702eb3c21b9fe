//! The sockets at which queries arrive.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use holdfast_dns::{ClientPrefix, QueryTransport};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::Server;

/// Maximum length of a query in bytes: a name, EDNS and options.
const QUERY_BYTES_MAX: usize = 4_096;
/// Maximum number of TCP connections.
const CONNECTIONS_MAX: usize = 256;
/// Maximum number of TCP connections of clients in one network.
const CONNECTIONS_PER_PREFIX_MAX: usize = 16;
/// Longest time between two queries of a TCP connection, and for an answer (RFC 7766 section 6.2.3 leaves the time to the
/// server).
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest life of a TCP connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause after an error of a socket, such as a lack of descriptors.
const ERROR_PAUSE: Duration = Duration::from_millis(100);

/// Numbers of open TCP connections.
#[derive(Debug, Default)]
pub(super) struct TcpConnections {
    by_prefix: BTreeMap<ClientPrefix, usize>,
}

impl TcpConnections {
    fn try_add(&mut self, client: ClientPrefix) -> bool {
        let total: usize = self.by_prefix.values().sum();
        let of_prefix = self.by_prefix.get(&client).copied().unwrap_or(0);
        let is_admitted = total < CONNECTIONS_MAX && of_prefix < CONNECTIONS_PER_PREFIX_MAX;
        if is_admitted {
            self.by_prefix.insert(client, of_prefix + 1);
        }
        is_admitted
    }

    fn remove(&mut self, client: ClientPrefix) {
        if let Some(count) = self.by_prefix.get_mut(&client) {
            *count -= 1;
            if *count == 0 {
                self.by_prefix.remove(&client);
            }
        }
    }
}

/// Answers queries by UDP for ever.
pub(super) async fn serve_udp(socket: UdpSocket, server: Rc<Server>) {
    let mut buffer = vec![0; QUERY_BYTES_MAX];
    loop {
        match socket.recv_from(&mut buffer).await {
            Ok((length, from)) => {
                let answer = server.answer(from.ip(), QueryTransport::Udp, &buffer[..length]);
                if let Some(answer) = answer
                    && let Err(error) = socket.send_to(&answer, from).await
                {
                    tracing::debug!(%from, %error, "a DNS answer was lost");
                }
            }
            Err(error) => {
                tracing::debug!(%error, "cannot receive DNS queries");
                sleep(ERROR_PAUSE).await;
            }
        }
    }
}

/// Answers queries by TCP for ever.
pub(super) async fn serve_tcp(listener: TcpListener, server: Rc<Server>) {
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "cannot accept DNS connections");
                sleep(ERROR_PAUSE).await;
                continue;
            }
        };
        let prefix = ClientPrefix::from(from.ip());
        if !server.connections.borrow_mut().try_add(prefix) {
            continue;
        }
        let server = server.clone();
        spawn_local(async move {
            let served = timeout(CONNECTION_TIMEOUT, serve_connection(stream, from, &server)).await;
            if let Ok(Err(error)) = served {
                tracing::debug!(%from, %error, "a DNS connection has ended");
            }
            server.connections.borrow_mut().remove(prefix);
        });
    }
}

/// Answers the queries of a connection in their order. Each has its length in front (RFC 1035 section 4.2.2).
async fn serve_connection(
    mut stream: TcpStream,
    from: SocketAddr,
    server: &Server,
) -> io::Result<()> {
    let mut buffer = vec![0; QUERY_BYTES_MAX];
    loop {
        let length = usize::from(timeout(IDLE_TIMEOUT, stream.read_u16()).await??);
        let Some(query) = buffer.get_mut(..length) else {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        };
        timeout(IDLE_TIMEOUT, stream.read_exact(query)).await??;
        let Some(answer) = server.answer(from.ip(), QueryTransport::Tcp, query) else {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        };
        let Ok(length) = u16::try_from(answer.len()) else {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        };
        let message = [&length.to_be_bytes()[..], &answer].concat();
        timeout(IDLE_TIMEOUT, stream.write_all(&message)).await??;
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn prefix(text: &str) -> ClientPrefix {
        ClientPrefix::from(text.parse::<IpAddr>().unwrap())
    }

    #[test]
    fn connections_are_limited_in_total_and_for_each_network() {
        let mut connections = TcpConnections::default();
        let first = prefix("192.0.2.1");
        for _ in 0..CONNECTIONS_PER_PREFIX_MAX {
            assert!(connections.try_add(first));
        }
        assert!(!connections.try_add(prefix("192.0.2.9")));
        connections.remove(first);
        assert!(connections.try_add(first));
        let others = (0..=255).map(|third| prefix(&format!("10.0.{third}.1")));
        let admitted = others.filter(|other| connections.try_add(*other)).count();
        assert_eq!(admitted, CONNECTIONS_MAX - CONNECTIONS_PER_PREFIX_MAX);
    }
}
