//! The peer list (RFC 5353 section 3.4): active and silent registrars.

use super::associations::{endpoints, is_registrar_permitted};
use super::dials::DialPurpose;
use super::resynchronisation::StaleElementSweep;
use super::takeover::TakeoverArbitration;
use super::timer_queue::RegistrarTimer;
use super::{AssociationId, DialId, Event, PoolProtocol, Registrar};
use holdfast_wire::rserpool::enrp::EnrpBody;
use holdfast_wire::rserpool::{RegistrarId, SctpTransport, ServerInformation};
use rand::seq::IteratorRandom;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct PeerRegistrar {
    /// Transport address of the peer; unknown for one that was only named as an element's home.
    pub(super) transport: Option<SctpTransport>,
    pub(super) association: Option<AssociationId>,
    dial: Option<DialId>,
    /// Time at which the peer was last heard: peer_last_heard.
    pub(super) last_heard: Duration,
    pub(super) state: PeerState,
    /// Current stamp: elements of this home with another stamp were not in its table.
    pub(super) sync_stamp: u32,
    /// True while its table is requested, or elements missing from it are removed.
    pub(super) is_syncing: bool,
    pub(super) sweep: Option<StaleElementSweep>,
    /// True if another registrar has described elements of this peer that have a distance, and the peer's own table is
    /// needed.
    pub(super) has_hearsay_distances: bool,
    /// The checksum that the peer announced last.
    announced_checksum: Option<u16>,
}

#[derive(Debug)]
pub(super) enum PeerState {
    Active,
    /// The peer is silent, and was asked for a response.
    Suspect,
    /// Another registrar wants to take over its elements ("not active").
    NotActive,
    /// This registrar is taking over its elements.
    TakingOver(TakeoverArbitration),
}

/// Status of a peer, for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerStatus {
    /// Number of the peer.
    pub id: RegistrarId,
    /// Transport address of the peer, if known.
    pub transport: Option<SctpTransport>,
    /// True if there is an association with the peer.
    pub connected: bool,
    /// True if the peer is neither silent nor being taken over.
    pub active: bool,
    /// Time at which the peer was last heard.
    pub last_heard: Duration,
    /// Number of elements that have the peer as home.
    pub elements: usize,
    /// The checksum of its elements here, and the last one that the peer announced.
    pub checksum: (u16, Option<u16>),
}

/// The peer list, in the order of the numbers.
#[derive(Debug, Default)]
pub(super) struct PeerList {
    by_id: BTreeMap<RegistrarId, PeerRegistrar>,
}

impl PeerList {
    pub(super) fn get(&self, id: RegistrarId) -> Option<&PeerRegistrar> {
        self.by_id.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: RegistrarId) -> Option<&mut PeerRegistrar> {
        self.by_id.get_mut(&id)
    }

