//! The next view, as the contact node wishes it.

use super::Membership;
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{JoinRole, Member, VOTERS_MAX, VotedView};
use std::ops::Range;
use std::time::Duration;

/// Least number of node numbers that the contact node reserves for server nodes in one vote.
const RESERVED_IDS_MIN: u32 = 16;
/// The end of all node numbers.
const IDS_END: u32 = u16::MAX as u32 + 1;

impl Membership {
    /// Returns the view with all changes that wait; none if there are none.
    pub(super) fn next_view(&mut self, now: Duration) -> Option<VotedView> {
        let view = self.view.clone()?;
        let mut next = view.clone();
        let removals = &self.contact.removals;
        next.voters
            .retain(|voter| !removals.contains_key(&voter.id));
        self.add_backups(&mut next);
        self.reorder_voters(now, &mut next);
        if let Some(group_data) = self.changed_group_data(&view.group_data) {
            next.group_data = group_data;
        }
        let ids = self.reserve_ids(&mut next);
        if next == view {
            return None;
        }
        next.epoch += 1;
        self.contact.reserved = Some((next.clone(), ids));
        Some(next)
    }

    /// Adds the joining backups that have answered a heartbeat. A voter that has lost its disk gets a new number.
    fn add_backups(&self, next: &mut VotedView) {
        for (name, joiner) in &self.contact.joiners {
            let has_answered = self
                .contact
                .grants
                .has_granted(&(name.clone(), joiner.join));
            let Ok(id) = u16::try_from(next.next_id) else {
                return;
            };
            if joiner.role != JoinRole::Backup || !has_answered {
                continue;
            }
            next.voters.retain(|voter| voter.name != *name);
            if next.voters.len() >= VOTERS_MAX {
                return;
            }
            next.next_id += 1;
            next.voters.push(Member {
                id: NodeId(id),
                name: name.clone(),
                address: joiner.address,
                join: joiner.join,
            });
        }
    }

    /// Puts a promoted backup first, and the local node last; leaves the local node out if it leaves and a backup of the present
    /// view takes its place: server nodes would not believe a view of new voters alone.
    fn reorder_voters(&self, now: Duration, next: &mut VotedView) {
        let is_alive = |voter: &Member| self.is_alive(now, voter);
        let view = self.view.as_ref();
        let is_known = |voter: &Member| view.is_some_and(|view| view.voter(&voter.name).is_some());
        let successor = match self.contact.promoted {
            Some(id) => next
                .voters
                .iter()
                .position(|voter| voter.id == id && is_alive(voter)),
            None if self.contact.is_leaving => {
                let others = next.voters.iter().skip(1);
                others
                    .clone()
                    .position(|voter| is_alive(voter) && is_known(voter))
                    .map(|position| position + 1)
            }
            None => None,
        };
        let Some(successor) = successor.filter(|position| *position > 0) else {
            return;
        };
        let successor = next.voters.remove(successor);
        let own = next.voters.remove(0);
        next.voters.insert(0, successor);
        if !self.contact.is_leaving {
            next.voters.push(own);
        }
    }

    /// Returns true if a voter has granted the local node's lease of late.
    pub(super) fn is_alive(&self, now: Duration, voter: &Member) -> bool {
        let heard = self.contact.grants.heard(voter);
        let key = (voter.name.clone(), voter.join);
        self.contact.grants.has_granted(&key)
            && heard.is_some_and(|heard| now < heard + self.config.detection_timeout)
    }

    /// Reserves numbers for the server nodes that wait, if there are too few: the contact node gives them without a
    /// further vote, and they are never given again.
    fn reserve_ids(&self, next: &mut VotedView) -> Range<u32> {
        let waiting = self.contact.joiner_count(JoinRole::ServerNode) as u32;
        if waiting == 0 || !self.contact.server_ids.is_empty() {
            return 0..0;
        }
        let first = next.next_id;
        next.next_id = (first + waiting.max(RESERVED_IDS_MIN)).min(IDS_END);
        first..next.next_id
    }
}
