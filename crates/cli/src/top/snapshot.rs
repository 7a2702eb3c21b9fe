//! What the daemon knows at one time.

use anyhow::Result;
use holdfast_api::control::{
    BalanceLog, BalanceStatus, BlockingControlClient, DrainReport, HandoffState, HandoffSummary,
    MigrationOutcome, MigrationStatus, NodeEntry, NodeLoadStatus, Status,
};
use serde::Serialize;

use crate::daemon_client::DaemonArgs;

/// Most ended moves that the screen shows.
const ENDED_MOVES_MAX: usize = 8;

/// Answers of the daemon for one screen of `holdfast top`.
#[derive(Debug, Serialize)]
pub struct Snapshot {
    /// Status of the node whose daemon answers.
    pub status: Status,
    /// The nodes of the group.
    pub nodes: Vec<NodeEntry>,
    /// Known loads of nodes, and the processes that this node may move.
    pub balance: BalanceStatus,
    /// Load of the node whose daemon answers.
    pub load: NodeLoadStatus,
    /// The drain of this node.
    pub drain: DrainReport,
    /// The latest decisions of the conductor.
    pub decisions: BalanceLog,
    /// Migrations from this node.
    pub migrations: Vec<MigrationStatus>,
    /// Handoffs from this node.
    pub handoffs: Vec<HandoffSummary>,
}

impl Snapshot {
    /// Asks the daemon for everything that the screen shows.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn read(daemon: &DaemonArgs, client: &BlockingControlClient) -> Result<Snapshot> {
        Ok(Snapshot {
            status: daemon.ask(client, |client| client.status())?,
            nodes: daemon.ask(client, |client| client.nodes())?.nodes,
            balance: daemon.ask(client, |client| client.balance())?,
            load: daemon.ask(client, |client| client.load())?,
            drain: daemon.ask(client, |client| client.drain_report())?,
            decisions: daemon.ask(client, |client| client.balance_log())?,
            migrations: daemon.ask(client, |client| client.migrations())?.migrations,
            handoffs: daemon.ask(client, |client| client.handoffs())?.handoffs,
        })
    }

    /// Returns lines about the moves from this node: those under way first, then the latest that have ended.
    pub fn moves(&self) -> Vec<String> {
        let is_running =
            |migration: &&MigrationStatus| migration.outcome == MigrationOutcome::Running;
        let running = self
            .migrations
            .iter()
            .filter(is_running)
            .map(migration_text);
        let handoffs = self.handoffs.iter();
        let handoffs = handoffs.filter(|handoff| handoff.state != HandoffState::Finished);
        let handoffs = handoffs.map(|handoff| {
            format!(
                "{} connections to {}: {} moved, {} stayed",
                handoff.total, handoff.to, handoff.moved, handoff.kept
            )
        });
        let ended = self.migrations.iter().rev().filter(|one| !is_running(one));
        let ended = ended.take(ENDED_MOVES_MAX).map(migration_text);
        running.chain(handoffs).chain(ended).collect()
    }
}

fn migration_text(migration: &MigrationStatus) -> String {
    let (name, pid, to) = (&migration.name, migration.pid, &migration.to);
    let copied_mib = migration.copied_bytes as f64 / f64::from(1 << 20);
    match &migration.outcome {
        MigrationOutcome::Running => {
            let round = migration.round.map_or(0, |round| round.number);
            format!("{name} ({pid}) moves to {to}: round {round}, {copied_mib:.1} MiB copied")
        }
        MigrationOutcome::Moved => {
            let freeze_ms = migration.freeze_us.unwrap_or(0.0) / 1e3;
            format!("{name} ({pid}) moved to {to}, frozen {freeze_ms:.1} ms")
        }
        MigrationOutcome::Cloned => format!("{name} ({pid}) was copied to {to}"),
        MigrationOutcome::Kept { reason, .. } => format!("{name} ({pid}) stayed here: {reason}"),
    }
}

