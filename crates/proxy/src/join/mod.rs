//! Joins a client's connection and the connection to the local server: bytes, ends of streams and resets of each pass
//! to the other.

#[cfg(test)]
mod tests;

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::task::coop::{consume_budget, unconstrained};
use tokio::time::{sleep, timeout};

use crate::pipe_pool::PipePool;

/// The two connections of a join.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JoinedStreams<'a> {
    /// The client's connection to the service.
    pub(crate) client: &'a TcpStream,
    /// The connection to the local server.
    pub(crate) server: &'a TcpStream,
}

/// One of the two connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

/// Time limits of a join.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimeLimits {
    /// Maximum silence of a client after the server has ended its stream: a server that closed its connection would leave
    /// the proxy with a half-open connection for as long as such a client lives. The kernel limits the same state of its
    /// own connections (FIN-WAIT-2, tcp_fin_timeout).
    pub(crate) silence_after_server_end: Duration,
    /// Maximum time in which a side takes none of the bytes that wait for it in a pipe. The kernel gives up a peer that
    /// answers nothing, but not one that keeps its window closed.
    pub(crate) stall: Duration,
}

/// Numbers of bytes that a join has passed on.
#[derive(Debug, Default)]
pub(crate) struct ByteCounts {
    pub(crate) to_server: AtomicU64,
    pub(crate) to_client: AtomicU64,
}

/// The reason that a join ended before both streams.
#[derive(Debug)]
pub(crate) enum JoinFailure {
    /// The connection of this side was reset, or its peer is unreachable.
    Broken(Side),
    /// A side took no bytes for too long.
    Stalled,
    /// The system gave no pipe.
    NoPipe(io::Error),
}

/// Passes bytes both ways until both streams have ended; then every byte is in a send queue.
///
/// Ends too if the server has ended its stream and the client is silent for too long (see [`TimeLimits`]).
///
/// # Errors
/// See [`JoinFailure`]. The caller resets both connections then; the bytes that one side sent before its reset have
/// been passed on as far as the other side's send queue takes them.
pub(crate) async fn join(
    streams: JoinedStreams<'_>,
    pipes: &PipePool,
    bytes: &ByteCounts,
    limits: TimeLimits,
) -> Result<(), JoinFailure> {
    let client = End(streams.client, Side::Client);
    let server = End(streams.server, Side::Server);
    let mut to_server = pin!(pass_stream(
        client,
        server,
        pipes,
        &bytes.to_server,
        limits.stall
    ));
    let mut to_client = pin!(pass_stream(
        server,
        client,
        pipes,
        &bytes.to_client,
        limits.stall
    ));
    let (mut is_to_server_done, mut is_to_client_done) = (false, false);
    let failure = loop {
        let step = tokio::select! {
            // Bytes that arrived before a reset are passed on before the reset is noticed.
            biased;
            result = &mut to_server, if !is_to_server_done => {
                is_to_server_done = true;
                result.and_then(|()| server.end_stream())
            }
            result = &mut to_client, if !is_to_client_done => {
                is_to_client_done = true;
                result.and_then(|()| client.end_stream())
            }
            failure = client.failure() => Err(failure),
            failure = server.failure() => Err(failure),
            () = silence(&bytes.to_server, limits.silence_after_server_end), if is_to_client_done => return Ok(()),
        };
        match step {
            Ok(()) if is_to_server_done && is_to_client_done => return Ok(()),
            Ok(()) => {}
            Err(failure) => break failure,
        }
    };
    let rest = match &failure {
        JoinFailure::Broken(Side::Client) if !is_to_server_done => Some(to_server),
        JoinFailure::Broken(Side::Server) if !is_to_client_done => Some(to_client),
        _ => None,
    };
    if let Some(mut rest) = rest {
        // A closed socket has all its bytes already, so one poll passes on as many as the other side can take.
        let poll_once = poll_fn(|context| Poll::Ready(rest.as_mut().poll(context).is_ready()));
        unconstrained(poll_once).await;
    }
    Err(failure)
}

/// One of the two connections, with its side.
#[derive(Clone, Copy)]
struct End<'a>(&'a TcpStream, Side);

impl End<'_> {
    fn broken(self) -> JoinFailure {
        JoinFailure::Broken(self.1)
    }

    /// Ends the stream to this side.
    fn end_stream(self) -> Result<(), JoinFailure> {
        shutdown(self.0, Shutdown::Write).map_err(|_| self.broken())
    }

    /// Waits until the connection is reset or its peer is unreachable: needed whenever no read waits, because the side
    /// has ended its stream or the other side takes no bytes.
    async fn failure(self) -> JoinFailure {
        // An error of the wait itself ends the join too.
        let _ = self.0.ready(Interest::ERROR).await;
        self.broken()
    }
}

/// Passes bytes on until the end of the stream.
async fn pass_stream(
    from: End<'_>,
    to: End<'_>,
    pipes: &PipePool,
    bytes: &AtomicU64,
    stall_max: Duration,
) -> Result<(), JoinFailure> {
    loop {
        let ready = from.0.readable().await;
        ready.map_err(|_| from.broken())?;
        let mut pipe = pipes.take().map_err(JoinFailure::NoPipe)?;
        loop {
            match pipe.fill_from(from.0) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return Err(from.broken()),
            }
            while !pipe.is_empty() {
                match pipe.empty_into(to.0) {
                    Ok(moved) => {
                        bytes.fetch_add(moved as u64, Ordering::Relaxed);
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        let ready = timeout(stall_max, to.0.writable()).await;
                        let ready = ready.map_err(|_| JoinFailure::Stalled)?;
                        ready.map_err(|_| to.broken())?;
                    }
                    Err(_) => return Err(to.broken()),
                }
            }
            // A fast stream must not keep the thread from other connections.
            consume_budget().await;
        }
    }
}

/// Waits until `bytes` has not changed for `silence_max`.
async fn silence(bytes: &AtomicU64, silence_max: Duration) {
    let mut before = bytes.load(Ordering::Relaxed);
    loop {
        sleep(silence_max).await;
        let total = bytes.load(Ordering::Relaxed);
        if total == before {
            return;
        }
        before = total;
    }
}
