//! Numbers of nodes: the name that each belongs to, and how often a name may get a new one.
//!
//! There are 65,535 numbers, and none is given to another name: records of flows contain them. A server node that comes
//! back gets its former number. A voter gets a new one, since a vote must not count for an earlier life of the node; so
//! the contact node bounds the numbers that one name gets.

use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{JoinNumber, Member, NodeName, SERVER_NODES_MAX};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most numbers whose names are remembered.
const HOLDERS_MAX: usize = 2 * SERVER_NODES_MAX;
/// Most names of voters that are remembered.
const FORMER_VOTERS_MAX: usize = 256;
/// Most names whose joins are counted.
const JOINERS_MAX: usize = 2 * SERVER_NODES_MAX;
/// Numbers that a name gets without a wait.
const FREE_NUMBERS: u32 = 32;
/// Time after which one number less counts: a name gets 48 numbers a day at most, and all numbers last for years.
const FORGIVEN_AFTER: Duration = Duration::from_secs(30 * 60);
/// Wait after the last free number; doubles with each further number.
const WAIT_MIN: Duration = Duration::from_secs(10);
/// Longest wait between two numbers.
const WAIT_MAX: Duration = Duration::from_secs(60 * 60);

/// The names that numbers belong to, at the contact node and where there is a copy of the list of server nodes.
#[derive(Debug, Default)]
pub(super) struct NumberHolders {
    by_number: BTreeMap<NodeId, NodeName>,
    /// The last number of each name that was a server node.
    of_server_nodes: BTreeMap<NodeName, NodeId>,
    /// Names of present and former voters.
    voters: BTreeSet<NodeName>,
}

impl NumberHolders {
    /// Notes a voter's number.
    pub fn note_voter(&mut self, voter: &Member) {
        self.note(voter.id, &voter.name);
        if self.voters.len() >= FORMER_VOTERS_MAX && !self.voters.contains(&voter.name) {
            self.voters.pop_first();
        }
        self.voters.insert(voter.name.clone());
    }

    /// Returns true if a node is or was a voter, and is not forgotten.
    pub fn was_voter(&self, name: &NodeName) -> bool {
        self.voters.contains(name)
    }

    /// Notes the number of a node in the list of server nodes.
    pub fn note_server_node(&mut self, member: &Member) {
        self.note(member.id, &member.name);
        self.of_server_nodes.insert(member.name.clone(), member.id);
    }

    fn note(&mut self, id: NodeId, name: &NodeName) {
        match self.by_number.insert(id, name.clone()) {
            Some(former) if former != *name => self.forget_server_node(id, &former),
            None if self.by_number.len() > HOLDERS_MAX => {
                // The lowest numbers were given first.
                let oldest = self.by_number.keys().copied().find(|known| *known != id);
                if let Some((id, name)) = oldest.and_then(|id| self.by_number.remove_entry(&id)) {
                    self.forget_server_node(id, &name);
                }
            }
            _ => {}
        }
    }

    fn forget_server_node(&mut self, id: NodeId, name: &NodeName) {
        if self.of_server_nodes.get(name) == Some(&id) {
            self.of_server_nodes.remove(name);
        }
    }

    /// Returns true if the number is not known to belong to another name.
    pub fn may_have(&self, id: NodeId, name: &NodeName) -> bool {
        self.by_number.get(&id).is_none_or(|holder| holder == name)
    }

    /// Returns the number that a server node had last.
    pub fn former_number(&self, name: &NodeName) -> Option<NodeId> {
        self.of_server_nodes.get(name).copied()
    }
}

/// The new node numbers that a name was given.
#[derive(Debug)]
struct NodeNumberAllowance {
    /// The last join that was admitted; none once the node has a number by it.
    join: Option<JoinNumber>,
    /// Number of joins that count.
    used: u32,
    /// Time from which the next forgiveness counts.
    forgiven_at: Duration,
    /// Time of the next number.
    next_at: Duration,
}

/// The joins that need new numbers, counted by name at the contact node.
#[derive(Debug, Default)]
pub(super) struct NumberAllowances(BTreeMap<NodeName, NodeNumberAllowance>);