#[cfg(test)]
pub mod tests {
    use holdfast_api::control::{MigrationPhasesUs, MigrationStepsUs};
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    fn parsed<T: DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn node(name: &str, id: u16, connected: bool) -> Value {
        let problem = (!connected).then_some("no answer");
        json!({"name": name, "id": id, "address": "10.0.0.1:7400", "this_node": id == 1, "contact_node": id == 1,
               "connected": connected, "rtt_us": 10.0, "weight": 1, "flows": 5, "problem": problem})
    }

    /// Returns what node n1 of four knows.
    pub fn snapshot() -> Snapshot {
        let load = |name: &str, load: f64, is_open: bool| json!({"name": name, "load_percent": load, "capacity": 2000, "age_ms": 3, "is_open": is_open});
        let process = |pid: i32, blocked: Option<&str>| {
            json!({"pid": pid, "name": "game", "used": 250, "memory_kib": 2048, "has_moved_here": false,
                   "blocked": blocked})
        };
        let mut snapshot = Snapshot {
            status: parsed(
                json!({"node": "n1", "node_id": 1, "group": "g", "version": "1", "uptime_s": 3, "reach": "steer",
                       "contact_node": "n1", "services": [], "programs": [],
                       "flows": {"owned": 5, "transit": 1, "moved": 2},
                       "handoffs": {"donated": 0, "accepted": 0, "kept": 0},
                       "peers_connected": 2, "peers_total": 3, "problems": []}),
            ),
            nodes: parsed(json!([
                node("n1", 1, true),
                node("n2", 2, true),
                node("n3", 3, true),
                node("n4", 4, false)
            ])),
            balance: parsed(json!({"on": false, "average_percent": 40.0,
                "nodes": [load("n1", 65.0, false), load("n2", 130.0, true)],
                "processes": [process(41, Some("its other end is outside")), process(42, None)]})),
            load: NodeLoadStatus::default(),
            drain: DrainReport::default(),
            decisions: parsed(
                json!({"records": [{"age_s": 4, "duration_ms": 9, "role": "gives", "name": "game",
                "peer": "n2", "purpose": "drain", "before_percent": 1.0, "predicted_percent": 0.5,
                "observed_percent": null, "outcome": "moved"}]}),
            ),
            migrations: Vec::new(),
            handoffs: Vec::new(),
        };
        snapshot
            .migrations
            .push(migration(40, MigrationOutcome::Moved));
        snapshot
    }

    pub fn migration(pid: i32, outcome: MigrationOutcome) -> MigrationStatus {
        let mut value = json!({"id": 1, "pid": pid, "name": "game", "to": "n2", "clone": false, "round": null,
            "copied_bytes": 1 << 20, "freeze_bytes": 0, "saved_bytes": 0, "predicted_freeze_us": null,
            "freeze_us": 5_000.0, "phases_us": MigrationPhasesUs::default(), "steps_us": MigrationStepsUs::default()});
        let outcome = serde_json::to_value(outcome).unwrap();
        for (key, part) in outcome.as_object().unwrap() {
            value[key] = part.clone();
        }
        parsed(value)
    }

    #[test]
    fn moves_under_way_come_first() {
        let mut snapshot = snapshot();
        snapshot
            .migrations
            .push(migration(42, MigrationOutcome::Running));
        snapshot.handoffs.push(parsed(
            json!({"id": 1, "to": "n3", "requested_by_operator": true, "state": "running", "total": 9, "moved": 4,
                   "kept": 1, "started_at_ns": 1, "finished_at_ns": null}),
        ));
        assert_eq!(
            snapshot.moves(),
            [
                "game (42) moves to n2: round 0, 1.0 MiB copied",
                "9 connections to n3: 4 moved, 1 stayed",
                "game (40) moved to n2, frozen 5.0 ms",
            ]
        );
    }
}