    pub(super) fn contains(&self, id: RegistrarId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (RegistrarId, &mut PeerRegistrar)> {
        self.by_id.iter_mut().map(|(id, peer)| (*id, peer))
    }

    /// Returns the stamp that marks elements of a home as contained in its table.
    pub(super) fn sync_stamp_of(&self, home: RegistrarId) -> u32 {
        self.by_id.get(&home).map_or(0, |peer| peer.sync_stamp)
    }

    /// Adds a peer that counts as heard at `now`.
    fn add(&mut self, now: Duration, id: RegistrarId) {
        let peer = PeerRegistrar {
            transport: None,
            association: None,
            dial: None,
            last_heard: now,
            state: PeerState::Active,
            sync_stamp: 1,
            is_syncing: false,
            sweep: None,
            has_hearsay_distances: false,
            announced_checksum: None,
        };
        self.by_id.insert(id, peer);
    }

    /// Returns the peers with an association, and that association.
    fn connected(&self) -> impl Iterator<Item = (RegistrarId, AssociationId)> {
        let peers = self.by_id.iter();
        peers.filter_map(|(id, peer)| Some((*id, peer.association?)))
    }

    /// Returns the active peers with an association.
    pub(super) fn active_ids(&self) -> impl Iterator<Item = RegistrarId> {
        let active = self.by_id.iter().filter(|(_, peer)| {
            matches!(peer.state, PeerState::Active) && peer.association.is_some()
        });
        active.map(|(id, _)| *id)
    }

    /// Returns the active peers with an association and a transport address. Registrars known by hearsay only are left
    /// out: two lists would keep each other's dead ones alive.
    fn servers(&self) -> impl Iterator<Item = ServerInformation> {
        self.by_id.iter().filter_map(|(id, peer)| {
            let transport = peer.transport.clone()?;
            let active = matches!(peer.state, PeerState::Active) && peer.association.is_some();
            active.then_some(ServerInformation { id: *id, transport })
        })
    }

    /// Returns true if the transport address of a peer includes one of these addresses.
    pub(super) fn has_peer_at(&self, addresses: &[SocketAddr]) -> bool {
        self.by_id.values().any(|peer| {
            let transport = peer.transport.as_ref();
            transport.is_some_and(|transport| {
                let has = |a: &SocketAddr| {
                    a.port() == transport.port
                        && transport.addresses.contains(&a.ip().to_canonical())
                };
                addresses.iter().any(has)
            })
        })
    }
}

impl Registrar {
    /// Returns the peer list, in the order of the numbers.
    pub fn peers(&self) -> impl Iterator<Item = PeerStatus> + '_ {
        self.peers.by_id.iter().map(|(id, peer)| PeerStatus {
            id: *id,
            transport: peer.transport.clone(),
            connected: peer.association.is_some(),
            active: matches!(peer.state, PeerState::Active),
            last_heard: peer.last_heard,
            elements: self.elements.space().elements_owned_by(*id),
            checksum: (self.elements.space().checksum(*id), peer.announced_checksum),
        })
    }

    /// Adds a registrar to the peer list. Returns false if the list is full. A registrar known by hearsay has as much
    /// time to be heard as any other.
    pub(super) fn add_peer(&mut self, now: Duration, id: RegistrarId) -> bool {
        if id.0 == 0 || id == self.config.id {
            return false;
        }
        if self.peers.contains(id) {
            return true;
        }
        if self.peers.by_id.len() >= self.config.settings.limits.registrars {
            return false;
        }
        self.peers.add(now, id);
        let silent = now + self.config.settings.last_heard_max;
        self.schedule.set(RegistrarTimer::PeerState(id), silent);
        self.outbox.push_event(Event::PeerUp(id));
        true
    }

    /// Handles a sign of life from a peer, which ends any suspicion or takeover.
    pub(super) fn on_peer_heard(&mut self, now: Duration, id: RegistrarId) {
        let Some(peer) = self.peers.get_mut(id) else {
            return;
        };
        peer.last_heard = now;
        if matches!(peer.state, PeerState::Active) {
            return;
        }
        let before = std::mem::replace(&mut peer.state, PeerState::Active);
        let silent = now + self.config.settings.last_heard_max;
        self.schedule.set(RegistrarTimer::PeerState(id), silent);
        if matches!(before, PeerState::TakingOver(_)) {
            self.outbox.push_event(Event::TakeoverEnded(id));
        }
        self.outbox.push_event(Event::PeerUp(id));
    }

    /// Binds an association to the peer that sent a message over it.
    pub(super) fn bind_association(
        &mut self,
        now: Duration,
        association: AssociationId,
        id: RegistrarId,
    ) {
        if let Some(known_association) = self.associations.get_mut(association) {
            known_association.peer = Some(id);
        }
        if let Some(peer) = self.peers.get_mut(id)
            && peer.association.is_none()
        {
            peer.association = Some(association);
            self.schedule.stop(RegistrarTimer::DialPeer(id));
            self.update_connected_peers();
            self.on_peer_bound(now, association);
        }
    }

