//! Keys of the datagrams between this node and each other one, in a group that runs itself.
//!
//! Each end of a greeted connection tells the other end the key that it wants to see in datagrams. A node tells the same
//! key on all connections in one life of both daemons, so datagrams pass while a broken channel is established anew.

use std::collections::BTreeMap;

use holdfast_wire::authenticated_datagram::{DatagramAuthenticationKey, PairKeys};
use holdfast_wire::membership_frames::NodeName;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;

use crate::membership::random_bytes;

/// The keys that this node has agreed on with other nodes.
#[derive(Debug, Default)]
pub struct DatagramKeyTable {
    by_name: BTreeMap<String, AgreedKeys>,
}

#[derive(Debug)]
struct AgreedKeys {
    keys: PairKeys,
    /// The certificates that the other node has shown last.
    certificates: Vec<CertificateDer<'static>>,
}

impl DatagramKeyTable {
    /// Returns the keys that this node has agreed on with the node `name`.
    pub fn get(&self, name: &NodeName) -> Option<PairKeys> {
        self.by_name.get(name.as_str()).map(|agreed| agreed.keys)
    }
}

/// The table of the peer channel, which other threads watch. Only peers that the channel knows have keys, so the table is
/// bounded.
#[derive(Debug, Default)]
pub(super) struct DatagramKeys {
    table: watch::Sender<DatagramKeyTable>,
}

impl DatagramKeys {
    pub(super) fn subscribe(&self) -> watch::Receiver<DatagramKeyTable> {
        self.table.subscribe()
    }

    /// Returns the key for the datagrams from a node that was greeted with the start number `boot`. Keys of an earlier life
    /// of the node's daemon end.
    pub(super) fn agree(
        &self,
        peer: &str,
        boot: u64,
        certificates: Vec<CertificateDer<'static>>,
    ) -> DatagramAuthenticationKey {
        let known = self
            .table
            .borrow()
            .by_name
            .get(peer)
            .map(|agreed| agreed.keys);
        let keys = known
            .filter(|keys| keys.boot == boot)
            .unwrap_or_else(|| PairKeys {
                boot,
                inbound: DatagramAuthenticationKey(random_bytes()),
                outbound: None,
            });
        let agreed = AgreedKeys { keys, certificates };
        self.table.send_modify(|table| {
            table.by_name.insert(peer.to_owned(), agreed);
        });
        keys.inbound
    }

    /// Notes the key for the datagrams to a node, told by the daemon with the start number `boot`. A key of another life of
    /// that daemon is worthless, and ignored.
    pub(super) fn learn(&self, peer: &str, boot: u64, key: DatagramAuthenticationKey) {
        self.table.send_if_modified(|table| {
            let agreed = table.by_name.get_mut(peer);
            let Some(agreed) = agreed.filter(|agreed| agreed.keys.boot == boot) else {
                return false;
            };
            agreed.keys.outbound.replace(key) != Some(key)
        });
    }

    /// Drops the keys of a node.
    pub(super) fn forget(&self, peer: &str) {
        self.table
            .send_if_modified(|table| table.by_name.remove(peer).is_some());
    }

    /// Drops the keys of the nodes whose certificates `admits` refuses, connected or not.
    pub(super) fn forget_refused(&self, admits: impl Fn(&[CertificateDer<'static>]) -> bool) {
        let is_refused = |(_, agreed): &(&String, &AgreedKeys)| !admits(&agreed.certificates);
        let refused: Vec<String> = {
            let table = self.table.borrow();
            let refused = table.by_name.iter().filter(is_refused);
            refused.map(|(name, _)| name.clone()).collect()
        };
        for name in refused {
            self.forget(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys_of(keys: &DatagramKeys, name: &str) -> Option<PairKeys> {
        keys.table.borrow().get(&name.parse().unwrap())
    }

    #[test]
    fn keys_last_as_long_as_the_lives_of_both_daemons() {
        let keys = DatagramKeys::default();
        let inbound = keys.agree("n2", 5, Vec::new());
        keys.learn("n2", 5, DatagramAuthenticationKey([1; 32]));
        let expected = PairKeys {
            boot: 5,
            inbound,
            outbound: Some(DatagramAuthenticationKey([1; 32])),
        };
        assert_eq!(keys.agree("n2", 5, Vec::new()), inbound, "a new connection");
        assert_eq!(keys_of(&keys, "n2"), Some(expected));
        assert_ne!(keys.agree("n2", 6, Vec::new()), inbound, "a restart");
        assert_eq!(keys_of(&keys, "n2").unwrap().outbound, None);
        // A connection of the former life ends later than the greeting of the next one.
        keys.learn("n2", 5, DatagramAuthenticationKey([1; 32]));
        assert_eq!(keys_of(&keys, "n2").unwrap().outbound, None);
        assert_ne!(keys.agree("n3", 6, Vec::new()), inbound, "another node");
    }

    #[test]
    fn refused_certificate_ends_the_keys_of_its_node_alone() {
        let keys = DatagramKeys::default();
        let certificate = |byte| vec![CertificateDer::from(vec![byte])];
        let inbound = keys.agree("n2", 5, certificate(2));
        keys.agree("n3", 5, certificate(3));
        keys.forget_refused(|chain| chain != certificate(2));
        assert_eq!(keys_of(&keys, "n2"), None);
        assert!(keys_of(&keys, "n3").is_some());
        keys.learn("n2", 5, DatagramAuthenticationKey([1; 32]));
        assert_eq!(keys_of(&keys, "n2"), None);
        assert_ne!(keys.agree("n2", 5, certificate(4)), inbound);
    }
}
