//! All peers, and the engine's handle on the channel.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use holdfast_daemon::log_limit::LogLimit;
use holdfast_daemon::tls::{Tls, node_name};
use holdfast_wire::authenticated_datagram::DatagramAuthenticationKey;
use holdfast_wire::membership_frames::{JoinRole, Member, MembershipFrame, NodeName};
use holdfast_wire::{Frame, NodeId};
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::connection::{EncodedFrame, PeerConnection};
use super::datagram_keys::{DatagramKeyTable, DatagramKeys};
use super::events::{EventQueue, ReceivedMembershipFrame};
use super::peer::Peer;
use super::{PeerChannelOptions, PeerConnectionError, PeerStats, SendError, dial};
use crate::metrics::Metrics;

/// Maximum number of guests: nodes without a number in the group.
const GUESTS_MAX: usize = 256;

/// A handle on the channel. Clones refer to the same channel.
#[derive(Clone)]
pub struct Peers {
    state: Rc<PeerChannelState>,
}

/// State that the tasks of the peer channel share.
pub(super) struct PeerChannelState {
    pub(super) options: PeerChannelOptions,
    pub(super) events: Rc<EventQueue>,
    pub(super) metrics: Metrics,
    pub(super) unknown_peer_log: LogLimit,
    address: SocketAddr,
    tls: RefCell<Tls>,
    own_number: Cell<NodeId>,
    /// Members and guests by their names in certificates.
    by_name: RefCell<BTreeMap<String, Rc<Peer>>>,
    /// Members by number.
    by_number: RefCell<BTreeMap<NodeId, Rc<Peer>>>,
    /// Addresses that are being asked for the group.
    asked: RefCell<BTreeSet<SocketAddr>>,
    /// Keys of datagrams; none in a configured group.
    datagram_keys: DatagramKeys,
    /// Names of the nodes that have answered at an address that was asked for the group.
    seeds: watch::Sender<BTreeSet<String>>,
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

