//! The list of server nodes: kept by the contact node without votes, copied to backups and server nodes (paper 000,
//! section 2.3.2).

use super::numbers::NumberHolders;
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{
    Member, MembershipFrame, NodeName, SERVER_NODES_MAX, ServerListVersion, ServerNodeChange,
};
use std::collections::{BTreeMap, VecDeque};

/// Most changes that the list remembers. A copy that lacks more gets the whole list.
const REMEMBERED_CHANGES_MAX: usize = 1_024;

/// The list, at the contact node or as a copy.
#[derive(Debug, Default)]
pub(super) struct ServerList {
    entries: BTreeMap<NodeId, Member>,
    by_name: BTreeMap<NodeName, NodeId>,
    /// Names of present and former nodes by their numbers.
    holders: NumberHolders,
    version: ServerListVersion,
    /// The last steps from version to version, the newest one last. A new contact node remembers the steps of the former
    /// one, so that copies need not be sent anew.
    steps: VecDeque<Step>,
    /// Number of changes in `steps`, each step counted as one at least.
    remembered: usize,
    /// The version that the backups have been sent.
    sent: ServerListVersion,
    /// True if the list changed since `take_changed`.
    is_changed: bool,
}

/// The changes that make the next version of the list from one version. A new contact node makes a version without
/// changes.
#[derive(Debug)]
struct Step {
    from: ServerListVersion,
    changes: Vec<ServerNodeChange>,
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

    /// Notes the numbers of voters, which no server node may have.
    pub fn note_voters(&mut self, voters: &[Member]) {
        for voter in voters {
            self.holders.note_voter(voter);
        }
    }

    /// Returns true if a node is or was a voter, as far as this node remembers.
    pub fn was_voter(&self, name: &NodeName) -> bool {
        self.holders.was_voter(name)
    }

    /// Returns the number that a node had when it was in the list last.
    pub fn former_number(&self, name: &NodeName) -> Option<NodeId> {
        self.holders.former_number(name)
    }

    /// Makes the copy the list of the new contact node. `term` is a random number, so that no version comes twice.
    pub fn begin(&mut self, term: u64) {
        self.remember(self.version, Vec::new());
        self.version = ServerListVersion { term, changes: 0 };
        self.sent = self.version;
    }

