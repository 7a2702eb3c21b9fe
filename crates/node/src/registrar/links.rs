//! Associations of both endpoints, by the machine's numbers for them.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;

use holdfast_proto::registrar::{AssociationId, DialId, Protocol};
use holdfast_sys::transport::AssocId;

/// Returns the machine's number of an association, made of the endpoint's number and the endpoint.
pub(super) fn number(protocol: Protocol, assoc: AssocId) -> AssociationId {
    let endpoint = match protocol {
        Protocol::Asap => 0,
        Protocol::Enrp => 1,
    };
    // The highest bit, which the shift loses, is never set.
    AssociationId(assoc.0 << 1 | endpoint)
}

/// Returns the endpoint of a machine's number, and the endpoint's own number.
pub(super) fn of_number(id: AssociationId) -> (Protocol, AssocId) {
    let protocol = match id.0 & 1 {
        0 => Protocol::Asap,
        _ => Protocol::Enrp,
    };
    (protocol, AssocId(id.0 >> 1))
}

#[derive(Debug)]
struct Link {
    addresses: Vec<SocketAddr>,
    /// Dials that wait for the association to come up.
    dials: Vec<DialId>,
    is_up: bool,
    /// Turn in the rota, if it has one; a new number each time.
    turn: Option<u64>,
}

/// Result of looking for an association to connect.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// An association is up, with these addresses.
    Up(AssociationId, Vec<SocketAddr>),
    /// An association is coming up; the dial waits for it.
    Coming,
    /// There is no association.
    Nothing,
}

/// Associations that are up or coming up.
#[derive(Debug, Default)]
pub(super) struct Links {
    links: HashMap<AssociationId, Link>,
    by_address: HashMap<(Protocol, SocketAddr), AssociationId>,
    /// Associations whose round trip is measured, the next one first. An entry whose turn is not its link's is stale.
    rota: VecDeque<(AssociationId, u64)>,
    turns: u64,
}

impl Links {
    /// Adds an association begun here.
    pub(super) fn begun(&mut self, id: AssociationId, addresses: Vec<SocketAddr>, dial: DialId) {
        self.know(id, &addresses);
        let link = Link {
            addresses,
            dials: vec![dial],
            is_up: false,
            turn: None,
        };
        self.links.insert(id, link);
    }

    /// Finds an association with one of these addresses. If it is coming up, `dial` waits for it too.
    pub(super) fn find(
        &mut self,
        protocol: Protocol,
        addresses: &[SocketAddr],
        dial: DialId,
    ) -> Found {
        let known = |address: &SocketAddr| self.by_address.get(&(protocol, *address)).copied();
        let Some(id) = addresses.iter().find_map(known) else {
            return Found::Nothing;
        };
        match self.links.get_mut(&id) {
            Some(link) if link.is_up => Found::Up(id, link.addresses.clone()),
            Some(link) => {
                link.dials.push(dial);
                Found::Coming
            }
            None => Found::Nothing,
        }
    }

    /// Records that an association is up, with these addresses. Returns the dials that waited for it.
    pub(super) fn up(&mut self, id: AssociationId, addresses: &[SocketAddr]) -> Vec<DialId> {
        let dials = match self.links.remove(&id) {
            Some(before) => {
                self.forget(id, &before.addresses);
                before.dials
            }
            None => Vec::new(),
        };
        self.know(id, addresses);
        let link = Link {
            addresses: addresses.to_vec(),
            dials: Vec::new(),
            is_up: true,
            turn: None,
        };
        self.links.insert(id, link);
        dials
    }

    /// Returns true if an association is up.
    pub(super) fn is_up(&self, id: AssociationId) -> bool {
        self.links.get(&id).is_some_and(|link| link.is_up)
    }

    /// Replaces the addresses of an association that is up.
    pub(super) fn readdress(&mut self, id: AssociationId, addresses: &[SocketAddr]) {
        if let Some(link) = self.links.get_mut(&id) {
            let before = std::mem::replace(&mut link.addresses, addresses.to_vec());
            self.forget(id, &before);
            self.know(id, addresses);
        }
    }

    /// Removes an association. Returns the dials that waited for it, and whether it was up.
    pub(super) fn down(&mut self, id: AssociationId) -> (Vec<DialId>, bool) {
        let Some(link) = self.links.remove(&id) else {
            return (Vec::new(), false);
        };
        self.forget(id, &link.addresses);
        (link.dials, link.is_up)
    }

    /// Returns the number of associations.
    pub(super) fn len(&self) -> usize {
        self.links.len()
    }

