//! Links: the associations of each machine, by the machine's names for them.
//!
//! Machines have links of their own, but two SCTP endpoints have one association, and a registrar one connection. So an
//! association with a registrar may be a link of several elements and of the user. An association that the other end
//! made is named by its serial number.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;

use holdfast_proto::pool_element::Link;
use holdfast_sys::transport::{AssocId, Message};
use tokio::sync::OwnedSemaphorePermit;

/// Owner of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Owner {
    /// The pool user.
    User,
    /// An element by number, on its side towards registrars.
    Element(u64),
    /// An element by number, on its side towards its users.
    Service(u64),
}

/// An association or a registrar connection: its endpoint (0 is the daemon's own, otherwise that of the element
/// with this number), and the endpoint's id for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Place {
    pub(super) endpoint: u64,
    pub(super) assoc: AssocId,
}

/// Transport of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// An association.
    Sctp(Place),
    /// A stream or a UDP socket, by number.
    Stream(u64),
    /// This daemon itself, when its user probes its elements.
    Own,
}

/// A message that waits for room in an association's buffer, with the permit for its program's unsent bytes.
pub(super) type Waiting = (Message, Option<OwnedSemaphorePermit>);

#[derive(Debug)]
struct Association {
    serial: u64,
    /// Addresses of the remote end: before the association is up, those dialled; afterwards, the confirmed ones.
    addresses: Vec<SocketAddr>,
    owners: Vec<(Owner, Link)>,
    /// True if other owners may find the association by its addresses.
    shared: bool,
    is_up: bool,
    waiting: VecDeque<Waiting>,
}

/// Result of giving up a link.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Detached {
    /// No other owner has the association, so it must be ended. The flag says whether it is up.
    Last(Place, bool),
    /// Other owners have the association.
    Shared,
    /// The link was a stream.
    Stream(u64),
}

/// All links.
#[derive(Debug, Default)]
pub(super) struct Links {
    associations: BTreeMap<Place, Association>,
    /// Shared associations, by kind (true: TCP) and remote address.
    by_address: HashMap<(bool, SocketAddr), Place>,
    targets: HashMap<(Owner, Link), Target>,
    streams: HashMap<u64, (Owner, Link)>,
    serials: u64,
}

impl Links {
    /// Adds an association begun here. Only a `shared` one can be found by its addresses.
    pub(super) fn begun(&mut self, place: Place, addresses: Vec<SocketAddr>, shared: bool) {
        self.serials += 1;
        let association = Association {
            serial: self.serials,
            addresses,
            owners: Vec::new(),
            shared,
            is_up: false,
            waiting: VecDeque::new(),
        };
        self.associations.insert(place, association);
        self.know(place);
    }

    fn know(&mut self, place: Place) {
        if let Some(association) = self.associations.get(&place)
            && association.shared
        {
            let each = association.addresses.iter();
            self.by_address
                .extend(each.map(|address| ((place.assoc.is_stream(), *address), place)));
        }
    }

    fn forget(&mut self, place: Place) {
        let Some(association) = self.associations.get(&place) else {
            return;
        };
        for address in &association.addresses {
            let key = (place.assoc.is_stream(), *address);
            if self.by_address.get(&key) == Some(&place) {
                self.by_address.remove(&key);
            }
        }
    }

    /// Binds a link to this association.
    pub(super) fn attach(&mut self, owner: Owner, link: Link, place: Place) {
        if let Some(association) = self.associations.get_mut(&place) {
            association.owners.push((owner, link));
            self.targets.insert((owner, link), Target::Sctp(place));
        }
    }

    /// Binds a link to this stream.
    pub(super) fn attach_stream(&mut self, owner: Owner, link: Link, stream: u64) {
        self.targets.insert((owner, link), Target::Stream(stream));
        self.streams.insert(stream, (owner, link));
    }

    /// Binds a link to this daemon itself.
    pub(super) fn attach_own(&mut self, owner: Owner, link: Link) {
        self.targets.insert((owner, link), Target::Own);
    }

