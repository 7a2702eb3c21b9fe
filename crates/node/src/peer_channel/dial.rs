//! The dialling side: one task for each peer.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use holdfast_wire::NodeId;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};

use super::connection::PeerConnection;
use super::peer::{Direction, Peer};
use super::peers::PeerChannelState;
use super::{PeerConnectionError, greet, serve};

const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// Keeps a connection to `id`, forever.
pub(super) async fn run(state: Rc<PeerChannelState>, id: NodeId) {
    let Some(peer) = state.get(id) else {
        return;
    };
    let mut backoff = BACKOFF_MIN;
    loop {
        match connect(&state, &peer).await {
            Ok((link, boot)) => {
                let up_count = peer.up_count();
                peer.attach(Direction::Outgoing, link.clone(), boot);
                let reason = serve::run(&state, &peer, &link, Direction::Outgoing).await;
                state.count_rejection(&reason);
                if peer.up_count() != up_count {
                    backoff = BACKOFF_MIN;
                }
                peer.record_problem(&reason);
                peer.detach(Direction::Outgoing, &link, reason);
            }
            Err(reason) => {
                state.count_rejection(&reason);
                peer.record_problem(&reason);
            }
        }
        tokio::select! {
            () = sleep(backoff) => {}
            () = peer.dial_now.notified() => {}
        }
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

async fn connect(
    state: &PeerChannelState,
    peer: &Peer,
) -> Result<(Rc<PeerConnection>, u64), PeerConnectionError> {
    let options = &state.options;
    let limit = options.timing.dead_after;
    let address = peer.config.address;
    let socket = timeout(limit, open(options.address, address))
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
        .map_err(|source| PeerConnectionError::Connect { address, source })?;
    let tls = state.tls().dial(&peer.config.name)?;
    let link = Rc::new(PeerConnection::new(socket, tls.into()));
    let limit = serve::GREETING_TIMEOUT;
    let boot = timeout(
        limit,
        greet::greet_as_dialler(options, &link, peer.config.id),
    )
    .await
    .unwrap_or(Err(PeerConnectionError::GreetingTimeout(limit)))?;
    Ok((link, boot))
}

async fn open(from: SocketAddr, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = match to {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // A service address must not be the source, because it does not belong to this node alone.
    if from.is_ipv4() == to.is_ipv4() {
        socket.bind(SocketAddr::new(from.ip(), 0))?;
    }
    socket.set_nodelay(true)?;
    socket.connect(to).await
}
