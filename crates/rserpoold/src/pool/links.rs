//! Links: the associations of each machine, by the machine's names for them.
//!
//! Machines have links of their own, but two SCTP endpoints have one association, and a registrar one connection. So an
//! association with a registrar may be a link of several elements and of the user. An association that the other end
//! made is named by its serial number.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;

use holdfast_proto::pool_element::LinkId;
use holdfast_sctp::{AssocId, MessageToSend};
use holdfast_wire::rserpool::asap::Message;
use tokio::sync::OwnedSemaphorePermit;

/// Machine, or side of a machine, that owns a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum LinkOwner {
    /// The pool user.
    User,
    /// An element by number, on its side towards registrars.
    Element(u64),
    /// An element by number, on its side towards its users.
    ElementUsers(u64),
}

/// An association or a registrar connection: its endpoint (0 is the daemon's own, otherwise that of the element
/// with this number), and the endpoint's id for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct AssociationKey {
    pub(super) endpoint: u64,
    pub(super) assoc: AssocId,
}

/// Transport of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkTarget {
    /// An SCTP association, or a registrar connection, by its key.
    Association(AssociationKey),
    /// A stream or a UDP socket, by number.
    Stream(u64),
    /// This daemon itself, when its user probes its elements.
    Local,
}

/// An input for the machine that owns a link.
#[derive(Debug)]
pub(super) enum MachineInput {
    Connected(LinkOwner, LinkId),
    Lost(LinkOwner, LinkId),
    /// The other side ended the link in order.
    Ended(LinkOwner, LinkId),
    Message(LinkOwner, LinkId, Message),
}

/// A message that waits for room in an association's buffer, with the permit for its program's unsent bytes.
pub(super) type QueuedMessage = (MessageToSend, Option<OwnedSemaphorePermit>);

#[derive(Debug)]
struct PoolAssociation {
    serial: u64,
    /// Addresses of the remote end: before the association is up, those dialled; afterwards, the confirmed ones.
    addresses: Vec<SocketAddr>,
    owners: Vec<(LinkOwner, LinkId)>,
    /// True if other owners may find the association by its addresses.
    is_shared: bool,
    is_up: bool,
    queued: VecDeque<QueuedMessage>,
}

/// Result of giving up a link: the transport that it had.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DetachedLink {
    /// No other owner has the association, so it must be ended. The flag says whether it is up.
    LastOwner(AssociationKey, bool),
    /// Other owners have the association, which stays.
    Shared,
    /// The link was a stream of this number.
    Stream(u64),
}

/// All links of the daemon's machines.
#[derive(Debug, Default)]
pub(super) struct LinkTable {
    associations: BTreeMap<AssociationKey, PoolAssociation>,
    /// Shared associations, by kind (true: TCP) and remote address.
    by_address: HashMap<(bool, SocketAddr), AssociationKey>,
    targets: HashMap<(LinkOwner, LinkId), LinkTarget>,
    streams: HashMap<u64, (LinkOwner, LinkId)>,
    last_serial: u64,
}

impl LinkTable {
    /// Adds an association begun here. Only a `shared` one can be found by its addresses.
    pub(super) fn add(
        &mut self,
        assoc_key: AssociationKey,
        addresses: Vec<SocketAddr>,
        shared: bool,
    ) {
        self.last_serial += 1;
        let association = PoolAssociation {
            serial: self.last_serial,
            addresses,
            owners: Vec::new(),
            is_shared: shared,
            is_up: false,
            queued: VecDeque::new(),
        };
        self.associations.insert(assoc_key, association);
        self.index_addresses(assoc_key);
    }

    fn index_addresses(&mut self, assoc_key: AssociationKey) {
        if let Some(association) = self.associations.get(&assoc_key)
            && association.is_shared
        {
            let addresses = association.addresses.iter();
            self.by_address.extend(
                addresses.map(|address| ((assoc_key.assoc.is_stream(), *address), assoc_key)),
            );
        }
    }

    fn unindex_addresses(&mut self, assoc_key: AssociationKey) {
        let Some(association) = self.associations.get(&assoc_key) else {
            return;
        };
        for address in &association.addresses {
            let key = (assoc_key.assoc.is_stream(), *address);
            if self.by_address.get(&key) == Some(&assoc_key) {
                self.by_address.remove(&key);
            }
        }
    }

    /// Binds a link to this association.
    pub(super) fn attach(&mut self, owner: LinkOwner, link: LinkId, assoc_key: AssociationKey) {
        if let Some(association) = self.associations.get_mut(&assoc_key) {
            association.owners.push((owner, link));
            self.targets
                .insert((owner, link), LinkTarget::Association(assoc_key));
        }
    }

    /// Binds a link to this stream.
    pub(super) fn attach_stream(&mut self, owner: LinkOwner, link: LinkId, stream: u64) {
        self.targets
            .insert((owner, link), LinkTarget::Stream(stream));
        self.streams.insert(stream, (owner, link));
    }

