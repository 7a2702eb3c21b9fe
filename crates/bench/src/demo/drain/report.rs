//! Results of the demonstration, and their comparison with its promises.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use holdfast_testbed::server_fleet::{ClientErrors, ClientWork, ServerKind};

use super::{DrainDemoSpec, NodeResult};

/// Results of the demonstration.
#[derive(Debug, Serialize)]
pub struct DrainDemoReport {
    /// Parameters of the demonstration.
    pub spec: DrainDemoSpec,
    /// Kinds of the servers.
    pub kinds: Vec<ServerKind>,
    /// True if every promise is kept.
    pub passed: bool,
    /// Promises of the demonstration that were broken.
    pub problems: Vec<String>,
    /// The drained nodes, in order.
    pub nodes: Vec<NodeResult>,
    /// Number of servers at each node at the end.
    pub servers_left: BTreeMap<String, usize>,
    /// Work of the clients.
    pub work: ClientWork,
    /// Errors that the clients have seen, from the first connection to the end.
    pub errors: ClientErrors,
    /// Duration of the demonstration, seconds.
    pub total_s: f64,
}

/// Measurements of a run.
pub(super) struct Measured {
    pub nodes: Vec<NodeResult>,
    pub servers_left: BTreeMap<String, usize>,
    pub work: ClientWork,
    pub errors: ClientErrors,
    pub total: Duration,
}

impl DrainDemoReport {
    pub(super) fn new(
        spec: &DrainDemoSpec,
        kinds: Vec<ServerKind>,
        measured: Measured,
    ) -> DrainDemoReport {
        let mut report = DrainDemoReport {
            spec: spec.clone(),
            kinds,
            passed: false,
            problems: Vec::new(),
            nodes: measured.nodes,
            servers_left: measured.servers_left,
            work: measured.work,
            errors: measured.errors,
            total_s: measured.total.as_secs_f64(),
        };
        report.problems = report.find_problems();
        report.passed = report.problems.is_empty();
        report
    }

    fn find_problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut expect = |kept: bool, problem: String| {
            if !kept {
                problems.push(problem);
            }
        };
        let drained = self.nodes.iter().filter(|node| node.safe_to_reboot).count();
        expect(
            drained == usize::from(self.spec.nodes_to_drain),
            format!(
                "{drained} of {} nodes were drained",
                self.spec.nodes_to_drain
            ),
        );
        for NodeResult {
            node,
            safe_to_reboot,
            reasons,
            moved,
            servers,
            ..
        } in &self.nodes
        {
            expect(
                *safe_to_reboot,
                format!("{node} was not safe to reboot: {}", reasons.join("; ")),
            );
            expect(
                !safe_to_reboot || *moved == *servers as u64,
                format!("{moved} processes left {node}, which had {servers} servers"),
            );
        }
        let errors = &self.errors;
        expect(
            errors.count() == 0,
            format!(
                "clients saw {} errors: {}",
                errors.count(),
                errors.details.join("; ")
            ),
        );
        expect(
            errors.wrong_bytes == 0,
            format!("clients received {} wrong bytes", errors.wrong_bytes),
        );
        let work = self.work;
        expect(
            work.answers > 0 && (work.new_clients > 0 || self.spec.clients.new_per_s == 0),
            "the clients did not work".to_owned(),
        );
        problems
    }

    /// Returns the report as text of several lines.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{:<4}  {:>7}  {:>5}  {:>9}  {:>17}  {:>17}  {:>8}  {:>8}\n",
            "node",
            "drain s",
            "moved",
            "freeze ms",
            "wait ms (control)",
            "new ms (control)",
            "reboot s",
            "returned"
        );
        for node in &self.nodes {
            text += &node_row(node);
        }
        text.push('\n');
        for (name, value) in self.rows() {
            text += &format!("{name:<34}{value}\n");
        }
        for problem in &self.problems {
            text += &format!("NOT AS PROMISED: {problem}\n");
        }
        if self.passed {
            text +=
                "As promised: every node was drained and rebooted, and no client saw an error.\n";
        }
        text
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let kinds: Vec<String> = self
            .kinds
            .iter()
            .map(|kind| kind.name().to_owned())
            .collect();
        let left = self.servers_left.iter();
        let left: Vec<String> = left
            .map(|(node, count)| format!("{node} {count}"))
            .collect();
        let ClientWork {
            connections,
            answers,
            new_clients,
            players,
        } = self.work;
        let added = self.nodes.iter().map(longest_added_wait_ms);
        let mut rows = vec![
            (
                "servers",
                format!(
                    "{} each of {}",
                    self.spec.servers_per_kind,
                    kinds.join(", ")
                ),
            ),
            ("servers at the end", left.join(", ")),
            (
                "clients",
                format!(
                    "{connections} connections with {answers} answers, {new_clients} new clients, {players} players"
                ),
            ),
            (
                "longest wait, minus the control's",
                format!(
                    "{:.1} ms, of connections and players in any drain",
                    added.fold(0.0, f64::max)
                ),
            ),
            ("errors seen by clients", self.errors.count().to_string()),
            ("wrong bytes", self.errors.wrong_bytes.to_string()),
            ("total time", format!("{:.1} s", self.total_s)),
        ];
        if let Some(node) = self.nodes.iter().find(|node| node.was_contact_node) {
            let text = format!(
                "{}, which gave the role to a backup before its drain",
                node.node
            );
            rows.insert(0, ("contact node at first", text));
        }
        rows
    }
}

