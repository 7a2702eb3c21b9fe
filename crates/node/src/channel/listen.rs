//! The accepting side: one task that accepts, one for each connection.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::link::Link;
use super::peer::Direction;
use super::peers::Table;
use super::{LinkError, greet, serve};

/// Connections that may be greeting at once; more wait in the kernel.
const GREETING_AT_ONCE: usize = 64;
const BACKLOG: u32 = 256;

pub(super) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Accepts, for ever.
pub(super) async fn run(table: Rc<Table>, listener: TcpListener) {
    let greeting = std::sync::Arc::new(Semaphore::new(GREETING_AT_ONCE));
    let mut links = JoinSet::new();
    loop {
        let Ok(permit) = greeting.clone().acquire_owned().await else {
            return;
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = links.join_next() => continue,
        };
        match accepted {
            Ok((socket, from)) => {
                links.spawn_local(link(table.clone(), socket, from, permit));
            }
            Err(error) => {
                // Out of descriptors, most likely: what is connected goes on.
                tracing::error!(%error, "cannot accept connections from other nodes");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn link(table: Rc<Table>, socket: TcpStream, from: SocketAddr, permit: OwnedSemaphorePermit) {
    let why = match greeted(&table, socket).await {
        Ok((peer, link, boot)) => {
            drop(permit);
            peer.attach(Direction::Incoming, link.clone(), boot);
            let why = serve::run(&table, &peer, &link, Direction::Incoming).await;
            table.count(&why);
            peer.detach(Direction::Incoming, &link, why);
            return;
        }
        Err(why) => why,
    };
    table.count(&why);
    if table.strangers.admits() {
        tracing::warn!(%from, %why, "refused a connection between nodes");
    } else {
        tracing::debug!(%from, %why, "refused a connection between nodes");
    }
}

type Greeted = (Rc<super::peer::Peer>, Rc<Link>, u64);

async fn greeted(table: &Table, socket: TcpStream) -> Result<Greeted, LinkError> {
    socket.set_nodelay(true).map_err(LinkError::Io)?;
    let link = Rc::new(Link::new(socket, table.tls().accept()?.into()));
    let limit = serve::GREETING_MAX;
    let greeting = timeout(limit, greet::accepted(table, &link))
        .await
        .unwrap_or(Err(LinkError::Late(limit)));
    if greeting.is_err() {
        link.farewell().await;
    }
    let (node, boot) = greeting?;
    let peer = table.get(node).ok_or(LinkError::Closed)?;
    Ok((peer, link, boot))
}
