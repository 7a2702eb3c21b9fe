//! Associations of both endpoints, by the machine's numbers for them.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;

use holdfast_proto::registrar::{AssociationId, DialId, PoolProtocol};
use holdfast_sctp::AssocId;

/// Returns the machine's number of an association, made of the endpoint's number and the endpoint.
pub(super) fn association_id(protocol: PoolProtocol, assoc: AssocId) -> AssociationId {
    let endpoint = match protocol {
        PoolProtocol::Asap => 0,
        PoolProtocol::Enrp => 1,
    };
    // The highest bit, which the shift loses, is never set.
    AssociationId(assoc.0 << 1 | endpoint)
}

/// Returns the endpoint of a machine's number, and the endpoint's own number.
pub(super) fn endpoint_of(id: AssociationId) -> (PoolProtocol, AssocId) {
    let protocol = match id.0 & 1 {
        0 => PoolProtocol::Asap,
        _ => PoolProtocol::Enrp,
    };
    (protocol, AssocId(id.0 >> 1))
}

#[derive(Debug)]
struct RegistrarAssociation {
    addresses: Vec<SocketAddr>,
    /// Dials that wait for the association to come up.
    dials: Vec<DialId>,
    is_up: bool,
    /// Turn in the rota, if it has one; a new number each time.
    rota_turn: Option<u64>,
}

/// Result of looking for an association to connect.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AssociationLookup {
    /// An association is up, with these addresses of the peer.
    Up(AssociationId, Vec<SocketAddr>),
    /// An association is coming up; the dial waits for it.
    Connecting,
    /// There is no association with the address.
    Absent,
}

/// Associations that are up or coming up.
#[derive(Debug, Default)]
pub(super) struct AssociationTable {
    links: HashMap<AssociationId, RegistrarAssociation>,
    by_address: HashMap<(PoolProtocol, SocketAddr), AssociationId>,
    /// Associations whose round trip is measured, the next one first. An entry whose turn is not its link's is stale.
    rota: VecDeque<(AssociationId, u64)>,
    last_turn: u64,
}

impl AssociationTable {
    /// Adds an association begun here.
    pub(super) fn add(&mut self, id: AssociationId, addresses: Vec<SocketAddr>, dial: DialId) {
        self.index_addresses(id, &addresses);
        let link = RegistrarAssociation {
            addresses,
            dials: vec![dial],
            is_up: false,
            rota_turn: None,
        };
        self.links.insert(id, link);
    }

    /// Finds an association with one of these addresses. If it is coming up, `dial` waits for it too.
    pub(super) fn find(
        &mut self,
        protocol: PoolProtocol,
        addresses: &[SocketAddr],
        dial: DialId,
    ) -> AssociationLookup {
        let association_at =
            |address: &SocketAddr| self.by_address.get(&(protocol, *address)).copied();
        let Some(id) = addresses.iter().find_map(association_at) else {
            return AssociationLookup::Absent;
        };
        match self.links.get_mut(&id) {
            Some(link) if link.is_up => AssociationLookup::Up(id, link.addresses.clone()),
            Some(link) => {
                link.dials.push(dial);
                AssociationLookup::Connecting
            }
            None => AssociationLookup::Absent,
        }
    }

    /// Records that an association is up, with these addresses. Returns the dials that waited for it.
    pub(super) fn mark_up(&mut self, id: AssociationId, addresses: &[SocketAddr]) -> Vec<DialId> {
        let dials = match self.links.remove(&id) {
            Some(before) => {
                self.unindex_addresses(id, &before.addresses);
                before.dials
            }
            None => Vec::new(),
        };
        self.index_addresses(id, addresses);
        let link = RegistrarAssociation {
            addresses: addresses.to_vec(),
            dials: Vec::new(),
            is_up: true,
            rota_turn: None,
        };
        self.links.insert(id, link);
        dials
    }

    /// Returns true if an association is up.
    pub(super) fn is_up(&self, id: AssociationId) -> bool {
        self.links.get(&id).is_some_and(|link| link.is_up)
    }

    /// Replaces the addresses of an association that is up.
    pub(super) fn set_addresses(&mut self, id: AssociationId, addresses: &[SocketAddr]) {
        if let Some(link) = self.links.get_mut(&id) {
            let old_addresses = std::mem::replace(&mut link.addresses, addresses.to_vec());
            self.unindex_addresses(id, &old_addresses);
            self.index_addresses(id, addresses);
        }
    }

    /// Removes an association. Returns the dials that waited for it, and whether it was up.
    pub(super) fn remove(&mut self, id: AssociationId) -> (Vec<DialId>, bool) {
        let Some(link) = self.links.remove(&id) else {
            return (Vec::new(), false);
        };
        self.unindex_addresses(id, &link.addresses);
        (link.dials, link.is_up)
    }

    /// Returns the number of associations.
    pub(super) fn len(&self) -> usize {
        self.links.len()
    }

