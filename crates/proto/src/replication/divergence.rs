//! Legs whose outputs differ.

use super::Replication;
use super::config::DivergencePolicy;
use super::event::{DropReason, Event};
use core::time::Duration;
use holdfast_wire::replication_frames::{LEGS_MAX, LegIndex, LegSet};
use std::net::SocketAddr;

/// Fewest legs with which a majority can tell a wrong leg from a right one.
const VOTERS_MIN: usize = 3;

impl Replication {
    /// Takes differing digests at a position of a connection's output.
    pub(super) fn on_diverged(
        &mut self,
        now: Duration,
        client: SocketAddr,
        position: u64,
        digests: &[Option<u64>; LEGS_MAX],
    ) {
        let Some(connection) = self.connections.get(&client) else {
            return;
        };
        let live = connection.record.live.intersection(self.legs.serving());
        let primary = connection.primary;
        let Some(shown) = digests[primary.position()] else {
            return;
        };
        let is_voting =
            self.config.divergence == DivergencePolicy::Vote && live.len() >= VOTERS_MIN;
        let right = match is_voting {
            true => majority(live, digests),
            false => Some(shown),
        };
        let is_unknown = |leg: &LegIndex| digests[leg.position()].is_none();
        if right.is_none() && live.iter().any(|leg| is_unknown(&leg)) {
            return self.mark_disputed(client, position, digests, shown);
        }
        // Without a majority nobody knows better than the primary.
        let reference = right.unwrap_or(shown);
        let is_wrong = |leg: &LegIndex| {
            let digest = digests[leg.position()];
            digest.is_some_and(|digest| digest != reference)
        };
        let wrong: LegSet = live.iter().filter(is_wrong).collect();
        self.mark_diverged(client, position, wrong);
        let is_dropping = match self.config.divergence {
            DivergencePolicy::Report => false,
            DivergencePolicy::Drop => true,
            DivergencePolicy::Vote => right.is_some(),
        };
        if is_dropping {
            for leg in wrong.iter() {
                self.drop_leg(now, leg, DropReason::Diverged);
            }
        }
    }

    /// Reports legs that differ from the primary, and doubts them until further legs have voted.
    fn mark_disputed(
        &mut self,
        client: SocketAddr,
        position: u64,
        digests: &[Option<u64>; LEGS_MAX],
        shown: u64,
    ) {
        let Some(connection) = self.connections.get_mut(&client) else {
            return;
        };
        let differs = |leg: &LegIndex| digests[leg.position()].is_some_and(|own| own != shown);
        let disputed: LegSet = connection.record.live.iter().filter(differs).collect();
        let new = disputed.difference(connection.disputed);
        connection.disputed = connection.disputed.union(disputed);
        for leg in new.iter() {
            self.report(Event::Diverged {
                client,
                leg,
                position,
            });
        }
    }

    /// Reports each leg once in each connection.
    fn mark_diverged(&mut self, client: SocketAddr, position: u64, wrong: LegSet) {
        let Some(connection) = self.connections.get_mut(&client) else {
            return;
        };
        let new = wrong.difference(connection.diverged);
        connection.diverged = connection.diverged.union(wrong);
        connection.disputed = LegSet::EMPTY;
        for leg in new.iter() {
            if let Some(state) = self.legs.get_mut(leg) {
                state.has_diverged = true;
            }
            self.report(Event::Diverged {
                client,
                leg,
                position,
            });
        }
        self.update_protection();
    }
}

/// Returns the digest of more than half of the legs.
fn majority(live: LegSet, digests: &[Option<u64>; LEGS_MAX]) -> Option<u64> {
    let digest_of = |leg: LegIndex| digests[leg.position()];
    let votes_for = |digest: &u64| {
        let votes = live.iter().filter(|leg| digest_of(*leg) == Some(*digest));
        votes.count() * 2 > live.len()
    };
    live.iter().filter_map(digest_of).find(votes_for)
}