    /// Adds a node, or changes its address or join. Returns false if the list is full, or another node has or had the
    /// number.
    pub fn add(&mut self, member: Member) -> bool {
        match self.entries.get(&member.id) {
            Some(known) if *known == member => return true,
            Some(known) if known.name != member.name => return false,
            _ if !self.holders.may_have(member.id, &member.name) => return false,
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

    /// Returns the frame with the changes since the last call, if there are any. Backups see by the version whether they
    /// miss more changes than the list remembers.
    pub fn take_unsent(&mut self) -> Option<MembershipFrame> {
        let base = std::mem::replace(&mut self.sent, self.version);
        let changes = self.changes_since(base)?;
        (!changes.is_empty()).then_some(MembershipFrame::ServerNodes {
            version: self.version,
            base: Some(base),
            changes,
        })
    }

    /// Returns the frame that makes the present list from a copy of version `known`: with the changes since then, or with
    /// the whole list if that is shorter.
    pub fn since(&self, known: ServerListVersion) -> MembershipFrame {
        match self.changes_since(known) {
            Some(changes) if changes.len() <= self.len() => MembershipFrame::ServerNodes {
                version: self.version,
                base: Some(known),
                changes,
            },
            _ => self.whole(),
        }
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
        base: Option<ServerListVersion>,
        changes: Vec<ServerNodeChange>,
    ) -> bool {
        let is_late = self.version.term == version.term && self.version.changes >= version.changes;
        match base {
            // Nothing is missing of a repeated frame.
            _ if is_late => return true,
            Some(base) if base != self.version => return false,
            Some(base) => {
                self.is_changed |= !changes.is_empty();
                self.apply_changes(&changes);
                self.remember(base, changes);
            }
            None => {
                let former = std::mem::take(&mut self.entries);
                self.by_name.clear();
                self.apply_changes(&changes);
                self.is_changed |= self.entries != former;
                self.steps.clear();
                self.remembered = 0;
            }
        }
        self.version = version;
        true
    }

    fn apply_changes(&mut self, changes: &[ServerNodeChange]) {
        for change in changes {
            match change {
                ServerNodeChange::Added(member) => {
                    if let Some(former) = self.by_name.get(&member.name).copied() {
                        self.erase(former);
                    }
                    self.erase(member.id);
                    if self.entries.len() < SERVER_NODES_MAX {
                        self.insert(member.clone());
                    }
                }
                ServerNodeChange::Removed(id) => drop(self.erase(*id)),
            }
        }
    }

    /// Returns true once after each change.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_changed)
    }

    fn insert(&mut self, member: Member) {
        self.holders.note_server_node(&member);
        self.by_name.insert(member.name.clone(), member.id);
        self.entries.insert(member.id, member);
    }

    fn erase(&mut self, id: NodeId) -> Option<Member> {
        let member = self.entries.remove(&id)?;
        self.by_name.remove(&member.name);
        Some(member)
    }

    fn record(&mut self, change: ServerNodeChange) {
        self.is_changed = true;
        self.remember(self.version, vec![change]);
        self.version.changes += 1;
    }

    fn remember(&mut self, from: ServerListVersion, changes: Vec<ServerNodeChange>) {
        let weight = |step: &Step| step.changes.len().max(1);
        let step = Step { from, changes };
        self.remembered += weight(&step);
        self.steps.push_back(step);
        while self.remembered > REMEMBERED_CHANGES_MAX
            && let Some(oldest) = self.steps.pop_front()
        {
            self.remembered -= weight(&oldest);
        }
    }

    /// Returns the changes since a version; none if the list does not remember them.
    fn changes_since(&self, known: ServerListVersion) -> Option<Vec<ServerNodeChange>> {
        if known == self.version {
            return Some(Vec::new());
        }
        let first = self.steps.iter().position(|step| step.from == known)?;
        let steps = self.steps.range(first..);
        Some(
            steps
                .flat_map(|step| step.changes.iter().cloned())
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_group::member;
    use super::*;

    fn changes_of(
        frame: MembershipFrame,
    ) -> (
        ServerListVersion,
        Option<ServerListVersion>,
        Vec<ServerNodeChange>,
    ) {
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

    /// Brings a copy up to date as a node does that asks for the changes. Returns the number of changes in the answer, none
    /// for a whole list.
    fn update(copy: &mut ServerList, list: &ServerList) -> Option<usize> {
        let (version, base, changes) = changes_of(list.since(copy.version()));
        let count = changes.len();
        assert!(copy.apply(version, base, changes));
        assert_eq!(copy.version(), list.version());
        assert!(copy.members().eq(list.members()));
        base.map(|_| count)
    }

    #[test]
    fn copy_gets_the_changes_since_its_version() {
        let (mut list, mut copy) = (ServerList::default(), ServerList::default());
        list.begin(7);
        for id in 20..30 {
            assert!(list.add(member(id)));
        }
        assert_eq!(update(&mut copy, &list), Some(10), "both began empty");
        assert!(list.add(member(40)) && list.remove(NodeId(21)).is_some());
        assert_eq!(update(&mut copy, &list), Some(2));
        assert_eq!(update(&mut copy, &list), Some(0));
        for _ in 0..REMEMBERED_CHANGES_MAX {
            assert!(list.add(member(50)) && list.remove(NodeId(50)).is_some());
        }
        assert_eq!(
            update(&mut copy, &list),
            None,
            "more than the list remembers"
        );
        assert!(list.remembered <= REMEMBERED_CHANGES_MAX && !list.steps.is_empty());
    }

    #[test]
    fn copies_outlive_a_change_of_the_contact_node() {
        let [mut first, mut second, mut copy] = [(); 3].map(|()| ServerList::default());
        first.begin(7);
        for id in 20..30 {
            assert!(first.add(member(id)));
        }
        update(&mut second, &first);
        update(&mut copy, &first);
        assert!(first.add(member(40)));
        assert_eq!(update(&mut second, &first), Some(1));
        second.begin(9);
        assert!(second.remove(NodeId(20)).is_some());
        assert_eq!(
            update(&mut copy, &second),
            Some(2),
            "the copy missed one change"
        );
        assert_eq!(update(&mut first, &second), Some(1));
        let before = second.version();
        first.begin(8);
        assert_ne!(first.version(), before);
        assert_eq!(update(&mut copy, &first), Some(0));
    }

    #[test]
    fn late_frame_changes_nothing() {
        let (mut list, mut copy) = (ServerList::default(), ServerList::default());
        list.begin(7);
        assert!(list.add(member(20)));
        let (version, base, changes) = changes_of(list.whole());
        assert!(list.add(member(21)));
        update(&mut copy, &list);
        assert!(copy.apply(version, base, changes));
        assert_eq!((copy.len(), copy.version()), (2, list.version()));
    }
}