    /// Returns the ids of all associations.
    pub(super) fn ids(&self) -> impl Iterator<Item = AssociationId> + '_ {
        self.links.keys().copied()
    }

    /// Adds an association to the rota of round-trip measurements, at its front.
    pub(super) fn add_to_rota(&mut self, id: AssociationId) {
        if let Some(link) = self
            .links
            .get_mut(&id)
            .filter(|link| link.rota_turn.is_none())
        {
            self.last_turn += 1;
            link.rota_turn = Some(self.last_turn);
            self.rota.push_front((id, self.last_turn));
        }
    }

    /// Returns the length of the rota, including stale entries.
    pub(super) fn rota_len(&self) -> usize {
        self.rota.len()
    }

    /// Returns the next association for a round-trip measurement and moves it to the end of the rota. Associations that
    /// no longer matter are removed.
    pub(super) fn next_in_rota(
        &mut self,
        is_measured: impl Fn(AssociationId) -> bool,
    ) -> Option<AssociationId> {
        while let Some((id, turn)) = self.rota.pop_front() {
            let link = self.links.get_mut(&id);
            let Some(link) = link.filter(|link| link.rota_turn == Some(turn)) else {
                continue;
            };
            if is_measured(id) {
                self.rota.push_back((id, turn));
                return Some(id);
            }
            link.rota_turn = None;
        }
        None
    }

    fn index_addresses(&mut self, id: AssociationId, addresses: &[SocketAddr]) {
        let (protocol, _) = endpoint_of(id);
        for address in addresses {
            self.by_address.insert((protocol, *address), id);
        }
    }

    fn unindex_addresses(&mut self, id: AssociationId, addresses: &[SocketAddr]) {
        let (protocol, _) = endpoint_of(id);
        for address in addresses {
            let key = (protocol, *address);
            if self.by_address.get(&key) == Some(&id) {
                self.by_address.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn association_id_encodes_the_endpoint() {
        let stream = 1 << 62 | 7;
        for (protocol, own) in [
            (PoolProtocol::Asap, 7),
            (PoolProtocol::Asap, stream),
            (PoolProtocol::Enrp, 0xffff_fffe),
        ] {
            let id = association_id(protocol, AssocId(own));
            assert_eq!(endpoint_of(id), (protocol, AssocId(own)));
        }
    }

    #[test]
    fn second_dial_waits_for_the_pending_association() {
        let mut links = AssociationTable::default();
        let id = association_id(PoolProtocol::Enrp, AssocId(1));
        let (one, two) = (address("10.0.0.1:9901"), address("10.1.0.1:9901"));
        links.add(id, vec![one], DialId(1));
        assert_eq!(
            links.find(PoolProtocol::Enrp, &[two, one], DialId(2)),
            AssociationLookup::Connecting
        );
        assert_eq!(
            links.find(PoolProtocol::Asap, &[one], DialId(3)),
            AssociationLookup::Absent
        );
        assert_eq!(links.mark_up(id, &[one, two]), [DialId(1), DialId(2)]);
        let up = AssociationLookup::Up(id, vec![one, two]);
        assert_eq!(links.find(PoolProtocol::Enrp, &[two], DialId(4)), up);
        links.set_addresses(id, &[one]);
        let link_after_end = links.find(PoolProtocol::Enrp, &[two], DialId(4));
        assert_eq!(link_after_end, AssociationLookup::Absent);
        links.set_addresses(id, &[one, two]);
        assert_eq!(links.remove(id), (Vec::new(), true));
        assert_eq!(
            links.find(PoolProtocol::Enrp, &[one, two], DialId(5)),
            AssociationLookup::Absent
        );
        assert_eq!(links.len(), 0);
    }

    #[test]
    fn rota_drops_unmeasured_associations() {
        let mut links = AssociationTable::default();
        let [one, two, idle] = [2, 4, 6].map(AssociationId);
        for id in [one, two, idle] {
            links.mark_up(id, &[]);
        }
        assert_eq!(links.next_in_rota(|_| true), None);
        for id in [one, two, two] {
            links.add_to_rota(id);
        }
        let round = |links: &mut AssociationTable| [(); 3].map(|()| links.next_in_rota(|_| true));
        assert_eq!(round(&mut links), [Some(two), Some(one), Some(two)]);
        // One association ends and its number is reused by another that is measured: it gets one turn only.
        links.remove(two);
        links.mark_up(two, &[]);
        links.add_to_rota(two);
        assert_eq!(round(&mut links), [Some(two), Some(one), Some(two)]);
        assert_eq!(links.rota_len(), 2);
        assert_eq!(links.next_in_rota(|id| id == two), Some(two));
        assert_eq!(links.rota_len(), 1);
        links.add_to_rota(one);
        assert_eq!(links.next_in_rota(|_| true), Some(one));
    }

    #[test]
    fn address_belongs_to_the_newest_association() {
        let mut links = AssociationTable::default();
        let (old, new) = (AssociationId(2), AssociationId(4));
        let shared_address = address("10.0.0.1:3863");
        links.mark_up(old, &[shared_address]);
        links.mark_up(new, &[shared_address]);
        links.remove(old);
        let newest = links.find(PoolProtocol::Asap, &[shared_address], DialId(1));
        assert_eq!(newest, AssociationLookup::Up(new, vec![shared_address]));
    }
}
