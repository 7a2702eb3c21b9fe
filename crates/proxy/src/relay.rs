//! One client's connection: the connection to the local server is made, and both are joined.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use holdfast_api::TcpConnection;
use rustix::net::sockopt::{
    set_socket_keepalive, set_socket_linger, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::event::{ProxyEvent, ReportLimit, TotalCounters};
use crate::join::{ByteCounts, JoinFailure, JoinedStreams, Side, TimeLimits, join};
use crate::pipe_pool::PipePool;
use crate::proxy_protocol::header;

/// Time limit for the local server's answer to a connection request.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limits of each connection: the default of the kernel's tcp_fin_timeout, and the default of nginx for a peer that
/// takes nothing (`send_timeout`, `proxy_send_timeout`).
const TIME_LIMITS: TimeLimits = TimeLimits {
    silence_after_server_end: Duration::from_secs(60),
    stall: Duration::from_secs(60),
};

/// Silence of a client after which the kernel asks whether the connection still exists, time between two questions, and
/// number of unanswered ones that end the connection: together 25 s, less than a drain takes by default.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// Takes the proxy's events.
pub(crate) type EventSink = Box<dyn Fn(ProxyEvent) + Send + Sync>;

/// State that all connections of a proxy share.
pub(crate) struct Relay {
    to: SocketAddr,
    sends_header: bool,
    pipes: PipePool,
    pub(crate) counters: TotalCounters,
    report: EventSink,
    unavailable_limit: Mutex<ReportLimit>,
    system_error_limit: Mutex<ReportLimit>,
    is_server_unavailable: AtomicBool,
}

/// The reason that a client's connection was reset.
enum RelayFailure {
    ServerUnavailable(io::Error),
    Join(JoinFailure),
}

impl Relay {
    pub(crate) fn new(to: SocketAddr, sends_header: bool, report: EventSink) -> Self {
        Self {
            to,
            sends_header,
            pipes: PipePool::default(),
            counters: TotalCounters::default(),
            report,
            unavailable_limit: Mutex::default(),
            system_error_limit: Mutex::default(),
            is_server_unavailable: AtomicBool::new(false),
        }
    }

    pub(crate) fn to(&self) -> SocketAddr {
        self.to
    }

    pub(crate) fn report(&self, event: ProxyEvent) {
        (self.report)(event);
    }

    /// Reports an error of the system, unless one was reported a short time ago.
    pub(crate) fn report_system_error(&self, operation: &'static str, error: &io::Error) {
        if admits(&self.system_error_limit) {
            let reason = error.to_string();
            self.report(ProxyEvent::SystemError { operation, reason });
        }
    }

    /// Serves a client's connection to its end.
    pub(crate) async fn serve(&self, connection: TcpConnection) {
        let counters = &self.counters;
        let counter = match self.join_to_server(&connection).await {
            Ok(()) => &counters.complete,
            Err(RelayFailure::Join(JoinFailure::Broken(Side::Client))) => &counters.client_resets,
            Err(RelayFailure::Join(JoinFailure::Broken(Side::Server))) => &counters.server_resets,
            Err(RelayFailure::Join(JoinFailure::Stalled)) => &counters.stalled,
            Err(RelayFailure::Join(JoinFailure::NoPipe(error))) => {
                self.report_system_error("make a pipe for a connection", &error);
                &counters.refused
            }
            Err(RelayFailure::ServerUnavailable(error)) => {
                let clients_reset = counters.refused.fetch_add(1, Ordering::Relaxed) + 1;
                return self.on_server_unavailable(&error, clients_reset);
            }
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    async fn join_to_server(&self, connection: &TcpConnection) -> Result<(), RelayFailure> {
        let client = connection.stream();
        reset_when_dropped(client);
        detect_lost_peer(client);
        let mut server = self
            .connect()
            .await
            .map_err(RelayFailure::ServerUnavailable)?;
        reset_when_dropped(&server);
        if self.is_server_unavailable.swap(false, Ordering::Relaxed) {
            self.report(ProxyEvent::ServerAvailable { to: self.to });
        }
        if self.sends_header {
            let flow = connection.flow();
            let header = header(flow.remote(), flow.local());
            let written = server.write_all(&header).await;
            written.map_err(|_| RelayFailure::Join(JoinFailure::Broken(Side::Server)))?;
        }
        let streams = JoinedStreams {
            client,
            server: &server,
        };
        let bytes = AddedByteCounts {
            bytes: ByteCounts::default(),
            counters: &self.counters,
        };
        join(streams, &self.pipes, &bytes.bytes, TIME_LIMITS)
            .await
            .map_err(RelayFailure::Join)?;
        close_when_dropped(client);
        close_when_dropped(&server);
        Ok(())
    }

    async fn connect(&self) -> io::Result<TcpStream> {
        match timeout(CONNECT_TIMEOUT, TcpStream::connect(self.to)).await {
            Ok(connected) => connected,
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()),
            )),
        }
    }

    fn on_server_unavailable(&self, error: &io::Error, clients_reset: u64) {
        self.is_server_unavailable.store(true, Ordering::Relaxed);
        if admits(&self.unavailable_limit) {
            self.report(ProxyEvent::ServerUnavailable {
                to: self.to,
                reason: error.to_string(),
                clients_reset,
            });
        }
    }
}

