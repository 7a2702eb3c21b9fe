//! Associations begun by the registrar: to elements for a keep-alive, to peers, to mentors.

use super::{AssociationId, DialId, Output, PoolProtocol, Registrar};
use holdfast_handlespace::ElementKey;
use holdfast_wire::rserpool::RegistrarId;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Reason for an attempt to connect to another host.
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

/// Attempts to connect that have neither succeeded nor failed yet.
#[derive(Debug, Default)]
pub(super) struct OpenDials {
    open_dials: BTreeMap<DialId, DialPurpose>,
    /// Attempts to connect to elements, by the first address of the elements.
    element_dials: BTreeMap<SocketAddr, DialId>,
    last_id: u64,
}

impl OpenDials {
    /// Adds an attempt to connect. Returns its number.
    fn begin(&mut self, purpose: DialPurpose) -> DialId {
        self.last_id += 1;
        let dial = DialId(self.last_id);
        if let DialPurpose::Elements(first, _) = &purpose {
            self.element_dials.insert(*first, dial);
        }
        self.open_dials.insert(dial, purpose);
        dial
    }

    /// Removes an attempt that has succeeded or failed. Returns its purpose.
    fn end(&mut self, dial: DialId) -> Option<DialPurpose> {
        let purpose = self.open_dials.remove(&dial)?;
        if let DialPurpose::Elements(first, _) = &purpose {
            self.element_dials.remove(first);
        }
        Some(purpose)
    }

    /// Adds an element to the open attempt that connects to its first address. Returns false if there is none.
    pub(super) fn join_element(&mut self, first: SocketAddr, key: ElementKey) -> bool {
        if let Some(dial) = self.element_dials.get(&first)
            && let Some(DialPurpose::Elements(_, keys)) = self.open_dials.get_mut(dial)
        {
            keys.push(key);
            return true;
        }
        false
    }

    /// Returns the purposes of all open attempts.
    pub(super) fn purposes(&self) -> impl Iterator<Item = &DialPurpose> {
        self.open_dials.values()
    }
}

impl Registrar {
    pub(super) fn dial(
        &mut self,
        protocol: PoolProtocol,
        addresses: Vec<SocketAddr>,
        purpose: DialPurpose,
    ) -> DialId {
        let dial = self.dials.begin(purpose);
        self.outbox.push(Output::Connect {
            dial,
            protocol,
            addresses,
        });
        dial
    }

    /// Handles the success of an [`Output::Connect`].
    pub(super) fn on_dial_succeeded(
        &mut self,
        now: Duration,
        dial: DialId,
        association: AssociationId,
    ) {
        match self.dials.end(dial) {
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
        match self.dials.end(dial) {
            Some(DialPurpose::Elements(_, keys)) => self.on_elements_unreached(keys),
            Some(DialPurpose::Peer(id)) => self.on_peer_unreached(now, id),
            Some(DialPurpose::Mentor) if self.startup.is_mentor_dial(dial) => {
                self.on_mentor_failed(now)
            }
            Some(DialPurpose::MulticastPeer(at)) => self.on_unknown_peer_unreached(now, at),
            Some(DialPurpose::Mentor | DialPurpose::ConfiguredPeer) | None => {}
        }
    }
}
