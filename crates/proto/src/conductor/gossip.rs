//! The information policy at work: loads that this node tells and hears.

use super::Conductor;
use super::known_nodes::age_ms;
use super::policy::InformationPolicy;
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{ConductorFrame, LoadReport, REPORTS_MAX};
use rand::Rng;

/// The word of a node about itself is kept against others for this part of the time that loads are fresh.
const DIRECT_PART: u32 = 3;

impl Conductor {
    /// Sends this node's load, and loads that it has heard of, to the receivers of this round.
    pub(super) fn tell_loads(&mut self, now: Duration) {
        let policy = self.config.policies.information;
        self.gossip_at = now + self.around(policy.interval());
        let Some(own) = self.own_report(now) else {
            return;
        };
        let (receivers, hearsay) = match policy {
            InformationPolicy::ToAll { .. } => (self.peers.clone(), Vec::new()),
            InformationPolicy::Gossip {
                fanout, reports, ..
            } => {
                let count = reports.clamp(1, REPORTS_MAX) - 1;
                let hearsay = self.known.newest(now, self.config.freshness, count);
                (self.random_peers(fanout), hearsay)
            }
        };
        for to in receivers {
            let others = hearsay.iter().filter(|report| report.node != to);
            let reports = std::iter::once(&own).chain(others).copied().collect();
            self.send(to, ConductorFrame::Loads { reports });
        }
    }

    fn own_report(&self, now: Duration) -> Option<LoadReport> {
        Some(LoadReport {
            node: self.config.node,
            demand: self.own_demand(now)?,
            memory_free_kib: self.own.memory_free_kib,
            is_open: self.drain.is_none(),
            age_ms: age_ms(now, self.own.measured_at()?),
        })
    }

    /// Returns `count` different random nodes, or all others if they are fewer.
    fn random_peers(&mut self, count: usize) -> Vec<NodeId> {
        if self.peers.len() <= count {
            return self.peers.clone();
        }
        let mut chosen = Vec::with_capacity(count);
        while chosen.len() < count {
            let peer = self.peers[self.random.random_range(0..self.peers.len())];
            if !chosen.contains(&peer) {
                chosen.push(peer);
            }
        }
        chosen
    }

    pub(super) fn on_loads(&mut self, now: Duration, from: NodeId, reports: &[LoadReport]) {
        let direct_for = self.config.freshness / DIRECT_PART;
        for report in reports {
            if self.is_peer(report.node) {
                self.known.learn(now, from, report, direct_for);
            }
        }
    }
}