fn node_row(node: &NodeResult) -> String {
    let or_none = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    let (during, control) = (node.waits, node.control_waits);
    let pair = |during: f64, control: f64| format!("{during:.1} ({control:.1})");
    format!(
        "{:<4}  {:>7.1}  {:>5}  {:>9}  {:>17}  {:>17}  {:>8}  {:>8}\n",
        node.node,
        node.drain_s,
        node.moved,
        or_none(node.freeze_ms_max),
        pair(
            during.connection_ms.max(during.player_ms),
            control.connection_ms.max(control.player_ms)
        ),
        pair(during.new_client_ms, control.new_client_ms),
        or_none(node.reboot_s),
        node.refilled
    )
}

/// Returns the longest wait of a connection or player in the drain, minus that in the control period, milliseconds.
fn longest_added_wait_ms(node: &NodeResult) -> f64 {
    let connections = node.waits.connection_ms - node.control_waits.connection_ms;
    connections.max(node.waits.player_ms - node.control_waits.player_ms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_testbed::server_fleet::ClientWaits;

    fn node(name: &str) -> NodeResult {
        NodeResult {
            node: name.to_owned(),
            servers: 4,
            moved: 4,
            safe_to_reboot: true,
            freeze_ms_max: Some(12.34),
            waits: ClientWaits {
                connection_ms: 31.0,
                ..ClientWaits::default()
            },
            control_waits: ClientWaits {
                connection_ms: 6.0,
                ..ClientWaits::default()
            },
            reboot_s: Some(1.5),
            ..NodeResult::default()
        }
    }

    fn report(nodes: Vec<NodeResult>, errors: ClientErrors) -> DrainDemoReport {
        let spec = DrainDemoSpec {
            nodes_to_drain: 2,
            ..DrainDemoSpec::default()
        };
        let measured = Measured {
            nodes,
            servers_left: BTreeMap::from([("n1".to_owned(), 4)]),
            work: ClientWork {
                connections: 80,
                answers: 9_000,
                new_clients: 700,
                players: 0,
            },
            errors,
            total: Duration::from_secs(90),
        };
        DrainDemoReport::new(&spec, vec![ServerKind::Redis, ServerKind::Nginx], measured)
    }

    #[test]
    fn text_shows_waits_beside_the_control() {
        let report = report(vec![node("n1"), node("n2")], ClientErrors::default());
        let text = report.text();
        for part in [
            "12.3",
            "31.0 (6.0)",
            "25.0 ms, of connections",
            "5 each of redis, nginx",
            "As promised",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
        assert!(report.passed, "{:?}", report.problems);
    }

    #[test]
    fn every_broken_promise_is_a_problem() {
        let is_broken = |nodes: Vec<NodeResult>, errors: ClientErrors, words: &str| {
            let report = report(nodes, errors);
            assert!(!report.passed);
            let problems = report.problems.join("\n");
            assert!(problems.contains(words), "{words} is not in:\n{problems}");
            assert!(report.text().contains("NOT AS PROMISED"));
        };
        let both = || vec![node("n1"), node("n2")];
        is_broken(vec![node("n1")], ClientErrors::default(), "1 of 2 nodes");
        let mut nodes = both();
        nodes[1].safe_to_reboot = false;
        nodes[1].reasons = vec!["redis-server stays".to_owned()];
        is_broken(
            nodes,
            ClientErrors::default(),
            "n2 was not safe to reboot: redis-server stays",
        );
        let mut nodes = both();
        nodes[0].moved = 3;
        is_broken(nodes, ClientErrors::default(), "3 processes left n1");
        let errors = ClientErrors {
            failed_new_clients: 2,
            details: vec!["of nginx-1".to_owned()],
            ..ClientErrors::default()
        };
        is_broken(both(), errors, "clients saw 2 errors: of nginx-1");
        let errors = ClientErrors {
            wrong_bytes: 9,
            ..ClientErrors::default()
        };
        is_broken(both(), errors, "9 wrong bytes");
    }
}
