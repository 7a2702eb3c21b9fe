//! The accepting side: one task that accepts, and one for each connection.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

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
/// Connections that addresses of no member may begin in a second, since each costs a TLS handshake on the event loop: in
/// total, and from one network. A hundred let a few dozen hosts join at once.
const UNKNOWN_GREETINGS_PER_SECOND_MAX: u32 = 100;
const UNKNOWN_GREETINGS_PER_SECOND_AND_NETWORK_MAX: u32 = 20;
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
    unknown_rate: RefCell<UnknownGreetingRate>,
}

/// The connections of one second that began at addresses of no member.
struct UnknownGreetingRate {
    second: Instant,
    by_network: HashMap<IpAddr, u32>,
}

impl Default for UnknownGreetingRate {
    fn default() -> UnknownGreetingRate {
        UnknownGreetingRate {
            second: Instant::now(),
            by_network: HashMap::new(),
        }
    }
}

impl UnknownGreetingRate {
    /// Counts a connection; returns false if that would be too many.
    fn admits(&mut self, now: Instant, source: IpAddr) -> bool {
        if now.duration_since(self.second) >= Duration::from_secs(1) {
            self.second = now;
            self.by_network.clear();
        }
        let network = match source {
            IpAddr::V4(_) => source,
            // One host may have all addresses of a /64 (RFC 4291, section 2.5.1).
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        };
        let total: u32 = self.by_network.values().sum();
        let count = self.by_network.get(&network).copied().unwrap_or(0);
        let is_admitted = total < UNKNOWN_GREETINGS_PER_SECOND_MAX
            && count < UNKNOWN_GREETINGS_PER_SECOND_AND_NETWORK_MAX;
        if is_admitted {
            self.by_network.insert(network, count + 1);
        }
        is_admitted
    }
}

/// A slot for a connection in its greeting.
struct GreetingSlot {
    counts: Rc<GreetingCounts>,
    source: IpAddr,
}

impl GreetingCounts {
    /// Returns a slot for a connection from `source`, or `None` if a limit for that address is reached.
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
                    && (self.unknown_rate.borrow_mut()).admits(Instant::now(), source)
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
            state.tell_datagram_key(&peer, &link, boot);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_unknown_addresses_are_limited_per_second() {
        let mut rate = UnknownGreetingRate::default();
        let now = rate.second;
        let mut admitted = |now, source: &str| {
            let source: IpAddr = source.parse().unwrap();
            (0..1_000).filter(|_| rate.admits(now, source)).count()
        };
        let most_of_network = UNKNOWN_GREETINGS_PER_SECOND_AND_NETWORK_MAX as usize;
        assert_eq!(admitted(now, "2001:db8::1"), most_of_network);
        // Another address of the same network has no share of its own, another network has.
        assert_eq!(admitted(now, "2001:db8::2"), 0);
        let others = (1..=9).map(|host| admitted(now, &format!("192.0.2.{host}")));
        let most = UNKNOWN_GREETINGS_PER_SECOND_MAX as usize;
        assert_eq!(others.sum::<usize>(), most - most_of_network);
        let next_second = now + Duration::from_secs(1);
        assert_eq!(admitted(next_second, "2001:db8::1"), most_of_network);
    }
}