    /// Sets a peer's transport address to the announced one, as far as registrars are permitted there.
    pub(super) fn set_peer_transport(&mut self, id: RegistrarId, transport: &SctpTransport) {
        let mut transport = transport.clone();
        let config = &self.config;
        transport
            .addresses
            .retain(|address| is_registrar_permitted(*address, &config.settings, &config.mentors));
        if transport.addresses.is_empty() {
            return;
        }
        if let Some(peer) = self.peers.get_mut(id) {
            peer.transport = Some(transport);
            self.dial_peer(id);
        }
    }

    /// Makes an association with a peer that has none.
    pub(super) fn dial_peer(&mut self, id: RegistrarId) {
        let Some(peer) = self.peers.get(id) else {
            return;
        };
        if peer.association.is_some() || peer.dial.is_some() {
            return;
        }
        let Some(transport) = &peer.transport else {
            return;
        };
        let addresses = endpoints(transport).collect();
        let dial = self.dial(PoolProtocol::Enrp, addresses, DialPurpose::Peer(id));
        if let Some(peer) = self.peers.get_mut(id) {
            peer.dial = Some(dial);
        }
    }

    pub(super) fn on_peer_reached(&mut self, id: RegistrarId, at: AssociationId) {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.dial = None;
        }
        // The registrar there identifies itself in its presence, which binds it.
        self.send_presence(at, RegistrarId(0), true);
    }

    pub(super) fn on_peer_unreached(&mut self, now: Duration, id: RegistrarId) {
        let retry_at = now + self.config.settings.retry_interval;
        let Some(peer) = self.peers.get_mut(id) else {
            return;
        };
        peer.dial = None;
        match peer.state {
            // RFC 5353 section 3.4.3: "If the send fails".
            PeerState::Suspect if peer.association.is_none() => self.on_peer_dead(now, id),
            _ => self.schedule.set(RegistrarTimer::DialPeer(id), retry_at),
        }
    }

    pub(super) fn on_peer_lost(
        &mut self,
        now: Duration,
        id: RegistrarId,
        association: AssociationId,
    ) {
        let Some(peer) = self.peers.get_mut(id) else {
            return;
        };
        if peer.association != Some(association) {
            return;
        }
        peer.association = None;
        self.stop_sync(id);
        self.update_connected_peers();
        let active = self.peers.get(id).map(|peer| &peer.state);
        if matches!(active, Some(PeerState::Active)) {
            self.suspect_peer(now, id);
        }
    }

    /// Removes a peer from the list.
    pub(super) fn drop_peer(&mut self, id: RegistrarId) {
        let Some(peer) = self.peers.by_id.remove(&id) else {
            return;
        };
        for timer in [
            RegistrarTimer::PeerState(id),
            RegistrarTimer::DialPeer(id),
            RegistrarTimer::SyncTimeout(id),
            RegistrarTimer::Sweep(id),
        ] {
            self.schedule.stop(timer);
        }
        if let Some(association) = peer.association
            && let Some(association) = self.associations.get_mut(association)
        {
            association.peer = None;
        }
        self.update_connected_peers();
    }

    fn update_connected_peers(&mut self) {
        let connected = self.peers.connected();
        self.outbox
            .set_peers(connected.map(|(_, association)| association));
    }

    /// Handles a peer's timer, according to the peer's state.
    pub(super) fn on_peer_timeout(&mut self, now: Duration, id: RegistrarId) {
        let Some(peer) = self.peers.get(id) else {
            return;
        };
        match &peer.state {
            PeerState::Active => {
                let due = peer.last_heard + self.config.settings.last_heard_max;
                if now < due {
                    self.schedule.set(RegistrarTimer::PeerState(id), due);
                } else {
                    self.suspect_peer(now, id);
                }
            }
            PeerState::Suspect => self.on_peer_dead(now, id),
            // The registrar that wanted to take this peer over has not announced it. rsplib never does.
            PeerState::NotActive if self.elements.space().elements_owned_by(id) == 0 => {
                self.drop_peer(id)
            }
            PeerState::NotActive => self.on_peer_dead(now, id),
            PeerState::TakingOver(_) => self.on_takeover_timeout(now, id),
        }
    }

    /// Asks a silent peer for a response. RFC 5353 section 3.4.3: "MUST immediately send a point-to-point ENRP_PRESENCE
    /// with the Reply_request flag set".
    fn suspect_peer(&mut self, now: Duration, id: RegistrarId) {
        let until = now + self.config.settings.no_response_max;
        let Some(peer) = self.peers.get_mut(id) else {
            return;
        };
        peer.state = PeerState::Suspect;
        let association = peer.association;
        self.schedule.set(RegistrarTimer::PeerState(id), until);
        match association {
            Some(to) => self.send_presence(to, id, true),
            None => self.dial_peer(id),
        }
        // A takeover may have waited for this peer.
        self.drop_silent_arbiter(now, id);
    }

    fn on_peer_dead(&mut self, now: Duration, id: RegistrarId) {
        self.outbox.push_event(Event::PeerDead(id));
        self.begin_takeover(now, id);
    }

    /// Sends the heartbeat (RFC 5353 section 3.4.2).
    pub(super) fn send_heartbeat(&mut self, now: Duration) {
        if !self.orphaned_elements.is_empty() {
            // The checksum would differ from the peers' knowledge.
            let soon = now + Duration::from_millis(1);
            return self.schedule.set(RegistrarTimer::Heartbeat, soon);
        }
        let body = self.presence(false);
        let body = self.outbox.announce_to_peers(body);
        if self.config.settings.enrp_multicast {
            self.outbox.multicast_enrp(body);
        }
        let next = now + self.config.settings.heartbeat_cycle;
        self.schedule.set(RegistrarTimer::Heartbeat, next);
        let ids: Vec<_> = self.peers.by_id.keys().copied().collect();
        for id in ids {
            self.dial_peer(id);
        }
        self.dial_mentors();
        self.ask_unknown_registrars();
        self.request_list();
        self.subscriptions.mark_all_changed();
    }

    /// Asks one of the peers for its list from time to time. Two registrars that took each other for dead have
    /// forgotten each other, but other peers know both.
    fn request_list(&mut self) {
        if let Some((id, to)) = self.peers.connected().choose(&mut self.random) {
            self.outbox.send_enrp(to, id, EnrpBody::ListRequest);
        }
    }

    /// Returns this registrar's presence. rsplib expects all its fields always.
    pub(super) fn presence(&self, reply_required: bool) -> EnrpBody {
        EnrpBody::Presence {
            reply_required,
            checksum: Some(self.elements.space().checksum(self.config.id)),
            server: Some(self.config.own_information()),
        }
    }

    pub(super) fn send_presence(&mut self, to: AssociationId, receiver: RegistrarId, reply: bool) {
        let body = self.presence(reply);
        self.outbox.send_enrp(to, receiver, body);
    }

    /// Handles a presence of a peer.
    pub(super) fn on_presence(
        &mut self,
        now: Duration,
        id: RegistrarId,
        checksum: Option<u16>,
        server: Option<ServerInformation>,
    ) {
        if let Some(server) = server.filter(|server| server.id == id) {
            self.set_peer_transport(id, &server.transport);
        }
        let Some(checksum) = checksum else { return };
        if let Some(peer) = self.peers.get_mut(id) {
            peer.announced_checksum = Some(checksum);
        }
        self.compare_checksum(now, id, checksum);
    }

    /// Returns the known registrars, including this one.
    pub(super) fn server_list(&self) -> Vec<ServerInformation> {
        std::iter::once(self.config.own_information())
            .chain(self.peers.servers())
            .collect()
    }

    /// Learns registrars from a peer's list.
    pub(super) fn learn_list(&mut self, now: Duration, servers: Vec<ServerInformation>) {
        for server in servers {
            if !self.peers.contains(server.id) && self.add_peer(now, server.id) {
                self.set_peer_transport(server.id, &server.transport);
            }
        }
    }
}