    /// Returns a shared association with one of these addresses, and whether it is up.
    pub(super) fn find(&self, addresses: &[SocketAddr]) -> Option<(Place, bool)> {
        let known = |address: &SocketAddr| self.by_address.get(&(false, *address)).copied();
        let place = addresses.iter().find_map(known)?;
        Some((place, self.associations.get(&place)?.is_up))
    }

    /// Returns a TCP connection to this address, and whether it is up.
    pub(super) fn find_stream(&self, address: SocketAddr) -> Option<(Place, bool)> {
        let place = *self.by_address.get(&(true, address))?;
        Some((place, self.associations.get(&place)?.is_up))
    }

    /// Records that an association is up, with these remote addresses. Returns the links that it serves; `None` if the
    /// other end made it.
    pub(super) fn up(
        &mut self,
        place: Place,
        addresses: &[SocketAddr],
    ) -> Option<Vec<(Owner, Link)>> {
        let is_ours = self.associations.contains_key(&place);
        if !is_ours {
            self.begun(place, Vec::new(), place.endpoint == 0);
        }
        self.readdress(place, addresses.to_vec());
        let association = self.associations.get_mut(&place)?;
        association.is_up = true;
        is_ours.then(|| association.owners.clone())
    }

    /// Replaces the remote addresses of an association.
    pub(super) fn readdress(&mut self, place: Place, addresses: Vec<SocketAddr>) {
        self.forget(place);
        if let Some(association) = self.associations.get_mut(&place) {
            association.addresses = addresses;
        }
        self.know(place);
    }

    /// Removes an association. Returns the links that ended.
    pub(super) fn down(&mut self, place: Place) -> Vec<(Owner, Link)> {
        self.forget(place);
        let owners = self.owners_end(place);
        self.associations.remove(&place);
        owners
    }

    /// Ends all links of an association that itself continues: data in transit is lost. Returns the links.
    pub(super) fn owners_end(&mut self, place: Place) -> Vec<(Owner, Link)> {
        let Some(association) = self.associations.get_mut(&place) else {
            return Vec::new();
        };
        association.waiting.clear();
        let owners = std::mem::take(&mut association.owners);
        for owner in &owners {
            self.targets.remove(owner);
        }
        owners
    }

    /// Removes a stream. Returns the link that ended.
    pub(super) fn stream_down(&mut self, stream: u64) -> Option<(Owner, Link)> {
        let owner = self.streams.remove(&stream)?;
        self.targets.remove(&owner);
        Some(owner)
    }

    /// Returns the owner of the stream.
    pub(super) fn stream_owner(&self, stream: u64) -> Option<(Owner, Link)> {
        self.streams.get(&stream).copied()
    }

    /// Removes a link that a machine gives up.
    pub(super) fn detach(&mut self, owner: Owner, link: Link) -> Option<Detached> {
        let place = match self.targets.remove(&(owner, link))? {
            Target::Stream(stream) => {
                self.streams.remove(&stream);
                return Some(Detached::Stream(stream));
            }
            Target::Own => return None,
            Target::Sctp(place) => place,
        };
        let association = self.associations.get_mut(&place)?;
        association.owners.retain(|own| *own != (owner, link));
        Some(match association.owners.is_empty() {
            true => Detached::Last(place, association.is_up),
            false => Detached::Shared,
        })
    }

    /// Returns the transport of a link.
    pub(super) fn target(&self, owner: Owner, link: Link) -> Option<Target> {
        self.targets.get(&(owner, link)).copied()
    }

    /// Returns the link of `owner` for the association; creates one if necessary.
    pub(super) fn name_for(&mut self, owner: Owner, place: Place) -> Option<Link> {
        let association = self.associations.get(&place)?;
        let own = |(by, _): &&(Owner, Link)| *by == owner;
        if let Some((_, link)) = association.owners.iter().find(own) {
            return Some(*link);
        }
        let link = Link::Theirs(association.serial);
        self.attach(owner, link, place);
        Some(link)
    }

    /// Returns true if the association is up.
    pub(super) fn is_up(&self, place: Place) -> bool {
        let association = self.associations.get(&place);
        association.is_some_and(|association| association.is_up)
    }