    /// Binds a link to this daemon itself.
    pub(super) fn attach_local(&mut self, owner: LinkOwner, link: LinkId) {
        self.targets.insert((owner, link), LinkTarget::Local);
    }

    /// Returns a shared association with one of these addresses, and whether it is up.
    pub(super) fn find(&self, addresses: &[SocketAddr]) -> Option<(AssociationKey, bool)> {
        let key_of_address =
            |address: &SocketAddr| self.by_address.get(&(false, *address)).copied();
        let assoc_key = addresses.iter().find_map(key_of_address)?;
        Some((assoc_key, self.associations.get(&assoc_key)?.is_up))
    }

    /// Returns a TCP connection to this address, and whether it is up.
    pub(super) fn find_stream(&self, address: SocketAddr) -> Option<(AssociationKey, bool)> {
        let assoc_key = *self.by_address.get(&(true, address))?;
        Some((assoc_key, self.associations.get(&assoc_key)?.is_up))
    }

    /// Records that an association is up, with these remote addresses. Returns the links that it serves; `None` if the
    /// other end made it.
    pub(super) fn mark_up(
        &mut self,
        assoc_key: AssociationKey,
        addresses: &[SocketAddr],
    ) -> Option<Vec<(LinkOwner, LinkId)>> {
        let was_begun_here = self.associations.contains_key(&assoc_key);
        if !was_begun_here {
            self.add(assoc_key, Vec::new(), assoc_key.endpoint == 0);
        }
        self.set_addresses(assoc_key, addresses.to_vec());
        let association = self.associations.get_mut(&assoc_key)?;
        association.is_up = true;
        was_begun_here.then(|| association.owners.clone())
    }

    /// Replaces the remote addresses of an association.
    pub(super) fn set_addresses(&mut self, assoc_key: AssociationKey, addresses: Vec<SocketAddr>) {
        self.unindex_addresses(assoc_key);
        if let Some(association) = self.associations.get_mut(&assoc_key) {
            association.addresses = addresses;
        }
        self.index_addresses(assoc_key);
    }

    /// Removes an association. Returns the links that ended.
    pub(super) fn remove(&mut self, assoc_key: AssociationKey) -> Vec<(LinkOwner, LinkId)> {
        self.unindex_addresses(assoc_key);
        let owners = self.end_links(assoc_key);
        self.associations.remove(&assoc_key);
        owners
    }

    /// Ends all links of an association that itself continues: data in transit is lost. Returns the links.
    pub(super) fn end_links(&mut self, assoc_key: AssociationKey) -> Vec<(LinkOwner, LinkId)> {
        let Some(association) = self.associations.get_mut(&assoc_key) else {
            return Vec::new();
        };
        association.queued.clear();
        let owners = std::mem::take(&mut association.owners);
        for owner in &owners {
            self.targets.remove(owner);
        }
        owners
    }

    /// Removes a stream. Returns the link that ended.
    pub(super) fn remove_stream(&mut self, stream: u64) -> Option<(LinkOwner, LinkId)> {
        let owner = self.streams.remove(&stream)?;
        self.targets.remove(&owner);
        Some(owner)
    }

    /// Returns the owner of a stream, and the link that has it.
    pub(super) fn stream_owner(&self, stream: u64) -> Option<(LinkOwner, LinkId)> {
        self.streams.get(&stream).copied()
    }

    /// Removes a link that a machine gives up.
    pub(super) fn detach(&mut self, owner: LinkOwner, link: LinkId) -> Option<DetachedLink> {
        let assoc_key = match self.targets.remove(&(owner, link))? {
            LinkTarget::Stream(stream) => {
                self.streams.remove(&stream);
                return Some(DetachedLink::Stream(stream));
            }
            LinkTarget::Local => return None,
            LinkTarget::Association(assoc_key) => assoc_key,
        };
        let association = self.associations.get_mut(&assoc_key)?;
        association.owners.retain(|own| *own != (owner, link));
        Some(match association.owners.is_empty() {
            true => DetachedLink::LastOwner(assoc_key, association.is_up),
            false => DetachedLink::Shared,
        })
    }

    /// Returns the transport of a link.
    pub(super) fn target(&self, owner: LinkOwner, link: LinkId) -> Option<LinkTarget> {
        self.targets.get(&(owner, link)).copied()
    }

    /// Returns the link of `owner` for the association; creates one if necessary.
    pub(super) fn link_for(
        &mut self,
        owner: LinkOwner,
        assoc_key: AssociationKey,
    ) -> Option<LinkId> {
        let association = self.associations.get(&assoc_key)?;
        let is_of_owner = |(by, _): &&(LinkOwner, LinkId)| *by == owner;
        if let Some((_, link)) = association.owners.iter().find(is_of_owner) {
            return Some(*link);
        }
        let link = LinkId::Accepted(association.serial);
        self.attach(owner, link, assoc_key);
        Some(link)
    }

