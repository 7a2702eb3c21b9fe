//! All peers: what the engine holds on to.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use holdfast_wire::{Frame, NodeId};
use tokio::task::AbortHandle;

use super::events::Queue;
use super::link::Encoded;
use super::peer::Peer;
use super::{LinkError, Options, PeerStats, SendError};
use crate::limit::LogLimit;
use crate::metrics::Metrics;
use crate::tls::Tls;

/// A handle on the channel. Clones are the same channel.
#[derive(Clone)]
pub struct Peers {
    table: Rc<Table>,
}

/// What the channel's tasks share.
pub(super) struct Table {
    pub(super) options: Options,
    pub(super) events: Rc<Queue>,
    pub(super) metrics: Metrics,
    pub(super) strangers: LogLimit,
    address: SocketAddr,
    tls: RefCell<Tls>,
    peers: BTreeMap<NodeId, Rc<Peer>>,
    tasks: RefCell<Vec<AbortHandle>>,
}

impl Peers {
    pub(super) fn new(table: Rc<Table>) -> Peers {
        Peers { table }
    }

    /// Sends `frame` to `to`: encoded, encrypted and written to the socket before this returns, as far as the socket
    /// takes it. Frames to one peer arrive in order, or the peer is lost.
    ///
    /// # Errors
    /// The peer is not up, its queue is full, or the frame is too long; nothing was sent then.
    pub fn send(&self, to: NodeId, frame: &Frame) -> Result<(), SendError> {
        let peer = self.peer(to)?;
        if !peer.is_up() {
            return Err(SendError::NotConnected(to));
        }
        peer.send(Encoded::new(frame)?, self.table.options.timing.queue_bytes)
    }

    /// Whether both directions to `peer` work.
    pub fn is_up(&self, peer: NodeId) -> bool {
        self.peer(peer).is_ok_and(|peer| peer.is_up())
    }

    /// Bytes of frames that wait for the socket to `peer`: 0 as long as the path keeps up.
    pub fn queued_bytes(&self, peer: NodeId) -> usize {
        self.stats(peer).map_or(0, |stats| stats.queued_bytes)
    }

    /// What is measured of `peer`; none if it is no peer.
    pub fn stats(&self, peer: NodeId) -> Option<PeerStats> {
        self.peer(peer).ok().map(|peer| peer.stats())
    }

    /// Why `peer` is not up, if it is not and has been tried.
    pub fn problem(&self, peer: NodeId) -> Option<String> {
        self.peer(peer).ok().and_then(|peer| peer.problem())
    }

    /// The numbers of all peers.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> {
        self.table.ids().collect::<Vec<_>>().into_iter()
    }

    /// Where this node listens.
    pub fn address(&self) -> SocketAddr {
        self.table.address
    }

    /// Uses `tls` from here on, and closes connections to peers that it does not admit: for a new revocation list.
    pub fn set_tls(&self, tls: Tls) {
        for peer in self.table.peers.values() {
            peer.recheck(|link| tls.admits(&link.certificates()));
        }
        self.table.tls.replace(tls);
    }

    /// Closes everything; every peer that was up is reported lost.
    pub fn shutdown(&self) {
        for task in self.table.tasks.take() {
            task.abort();
        }
        for peer in self.table.peers.values() {
            peer.shut();
        }
    }

    fn peer(&self, id: NodeId) -> Result<&Rc<Peer>, SendError> {
        let peer = self.table.peers.get(&id);
        peer.ok_or(SendError::NotConnected(id))
    }
}

impl Table {
    pub(super) fn new(
        options: Options,
        address: SocketAddr,
        tls: Tls,
        metrics: Metrics,
        events: Rc<Queue>,
    ) -> Table {
        let peers = options.peers.iter().map(|config| {
            let peer = Peer::new(config.clone(), events.clone(), metrics.clone());
            (config.id, Rc::new(peer))
        });
        Table {
            peers: peers.collect(),
            strangers: LogLimit::default(),
            tasks: RefCell::default(),
            tls: RefCell::new(tls),
            options,
            address,
            events,
            metrics,
        }
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = NodeId> {
        self.peers.keys().copied()
    }

    pub(super) fn get(&self, id: NodeId) -> Option<Rc<Peer>> {
        self.peers.get(&id).cloned()
    }

    pub(super) fn tls(&self) -> Tls {
        self.tls.borrow().clone()
    }

    /// Tasks to be stopped by a shutdown.
    pub(super) fn own(&self, tasks: Vec<AbortHandle>) {
        self.tasks.borrow_mut().extend(tasks);
    }

    /// Counts a connection that was closed for what the other side sent.
    pub(super) fn count(&self, why: &LinkError) {
        if let Some(reason) = why.rejection() {
            self.metrics.frame_rejected(reason);
        }
    }
}
