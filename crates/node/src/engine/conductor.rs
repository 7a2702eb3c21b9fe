//! The conductor in the event loop: scans, frames, moves, and the requests of the operator.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use holdfast_api::control::{
    BalancePlan, DrainReport, DrainRequest, DrainState, ErrorBody, FlowOutcome, FlowSelection,
    HandoffRequest, HandoffState, MigrationRequest, ProcessCheck, SocketStrategy,
};
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_wire::failure::{OperatorFault, Text};
use holdfast_wire::{Flow, Frame, NodeId};

use super::operator_view::error_body;
use super::{Engine, flow_text};
use crate::conductor::{DriverOutput, MoveResult, Scan, ScanFacts, ScanRequest};
use crate::control::ControlRequest;

/// Most connections of server programs in one handoff of a drain.
const HANDOFF_FLOWS_MAX: usize = 16_384;
/// Time between two attempts to hand connections off in a drain.
const HANDOFF_INTERVAL: Duration = Duration::from_secs(2);
/// Longest deadline of a drain, in seconds: a year.
const DEADLINE_S_MAX: u64 = 366 * 86_400;

impl Engine {
    /// Starts the scans of managed processes, with the privileges of the calling thread.
    ///
    /// # Errors
    /// There is no memory for a thread, or no descriptor for a socket.
    pub(super) fn start_conductor(&mut self) -> std::io::Result<()> {
        self.conductor.start()
    }

    /// Carries out the conductor's actions. Returns true if a move has begun.
    pub(super) fn run_conductor_machine(&mut self) -> bool {
        let now = self.now();
        if let Some(end) = self.migrations.take_conductor_move_end() {
            self.conductor.handle_move_ended(now, end);
        }
        let moves = self.migrations.moves_under_way();
        self.conductor.handle_moves_under_way(now, moves);
        let mut has_begun = false;
        while let Some(output) = self.conductor.next_output(now) {
            match output {
                DriverOutput::Send { to, frame } => {
                    let frame = Frame::Conductor(frame);
                    if let Err(error) = self.peers.send(to, &frame) {
                        tracing::debug!(%to, frame = frame.name(), %error, "a frame was dropped");
                    }
                }
                DriverOutput::BeginMove { pid, to } => {
                    self.begin_conductor_move(pid, to);
                    has_begun = true;
                }
            }
        }
        has_begun
    }

    fn begin_conductor_move(&mut self, pid: i32, to: NodeId) {
        let now = self.now();
        let request = MigrationRequest {
            pid,
            to: self.node_name(to),
            sockets: SocketStrategy::default(),
            clone: false,
            max_freeze_us: None,
            post_copy: false,
            verify: false,
        };
        if let Err(refused) = self.migrations.start_for_conductor(now, &request, to) {
            let failure = OperatorFault::RequestRefused(Text::of(refused.error)).into();
            self.conductor.handle_move_ended(
                now,
                MoveResult {
                    end: Err(failure),
                    freeze_us: None,
                    forwarded: 0,
                },
            );
        }
    }

    /// Lets the conductor do its due work, and requests a scan of processes if one is due.
    pub(super) fn poll_conductor(&mut self) {
        let now = self.now();
        self.conductor.handle_timeout(now);
        if self.conductor.is_scan_due(now) {
            self.request_scan(now);
        }
    }

    fn request_scan(&mut self, now: Duration) {
        let services = self.config.services.iter();
        let (number, checks) = self.conductor.next_scan_plan();
        let sessions = self
            .programs
            .iter()
            .map(|program| program.pid.cast_signed());
        let request = ScanRequest {
            number,
            services: services.map(|service| service.endpoint()).collect(),
            residents: self
                .migrations
                .residents()
                .iter()
                .map(|one| one.pid)
                .collect(),
            sessions: sessions.collect(),
            addresses: self.migrations.addresses().clone(),
            checks,
        };
        self.conductor.request_scan(now, request);
    }

    /// Takes the result of a scan.
    pub(super) fn handle_scan(&mut self, scan: Scan) {
        let now = self.now();
        let residents: BTreeMap<i32, NodeId> = (self.migrations.residents().iter())
            .map(|one| (one.pid, self.group.id_of(&one.from).unwrap_or(NodeId(0))))
            .collect();
        // To count clients is to read the table of flows.
        let clients = match self.conductor.chooses_processes() {
            true => self.client_counts(),
            false => BTreeMap::new(),
        };
        let migrations = &self.migrations;
        let resident_from = |pid: i32| residents.get(&pid).copied();
        let freeze_of = |check: &ProcessCheck| {
            Duration::from_secs_f64((migrations.predicted(check) / 1e6).clamp(0.0, 1e6))
        };
        let facts = ScanFacts {
            contact: self.group.contact(),
            is_migration_enabled: migrations.is_enabled(),
            resident_from: &resident_from,
            freeze_of: &freeze_of,
            measured: self.node_load.measurement(),
            clients: &clients,
        };
        self.conductor.handle_scan(now, scan, &facts);
        self.place_around_drained_nodes();
        self.hand_off_drained_connections(now);
    }

