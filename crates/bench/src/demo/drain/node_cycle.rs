//! One node: drained, rebooted, and filled again.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{BlockingControlClient, DrainReport, DrainRequest, DrainState};
use serde::Serialize;

use holdfast_testbed::cluster::Cluster;
use holdfast_testbed::server_fleet::{
    ClientWaits, FleetClients, ServerFleet, ServerKind, ServerLocations, count_by_node,
};

use super::{DrainEvent, EventHandler, servers_event};

/// Interval between polls of a drain, as `holdfast drain` polls.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Longest drain.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(600);
/// Longest time for the nodes to agree on a view.
const VIEW_TIMEOUT: Duration = Duration::from_secs(120);
/// Time after a drain in which late answers still count as waits of the drain.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// Most attempts to move a server back.
const ATTEMPTS_MAX: usize = 5;

/// A period of time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Period {
    pub begin: Instant,
    pub end: Instant,
}

impl Period {
    /// Returns a period from `begin` until now.
    fn since(begin: Instant) -> Period {
        Period {
            begin,
            end: Instant::now(),
        }
    }

    fn length(self) -> Duration {
        self.end.saturating_duration_since(self.begin)
    }

    /// Returns the last part of this period that is as long as `other`; all of it if that is longer.
    fn last_part(self, other: Period) -> Period {
        let length = self.length().min(other.length());
        Period {
            begin: self.end.checked_sub(length).unwrap_or(self.begin),
            end: self.end,
        }
    }
}

/// Result of one node.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NodeResult {
    /// Name of the node.
    pub node: String,
    /// True if the node was the contact node, and gave the role to a backup before the drain.
    pub was_contact_node: bool,
    /// Servers of the node before the drain.
    pub servers: usize,
    /// True if the drain said that the host may be rebooted.
    pub safe_to_reboot: bool,
    /// Reasons for which the host may not be rebooted.
    pub reasons: Vec<String>,
    /// Time from the request for the drain until the host may be rebooted, seconds.
    pub drain_s: f64,
    /// Processes that left, each with its children.
    pub moved: u64,
    /// Moves that failed and were made again.
    pub failed_moves: u64,
    /// Longest freeze of a process that left, milliseconds.
    pub freeze_ms_max: Option<f64>,
    /// Longest waits of clients from the beginning of the drain until 1 s after its end; the change of the contact node
    /// belongs to it.
    pub waits: ClientWaits,
    /// Longest waits of clients in the control period.
    pub control_waits: ClientWaits,
    /// Length of the control period, seconds: that of the drain, or of the whole time before the first drain if the
    /// drain took longer.
    pub control_s: f64,
    /// Time from the loss of power until the node was a member of the group again, seconds.
    pub reboot_s: Option<f64>,
    /// Servers that moved to the node after the reboot.
    pub refilled: usize,
    /// Longest waits of clients from the reboot until the node was filled again.
    pub reboot_waits: ClientWaits,
    /// Errors seen by clients in each part.
    pub errors: PhaseErrors,
}

/// Errors seen by clients in each part of a node's turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PhaseErrors {
    /// In the drain, with the change of the contact node before it.
    pub drain: u64,
    /// From the reboot until the node was a member of the group again.
    pub reboot: u64,
    /// While servers moved back.
    pub refill: u64,
}

/// A node's turn: drain, reboot and refill.
pub(super) struct NodeCycle<'a> {
    pub cluster: &'a mut Cluster,
    pub fleet: &'a ServerFleet,
    pub clients: &'a FleetClients,
    /// Time under load before the first drain.
    pub control: Period,
    pub watch: EventHandler<'a>,
    /// Servers that the node has at first and at the end.
    pub servers: usize,
    pub node: String,
}

