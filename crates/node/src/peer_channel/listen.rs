//! The accepting side: one task that accepts, and one for each connection.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::connection::PeerConnection;
use super::peer::Direction;
use super::peers::PeerChannelState;
use super::{PeerConnectionError, greet, serve};

/// Connections in their greeting from an address, for each peer with that address.
const GREETINGS_PER_PEER_MAX: usize = 4;
/// Connections in their greeting from addresses of no member: in total, and from one address.
const UNKNOWN_GREETINGS_MAX: usize = 32;
const UNKNOWN_GREETINGS_PER_ADDRESS_MAX: usize = 2;
const LISTEN_BACKLOG: u32 = 1024;

pub(super) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(LISTEN_BACKLOG)
}

/// Counts of connections in their greeting, by source address. Excess connections from an address are closed at once,
/// so that silent connections cannot use up a peer's slots.
#[derive(Default)]
struct GreetingCounts {
    by_source: RefCell<HashMap<IpAddr, usize>>,
}

/// A slot for a connection in its greeting.
struct GreetingSlot {
    counts: Rc<GreetingCounts>,
    source: IpAddr,
}

impl GreetingCounts {
    /// Returns a slot for a connection from `source`, or `None` if the limit for that address is reached.
    fn reserve_slot(
        self: &Rc<Self>,
        source: IpAddr,
        state: &PeerChannelState,
    ) -> Option<GreetingSlot> {
        let source = source.to_canonical();
        let peers_at = |ip: &IpAddr| state.members_at(*ip);
        let mut by_source = self.by_source.borrow_mut();
        let source_count = by_source.get(&source).copied().unwrap_or(0);
        let is_admitted = match peers_at(&source) {
            0 => {
                let unknown_count = by_source.iter().filter(|(ip, _)| peers_at(ip) == 0);
                let unknown_sources: usize = unknown_count.map(|(_, count)| count).sum();
                source_count < UNKNOWN_GREETINGS_PER_ADDRESS_MAX
                    && unknown_sources < UNKNOWN_GREETINGS_MAX
            }
            peers => source_count < peers * GREETINGS_PER_PEER_MAX,
        };
        is_admitted.then(|| {
            by_source.insert(source, source_count + 1);
            let greeting = self.clone();
            GreetingSlot {
                counts: greeting,
                source,
            }
        })
    }
}

impl Drop for GreetingSlot {
    fn drop(&mut self) {
        let mut by_source = self.counts.by_source.borrow_mut();
        if let Some(count) = by_source.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                by_source.remove(&self.source);
            }
        }
    }
}

/// Accepts connections, forever.
pub(super) async fn run(state: Rc<PeerChannelState>, listener: TcpListener) {
    let greeting = Rc::new(GreetingCounts::default());
    let mut links = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = links.join_next() => continue,
        };
        match accepted {
            Ok((socket, from)) => match greeting.reserve_slot(from.ip(), &state) {
                Some(place) => {
                    links.spawn_local(serve_connection(state.clone(), socket, from, place));
                }
                None => state.count_rejection(&PeerConnectionError::TooManyGreetings),
            },
            Err(error) => {
                // Most likely the descriptors are used up; existing connections continue.
                tracing::error!(%error, "cannot accept connections from other nodes");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve_connection(
    state: Rc<PeerChannelState>,
    socket: TcpStream,
    from: SocketAddr,
    slot: GreetingSlot,
) {
    let reason = match accept_greeting(&state, socket).await {
        Ok((peer, link, boot)) => {
            drop(slot);
            peer.attach(Direction::Incoming, link.clone(), boot);
            let reason = serve::run(&state, &peer, &link, Direction::Incoming).await;
            state.count_rejection(&reason);
            peer.detach(Direction::Incoming, &link, reason);
            state.forget_if_idle(&peer);
            return;
        }
        Err(reason) => reason,
    };
    state.count_rejection(&reason);
    if state.unknown_peer_log.admits() {
        tracing::warn!(%from, %reason, "refused a connection between nodes");
    } else {
        tracing::debug!(%from, %reason, "refused a connection between nodes");
    }
}

type GreetedPeer = (Rc<super::peer::Peer>, Rc<PeerConnection>, u64);

async fn accept_greeting(
    state: &PeerChannelState,
    socket: TcpStream,
) -> Result<GreetedPeer, PeerConnectionError> {
    socket.set_nodelay(true).map_err(PeerConnectionError::Io)?;
    let link = Rc::new(PeerConnection::new(socket, state.tls().accept()?.into()));
    let limit = serve::GREETING_TIMEOUT;
    let greeting = timeout(limit, greet::greet_as_listener(state, &link))
        .await
        .unwrap_or(Err(PeerConnectionError::GreetingTimeout(limit)));
    if greeting.is_err() {
        link.linger().await;
    }
    let (peer, boot) = greeting?;
    Ok((peer, link, boot))
}
