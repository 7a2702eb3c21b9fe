//! Judgement of another node's reachability, by the contact node.

use super::HealthConfig;
use super::event::Exclusion;
use super::hold_down::HoldDown;
use core::time::Duration;
use holdfast_wire::health_frames::{ServerState, ServiceEndpoint};
use std::collections::BTreeMap;

/// Another node, as the contact node sees it.
#[derive(Debug, Default)]
pub(super) struct NodeReach {
    is_connected: bool,
    was_connected: bool,
    /// Silence seen at inspections. A delay of this node's own daemon counts as one interval.
    silence: Duration,
    is_silent: bool,
    hold_down: HoldDown,
    /// The node's last report that counts; empty before the first one.
    servers: ReportedServers,
    /// Time of that report.
    reported_at: Duration,
    /// Time at which the counted reports would end with one report in each shortest mean time.
    reports_until: Duration,
    /// The last report, if it came too early to count.
    early_report: Option<ReportedServers>,
}

/// The servers that a node has reported.
pub(super) type ReportedServers = BTreeMap<ServiceEndpoint, ServerState>;

/// A change of a node's reachability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReachChange {
    Silent(Duration),
    Heard,
}

impl NodeReach {
    pub fn on_connected(&mut self) {
        self.is_connected = true;
        self.was_connected = true;
        self.silence = Duration::ZERO;
    }

    pub fn on_lost(&mut self) {
        self.is_connected = false;
    }

    /// Takes a report. Returns none if the report counts at once, or else the time at which the last report counts.
    pub fn on_report(
        &mut self,
        now: Duration,
        servers: ReportedServers,
        config: &HealthConfig,
    ) -> Option<Duration> {
        let gap = config.report_gap_min;
        let counts_at = (self.reports_until + gap).saturating_sub(gap * config.report_burst_max);
        if now < counts_at {
            self.early_report = Some(servers);
            return Some(counts_at);
        }
        self.servers = servers;
        self.reported_at = now;
        self.early_report = None;
        self.reports_until = self.reports_until.max(now) + gap;
        None
    }

    /// Forgets the node's last report if it came before this time.
    pub fn forget_reports_before(&mut self, time: Duration) {
        if self.reported_at < time {
            self.servers.clear();
        }
    }

    /// Lets an early report count if it is time. Returns the time at which it counts otherwise.
    pub fn count_early_report(&mut self, now: Duration, config: &HealthConfig) -> Option<Duration> {
        let early = self.early_report.take()?;
        self.on_report(now, early, config)
    }

    /// Takes an inspection of the node's channel into account, `elapsed` after the previous one.
    pub fn on_inspection(
        &mut self,
        now: Duration,
        elapsed: Duration,
        is_heard: bool,
        config: &HealthConfig,
    ) -> Option<ReachChange> {
        if !self.is_connected {
            return None;
        }
        if is_heard {
            self.silence = Duration::ZERO;
            if self.is_silent && now >= self.hold_down.until() {
                self.is_silent = false;
                self.hold_down.on_recovery(now);
                return Some(ReachChange::Heard);
            }
            return None;
        }
        self.silence += elapsed;
        if self.silence < config.silent_after || self.is_silent {
            return None;
        }
        self.is_silent = true;
        let max = config.silence_hold_down_max;
        self.hold_down.on_failure(now, config, max);
        Some(ReachChange::Silent(self.silence))
    }

    pub fn is_connected(&self) -> bool {
        self.is_connected
    }

    pub fn is_silent(&self) -> bool {
        self.is_connected && self.is_silent
    }

    /// Returns true if the node should be asked for a sign of life.
    pub fn needs_probe(&self) -> bool {
        self.is_connected && self.silence > Duration::ZERO
    }

    /// Returns true if the node has reported its server of a service since this node knows it.
    pub fn has_reported(&self, service: &ServiceEndpoint) -> bool {
        self.servers.contains_key(service)
    }

    /// Returns the reason why the node gets no new clients of a service.
    pub fn exclusion(
        &self,
        now: Duration,
        service: &ServiceEndpoint,
        config: &HealthConfig,
    ) -> Option<Exclusion> {
        let may_still_connect = !self.was_connected && now < config.startup_grace;
        match self.is_connected {
            false if !may_still_connect => Some(Exclusion::NotConnected),
            true if self.is_silent => Some(Exclusion::Silent),
            _ => exclusion_by_state(self.servers.get(service).copied()),
        }
    }
}

/// Returns the reason why a server in this state gets no new clients; an unknown server gets them.
pub(super) fn exclusion_by_state(state: Option<ServerState>) -> Option<Exclusion> {
    match state {
        None | Some(ServerState::Serving) => None,
        Some(ServerState::Absent) => Some(Exclusion::NoServer),
        Some(ServerState::Failing(problem)) => Some(Exclusion::Problem(problem)),
    }
}