impl NodeCycle<'_> {
    /// Drains the node and, if that is safe, reboots its host and fills the node again.
    ///
    /// # Errors
    /// A daemon does not answer, or the node does not come back or cannot be filled.
    pub fn run(&mut self) -> Result<NodeResult> {
        let mut seen = self.clients.errors().count();
        let mut result = self.drain()?;
        self.clients.wait_for_progress()?;
        result.errors.drain = self.new_errors(&mut seen);
        if !result.safe_to_reboot {
            return Ok(result);
        }
        let begin = Instant::now();
        result.reboot_s = Some(self.reboot()?.as_secs_f64());
        result.errors.reboot = self.new_errors(&mut seen);
        result.refilled = self.refill()?;
        self.clients.wait_for_progress()?;
        result.errors.refill = self.new_errors(&mut seen);
        let period = Period::since(begin);
        result.reboot_waits = self.clients.waits(period.begin, period.end);
        let PhaseErrors {
            drain,
            reboot,
            refill,
        } = result.errors;
        self.step(format!(
            "{} is filled again; errors seen by clients: {drain} in the drain, {reboot} at the reboot, {refill} while \
             servers moved back",
            self.node
        ));
        Ok(result)
    }

    /// Returns the number of errors that clients have seen since the last call.
    fn new_errors(&self, seen: &mut u64) -> u64 {
        let now = self.clients.errors().count();
        now - std::mem::replace(seen, now)
    }

    fn step(&self, text: String) {
        (self.watch)(&DrainEvent::Step(text));
    }

    fn show_servers(&self, locations: &ServerLocations) {
        (self.watch)(&servers_event(self.cluster, self.fleet, locations));
    }

    /// Drains the node, as the operator of the contact node does.
    fn drain(&self) -> Result<NodeResult> {
        let begin = Instant::now();
        let before = self.fleet.locate_all(self.cluster)?;
        let was_contact_node = self.give_contact_role_away()?;
        let names = before.into_iter().filter(|(_, at)| at.node == self.node);
        let names: BTreeMap<i32, String> = names.map(|(name, at)| (at.pid, name)).collect();
        let node = &self.node;
        self.step(format!("holdfast drain {node}: {} servers", names.len()));
        let asked = Instant::now();
        let report = self.wait_for_drain(&names)?;
        let drain_s = asked.elapsed().as_secs_f64();
        sleep(SETTLE_TIME);
        let period = Period::since(begin);
        let control = self.control.last_part(period);
        let result = NodeResult {
            node: node.clone(),
            was_contact_node,
            servers: names.len(),
            drain_s,
            waits: self.clients.waits(period.begin, period.end),
            control_waits: self.clients.waits(control.begin, control.end),
            control_s: control.length().as_secs_f64(),
            ..drain_result(&report)
        };
        match result.safe_to_reboot {
            true => self.step(format!(
                "{node} is safe to reboot after {drain_s:.1} s; longest wait of a client {:.1} ms, without a drain {:.1} ms",
                result.waits.connection_ms, result.control_waits.connection_ms
            )),
            false => self.step(format!("{node} is NOT safe to reboot: {:?}", result.reasons)),
        }
        if result.safe_to_reboot {
            self.show_servers(&self.fleet.locate_all(self.cluster)?);
        }
        Ok(result)
    }

    /// Makes a backup the contact node if the node to drain is the contact node. Returns true if so.
    fn give_contact_role_away(&self) -> Result<bool> {
        let view = self.cluster.wait_for_agreement(None, VIEW_TIMEOUT)?;
        if view.contact_node.as_ref() != Some(&self.node) {
            return Ok(false);
        }
        // Nodes are drained in the order of their names: the last one keeps the role for longest.
        let next = view.backups.iter().max();
        let next = next.context("the group has no backup")?;
        self.step(format!(
            "holdfast node promote {next}: {} is the contact node, and gives the role away",
            self.node
        ));
        let control = self.cluster.blocking_control_client(&self.node)?;
        control.run(async |client| client.promote_node(next).await)?;
        let view = self.cluster.wait_for_agreement(None, VIEW_TIMEOUT)?;
        ensure!(
            view.contact_node.as_ref() != Some(&self.node),
            "{} is still the contact node",
            self.node
        );
        Ok(true)
    }

    fn contact_node(&self) -> Result<BlockingControlClient> {
        let view = self.cluster.wait_for_agreement(None, VIEW_TIMEOUT)?;
        let contact = view.contact_node.context("the group has no contact node")?;
        self.cluster.blocking_control_client(&contact)
    }

    fn ask_for_drain(&self, contact: &BlockingControlClient) -> Result<DrainReport> {
        let request = DrainRequest::default();
        let report = contact.run(async |client| client.drain_node(&self.node, &request).await);
        report.with_context(|| format!("drain {}", self.node))
    }

    /// Asks for the drain, shows its moves, and waits for its end.
    fn wait_for_drain(&self, names: &BTreeMap<i32, String>) -> Result<DrainReport> {
        let mut contact = self.contact_node()?;
        let mut report = self.ask_for_drain(&contact)?;
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        let mut last_shown = 0;
        loop {
            self.show_moves(&report, names, &mut last_shown);
            let has_ended = report.safe_to_reboot || report.state == DrainState::Ended;
            if has_ended || Instant::now() > deadline {
                return Ok(report);
            }
            sleep(POLL_INTERVAL);
            report = match contact.run(async |client| client.node_drain_report(&self.node).await) {
                Ok(report) => report,
                // The node was late, or the group has another contact node; the drain goes on.
                Err(_) => {
                    contact = self.contact_node()?;
                    self.ask_for_drain(&contact)?
                }
            };
        }
    }

    /// Shows the moves that have ended since the last call.
    fn show_moves(
        &self,
        report: &DrainReport,
        names: &BTreeMap<i32, String>,
        last_shown: &mut u64,
    ) {
        for one in report.moves.iter().filter(|one| one.number > *last_shown) {
            let server = names.get(&one.pid).unwrap_or(&one.name).clone();
            (self.watch)(&match &one.failure {
                None => DrainEvent::Moved {
                    server,
                    from: self.node.clone(),
                    to: one.to.clone(),
                    freeze_ms: one.freeze_us.map(|us| us / 1e3),
                },
                Some(reason) => DrainEvent::Stayed {
                    server,
                    node: self.node.clone(),
                    reason: reason.clone(),
                },
            });
        }
        *last_shown = report.moves.last().map_or(*last_shown, |one| one.number);
    }

    /// Reboots the host without a warning, and waits until the node is a member of the group again. Returns the time.
    fn reboot(&mut self) -> Result<Duration> {
        self.step(format!("the host of {} is rebooted", self.node));
        let begin = Instant::now();
        self.cluster.reboot_node(&self.node)?;
        self.cluster.wait_for_rebooted_node(&self.node)?;
        let control = self.cluster.blocking_control_client(&self.node)?;
        let status = control.run(|client| client.status())?;
        ensure!(
            !status.draining && status.residents.is_empty(),
            "{} is not as after a reboot: {status:?}",
            self.node
        );
        let elapsed = begin.elapsed();
        self.step(format!(
            "{} is a member of the group again after {:.1} s",
            self.node,
            elapsed.as_secs_f64()
        ));
        Ok(elapsed)
    }

    /// Moves servers to the node until it has as many as at first. Returns their number.
    fn refill(&self) -> Result<usize> {
        let mut moved = 0;
        let mut failed = 0;
        loop {
            let locations = self.fleet.locate_all(self.cluster)?;
            let counts = count_by_node(&locations, &self.cluster.nodes());
            if counts[&self.node] >= self.servers {
                self.fleet.wait_for_placement(self.cluster, &locations)?;
                self.show_servers(&locations);
                return Ok(moved);
            }
            let (server, from) = self.next_to_return(&locations, &counts)?;
            match self.fleet.move_server(self.cluster, &server, &self.node) {
                Ok(status) => {
                    moved += 1;
                    (self.watch)(&DrainEvent::Moved {
                        server,
                        from,
                        to: self.node.clone(),
                        freeze_ms: status.freeze_us.map(|us| us / 1e3),
                    });
                }
                Err(error) if failed < ATTEMPTS_MAX => {
                    failed += 1;
                    (self.watch)(&DrainEvent::Stayed {
                        server,
                        node: from,
                        reason: format!("{error:#}"),
                    });
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns a server of the node with the most servers, and that node. Kinds of which this node has fewest come first.
    fn next_to_return(
        &self,
        locations: &ServerLocations,
        counts: &BTreeMap<String, usize>,
    ) -> Result<(String, String)> {
        let others = counts.iter().filter(|(node, _)| **node != self.node);
        let fullest = others.max_by_key(|(_, count)| **count);
        let (fullest, _) = fullest.context("the group has one node")?;
        let is_at = |name: &str, node: &str| locations.get(name).is_some_and(|at| at.node == node);
        let servers = self.fleet.servers();
        let count_here = |kind: ServerKind| {
            let here = servers.iter().filter(|one| one.kind == kind);
            here.filter(|one| is_at(&one.name, &self.node)).count()
        };
        let candidates = servers.iter().filter(|one| is_at(&one.name, fullest));
        let chosen = candidates.min_by_key(|one| count_here(one.kind));
        let chosen = chosen.context("no node has a server")?;
        Ok((chosen.name.clone(), fullest.clone()))
    }
}

/// Returns the parts of the result that the drain's own report has.
fn drain_result(report: &DrainReport) -> NodeResult {
    let freezes = report.moves.iter().filter_map(|one| one.freeze_us);
    let failed = report.moves.iter().filter(|one| one.failure.is_some());
    let mut reasons = Vec::new();
    if !report.safe_to_reboot {
        let stuck = report.stuck.iter();
        reasons.extend(stuck.map(|one| format!("{} ({}): {:?}", one.name, one.pid, one.reasons)));
        reasons.extend(report.waiting.clone());
        reasons.push(format!(
            "{} processes and {} connections are left",
            report.remaining, report.flows
        ));
        reasons.extend(report.notes.iter().cloned());
    }
    NodeResult {
        safe_to_reboot: report.safe_to_reboot,
        reasons,
        moved: report.moved,
        failed_moves: failed.count() as u64,
        freeze_ms_max: freezes.reduce(f64::max).map(|us| us / 1e3),
        ..NodeResult::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::control::{DrainedProcess, StuckProcess};

    #[test]
    fn control_period_is_as_long_as_the_drain() {
        let s = Duration::from_secs;
        let begin = Instant::now();
        let period = |from, to| Period {
            begin: begin + s(from),
            end: begin + s(to),
        };
        let control = period(0, 20);
        let part = control.last_part(period(30, 35));
        assert_eq!((part.begin, part.end), (begin + s(15), begin + s(20)));
        let part = control.last_part(period(30, 99));
        assert_eq!((part.begin, part.end), (begin, begin + s(20)));
    }

    #[test]
    fn result_has_the_longest_freeze_and_all_reasons() {
        let one = |freeze_us: Option<f64>| DrainedProcess {
            number: 1,
            pid: 7,
            name: "redis-server".to_owned(),
            to: "n3".to_owned(),
            freeze_us,
            failure: freeze_us.is_none().then(|| "late".to_owned()),
        };
        let mut report = DrainReport {
            moved: 2,
            moves: vec![one(Some(9e3)), one(None), one(Some(4e3))],
            safe_to_reboot: true,
            ..DrainReport::default()
        };
        let result = drain_result(&report);
        assert_eq!(result.freeze_ms_max, Some(9.0));
        assert_eq!((result.moved, result.failed_moves), (2, 1));
        assert!(result.reasons.is_empty());
        report.safe_to_reboot = false;
        report.stuck = vec![StuckProcess {
            pid: 8,
            name: "nginx".to_owned(),
            reasons: vec!["a pipe".to_owned()],
        }];
        let result = drain_result(&report);
        assert!(
            result.reasons[0].contains("nginx (8)"),
            "{:?}",
            result.reasons
        );
    }
}
