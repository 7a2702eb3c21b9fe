//! A listener for HTTP that limits slow and numerous callers.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// Limits on the connections of one listener.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListenerLimits {
    /// Maximum number of connections.
    pub(super) connections: usize,
    /// Maximum number of connections from one address.
    pub(super) per_source: usize,
    /// Maximum time without a write of an answer. A request that takes longer to arrive is not read.
    pub(super) answer_timeout: Duration,
}

impl Default for ListenerLimits {
    fn default() -> Self {
        Self {
            connections: 128,
            per_source: 16,
            answer_timeout: Duration::from_secs(30),
        }
    }
}

/// Source address of a caller, if callers can be told apart.
pub trait SourceAddress {
    /// Returns the caller's address.
    fn ip(&self) -> Option<IpAddr>;
}

impl SourceAddress for SocketAddr {
    fn ip(&self) -> Option<IpAddr> {
        Some(self.ip().to_canonical())
    }
}

impl SourceAddress for tokio::net::unix::SocketAddr {
    fn ip(&self) -> Option<IpAddr> {
        None
    }
}

type OpenConnections = Arc<Mutex<HashMap<Option<IpAddr>, usize>>>;

/// A listener with limits on its connections.
pub(super) struct LimitedListener<L> {
    listener: L,
    limits: ListenerLimits,
    open_connections: OpenConnections,
}

/// A connection of the listener.
pub(super) struct LimitedConnection<I> {
    io: I,
    answer_timeout: Duration,
    deadline: Pin<Box<Sleep>>,
    _slot: ConnectionSlot,
}

/// A slot among the open connections of a listener.
struct ConnectionSlot {
    open_connections: OpenConnections,
    source: Option<IpAddr>,
}

impl<L> LimitedListener<L> {
    pub fn new(listener: L, limits: ListenerLimits) -> Self {
        Self {
            listener,
            limits,
            open_connections: OpenConnections::default(),
        }
    }

    fn reserve_slot(&self, source: Option<IpAddr>) -> Option<ConnectionSlot> {
        let mut open = self
            .open_connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let all_connections: usize = open.values().sum();
        let from_source = open.get(&source).copied().unwrap_or(0);
        let of_source = source.map_or(usize::MAX, |_| self.limits.per_source);
        (all_connections < self.limits.connections && from_source < of_source).then(|| {
            open.insert(source, from_source + 1);
            let open = self.open_connections.clone();
            ConnectionSlot {
                open_connections: open,
                source,
            }
        })
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut open = self
            .open_connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.source);
            }
        }
    }
}

impl<L: Listener> Listener for LimitedListener<L>
where
    L::Addr: SourceAddress,
{
    type Io = LimitedConnection<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (io, address) = self.listener.accept().await;
            // Excess connections are closed.
            let Some(place) = self.reserve_slot(address.ip()) else {
                continue;
            };
            let silence = self.limits.answer_timeout;
            let connection = LimitedConnection {
                io,
                answer_timeout: silence,
                deadline: Box::pin(sleep(silence)),
                _slot: place,
            };
            return (connection, address);
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

impl<I> LimitedConnection<I> {
    /// Returns the connection itself.
    pub(super) fn io(&self) -> &I {
        &self.io
    }

    fn check_deadline(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.deadline.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for LimitedConnection<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_deadline(context)?;
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for LimitedConnection<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_deadline(context)?;
        let written = ready!(Pin::new(&mut self.io).poll_write(context, bytes))?;
        let deadline = Instant::now() + self.answer_timeout;
        self.deadline.as_mut().reset(deadline);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpSocket, TcpStream};

    use super::*;

    const LIMITS: ListenerLimits = ListenerLimits {
        connections: 3,
        per_source: 2,
        answer_timeout: Duration::from_millis(50),
    };

    async fn call(from: &str, to: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
        socket.connect(to).await.unwrap()
    }

    /// Returns a listener with `LIMITS`, and its address.
    async fn limited_listener() -> (LimitedListener<TcpListener>, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (LimitedListener::new(listener, LIMITS), address)
    }

    #[tokio::test]
    async fn full_source_does_not_block_others() {
        let (mut listener, address) = limited_listener().await;
        let mut open = Vec::new();
        for _ in 0..LIMITS.per_source {
            let caller = call("127.0.0.2", address).await;
            open.push((caller, listener.accept().await.0));
        }
        let mut refused = vec![call("127.0.0.2", address).await];
        let caller = call("127.0.0.3", address).await;
        let (connection, from) = listener.accept().await;
        assert_eq!(SourceAddress::ip(&from), Some([127, 0, 0, 3].into()));
        open.push((caller, connection));

        // All slots are taken until one is freed.
        refused.push(call("127.0.0.4", address).await);
        for mut caller in refused {
            let mut byte = [0];
            tokio::select! {
                _ = listener.accept() => panic!("a connection was accepted above the limit"),
                end = caller.read(&mut byte) => assert!(matches!(end, Ok(0) | Err(_))),
            }
        }
        open.remove(0);
        let _caller = call("127.0.0.5", address).await;
        let (_connection, from) = listener.accept().await;
        assert_eq!(SourceAddress::ip(&from), Some([127, 0, 0, 5].into()));
    }

    #[tokio::test]
    async fn slow_request_is_not_read() {
        let (mut listener, address) = limited_listener().await;
        let mut caller = call("127.0.0.1", address).await;
        let (mut connection, _) = listener.accept().await;
        let slow_sender = tokio::spawn(async move {
            loop {
                if caller.write_all(b"a").await.is_err() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let error = loop {
            if let Err(error) = connection.read(&mut [0; 16]).await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(connection);
        slow_sender.await.unwrap();
    }
}