    /// Sends new clients to nodes that are not being drained.
    pub(super) fn place_around_drained_nodes(&mut self) {
        let now = self.now();
        let draining = self.conductor.draining_nodes();
        self.health.machine().handle_draining_nodes(now, draining);
    }

    /// In a drain, hands the connections of server programs with a session to nodes that serve the same service.
    fn hand_off_drained_connections(&mut self, now: Duration) {
        let is_draining = self.conductor.is_draining();
        let Some(handoff) = self.conductor.connections_handoff().filter(|_| is_draining) else {
            return;
        };
        let running = std::mem::take(&mut handoff.running);
        let is_due = now >= handoff.next_at;
        let mut reasons = Vec::new();
        let mut still = BTreeSet::new();
        for id in running {
            match self.operations.get(id) {
                Some(status) if status.summary.state != HandoffState::Finished => {
                    still.insert(id);
                }
                Some(status) => {
                    reasons.extend(status.results.iter().filter_map(
                        |result| match &result.outcome {
                            FlowOutcome::Kept { reason, .. } => Some(reason.clone()),
                            _ => None,
                        },
                    ))
                }
                None => {}
            }
        }
        let mut targets = BTreeMap::new();
        if is_due && still.is_empty() {
            targets = self.drained_flows_by_target(now, &mut reasons);
        }
        for (to, flows) in targets {
            let request = HandoffRequest {
                selection: FlowSelection::Flows(flows.iter().map(flow_text).collect()),
                to: self.node_name(to),
                drain: holdfast_api::Drain::default(),
            };
            match self.start_handoff(request) {
                Ok(accepted) => drop(still.insert(accepted.id)),
                Err(refused) => reasons.push(refused.error),
            }
        }
        let Some(handoff) = self.conductor.connections_handoff() else {
            return;
        };
        handoff.running = still;
        if is_due {
            handoff.next_at = now + HANDOFF_INTERVAL;
            handoff.reasons.clear();
        }
        reasons.into_iter().for_each(|reason| handoff.note(reason));
    }

    /// Groups the connections of server programs by the nodes that take them: of the nodes that get new clients of the
    /// service, the one with the lowest load.
    fn drained_flows_by_target(
        &self,
        now: Duration,
        reasons: &mut Vec<String>,
    ) -> BTreeMap<NodeId, Vec<Flow>> {
        let mut targets: BTreeMap<NodeId, Vec<Flow>> = BTreeMap::new();
        let mut by_row: BTreeMap<Option<u16>, Option<NodeId>> = BTreeMap::new();
        for flow in self.programs.owned_flows().take(HANDOFF_FLOWS_MAX) {
            let row = self.dataplane.service_index(flow);
            let target = *by_row
                .entry(row)
                .or_insert_with(|| self.drain_target(now, row?));
            match target {
                Some(target) if !self.operations.has_flow(flow) => {
                    targets.entry(target).or_default().push(*flow);
                }
                Some(_) => {}
                None => reasons.push("no other node serves their service".to_owned()),
            }
        }
        targets
    }

    fn drain_target(&self, now: Duration, row: u16) -> Option<NodeId> {
        let draining = self.conductor.draining_nodes();
        let own = self.group.own();
        let shares = self.placement.shares(row).filter(|(_, share)| *share > 0);
        let nodes = shares.map(|(node, _)| node);
        let eligible = nodes
            .filter(|node| *node != own && self.peers.is_up(*node) && !draining.contains(node));
        eligible.min_by_key(|node| {
            let load = self.conductor.load_of(now, *node);
            (load.is_none(), load, *node)
        })
    }

