//! All peers, and the engine's handle on the channel.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use holdfast_daemon::log_limit::LogLimit;
use holdfast_daemon::tls::Tls;
use holdfast_wire::{Frame, NodeId};
use tokio::task::AbortHandle;

use super::connection::EncodedFrame;
use super::events::EventQueue;
use super::peer::Peer;
use super::{PeerChannelOptions, PeerConnectionError, PeerStats, SendError};
use crate::metrics::Metrics;

/// A handle on the channel. Clones refer to the same channel.
#[derive(Clone)]
pub struct Peers {
    state: Rc<PeerChannelState>,
}

/// State shared by the channel's tasks.
pub(super) struct PeerChannelState {
    pub(super) options: PeerChannelOptions,
    pub(super) events: Rc<EventQueue>,
    pub(super) metrics: Metrics,
    pub(super) unknown_peer_log: LogLimit,
    address: SocketAddr,
    tls: RefCell<Tls>,
    peers: BTreeMap<NodeId, Rc<Peer>>,
    tasks: RefCell<Vec<AbortHandle>>,
}

impl Peers {
    pub(super) fn new(state: Rc<PeerChannelState>) -> Peers {
        Peers { state }
    }

    /// Sends `frame` to `to`: encodes, encrypts and writes it to the socket before returning, as far as the socket
    /// accepts it. Frames to one peer arrive in order, or the peer is lost.
    ///
    /// # Errors
    /// The peer is not up, its queue is full, or the frame is too long; nothing was sent then.
    pub fn send(&self, to: NodeId, frame: &Frame) -> Result<(), SendError> {
        let peer = self.peer(to)?;
        if !peer.is_up() {
            return Err(SendError::NotConnected(to));
        }
        peer.send(
            EncodedFrame::new(frame)?,
            self.state.options.timing.queue_bytes,
        )
    }

    /// Returns true if both directions to `peer` work.
    pub fn is_up(&self, peer: NodeId) -> bool {
        self.peer(peer).is_ok_and(|peer| peer.is_up())
    }

    /// Returns the bytes of frames that wait for the socket to `peer`: 0 as long as the path keeps up.
    pub fn queued_bytes(&self, peer: NodeId) -> usize {
        self.stats(peer).map_or(0, |stats| stats.queued_bytes)
    }

    /// Returns the measurements of `peer`; `None` if it is no peer.
    pub fn stats(&self, peer: NodeId) -> Option<PeerStats> {
        self.peer(peer).ok().map(|peer| peer.stats())
    }

    /// Returns the reason why `peer` is not up, if it was dialled and is not up.
    pub fn problem(&self, peer: NodeId) -> Option<String> {
        self.peer(peer).ok().and_then(|peer| peer.problem())
    }

    /// Returns the ids of all peers.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> {
        self.state.ids().collect::<Vec<_>>().into_iter()
    }

    /// Returns the listening address of this node.
    pub fn address(&self) -> SocketAddr {
        self.state.address
    }

    /// Replaces the TLS configuration, and closes connections to peers that it refuses. Used for a new revocation list.
    pub fn set_tls(&self, tls: Tls) {
        for peer in self.state.peers.values() {
            peer.recheck_certificates(|link| tls.admits(&link.certificates()));
        }
        self.state.tls.replace(tls);
    }

    /// Closes everything; every peer that was up is reported lost.
    pub fn shutdown(&self) {
        for task in self.state.tasks.take() {
            task.abort();
        }
        for peer in self.state.peers.values() {
            peer.close();
        }
    }

    fn peer(&self, id: NodeId) -> Result<&Rc<Peer>, SendError> {
        let peer = self.state.peers.get(&id);
        peer.ok_or(SendError::NotConnected(id))
    }
}

impl PeerChannelState {
    pub(super) fn new(
        options: PeerChannelOptions,
        address: SocketAddr,
        tls: Tls,
        metrics: Metrics,
        events: Rc<EventQueue>,
    ) -> PeerChannelState {
        let peers = options.peers.iter().map(|config| {
            let peer = Peer::new(config.clone(), events.clone(), metrics.clone());
            (config.id, Rc::new(peer))
        });
        PeerChannelState {
            peers: peers.collect(),
            unknown_peer_log: LogLimit::default(),
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

    /// Adds tasks for the shutdown to stop.
    pub(super) fn add_tasks(&self, tasks: Vec<AbortHandle>) {
        self.tasks.borrow_mut().extend(tasks);
    }

    /// Counts a connection that was closed because of the other side's data.
    pub(super) fn count_rejection(&self, error: &PeerConnectionError) {
        if let Some(reason) = error.rejection_reason() {
            self.metrics.count_rejection(reason);
        }
    }
}