    /// Returns the links that the association serves.
    pub(super) fn owners(&self, place: Place) -> &[(Owner, Link)] {
        let association = self.associations.get(&place);
        association.map_or(&[], |association| &association.owners)
    }

    /// Returns the remote addresses.
    pub(super) fn addresses(&self, place: Place) -> &[SocketAddr] {
        let association = self.associations.get(&place);
        association.map_or(&[], |association| &association.addresses)
    }

    /// Returns the messages that wait for room in the association's buffer.
    pub(super) fn waiting(&mut self, place: Place) -> Option<&mut VecDeque<Waiting>> {
        let association = self.associations.get_mut(&place)?;
        Some(&mut association.waiting)
    }

    /// Returns the number of associations.
    pub(super) fn len(&self) -> usize {
        self.associations.len()
    }

    /// Returns the associations of an endpoint.
    pub(super) fn places_of(&self, endpoint: u64) -> Vec<Place> {
        let at = |assoc| Place { endpoint, assoc };
        let own = at(AssocId(0))..=at(AssocId(u64::MAX));
        self.associations
            .range(own)
            .map(|(place, _)| *place)
            .collect()
    }

    /// Returns all associations.
    pub(super) fn places(&self) -> Vec<Place> {
        self.associations.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn place(endpoint: u64, assoc: u64) -> Place {
        let assoc = AssocId(assoc);
        Place { endpoint, assoc }
    }

    #[test]
    fn machines_share_an_association_and_the_last_one_ends_it() {
        let mut links = Links::default();
        let (one, registrar) = (place(0, 7), at("10.0.0.1:3863"));
        links.begun(one, vec![registrar], true);
        links.attach(Owner::User, Link::Ours(1), one);
        assert_eq!(links.find(&[registrar]), Some((one, false)));
        let other = at("10.1.0.1:3863");
        let up = links.up(one, &[registrar, other]);
        assert_eq!(up, Some(vec![(Owner::User, Link::Ours(1))]));
        assert_eq!(links.find(&[other]), Some((one, true)));
        links.attach(Owner::Element(4), Link::Ours(1), one);
        let shared = links.detach(Owner::User, Link::Ours(1));
        assert_eq!(shared, Some(Detached::Shared));
        let last = links.detach(Owner::Element(4), Link::Ours(1));
        assert_eq!(last, Some(Detached::Last(one, true)));
        links.down(one);
        assert_eq!((links.find(&[other]), links.len()), (None, 0));
    }

    #[test]
    fn an_association_of_the_other_end_has_one_name_for_each_machine() {
        let mut links = Links::default();
        let one = place(0, 7);
        assert_eq!(links.up(one, &[at("10.0.0.1:3863")]), None);
        let name = links.name_for(Owner::Element(1), one).expect("a name");
        assert_eq!(links.name_for(Owner::Element(1), one), Some(name));
        let target = links.target(Owner::Element(1), name);
        assert_eq!(target, Some(Target::Sctp(one)));
        assert_eq!(links.down(one), [(Owner::Element(1), name)]);
        // The stack reuses the number; the name must differ.
        links.up(one, &[at("10.0.0.2:3863")]);
        assert_ne!(links.name_for(Owner::Element(1), one), Some(name));
    }

    #[test]
    fn an_association_of_a_session_is_not_found_by_others() {
        let mut links = Links::default();
        let (apart, element) = (place(0, 1 << 32), at("10.0.0.1:7"));
        links.begun(apart, vec![element], false);
        links.attach(Owner::User, Link::Ours(3), apart);
        links.up(apart, &[element]);
        assert_eq!(links.find(&[element]), None);
        links.begun(place(1, 0), Vec::new(), false);
        assert_eq!(links.places_of(0), [apart]);
        assert_eq!(links.places_of(1), [place(1, 0)]);
        links.attach_stream(Owner::User, Link::Ours(4), 9);
        assert_eq!(
            links.detach(Owner::User, Link::Ours(4)),
            Some(Detached::Stream(9))
        );
    }
}