    /// Answers a request about drains and balancing.
    pub(super) fn handle_conductor_request(&mut self, request: ControlRequest) {
        let now = self.now();
        match request {
            ControlRequest::Drain(request, reply) => drop(reply.send(self.drain(request))),
            ControlRequest::DrainReport(reply) => drop(reply.send(Ok(self.drain_report()))),
            ControlRequest::Undrain(reply) => drop(reply.send(Ok(self.undrain()))),
            ControlRequest::NodeDrain(node, order, reply) => self.order_drain(&node, order, reply),
            ControlRequest::Balance(reply) => {
                let status = self.conductor.balance_status(now, &|id| self.node_name(id));
                drop(reply.send(Ok(status)));
            }
            ControlRequest::SetBalancing(on, reply) => {
                let answer = match self.conductor.set_balancing(now, on) {
                    Ok(()) => Ok(self.conductor.balance_status(now, &|id| self.node_name(id))),
                    Err(error) => Err(unsaved_wish(&error)),
                };
                drop(reply.send(answer));
            }
            ControlRequest::Pin(request, reply) => {
                let answer = match self.conductor.pin(request.pid, request.pinned) {
                    Ok(true) => Ok(self.conductor.balance_status(now, &|id| self.node_name(id))),
                    Ok(false) => Err(error_body(
                        format!("no process with PID {} serves the group here", request.pid),
                        "name a process that `holdfast balance status` shows",
                    )),
                    Err(error) => Err(unsaved_wish(&error)),
                };
                drop(reply.send(answer));
                self.poll_conductor();
            }
            ControlRequest::BalanceNow(reply) => drop(reply.send(Ok(self.balance_now()))),
            ControlRequest::BalancePlan(reply) => {
                let plan = self.conductor.plan(now, &|id| self.node_name(id));
                drop(reply.send(Ok(plan)));
            }
            ControlRequest::BalanceLog(reply) => {
                let log = self.conductor.balance_log(now, &|id| self.node_name(id));
                drop(reply.send(Ok(log)));
            }
            other => other.refuse(error_body(
                "this request is not about the conductor",
                "report it",
            )),
        }
    }

    fn balance_now(&mut self) -> BalancePlan {
        let now = self.now();
        let decision = self.conductor.balance_now(now);
        self.conductor
            .plan_entry(&decision, &|id| self.node_name(id))
    }

    pub(super) fn drain(&mut self, request: DrainRequest) -> Result<DrainReport, ErrorBody> {
        let deadline = request.deadline_s;
        if deadline.is_some_and(|seconds| seconds == 0 || seconds > DEADLINE_S_MAX) {
            return Err(error_body(
                "the deadline of a drain is 1 s to one year",
                "name another deadline, or none",
            ));
        }
        let now = self.now();
        self.conductor.drain(now, deadline.map(Duration::from_secs));
        self.place_around_drained_nodes();
        self.poll_conductor();
        Ok(self.drain_report())
    }

    pub(super) fn undrain(&mut self) -> DrainReport {
        let now = self.now();
        self.conductor.undrain(now);
        self.place_around_drained_nodes();
        self.drain_report()
    }

    pub(super) fn drain_report(&mut self) -> DrainReport {
        let now = self.now();
        let mut report = self.conductor.drain_report(now, &|id| self.node_name(id));
        if report.state == DrainState::Off {
            return report;
        }
        let connections = self.programs.owned_flows().count();
        report.connections = connections as u64;
        let is_overdue = report.deadline_s == Some(0);
        if let Some(handoff) = self.conductor.connections_handoff() {
            let has_ended = handoff.running.is_empty() && connections == 0;
            if !has_ended && !is_overdue {
                report.state = DrainState::Draining;
            }
            if connections > 0 {
                report.connections_kept = handoff.reasons.iter().cloned().collect();
            }
        }
        // Whatever serves a connection here, known or unknown, a reboot would end the connection.
        report.flows = self.count_served_flows();
        report.safe_to_reboot &= connections == 0 && report.flows == 0;
        if report.flows > 0 && report.stuck.is_empty() && !is_overdue {
            report.state = DrainState::Draining;
            report.waiting = report
                .waiting
                .or_else(|| Some(format!("{} connections are served here", report.flows)));
        }
        if self.group.is_contact() {
            self.note_contact_role(&mut report);
        }
        report
    }

    fn count_served_flows(&self) -> u64 {
        let flows = self.dataplane.flows().into_iter();
        let served =
            flows.filter(|(_, state, _)| !matches!(state, FlowState::Moved | FlowState::Closing));
        served.count() as u64
    }

    /// Tells what becomes of the role of the contact node at a reboot.
    fn note_contact_role(&self, report: &mut DrainReport) {
        let is_self_running = self.membership.is_some();
        if is_self_running {
            report.notes.push(
                "this node is the contact node: a backup takes its place when the host goes down; `holdfast node promote \
                 NODE` gives the role to a backup before"
                    .to_owned(),
            );
        } else {
            report.safe_to_reboot = false;
            report.notes.push(
                "this node is the configured contact node: while its host is down, no client reaches the group"
                    .to_owned(),
            );
        }
    }
}

fn unsaved_wish(error: &std::io::Error) -> ErrorBody {
    error_body(
        format!("the wish cannot be saved: {error}"),
        "make node.run_dir and node.state_dir writable for the daemon",
    )
}
