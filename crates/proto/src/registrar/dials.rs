//! Associations begun by the registrar: to elements for a keep-alive, to peers, to mentors.

use super::{AssociationId, DialId, Output, PoolProtocol, Registrar};
use holdfast_handlespace::ElementKey;
use holdfast_wire::rserpool::RegistrarId;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

#[derive(Debug)]
pub(super) enum DialPurpose {
    /// Keep-alives to these elements, which share this address.
    Elements(SocketAddr, Vec<ElementKey>),
    Peer(RegistrarId),
    Mentor,
    /// A possible registrar at a configured address.
    ConfiguredPeer,
    /// A registrar heard by multicast.
    MulticastPeer(SocketAddr),
}

#[derive(Debug, Default)]
pub(super) struct OpenDials {
    pub(super) open_dials: BTreeMap<DialId, DialPurpose>,
    pub(super) element_dials: BTreeMap<SocketAddr, DialId>,
    last_id: u64,
}

impl Registrar {
    pub(super) fn dial(
        &mut self,
        protocol: PoolProtocol,
        addresses: Vec<SocketAddr>,
        purpose: DialPurpose,
    ) -> DialId {
        self.dials.last_id += 1;
        let dial = DialId(self.dials.last_id);
        self.dials.open_dials.insert(dial, purpose);
        self.outbox.push(Output::Connect {
            dial,
            protocol,
            addresses,
        });
        dial
    }

    fn end_dial(&mut self, dial: DialId) -> Option<DialPurpose> {
        let purpose = self.dials.open_dials.remove(&dial)?;
        if let DialPurpose::Elements(first, _) = &purpose {
            self.dials.element_dials.remove(first);
        }
        Some(purpose)
    }

    /// Handles the success of an [`Output::Connect`].
    pub(super) fn on_dial_succeeded(
        &mut self,
        now: Duration,
        dial: DialId,
        association: AssociationId,
    ) {
        match self.end_dial(dial) {
            Some(DialPurpose::Elements(_, keys)) => {
                for key in keys {
                    self.send_keep_alive(association, key);
                }
            }
            Some(DialPurpose::Peer(id)) => self.on_peer_reached(id, association),
            Some(DialPurpose::Mentor) => self.on_mentor_reached(now, association),
            Some(DialPurpose::ConfiguredPeer | DialPurpose::MulticastPeer(_)) => {
                self.send_presence(association, RegistrarId(0), true);
            }
            None => {}
        }
    }

    /// Handles the failure of an [`Output::Connect`].
    pub fn handle_dial_failed(&mut self, now: Duration, dial: DialId) {
        match self.end_dial(dial) {
            Some(DialPurpose::Elements(_, keys)) => self.on_elements_unreached(keys),
            Some(DialPurpose::Peer(id)) => self.on_peer_unreached(now, id),
            Some(DialPurpose::Mentor) if self.mentor_dial == Some(dial) => {
                self.on_mentor_failed(now)
            }
            Some(DialPurpose::MulticastPeer(at)) => self.on_unknown_peer_unreached(now, at),
            Some(DialPurpose::Mentor | DialPurpose::ConfiguredPeer) | None => {}
        }
    }
}
