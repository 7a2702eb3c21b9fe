//! Associations begun by the registrar: to elements for a keep-alive, to peers, to mentors.

use super::{AssociationId, DialId, Output, Protocol, Registrar};
use holdfast_handlespace::ElementKey;
use holdfast_wire::rserpool::RegistrarId;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

#[derive(Debug)]
pub(super) enum Purpose {
    /// Keep-alives to these elements, which share this address.
    Elements(SocketAddr, Vec<ElementKey>),
    Peer(RegistrarId),
    Mentor,
    /// A possible registrar at a configured address.
    Stranger,
    /// A registrar heard by multicast.
    Heard(SocketAddr),
}

#[derive(Debug, Default)]
pub(super) struct Dials {
    pub(super) open: BTreeMap<DialId, Purpose>,
    pub(super) to_elements: BTreeMap<SocketAddr, DialId>,
    last: u64,
}

impl Registrar {
    pub(super) fn dial(
        &mut self,
        protocol: Protocol,
        addresses: Vec<SocketAddr>,
        purpose: Purpose,
    ) -> DialId {
        self.dials.last += 1;
        let dial = DialId(self.dials.last);
        self.dials.open.insert(dial, purpose);
        self.out.push(Output::Connect {
            dial,
            protocol,
            addresses,
        });
        dial
    }

    fn hang_up(&mut self, dial: DialId) -> Option<Purpose> {
        let purpose = self.dials.open.remove(&dial)?;
        if let Purpose::Elements(first, _) = &purpose {
            self.dials.to_elements.remove(first);
        }
        Some(purpose)
    }

    /// Handles the success of an [`Output::Connect`].
    pub(super) fn dialled(&mut self, now: Duration, dial: DialId, association: AssociationId) {
        match self.hang_up(dial) {
            Some(Purpose::Elements(_, keys)) => {
                for key in keys {
                    self.send_keep_alive(association, key);
                }
            }
            Some(Purpose::Peer(id)) => self.peer_reached(id, association),
            Some(Purpose::Mentor) => self.mentor_reached(now, association),
            Some(Purpose::Stranger | Purpose::Heard(_)) => {
                self.send_presence(association, RegistrarId(0), true);
            }
            None => {}
        }
    }

    /// Handles the failure of an [`Output::Connect`].
    pub fn handle_dial_failed(&mut self, now: Duration, dial: DialId) {
        match self.hang_up(dial) {
            Some(Purpose::Elements(_, keys)) => self.elements_unreached(keys),
            Some(Purpose::Peer(id)) => self.peer_unreached(now, id),
            Some(Purpose::Mentor) if self.mentor_dial == Some(dial) => self.mentor_failed(now),
            Some(Purpose::Heard(at)) => self.stranger_unreached(now, at),
            Some(Purpose::Mentor | Purpose::Stranger) | None => {}
        }
    }
}
