//! The proxy: listeners at the service's addresses, and the open connections.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use holdfast_api::{Arrival, Service, Session, TcpConnection};
use rustix::net::sockopt::{set_ip_freebind, set_ipv6_freebind, set_socket_linger};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::event::{ProxyEvent, ReportLimit, Totals};
use crate::relay::Relay;

/// The reason for which a proxy takes part in no handoff.
const HANDOFF_REFUSAL: &str = "a proxy's connections stay with the proxy that accepted them, since the server behind \
    another proxy cannot continue them";
/// Length of a listener's queue of connections; the kernel limits it further (net.core.somaxconn).
const BACKLOG: u32 = 16_384;
/// Pause after a failed accept(2): the cause, such as a lack of descriptors, remains for a while.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(10);

/// Settings of a proxy.
#[derive(Clone, Copy, Debug)]
pub struct ProxyConfig {
    /// Address of the local server.
    pub to: SocketAddr,
    /// True if each connection to the server begins with a header of the PROXY protocol.
    pub sends_header: bool,
    /// Maximum number of open connections. Further clients wait in the listeners' queues.
    pub connections_max: usize,
}

/// The reason that the proxy cannot listen at an address.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another socket has the address.
    #[error(
        "cannot listen at {0}: another program listens there. The local server needs another address or port (for \
         example 127.0.0.1:8080), which --to names"
    )]
    InUse(SocketAddr),
    /// The port is below 1024, and the user has no right to such ports.
    #[error("cannot listen at {0}: this port needs root or CAP_NET_BIND_SERVICE")]
    NotPermitted(SocketAddr),
    /// Another error of the system.
    #[error("cannot listen at {0}: {1}")]
    System(SocketAddr, io::Error),
}

/// The proxy of one service at one node. Dropping the proxy resets its connections.
pub struct Proxy {
    session: Session,
    service_name: String,
    connections_max: usize,
    relay: Arc<Relay>,
    listeners: Vec<(SocketAddr, Service)>,
    /// Index of the listener that accepts first, so that a busy listener does not starve the others.
    next_listener: usize,
    /// Addresses at which the last attempt to listen failed.
    failed_addresses: BTreeSet<SocketAddr>,
    connections: JoinSet<()>,
    full_limit: ReportLimit,
}

impl Proxy {
    /// Returns a proxy without listeners. `service_name` is the pool handle of the service; `report` takes the events.
    pub fn new(
        session: &Session,
        service_name: &str,
        config: ProxyConfig,
        report: impl Fn(ProxyEvent) + Send + Sync + 'static,
    ) -> Self {
        Self {
            session: session.without_handoffs(HANDOFF_REFUSAL),
            service_name: service_name.to_owned(),
            connections_max: config.connections_max,
            relay: Arc::new(Relay::new(config.to, config.sends_header, Box::new(report))),
            listeners: Vec::new(),
            next_listener: 0,
            failed_addresses: BTreeSet::new(),
            connections: JoinSet::new(),
            full_limit: ReportLimit::default(),
        }
    }

