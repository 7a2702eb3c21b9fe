//! The dialling side: one task for each node that is dialled.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use holdfast_wire::membership_frames::MembershipFrame;
use rustls::ClientConnection;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};

use super::connection::PeerConnection;
use super::peer::{Direction, Peer};
use super::peers::PeerChannelState;
use super::{PeerConnectionError, greet, serve};

const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// Keeps a connection to a peer as long as the peer has a number, or there are frames to send to it.
pub(super) async fn run(state: Rc<PeerChannelState>, peer: Rc<Peer>) {
    let mut backoff = BACKOFF_MIN;
    loop {
        // A guest that was dialled by its address may have a connection already.
        peer.wait_outgoing_ended().await;
        match connect(&state, &peer).await {
            Ok((link, boot)) => {
                let up_count = peer.up_count();
                serve_outgoing(&state, &peer, link, boot).await;
                if peer.up_count() != up_count {
                    backoff = BACKOFF_MIN;
                }
            }
            Err(reason) => {
                state.count_rejection(&reason);
                peer.record_problem(&reason);
                if !peer.is_member() {
                    peer.drop_pending_frames();
                }
            }
        }
        if !peer.wants_connection() {
            break;
        }
        tokio::select! {
            () = sleep(backoff) => {}
            () = peer.dial_now.notified() => {}
        }
        if !peer.wants_connection() {
            break;
        }
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
    peer.dialling.set(false);
    state.forget_if_idle(&peer);
}

/// Connects to the node at an address, whoever that is, and sends the node a frame of the membership. The connection
/// stays as long as the other side keeps it.
pub(super) async fn ask(state: Rc<PeerChannelState>, address: SocketAddr, frame: MembershipFrame) {
    let greeted = async {
        let tls = state.tls().dial_any_member()?;
        let link = open_link(&state, address, tls).await?;
        let limit = serve::GREETING_TIMEOUT;
        let greeting = timeout(limit, greet::greet_unknown_node(&state, &link))
            .await
            .unwrap_or(Err(PeerConnectionError::GreetingTimeout(limit)));
        greeting.map(|(peer, boot)| (peer, link, boot))
    };
    let greeted = greeted.await;
    state.end_question(&address);
    match greeted {
        Ok((peer, link, boot)) => {
            state.note_seed(&peer);
            peer.set_address_if_unknown(address);
            peer.send_membership(&frame);
            if !peer.has_outgoing() {
                serve_outgoing(&state, &peer, link, boot).await;
            }
            state.forget_if_idle(&peer);
        }
        Err(reason) => {
            state.count_rejection(&reason);
            match state.unknown_peer_log.admits() {
                true => tracing::warn!(%address, %reason, "cannot ask for the group"),
                false => tracing::debug!(%address, %reason, "cannot ask for the group"),
            }
        }
    }
}

async fn serve_outgoing(
    state: &PeerChannelState,
    peer: &Peer,
    link: Rc<PeerConnection>,
    boot: u64,
) {
    peer.attach(Direction::Outgoing, link.clone(), boot);
    state.tell_datagram_key(peer, &link, boot);
    let reason = serve::run(state, peer, &link, Direction::Outgoing).await;
    state.count_rejection(&reason);
    peer.record_problem(&reason);
    peer.detach(Direction::Outgoing, &link, reason);
}

async fn connect(
    state: &PeerChannelState,
    peer: &Peer,
) -> Result<(Rc<PeerConnection>, u64), PeerConnectionError> {
    let address = peer.address().ok_or(PeerConnectionError::NotMember)?;
    let link = open_link(state, address, state.tls().dial(&peer.name)?).await?;
    let limit = serve::GREETING_TIMEOUT;
    let boot = timeout(limit, greet::greet_as_dialler(state, &link, peer))
        .await
        .unwrap_or(Err(PeerConnectionError::GreetingTimeout(limit)))?;
    Ok((link, boot))
}

async fn open_link(
    state: &PeerChannelState,
    address: SocketAddr,
    tls: ClientConnection,
) -> Result<Rc<PeerConnection>, PeerConnectionError> {
    let socket = timeout(
        state.options.timing.dead_after,
        open(state.options.address, address),
    )
    .await
    .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
    .map_err(|source| PeerConnectionError::Connect { address, source })?;
    Ok(Rc::new(PeerConnection::dialled(
        socket,
        tls.into(),
        address,
    )))
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
