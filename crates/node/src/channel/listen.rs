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

use super::link::Link;
use super::peer::Direction;
use super::peers::Table;
use super::{LinkError, greet, serve};
use crate::config::Peer;

/// Connections in their greeting from an address, for each peer with that address.
const GREETING_OF_PEER: usize = 4;
/// Connections in their greeting from addresses of no peer: in total, and from one address.
const GREETING_OF_STRANGERS: usize = 32;
const GREETING_OF_STRANGER: usize = 2;
const BACKLOG: u32 = 1024;

pub(super) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Counts of connections in their greeting, by source address. Excess connections from an address are closed at once,
/// so that silent connections cannot use up a peer's slots.
#[derive(Default)]
struct Greeting {
    by_source: RefCell<HashMap<IpAddr, usize>>,
}

/// A slot for a connection in its greeting.
struct Place {
    greeting: Rc<Greeting>,
    source: IpAddr,
}

impl Greeting {
    /// Returns a slot for a connection from `source`, or `None` if the limit for that address is reached.
    fn place(self: &Rc<Self>, source: IpAddr, peers: &[Peer]) -> Option<Place> {
        let source = source.to_canonical();
        let peers_at = |ip: &IpAddr| peers.iter().filter(|peer| peer.address.ip() == *ip).count();
        let mut by_source = self.by_source.borrow_mut();
        let here = by_source.get(&source).copied().unwrap_or(0);
        let admitted = match peers_at(&source) {
            0 => {
                let of_strangers = by_source.iter().filter(|(ip, _)| peers_at(ip) == 0);
                let strangers: usize = of_strangers.map(|(_, count)| count).sum();
                here < GREETING_OF_STRANGER && strangers < GREETING_OF_STRANGERS
            }
            peers => here < peers * GREETING_OF_PEER,
        };
        admitted.then(|| {
            by_source.insert(source, here + 1);
            let greeting = self.clone();
            Place { greeting, source }
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut by_source = self.greeting.by_source.borrow_mut();
        if let Some(count) = by_source.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                by_source.remove(&self.source);
            }
        }
    }
}

/// Accepts connections, forever.
pub(super) async fn run(table: Rc<Table>, listener: TcpListener) {
    let greeting = Rc::new(Greeting::default());
    let mut links = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = links.join_next() => continue,
        };
        match accepted {
            Ok((socket, from)) => match greeting.place(from.ip(), &table.options.peers) {
                Some(place) => {
                    links.spawn_local(link(table.clone(), socket, from, place));
                }
                None => table.count(&LinkError::Crowded),
            },
            Err(error) => {
                // Most likely the descriptors are used up; existing connections continue.
                tracing::error!(%error, "cannot accept connections from other nodes");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn link(table: Rc<Table>, socket: TcpStream, from: SocketAddr, place: Place) {
    let why = match greeted(&table, socket).await {
        Ok((peer, link, boot)) => {
            drop(place);
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