    /// Returns all associations.
    pub(super) fn each(&self) -> impl Iterator<Item = AssociationId> + '_ {
        self.links.keys().copied()
    }

    /// Adds an association to the rota of round-trip measurements, at its front.
    pub(super) fn measure(&mut self, id: AssociationId) {
        if let Some(link) = self.links.get_mut(&id).filter(|link| link.turn.is_none()) {
            self.turns += 1;
            link.turn = Some(self.turns);
            self.rota.push_front((id, self.turns));
        }
    }

    /// Returns the length of the rota, including stale entries.
    pub(super) fn measured(&self) -> usize {
        self.rota.len()
    }

    /// Returns the next association for a round-trip measurement and moves it to the end of the rota. Associations that
    /// no longer matter are removed.
    pub(super) fn next_in_rota(
        &mut self,
        matters: impl Fn(AssociationId) -> bool,
    ) -> Option<AssociationId> {
        while let Some((id, turn)) = self.rota.pop_front() {
            let link = self.links.get_mut(&id);
            let Some(link) = link.filter(|link| link.turn == Some(turn)) else {
                continue;
            };
            if matters(id) {
                self.rota.push_back((id, turn));
                return Some(id);
            }
            link.turn = None;
        }
        None
    }

    fn know(&mut self, id: AssociationId, addresses: &[SocketAddr]) {
        let (protocol, _) = of_number(id);
        for address in addresses {
            self.by_address.insert((protocol, *address), id);
        }
    }

    fn forget(&mut self, id: AssociationId, addresses: &[SocketAddr]) {
        let (protocol, _) = of_number(id);
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

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_number_tells_the_endpoint() {
        let stream = 1 << 62 | 7;
        for (protocol, own) in [
            (Protocol::Asap, 7),
            (Protocol::Asap, stream),
            (Protocol::Enrp, 0xffff_fffe),
        ] {
            let id = number(protocol, AssocId(own));
            assert_eq!(of_number(id), (protocol, AssocId(own)));
        }
    }

    #[test]
    fn a_second_dial_waits_for_the_first_one_s_association() {
        let mut links = Links::default();
        let id = number(Protocol::Enrp, AssocId(1));
        let (one, two) = (at("10.0.0.1:9901"), at("10.1.0.1:9901"));
        links.begun(id, vec![one], DialId(1));
        assert_eq!(
            links.find(Protocol::Enrp, &[two, one], DialId(2)),
            Found::Coming
        );
        assert_eq!(
            links.find(Protocol::Asap, &[one], DialId(3)),
            Found::Nothing
        );
        assert_eq!(links.up(id, &[one, two]), [DialId(1), DialId(2)]);
        let up = Found::Up(id, vec![one, two]);
        assert_eq!(links.find(Protocol::Enrp, &[two], DialId(4)), up);
        links.readdress(id, &[one]);
        let gone = links.find(Protocol::Enrp, &[two], DialId(4));
        assert_eq!(gone, Found::Nothing);
        links.readdress(id, &[one, two]);
        assert_eq!(links.down(id), (Vec::new(), true));
        assert_eq!(
            links.find(Protocol::Enrp, &[one, two], DialId(5)),
            Found::Nothing
        );
        assert_eq!(links.len(), 0);
    }

    #[test]
    fn only_what_matters_is_measured() {
        let mut links = Links::default();
        let [one, two, idle] = [2, 4, 6].map(AssociationId);
        for id in [one, two, idle] {
            links.up(id, &[]);
        }
        assert_eq!(links.next_in_rota(|_| true), None);
        for id in [one, two, two] {
            links.measure(id);
        }
        let round = |links: &mut Links| [(); 3].map(|()| links.next_in_rota(|_| true));
        assert_eq!(round(&mut links), [Some(two), Some(one), Some(two)]);
        // One association ends and its number is reused by another that is measured: it gets one turn only.
        links.down(two);
        links.up(two, &[]);
        links.measure(two);
        assert_eq!(round(&mut links), [Some(two), Some(one), Some(two)]);
        assert_eq!(links.measured(), 2);
        assert_eq!(links.next_in_rota(|id| id == two), Some(two));
        assert_eq!(links.measured(), 1);
        links.measure(one);
        assert_eq!(links.next_in_rota(|_| true), Some(one));
    }

    #[test]
    fn an_address_belongs_to_the_association_that_came_last() {
        let mut links = Links::default();
        let (old, new) = (AssociationId(2), AssociationId(4));
        let one = at("10.0.0.1:3863");
        links.up(old, &[one]);
        links.up(new, &[one]);
        links.down(old);
        let found = links.find(Protocol::Asap, &[one], DialId(1));
        assert_eq!(found, Found::Up(new, vec![one]));
    }
}
