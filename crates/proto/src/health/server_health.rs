//! Judgement of one service's server at this node.

use super::accept_queue_history::AcceptQueueHistory;
use super::config::JudgedService;
use super::event::{CheckKind, ListenerSample};
use super::hold_down::HoldDown;
use super::{HealthConfig, UNREAD_CONNECTIONS_MIN};
use core::time::Duration;
use holdfast_wire::health_frames::{ServerProblem, ServerState};
use std::collections::BTreeMap;

/// Signs of a server, and the judgement on them.
#[derive(Debug, Default)]
pub(super) struct ServerHealth {
    /// `None` before the first sample.
    is_listening: Option<bool>,
    has_served: bool,
    /// True from the move of the server to another node until its sockets here are closed.
    has_moved: bool,
    queues: AcceptQueueHistory,
    /// Number of inspected new connections with requests that the server has not read.
    unread_connections: u32,
    checks: BTreeMap<CheckKind, ServerCheckState>,
    hold_down: HoldDown,
    judgement: Option<ServerState>,
}

/// Results so far of one active check of the server: a connection attempt, or the operator's script.
#[derive(Debug, Clone, Copy, Default)]
struct ServerCheckState {
    /// Number of consecutive results that contradict the judgement.
    contradicting: u32,
    /// Problem of the last failed check.
    problem: Option<ServerProblem>,
    is_failed: bool,
}

impl ServerHealth {
    pub fn on_sample(&mut self, now: Duration, sample: &ListenerSample) {
        let is_listening = !sample.queues.is_empty();
        self.is_listening = Some(is_listening);
        self.has_served |= is_listening && !self.has_moved;
        self.has_moved &= is_listening;
        self.queues.on_sample(now, sample);
    }

    /// Records that the server has moved to another node, so that its sockets here close without a failure.
    pub fn on_departure(&mut self) {
        self.has_served = false;
        self.has_moved = true;
    }

    pub fn on_unread_connections(&mut self, connections: u32) {
        self.unread_connections = connections;
    }

    /// Forgets the results of checks that the service no longer has.
    pub fn keep_checks(&mut self, settings: &JudgedService) {
        self.checks.retain(|kind, _| settings.checks.contains(kind));
    }

    pub fn on_check(
        &mut self,
        settings: &JudgedService,
        kind: CheckKind,
        result: Result<(), ServerProblem>,
    ) {
        // A check that was removed may have been under way.
        if !settings.checks.contains(&kind) {
            return;
        }
        let results = self.checks.entry(kind).or_default();
        results.problem = result.err().or(results.problem);
        if result.is_err() == results.is_failed {
            results.contradicting = 0;
            return;
        }
        results.contradicting += 1;
        let needed = match results.is_failed {
            true => settings.rise,
            false => settings.fall,
        };
        if results.contradicting >= needed {
            results.is_failed = !results.is_failed;
            results.contradicting = 0;
        }
    }

    /// Judges the signs. Returns the state if the judgement has changed.
    pub fn judge(
        &mut self,
        now: Duration,
        settings: &JudgedService,
        config: &HealthConfig,
    ) -> Option<ServerState> {
        let mut state = self.present_state(now, settings)?;
        let is_failing = |state: &ServerState| matches!(state, ServerState::Failing(_));
        let was_failing = self.judgement.as_ref().is_some_and(is_failing);
        match (was_failing, is_failing(&state)) {
            (false, true) => {
                self.hold_down.on_failure(now, config, config.hold_down_max);
            }
            (true, false) if now < self.hold_down.until() => {
                state = self.judgement.unwrap_or(state);
            }
            (true, false) => self.hold_down.on_recovery(now),
            _ => {}
        }
        let changed = match (self.judgement, state) {
            // The numbers in a problem change all the time.
            (Some(ServerState::Failing(old)), ServerState::Failing(new)) => {
                old.name() != new.name()
            }
            (old, new) => old != Some(new),
        };
        self.judgement = Some(state);
        changed.then_some(state)
    }

    /// Returns the state that the present signs show; `None` before the first sample.
    fn present_state(&self, now: Duration, settings: &JudgedService) -> Option<ServerState> {
        if !self.is_listening? {
            return Some(match self.has_served {
                true => ServerState::Failing(ServerProblem::ListenerClosed),
                false => ServerState::Absent,
            });
        }
        let stalled = settings
            .stall_after
            .and_then(|stall_after| self.queues.stalled(now, stall_after))
            .map(|waiting| ServerProblem::QueueStalled { waiting });
        let is_unread =
            settings.stall_after.is_some() && self.unread_connections >= UNREAD_CONNECTIONS_MIN;
        let unread = is_unread.then_some(ServerProblem::RequestsUnread {
            connections: self.unread_connections,
        });
        let failed_checks = self.checks.values().filter(|check| check.is_failed);
        let failed_check = failed_checks.filter_map(|check| check.problem).next();
        Some(match stalled.or(unread).or(failed_check) {
            Some(problem) => ServerState::Failing(problem),
            None => ServerState::Serving,
        })
    }

    /// Returns the judgement; `None` before the first one.
    pub fn judgement(&self) -> Option<ServerState> {
        self.judgement
    }

    /// Returns the time at which a recovery begins to count, if one waits for it.
    pub fn recovery_at(&self, now: Duration) -> Option<Duration> {
        let is_failing = matches!(self.judgement, Some(ServerState::Failing(_)));
        (is_failing && self.hold_down.until() > now).then(|| self.hold_down.until())
    }
}