impl NumberAllowances {
    /// Returns true if the join may lead to a new number. A join that is repeated before it has led to one counts once.
    pub fn admit(&mut self, now: Duration, name: &NodeName, join: JoinNumber) -> bool {
        if self.0.len() >= JOINERS_MAX && !self.0.contains_key(name) {
            // Each name needs a certificate, so a host cannot make room for itself.
            let idlest = self.0.iter().min_by_key(|(_, it)| it.next_at);
            if let Some(idlest) = idlest.map(|(name, _)| name.clone()) {
                self.0.remove(&idlest);
            }
        }
        let known = self.0.entry(name.clone()).or_insert(NodeNumberAllowance {
            join: None,
            used: 0,
            forgiven_at: now,
            next_at: now,
        });
        if known.join == Some(join) {
            return true;
        }
        let elapsed = now.saturating_sub(known.forgiven_at).as_secs();
        let forgiven = u32::try_from(elapsed / FORGIVEN_AFTER.as_secs()).unwrap_or(u32::MAX);
        known.used = known.used.saturating_sub(forgiven);
        known.forgiven_at += FORGIVEN_AFTER.saturating_mul(forgiven);
        if now < known.next_at {
            return false;
        }
        (known.join, known.used) = (Some(join), known.used + 1);
        let beyond = known.used.saturating_sub(FREE_NUMBERS);
        known.next_at = match beyond {
            0 => now,
            _ => now + (WAIT_MIN * 2_u32.pow((beyond - 1).min(10))).min(WAIT_MAX),
        };
        true
    }

    /// Notes that a node has a number by its last join: the same join counts again if it leads to a further number.
    pub fn note_number(&mut self, name: &NodeName) {
        if let Some(known) = self.0.get_mut(name) {
            known.join = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_group::{member, name};
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn name_gets_some_numbers_at_once_and_few_a_day() {
        let mut allowances = NumberAllowances::default();
        let (mut now, mut count) = (Duration::from_secs(5), 0);
        let mut count_until = |end: Duration| {
            let before = count;
            while now < end {
                for _ in 0..100 {
                    let is_admitted = allowances.admit(now, &name(9), JoinNumber(count));
                    count += u64::from(is_admitted);
                    if !is_admitted {
                        break;
                    }
                }
                now += Duration::from_secs(1);
            }
            count - before
        };
        assert_eq!(count_until(Duration::from_secs(6)), 33);
        assert!(count_until(DAY) < 80);
        assert!(count_until(2 * DAY) < 52);
        assert!(allowances.admit(now, &name(8), JoinNumber(1)));
    }

    #[test]
    fn repeated_join_counts_once_for_each_number() {
        let mut allowances = NumberAllowances::default();
        let now = Duration::ZERO;
        for _ in 0..1_000 {
            assert!(allowances.admit(now, &name(9), JoinNumber(1)));
        }
        assert!(allowances.admit(now, &name(9), JoinNumber(2)));
        for _ in 0..31 {
            allowances.note_number(&name(9));
            assert!(allowances.admit(now, &name(9), JoinNumber(2)));
        }
        allowances.note_number(&name(9));
        assert!(!allowances.admit(now, &name(9), JoinNumber(2)));
    }

    #[test]
    fn counted_names_and_remembered_numbers_are_bounded() {
        let mut allowances = NumberAllowances::default();
        let mut holders = NumberHolders::default();
        for number in 1..=10_000 {
            let now = Duration::from_millis(number.into());
            assert!(allowances.admit(now, &name(number), JoinNumber(1)));
            holders.note_server_node(&member(number));
        }
        assert_eq!(allowances.0.len(), JOINERS_MAX);
        assert_eq!(holders.by_number.len(), HOLDERS_MAX);
        assert_eq!(holders.of_server_nodes.len(), HOLDERS_MAX);
        assert_eq!(holders.former_number(&name(10_000)), Some(NodeId(10_000)));
        assert!(!holders.may_have(NodeId(10_000), &name(1)));
    }
}