    /// Returns true if the association is up.
    pub(super) fn is_up(&self, assoc_key: AssociationKey) -> bool {
        let association = self.associations.get(&assoc_key);
        association.is_some_and(|association| association.is_up)
    }

    /// Returns the links that the association serves.
    pub(super) fn owners(&self, assoc_key: AssociationKey) -> &[(LinkOwner, LinkId)] {
        let association = self.associations.get(&assoc_key);
        association.map_or(&[], |association| &association.owners)
    }

    /// Returns the remote addresses.
    pub(super) fn addresses(&self, assoc_key: AssociationKey) -> &[SocketAddr] {
        let association = self.associations.get(&assoc_key);
        association.map_or(&[], |association| &association.addresses)
    }

    /// Returns the messages that wait for room in the association's buffer.
    pub(super) fn queued(
        &mut self,
        assoc_key: AssociationKey,
    ) -> Option<&mut VecDeque<QueuedMessage>> {
        let association = self.associations.get_mut(&assoc_key)?;
        Some(&mut association.queued)
    }

    /// Returns the number of associations.
    pub(super) fn len(&self) -> usize {
        self.associations.len()
    }

    /// Returns the associations of an endpoint.
    pub(super) fn of_endpoint(&self, endpoint: u64) -> Vec<AssociationKey> {
        let at = |assoc| AssociationKey { endpoint, assoc };
        let key_range = at(AssocId(0))..=at(AssocId(u64::MAX));
        self.associations
            .range(key_range)
            .map(|(assoc_key, _)| *assoc_key)
            .collect()
    }

    /// Returns the keys of all associations and registrar connections.
    pub(super) fn associations(&self) -> Vec<AssociationKey> {
        self.associations.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn assoc_key(endpoint: u64, assoc: u64) -> AssociationKey {
        let assoc = AssocId(assoc);
        AssociationKey { endpoint, assoc }
    }

    #[test]
    fn machines_share_an_association_that_ends_with_the_last() {
        let mut links = LinkTable::default();
        let (one, registrar) = (assoc_key(0, 7), address("10.0.0.1:3863"));
        links.add(one, vec![registrar], true);
        links.attach(LinkOwner::User, LinkId::Initiated(1), one);
        assert_eq!(links.find(&[registrar]), Some((one, false)));
        let other = address("10.1.0.1:3863");
        let up = links.mark_up(one, &[registrar, other]);
        assert_eq!(up, Some(vec![(LinkOwner::User, LinkId::Initiated(1))]));
        assert_eq!(links.find(&[other]), Some((one, true)));
        links.attach(LinkOwner::Element(4), LinkId::Initiated(1), one);
        let shared = links.detach(LinkOwner::User, LinkId::Initiated(1));
        assert_eq!(shared, Some(DetachedLink::Shared));
        let last = links.detach(LinkOwner::Element(4), LinkId::Initiated(1));
        assert_eq!(last, Some(DetachedLink::LastOwner(one, true)));
        links.remove(one);
        assert_eq!((links.find(&[other]), links.len()), (None, 0));
    }

    #[test]
    fn incoming_association_has_one_link_per_machine() {
        let mut links = LinkTable::default();
        let assoc_key = assoc_key(0, 7);
        assert_eq!(links.mark_up(assoc_key, &[address("10.0.0.1:3863")]), None);
        let name = links
            .link_for(LinkOwner::Element(1), assoc_key)
            .expect("a name");
        assert_eq!(links.link_for(LinkOwner::Element(1), assoc_key), Some(name));
        let target = links.target(LinkOwner::Element(1), name);
        assert_eq!(target, Some(LinkTarget::Association(assoc_key)));
        assert_eq!(links.remove(assoc_key), [(LinkOwner::Element(1), name)]);
        // The stack reuses the number; the name must differ.
        links.mark_up(assoc_key, &[address("10.0.0.2:3863")]);
        assert_ne!(links.link_for(LinkOwner::Element(1), assoc_key), Some(name));
    }

    #[test]
    fn session_association_is_not_shared() {
        let mut links = LinkTable::default();
        let (apart, element) = (assoc_key(0, 1 << 32), address("10.0.0.1:7"));
        links.add(apart, vec![element], false);
        links.attach(LinkOwner::User, LinkId::Initiated(3), apart);
        links.mark_up(apart, &[element]);
        assert_eq!(links.find(&[element]), None);
        links.add(assoc_key(1, 0), Vec::new(), false);
        assert_eq!(links.of_endpoint(0), [apart]);
        assert_eq!(links.of_endpoint(1), [assoc_key(1, 0)]);
        links.attach_stream(LinkOwner::User, LinkId::Initiated(4), 9);
        assert_eq!(
            links.detach(LinkOwner::User, LinkId::Initiated(4)),
            Some(DetachedLink::Stream(9))
        );
    }
}
