//! The list of server nodes: kept by the contact node without votes, copied to the backups (paper 000, section 2.3.2).

use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{
    Member, MembershipFrame, NodeName, SERVER_NODES_MAX, ServerListVersion, ServerNodeChange,
};
use std::collections::BTreeMap;

/// The list, at the contact node or as a backup's copy.
#[derive(Debug, Default)]
pub(super) struct ServerList {
    entries: BTreeMap<NodeId, Member>,
    by_name: BTreeMap<NodeName, NodeId>,
    version: ServerListVersion,
    /// Changes that the backups have not been sent.
    unsent: Vec<ServerNodeChange>,
    /// Number of changes that the list had without them.
    unsent_base: u64,
    /// True if the list changed since `take_changed`.
    is_changed: bool,
}

impl ServerList {
    pub fn version(&self) -> ServerListVersion {
        self.version
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.entries.values()
    }

    pub fn get(&self, id: NodeId) -> Option<&Member> {
        self.entries.get(&id)
    }

    pub fn by_name(&self, name: &NodeName) -> Option<&Member> {
        self.by_name.get(name).and_then(|id| self.entries.get(id))
    }

    /// Makes the backup's copy the list of the new contact node. `changes` of one `boot` never repeat.
    pub fn begin(&mut self, boot: u64) {
        let changes = match self.version.boot == boot {
            true => self.version.changes + 1,
            false => 0,
        };
        self.version = ServerListVersion { boot, changes };
        self.unsent.clear();
        self.unsent_base = changes;
    }

    /// Adds a node, or changes its address or join. Returns false if the list is full, or another node has the number.
    pub fn add(&mut self, member: Member) -> bool {
        match self.entries.get(&member.id) {
            Some(known) if *known == member => return true,
            Some(known) if known.name != member.name => return false,
            _ => {}
        }
        let former = self.by_name.get(&member.name).copied();
        if former.is_none() && self.entries.len() >= SERVER_NODES_MAX {
            return false;
        }
        if let Some(former) = former.filter(|former| *former != member.id) {
            self.remove(former);
        }
        self.insert(member.clone());
        self.record(ServerNodeChange::Added(member));
        true
    }

    /// Removes a node; returns it if it was in the list.
    pub fn remove(&mut self, id: NodeId) -> Option<Member> {
        let member = self.erase(id)?;
        self.record(ServerNodeChange::Removed(id));
        Some(member)
    }

    /// Returns the frame with the changes since the last call, if there are any.
    pub fn take_unsent(&mut self) -> Option<MembershipFrame> {
        if self.unsent.is_empty() {
            return None;
        }
        let base = std::mem::replace(&mut self.unsent_base, self.version.changes);
        Some(MembershipFrame::ServerNodes {
            version: self.version,
            base: Some(base),
            changes: std::mem::take(&mut self.unsent),
        })
    }

    /// Returns the frame with the whole list.
    pub fn whole(&self) -> MembershipFrame {
        let entries = self.entries.values().cloned();
        MembershipFrame::ServerNodes {
            version: self.version,
            base: None,
            changes: entries.map(ServerNodeChange::Added).collect(),
        }
    }

    /// Applies the changes of the contact node to a copy. Returns false if changes are missing in between.
    pub fn apply(
        &mut self,
        version: ServerListVersion,
        base: Option<u64>,
        changes: Vec<ServerNodeChange>,
    ) -> bool {
        match base {
            None => {
                self.entries.clear();
                self.by_name.clear();
            }
            Some(base) if (self.version.boot, self.version.changes) == (version.boot, base) => {}
            // Of a repeated frame nothing is missing.
            Some(_) => {
                return self.version.boot == version.boot
                    && self.version.changes >= version.changes;
            }
        }
        for change in changes {
            match change {
                ServerNodeChange::Added(member) => {
                    if let Some(former) = self.by_name.get(&member.name).copied() {
                        self.erase(former);
                    }
                    self.erase(member.id);
                    if self.entries.len() < SERVER_NODES_MAX {
                        self.insert(member);
                    }
                }
                ServerNodeChange::Removed(id) => drop(self.erase(id)),
            }
        }
        self.version = version;
        self.is_changed = true;
        true
    }

    /// Returns true once after each change.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_changed)
    }

    fn insert(&mut self, member: Member) {
        self.by_name.insert(member.name.clone(), member.id);
        self.entries.insert(member.id, member);
    }

    fn erase(&mut self, id: NodeId) -> Option<Member> {
        let member = self.entries.remove(&id)?;
        self.by_name.remove(&member.name);
        Some(member)
    }

    fn record(&mut self, change: ServerNodeChange) {
        self.version.changes += 1;
        self.is_changed = true;
        self.unsent.push(change);
        if self.unsent.len() > SERVER_NODES_MAX {
            // The backups see by the version that changes are missing, and ask for the whole list.
            self.unsent.clear();
            self.unsent_base = self.version.changes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_group::member;
    use super::*;

    fn changes_of(
        frame: MembershipFrame,
    ) -> (ServerListVersion, Option<u64>, Vec<ServerNodeChange>) {
        match frame {
            MembershipFrame::ServerNodes {
                version,
                base,
                changes,
            } => (version, base, changes),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn copy_follows_changes_and_notices_gaps() {
        let (mut list, mut copy) = (ServerList::default(), ServerList::default());
        list.begin(7);
        assert!(list.add(member(20)) && list.add(member(21)));
        let (version, base, changes) = changes_of(list.take_unsent().expect("two changes"));
        assert!(
            !copy.apply(version, base, changes),
            "the copy is of another contact node"
        );
        let (version, base, changes) = changes_of(list.whole());
        assert!(copy.apply(version, base, changes));
        assert_eq!((copy.len(), copy.version()), (2, list.version()));
        assert!(list.remove(NodeId(20)).is_some());
        let (version, base, changes) = changes_of(list.take_unsent().expect("one change"));
        assert!(copy.apply(version, base, changes.clone()));
        assert!(
            copy.apply(version, base, changes),
            "a repeated frame is no gap"
        );
        assert_eq!(copy.len(), 1);
        assert!(list.add(member(22)) && list.take_unsent().is_some() && list.add(member(23)));
        let (version, base, changes) = changes_of(list.take_unsent().expect("one change"));
        assert!(!copy.apply(version, base, changes), "a frame was lost");
        assert!(list.take_unsent().is_none());
    }

    #[test]
    fn name_and_number_belong_to_one_node() {
        let mut list = ServerList::default();
        list.begin(1);
        assert!(list.add(member(20)));
        let mut other = member(21);
        other.id = NodeId(20);
        assert!(!list.add(other), "node 20 has another name");
        let mut again = member(20);
        again.id = NodeId(30);
        assert!(list.add(again.clone()));
        assert_eq!(
            (list.len(), list.by_name(&again.name).map(|node| node.id)),
            (1, Some(NodeId(30)))
        );
        let changes = list.version().changes;
        assert!(list.add(again));
        assert_eq!(list.version().changes, changes, "nothing changed");
    }

    #[test]
    fn list_is_bounded() {
        let mut list = ServerList::default();
        list.begin(1);
        assert!((1..=SERVER_NODES_MAX as u16).all(|id| list.add(member(id))));
        assert!(!list.add(member(5_000)));
        assert!(list.add(member(17)), "a known node may come again");
    }
}