fn admits(limit: &Mutex<ReportLimit>) -> bool {
    let mut limit = limit.lock().unwrap_or_else(PoisonError::into_inner);
    limit.admits(Instant::now())
}

/// Makes the kernel reset the connection when its socket is closed: also if the proxy dies, since the end of the stream
/// would tell the peer that the stream is complete.
fn reset_when_dropped(stream: &TcpStream) {
    // Neither option fails on a TCP socket. Passing small segments on at once is the sender's decision.
    let _ = set_socket_linger(stream, Some(Duration::ZERO));
    let _ = stream.set_nodelay(true);
}

/// Makes the kernel ask an idle peer whether the connection still exists. Without that, the connection of a host that was
/// lost, or whose reset was lost, would stay until the proxy ends.
fn detect_lost_peer(stream: &TcpStream) {
    // No option fails on a TCP socket.
    let _ = set_socket_keepalive(stream, true);
    let _ = set_tcp_keepidle(stream, KEEPALIVE_IDLE);
    let _ = set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL);
    let _ = set_tcp_keepcnt(stream, KEEPALIVE_PROBES);
}

/// Makes the kernel send the queued bytes, and the end of the stream, when the socket is closed.
fn close_when_dropped(stream: &TcpStream) {
    let _ = set_socket_linger(stream, None);
}

/// The byte counts of a connection; dropping them adds them to the proxy's.
struct AddedByteCounts<'a> {
    bytes: ByteCounts,
    counters: &'a TotalCounters,
}

impl Drop for AddedByteCounts<'_> {
    fn drop(&mut self) {
        let add = |total: &AtomicU64, count: &mut AtomicU64| {
            total.fetch_add(*count.get_mut(), Ordering::Relaxed);
        };
        add(&self.counters.to_server_bytes, &mut self.bytes.to_server);
        add(&self.counters.to_client_bytes, &mut self.bytes.to_client);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::{socket_keepalive, tcp_keepcnt, tcp_keepidle, tcp_keepintvl};
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn silent_client_is_asked_within_the_time_of_a_drain() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, _server) = tokio::join!(TcpStream::connect(address), listener.accept());
        let client = client.unwrap();
        detect_lost_peer(&client);
        assert!(socket_keepalive(&client).unwrap());
        let probes = tcp_keepcnt(&client).unwrap();
        let detected = tcp_keepidle(&client).unwrap() + tcp_keepintvl(&client).unwrap() * probes;
        assert!(detected < Duration::from_secs(30));
    }
}