    /// Returns the certificate that `peer` shows on the connection that carries its frames; none if there is none.
    pub fn certificate(&self, peer: NodeId) -> Option<CertificateDer<'static>> {
        self.peer(peer).ok()?.incoming_certificate()
    }

    /// Asks `peer` for a sign of life at once, which its measurements then show as received bytes.
    pub fn probe(&self, peer: NodeId) {
        // A ping behind a backlog would be answered late. The regular pings, whose answers are measured, count from 1.
        if self.queued_bytes(peer) == 0 {
            let _ = self.send(peer, &Frame::Ping { token: 0 });
        }
    }

    /// Returns the differences between this node and its peers that do not keep them apart, each with the peer's name.
    pub fn disagreements(&self) -> Vec<String> {
        let with_name = |peer: Rc<Peer>| {
            let disagreements = peer.disagreements().into_iter();
            let named = disagreements.map(|text| format!("node {} disagrees: {text}", peer.name));
            named.collect::<Vec<_>>()
        };
        self.state.all().into_iter().flat_map(with_name).collect()
    }

    /// Returns the ids of all peers.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> {
        let by_number = self.state.by_number.borrow();
        by_number.keys().copied().collect::<Vec<_>>().into_iter()
    }

    /// Makes these nodes the members of the group, which this node belongs to by the number `own` (none: it is outside
    /// the group). New members are dialled; nodes that are no members are lost.
    pub fn set_members(&self, own: Option<NodeId>, members: &[Member]) {
        self.state.set_members(own, members);
    }

    /// Sends a frame of the membership to the node `to`, at the address that the group knows or at `address`. The frame
    /// may be lost.
    pub fn send_membership(
        &self,
        to: &NodeName,
        address: Option<SocketAddr>,
        frame: &MembershipFrame,
    ) {
        self.state.send_membership(to, address, frame);
    }

    /// Sends a frame of the membership to the node at an address, whoever that is. The frame may be lost.
    pub fn ask_address(&self, address: SocketAddr, frame: &MembershipFrame) {
        self.state.ask_address(address, frame);
    }

    /// Returns the listening address of this node.
    pub fn address(&self) -> SocketAddr {
        self.state.address
    }

    /// Replaces the TLS configuration, and closes connections to peers that it refuses. Their datagrams are refused from
    /// then on. Used for a new revocation list.
    pub fn set_tls(&self, tls: Tls) {
        for peer in self.state.all() {
            peer.recheck_certificates(|link| tls.admits(&link.certificates()));
        }
        (self.state.datagram_keys).forget_refused(|chain| tls.admits(chain).is_ok());
        self.state.tls.replace(tls);
    }

    /// Returns the keys of datagrams between this node and others, to be watched.
    pub fn watch_datagram_keys(&self) -> watch::Receiver<DatagramKeyTable> {
        self.state.datagram_keys.subscribe()
    }

    /// Returns the names of the nodes that have answered at the addresses of [`Peers::ask_address`], to be watched. A name is
    /// there before the answer of its node.
    pub fn watch_seeds(&self) -> watch::Receiver<BTreeSet<String>> {
        self.state.seeds.subscribe()
    }

    /// Closes everything; every peer that was up is reported lost.
    pub fn shutdown(&self) {
        for task in self.state.tasks.take() {
            task.abort();
        }
        for peer in self.state.all() {
            peer.close();
        }
    }

    fn peer(&self, id: NodeId) -> Result<Rc<Peer>, SendError> {
        self.state.get(id).ok_or(SendError::NotConnected(id))
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
        let state = PeerChannelState {
            own_number: Cell::new(options.node),
            by_name: RefCell::default(),
            by_number: RefCell::default(),
            asked: RefCell::default(),
            datagram_keys: DatagramKeys::default(),
            seeds: watch::Sender::default(),
            unknown_peer_log: LogLimit::default(),
            tasks: RefCell::default(),
            tls: RefCell::new(tls),
            options,
            address,
            events,
            metrics,
        };
        for config in &state.options.peers {
            let peer = state.new_peer(&config.name);
            state.add_member(&peer, config.id, config.address);
        }
        state
    }

    /// Returns true if the group runs itself: its nodes are not configured.
    pub(super) fn is_self_running(&self) -> bool {
        self.options.membership.is_some()
    }

    /// Returns this node's number; 0 outside the group.
    pub(super) fn own_number(&self) -> NodeId {
        self.own_number.get()
    }

    pub(super) fn all(&self) -> Vec<Rc<Peer>> {
        self.by_name.borrow().values().cloned().collect()
    }

    /// Returns the member with this number.
    pub(super) fn get(&self, number: NodeId) -> Option<Rc<Peer>> {
        self.by_number.borrow().get(&number).cloned()
    }

    /// Returns the number of members with this address.
    pub(super) fn members_at(&self, ip: IpAddr) -> usize {
        let by_number = self.by_number.borrow();
        let has_address =
            |peer: &&Rc<Peer>| peer.address().is_some_and(|address| address.ip() == ip);
        by_number.values().filter(has_address).count()
    }

    fn new_peer(&self, name: &str) -> Rc<Peer> {
        let (events, metrics) = (self.events.clone(), self.metrics.clone());
        let peer = Rc::new(Peer::new(name.to_owned(), events, metrics));
        self.by_name
            .borrow_mut()
            .insert(name.to_owned(), peer.clone());
        peer
    }

    fn add_member(&self, peer: &Rc<Peer>, number: NodeId, address: SocketAddr) {
        self.by_number.borrow_mut().insert(number, peer.clone());
        peer.set_member(number, address);
    }

    /// Returns the node of this name, as a guest if it is no member.
    fn peer_or_guest(&self, name: &str) -> Result<Rc<Peer>, PeerConnectionError> {
        if let Some(known) = self.by_name.borrow().get(name) {
            return Ok(known.clone());
        }
        let members = self.by_number.borrow().len();
        if self.by_name.borrow().len() - members >= GUESTS_MAX {
            return Err(PeerConnectionError::TooManyGuests);
        }
        Ok(self.new_peer(name))
    }

    /// Returns the node that the connection's certificate names.
    pub(super) fn peer_with_certificate(
        &self,
        link: &PeerConnection,
    ) -> Result<Rc<Peer>, PeerConnectionError> {
        let name = link.certificates().first().and_then(node_name);
        let name = name.ok_or(PeerConnectionError::NoName)?;
        match name == self.options.name {
            true => Err(PeerConnectionError::OwnName(name)),
            false => self.peer_or_guest(&name),
        }
    }

    fn set_members(self: &Rc<Self>, own: Option<NodeId>, members: &[Member]) {
        self.own_number.set(own.unwrap_or(NodeId(0)));
        let others = members
            .iter()
            .filter(|member| member.name.as_str() != self.options.name);
        let mut former = std::mem::take(&mut *self.by_number.borrow_mut());
        for member in others {
            let name = member.name.as_str();
            let known = self.by_name.borrow().get(name).cloned();
            let peer = known.unwrap_or_else(|| self.new_peer(name));
            if let Some(number) = peer.number() {
                former.remove(&number);
            }
            self.add_member(&peer, member.id, member.address);
            self.dial(&peer);
        }
        for peer in former.into_values() {
            peer.clear_number();
            self.forget_if_idle(&peer);
        }
    }

    /// Dials a peer, if no task does so.
    pub(super) fn dial(self: &Rc<Self>, peer: &Rc<Peer>) {
        if !peer.dialling.replace(true) {
            self.spawn(dial::run(self.clone(), peer.clone()));
        }
    }

    fn send_membership(
        self: &Rc<Self>,
        to: &NodeName,
        address: Option<SocketAddr>,
        frame: &MembershipFrame,
    ) {
        let peer = match self.peer_or_guest(to.as_str()) {
            Ok(peer) => peer,
            Err(reason) => return tracing::debug!(%to, %reason, "a membership frame was dropped"),
        };
        if let (Some(address), false) = (address, peer.is_member()) {
            peer.set_guest_address(address);
        }
        peer.send_membership(frame);
        match peer.address() {
            Some(_) if peer.wants_connection() => self.dial(&peer),
            Some(_) => {}
            None => peer.drop_pending_frames(),
        }
        self.forget_if_idle(&peer);
    }

    fn ask_address(self: &Rc<Self>, address: SocketAddr, frame: &MembershipFrame) {
        // A node may say of any address that it is its own: only the address that this node has dialled proves the node.
        let is_there = |peer: &Rc<Peer>| peer.dialled_address() == Some(address);
        match self.all().into_iter().find(is_there) {
            Some(peer) => {
                self.note_seed(&peer);
                peer.send_membership(frame);
            }
            None if address == self.address => {}
            None => {
                if self.asked.borrow_mut().insert(address) {
                    self.spawn(dial::ask(self.clone(), address, frame.clone()));
                }
            }
        }
    }

    /// Notes that a node has answered at an address that was asked for the group.
    pub(super) fn note_seed(&self, peer: &Peer) {
        (self.seeds).send_if_modified(|names| names.insert(peer.name.clone()));
    }

    /// Notes that an address has answered, or does not answer.
    pub(super) fn end_question(&self, address: &SocketAddr) {
        self.asked.borrow_mut().remove(address);
    }

    /// Forgets a guest without a connection.
    pub(super) fn forget_if_idle(&self, peer: &Rc<Peer>) {
        if peer.is_idle() && !peer.dialling.get() {
            let mut by_name = self.by_name.borrow_mut();
            if by_name
                .get(&peer.name)
                .is_some_and(|known| Rc::ptr_eq(known, peer))
            {
                by_name.remove(&peer.name);
                self.datagram_keys.forget(&peer.name);
            }
        }
    }

    /// Passes a received frame on to the membership, with the role that the certificate of its connection names.
    pub(super) fn deliver_membership_frame(
        &self,
        peer: &Peer,
        certified: Option<JoinRole>,
        frame: MembershipFrame,
    ) -> Result<(), PeerConnectionError> {
        let Some(receiver) = &self.options.membership else {
            return Err(PeerConnectionError::UnexpectedFrame(frame.name()));
        };
        let from = NodeName::try_from(peer.name.clone());
        let from = from.map_err(|_| PeerConnectionError::NoName)?;
        let name = frame.name();
        let received = ReceivedMembershipFrame {
            from,
            certified,
            frame,
        };
        if receiver.try_send(received).is_err() {
            tracing::debug!(
                peer = peer.name,
                frame = name,
                "a membership frame was dropped"
            );
        }
        Ok(())
    }

    /// Tells a node that was greeted with the start number `boot` the key of its datagrams to this node.
    pub(super) fn tell_datagram_key(&self, peer: &Peer, link: &PeerConnection, boot: u64) {
        if !self.is_self_running() {
            return;
        }
        let key = (self.datagram_keys).agree(&peer.name, boot, link.certificates());
        let frame = Frame::DatagramAuthenticationKey {
            boot: self.options.boot,
            key,
        };
        if let Err(reason) = link.send(&frame) {
            link.close(reason);
        }
    }

    /// Notes the key of this node's datagrams to a peer.
    pub(super) fn learn_datagram_key(
        &self,
        peer: &Peer,
        boot: u64,
        key: DatagramAuthenticationKey,
    ) {
        self.datagram_keys.learn(&peer.name, boot, key);
    }

    /// Refuses a greeted connection whose certificate was revoked during the greeting.
    pub(super) fn recheck_certificate(
        &self,
        link: &PeerConnection,
    ) -> Result<(), PeerConnectionError> {
        let admitted = self.tls.borrow().admits(&link.certificates());
        admitted.map_err(PeerConnectionError::Revoked)
    }

    pub(super) fn tls(&self) -> Tls {
        self.tls.borrow().clone()
    }

    /// Starts a task, which the shutdown stops.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let mut tasks = self.tasks.borrow_mut();
        tasks.retain(|task| !task.is_finished());
        tasks.push(tokio::task::spawn_local(task).abort_handle());
    }

    /// Counts a connection that was closed because of the other side's data.
    pub(super) fn count_rejection(&self, error: &PeerConnectionError) {
        if let Some(reason) = error.rejection_reason() {
            self.metrics.count_rejection(reason);
        }
    }
}