    /// Listens at a service address, which this host need not have yet. Returns the bound address. Must be called in a
    /// tokio runtime.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn listen(&mut self, address: SocketAddr) -> Result<SocketAddr, ListenError> {
        let bound = self
            .add_listener(address)
            .map_err(|error| match error.kind() {
                io::ErrorKind::AddrInUse => ListenError::InUse(address),
                io::ErrorKind::PermissionDenied => ListenError::NotPermitted(address),
                _ => ListenError::System(address, error),
            })?;
        let to = self.relay.to();
        self.relay
            .report(ProxyEvent::Listening { address: bound, to });
        Ok(bound)
    }

    fn add_listener(&mut self, address: SocketAddr) -> io::Result<SocketAddr> {
        let listener = bind(address)?;
        let bound = listener.local_addr()?;
        let service = self.session.serve(&self.service_name, listener)?;
        self.listeners.push((address, service));
        Ok(bound)
    }

    /// Serves, and listens at the addresses that `addresses` has: each change adds and removes listeners, and an
    /// unchanged value that is sent again makes the proxy try again where it could not listen. Never returns; dropping
    /// the future loses nothing.
    pub async fn serve(
        &mut self,
        addresses: &mut watch::Receiver<BTreeSet<SocketAddr>>,
    ) -> Infallible {
        loop {
            while self.connections.try_join_next().is_some() {}
            let is_full = self.connections.len() >= self.connections_max;
            if is_full && self.full_limit.admits(Instant::now()) {
                let connections_max = self.connections_max;
                self.relay
                    .report(ProxyEvent::ConnectionsMaxReached { connections_max });
            }
            let Self {
                connections,
                listeners,
                next_listener,
                ..
            } = self;
            tokio::select! {
                Some(_) = connections.join_next() => {}
                accepted = poll_fn(|context| poll_accept(listeners, next_listener, context)), if !is_full => {
                    if let Err(error) = self.on_accepted(accepted) {
                        self.relay.report_system_error("accept a connection", &error);
                        sleep(ACCEPT_RETRY_DELAY).await;
                    }
                }
                Ok(()) = addresses.changed() => {
                    let addresses = addresses.borrow_and_update().clone();
                    self.set_addresses(&addresses);
                }
            }
        }
    }

    /// Ends: accepts no more connections, and waits until the open ones have ended or `give_up` is ready; then the
    /// rest is reset. Connections that wait in a listener's queue are still served.
    pub async fn drain(mut self, give_up: impl Future<Output = ()>) -> Totals {
        self.remove_listeners(&BTreeSet::new());
        while self.connections.try_join_next().is_some() {}
        let open = self.connections.len();
        self.relay.report(ProxyEvent::Draining { open });
        let all_ended = async { while self.connections.join_next().await.is_some() {} };
        tokio::select! {
            () = all_ended => {}
            () = give_up => {}
        }
        while self.connections.try_join_next().is_some() {}
        let cut = self.connections.len() as u64;
        self.relay.counters.cut.fetch_add(cut, Ordering::Relaxed);
        self.connections.shutdown().await;
        let totals = self.relay.counters.totals();
        self.relay.report(ProxyEvent::Stopped { totals });
        totals
    }

    fn set_addresses(&mut self, wanted: &BTreeSet<SocketAddr>) {
        for address in self.remove_listeners(wanted) {
            self.relay.report(ProxyEvent::StoppedListening { address });
        }
        for address in wanted {
            if self.listeners.iter().any(|(each, _)| each == address) {
                continue;
            }
            match self.listen(*address) {
                Ok(_) => {
                    self.failed_addresses.remove(address);
                }
                Err(error) => {
                    if self.failed_addresses.insert(*address) {
                        self.relay.report(ProxyEvent::CannotListen {
                            address: *address,
                            reason: error.to_string(),
                        });
                    }
                }
            }
        }
    }

    /// Removes the listeners of addresses that `wanted` does not have. Returns the addresses.
    fn remove_listeners(&mut self, wanted: &BTreeSet<SocketAddr>) -> Vec<SocketAddr> {
        let is_removed = |(address, _): &mut (SocketAddr, Service)| !wanted.contains(address);
        let removed: Vec<_> = self.listeners.extract_if(.., is_removed).collect();
        self.next_listener = 0;
        // Closing a listener resets the connections in its queue.
        let mut context = Context::from_waker(Waker::noop());
        let mut next = 0;
        while self.connections.len() < self.connections_max
            && let Poll::Ready(accepted) = poll_accept(&removed, &mut next, &mut context)
        {
            if let Err(error) = self.on_accepted(accepted) {
                self.relay
                    .report_system_error("accept a connection", &error);
                break;
            }
        }
        removed.into_iter().map(|(address, _)| address).collect()
    }

    fn on_accepted(&mut self, accepted: io::Result<Arrival<TcpConnection>>) -> io::Result<()> {
        match accepted? {
            Arrival::New(connection) => {
                self.relay.counters.accepted.fetch_add(1, Ordering::Relaxed);
                let relay = Arc::clone(&self.relay);
                self.connections
                    .spawn(async move { relay.serve(connection).await });
            }
            Arrival::HandedOff { connection, .. } => {
                // The session refuses such connections. No server here knows the beginning of the stream.
                set_socket_linger(connection.stream(), Some(Duration::ZERO))?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy")
            .field("service_name", &self.service_name)
            .field("to", &self.relay.to())
            .field("connections", &self.connections.len())
            .finish_non_exhaustive()
    }
}

/// Returns the next connection of any listener, the one at index `next` first.
fn poll_accept(
    listeners: &[(SocketAddr, Service)],
    next: &mut usize,
    context: &mut Context<'_>,
) -> Poll<io::Result<Arrival<TcpConnection>>> {
    for offset in 0..listeners.len() {
        let index = (*next + offset) % listeners.len();
        if let Poll::Ready(accepted) = listeners[index].1.poll_accept(context) {
            *next = index + 1;
            return Poll::Ready(accepted);
        }
    }
    Poll::Pending
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address.is_ipv4() {
        true => TcpSocket::new_v4()?,
        false => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    // The daemon may give the address to this host later.
    match address.is_ipv4() {
        true => set_ip_freebind(&socket, true)?,
        false => set_ipv6_freebind(&socket, true)?,
    }
    socket.bind(address)?;
    socket.listen(BACKLOG)
}
