//! The contact node's lease, and the promises of voters that it stands on.
//!
//! A voter measures its promise from the receipt of a heartbeat, the contact node its lease from the sending. A majority
//! of voters that decides on a view with another contact node contains a voter of each majority that granted a lease,
//! and that voter takes part only when its promise has ended, later than the lease.

use holdfast_wire::membership_frames::{JoinNumber, Member, NodeName};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Most heartbeats whose sending times are kept: a grant for an older one is worth nothing.
const SENT_MAX: usize = 32;

/// A voter's promise to take part in no view with another contact node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LeasePromise {
    /// The contact node that has the promise.
    pub to: NodeName,
    /// Time at which the promise to the contact node ends.
    pub until: Duration,
}

/// A node's last signs of life, as the contact node sees them.
#[derive(Debug, Clone, Copy)]
struct Grants {
    /// Sending time of the newest heartbeat that the node has answered.
    newest: Option<Duration>,
    /// Time of the last answer, or of the first heartbeat to the node.
    heard: Duration,
}

/// The grants that a contact node has received.
#[derive(Debug, Default)]
pub(super) struct LeaseGrants {
    /// Number of the last heartbeat.
    sequence: u64,
    /// Heartbeats and their sending times.
    sent: VecDeque<(u64, Duration)>,
    by_node: BTreeMap<(NodeName, JoinNumber), Grants>,
}

impl LeaseGrants {
    /// Records the sending of a heartbeat to these nodes, and the grant of `own` node; returns the heartbeat's number.
    /// Forgets all other nodes.
    pub fn send(
        &mut self,
        now: Duration,
        own: &Member,
        receivers: impl Iterator<Item = (NodeName, JoinNumber)>,
    ) -> u64 {
        self.sequence += 1;
        self.sent.push_back((self.sequence, now));
        if self.sent.len() > SENT_MAX {
            self.sent.pop_front();
        }
        let mut former = std::mem::take(&mut self.by_node);
        for node in receivers {
            let grants = former.remove(&node).unwrap_or(Grants {
                newest: None,
                heard: now,
            });
            self.by_node.insert(node, grants);
        }
        let grants = Grants {
            newest: Some(now),
            heard: now,
        };
        self.by_node.insert((own.name.clone(), own.join), grants);
        self.sequence
    }

    /// Records a grant; returns false for a heartbeat that was not sent to the node, or too long ago.
    pub fn on_grant(&mut self, now: Duration, node: (NodeName, JoinNumber), sequence: u64) -> bool {
        let sent = self.sent.iter().find(|(number, _)| *number == sequence);
        let (Some((_, sent_at)), Some(grants)) = (sent, self.by_node.get_mut(&node)) else {
            return false;
        };
        grants.newest = grants.newest.max(Some(*sent_at));
        grants.heard = now;
        true
    }

    /// Returns true if the node has answered a heartbeat.
    pub fn has_granted(&self, node: &(NodeName, JoinNumber)) -> bool {
        (self.by_node.get(node)).is_some_and(|grants| grants.newest.is_some())
    }

    /// Returns the time of the last sign of life of a node; none if no heartbeat was sent to the node.
    pub fn heard(&self, voter: &Member) -> Option<Duration> {
        let grants = self.by_node.get(&(voter.name.clone(), voter.join));
        grants.map(|grants| grants.heard)
    }

    /// Gives all nodes time to show a sign of life: the local node itself has slept.
    pub fn excuse_silence(&mut self, now: Duration) {
        for grants in self.by_node.values_mut() {
            grants.heard = now;
        }
    }

    /// Forgets all grants and heartbeats. Numbers of heartbeats do not repeat nevertheless.
    pub fn forget_nodes(&mut self) {
        self.sent.clear();
        self.by_node.clear();
    }

    /// Returns the sending time of the newest heartbeat that a majority of the voters has answered, if there is one.
    pub fn majority_time(&self, voters: &[Member]) -> Option<Duration> {
        let newest = |voter: &Member| {
            let grants = self.by_node.get(&(voter.name.clone(), voter.join));
            grants.and_then(|grants| grants.newest)
        };
        let mut times: Vec<Option<Duration>> = voters.iter().map(newest).collect();
        times.sort_unstable_by(|a, b| b.cmp(a));
        times.get(voters.len() / 2).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_group::{member, ms};
    use super::*;

    fn key(member: &Member) -> (NodeName, JoinNumber) {
        (member.name.clone(), member.join)
    }

    #[test]
    fn lease_counts_from_the_sending_of_a_heartbeat_that_a_majority_answered() {
        let voters = [member(1), member(2), member(3), member(4)];
        let receivers = || voters[1..].iter().map(key);
        let mut grants = LeaseGrants::default();
        let first = grants.send(ms(10), &voters[0], receivers());
        let second = grants.send(ms(60), &voters[0], receivers());
        assert_eq!(grants.majority_time(&voters), None);
        assert!(grants.on_grant(ms(90), key(&voters[1]), second));
        assert_eq!(grants.majority_time(&voters), None);
        assert!(grants.on_grant(ms(91), key(&voters[2]), first));
        assert_eq!(grants.majority_time(&voters), Some(ms(10)));
        assert_eq!(grants.majority_time(&voters[..3]), Some(ms(60)));
        // A late grant for an older heartbeat changes nothing.
        assert!(grants.on_grant(ms(92), key(&voters[1]), first));
        assert_eq!(grants.majority_time(&voters[..3]), Some(ms(60)));
        assert_eq!(grants.heard(&voters[3]), Some(ms(10)));
    }

    #[test]
    fn grant_of_another_life_or_unknown_heartbeat_does_not_count() {
        let voters = [member(1), member(2)];
        let mut grants = LeaseGrants::default();
        let first = grants.send(ms(0), &voters[0], voters[1..].iter().map(key));
        let stranger = (voters[1].name.clone(), JoinNumber(999));
        assert!(!grants.on_grant(ms(1), stranger, first));
        assert!(!grants.on_grant(ms(1), key(&voters[1]), first + 1));
        assert_eq!(grants.majority_time(&voters), None);
        assert_eq!(grants.majority_time(&voters[..1]), Some(ms(0)));
    }
}
