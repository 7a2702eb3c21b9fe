//! The conductor's driver: feeds [`holdfast_proto::conductor`] with the load of this node and its managed processes, with
//! frames and the ends of moves, and keeps what must outlive the daemon. The engine sends the frames and begins the moves.

mod node_drain;
mod process_rules;
mod process_scan;
mod reports;
mod saved_state;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use holdfast_api::control::ProcessCheck;
use holdfast_proto::conductor::{
    Conductor, ConductorConfig, Decision, Event, LoadSample, Output, PlacementRules, ProcessSample,
};
use holdfast_proto::view::View;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{ConductorFrame, LoadReport, OfferEnd, OfferId, ProcessKey};
use holdfast_wire::failure::{Failure, OperatorFault, Text};
use tokio::sync::mpsc;

pub(crate) use node_drain::{ConnectionsHandoff, MoveResult};
pub(crate) use process_scan::{CheckScope, Scan, ScanRequest, ScannedProcess};

use crate::config::Config;
use crate::dataplane::monotonic_s;
use crate::load::NodeMeasurement;
use crate::migration::blocker_failure;
use node_drain::{DrainPhase, NodeDrain};
use process_scan::ProcessScanner;
use saved_state::{ArrivedKey, SavedDrain, SavedState, StateFiles};

/// Time between two scans of the managed processes.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);
/// Most offers of other nodes that are remembered until their processes arrive.
const OFFERS_MAX: usize = 32;
/// Most names of processes that are remembered for the log of decisions.
const NAMES_MAX: usize = 1_024;
/// Time for which a node tells the contact node that it takes clients again.
const REOPENED_NEWS: Duration = Duration::from_secs(5);

/// A managed process of this node.
#[derive(Debug)]
pub(crate) struct ManagedProcess {
    pid: i32,
    /// Start of the process in ticks since boot.
    started_ticks: u64,
    name: String,
    /// Demand for processor time, in thousandths of a processor; 0 until measured, like `memory_kib`.
    used: u32,
    memory_kib: u64,
    clients: u32,
    has_moved_here: bool,
    /// Predicted freeze of a move of the process.
    freeze: Duration,
    rules: PlacementRules,
    check: Option<Result<ProcessCheck, String>>,
}

/// A process that another node offers to this one.
#[derive(Debug, Clone, Copy)]
struct OfferedProcess {
    donor: NodeId,
    id: OfferId,
    key: ProcessKey,
    is_accepted: bool,
}

/// Facts about this node that a scan does not have.
pub(crate) struct ScanFacts<'a> {
    /// The contact node.
    pub contact: NodeId,
    /// True if processes may move from and to this node.
    pub is_migration_enabled: bool,
    /// Returns the node that a process came from, if the process has moved here.
    pub resident_from: &'a dyn Fn(i32) -> Option<NodeId>,
    /// Predicts the freeze of a checked process.
    pub freeze_of: &'a dyn Fn(&ProcessCheck) -> Duration,
    /// The newest measurement of the load; none in the first seconds of the daemon.
    pub measured: Option<&'a NodeMeasurement>,
    /// Numbers of clients, by the PIDs of the servers.
    pub clients: &'a BTreeMap<i32, u64>,
}

/// An action that the conductor asks of the engine.
#[derive(Debug)]
pub(crate) enum DriverOutput {
    /// Send a frame; losing it does no harm.
    Send {
        /// Node that receives the frame.
        to: NodeId,
        /// Frame for the receiver's conductor.
        frame: ConductorFrame,
    },
    /// Begin to move a process, and call [`ConductorDriver::handle_move_ended`] at its end.
    BeginMove {
        /// Root of the process tree.
        pid: i32,
        /// Node that takes the process.
        to: NodeId,
    },
}

/// The conductor of this node, with its inputs and its files.
pub(crate) struct ConductorDriver {
    own: NodeId,
    machine: Conductor,
    files: StateFiles,
    saved: SavedState,
    /// Thread that scans processes; none before the daemon is ready.
    scanner: Option<ProcessScanner>,
    scan_sender: mpsc::Sender<Scan>,
    scans: mpsc::Receiver<Scan>,
    scan_at: Duration,
    /// Number of the last request for a scan.
    last_scan: u64,
    /// Processes that have moved away and that the last scan still listed: each stays here stopped for a moment, until
    /// its new clients have followed. PIDs and starts in ticks since boot.
    departed: BTreeSet<(i32, u64)>,
    memory_free_kib: u64,
    processes: BTreeMap<ProcessKey, ManagedProcess>,
    /// Names of processes that are or were here.
    names: BTreeMap<ProcessKey, String>,
    offers: VecDeque<OfferedProcess>,
    /// The move that the machine has requested.
    moving: Option<(OfferId, ProcessKey, NodeId)>,
    /// Number of moves from and to this node that have not ended.
    moves_under_way: usize,
    drain: Option<NodeDrain>,
    /// Time until which the contact node is told of the end of a drain.
    reopened_until: Duration,
    is_balancing: bool,
    /// Nodes that are being drained, by their own word.
    draining_nodes: BTreeSet<NodeId>,
    /// Rules of the node's file, by names of processes.
    rules: BTreeMap<String, PlacementRules>,
    outputs: VecDeque<DriverOutput>,
}

impl ConductorDriver {
    /// Returns the driver of a daemon that starts with this view. A drain of the daemon before goes on.
    pub fn new(config: &Config, boot: u64, view: View) -> ConductorDriver {
        let own = config.node.id;
        let files = StateFiles::new(config);
        let is_balancing = files.is_balancing();
        let machine_config = ConductorConfig {
            is_balancing,
            moves_per_minute_max: config.balance.moves_per_minute,
            ..ConductorConfig::new(own, boot)
        };
        let now_s = u64::from(monotonic_s());
        let saved = files.read(now_s);
        let mut machine = Conductor::new(Duration::ZERO, machine_config, view);
        machine.handle_process_histories(Duration::ZERO, &saved.histories);
        let (scan_sender, scans) = mpsc::channel(1);
        let mut driver = ConductorDriver {
            own,
            machine,
            files,
            scanner: None,
            scan_sender,
            scans,
            scan_at: Duration::ZERO,
            last_scan: 0,
            departed: BTreeSet::new(),
            memory_free_kib: 0,
            processes: BTreeMap::new(),
            names: BTreeMap::new(),
            offers: VecDeque::new(),
            moving: None,
            moves_under_way: 0,
            drain: None,
            reopened_until: Duration::ZERO,
            is_balancing,
            draining_nodes: BTreeSet::new(),
            rules: process_rules::rules_by_name(&config.balance.rules),
            outputs: VecDeque::new(),
            saved,
        };
        if let Some(SavedDrain { deadline_s }) = driver.saved.drain {
            let left = deadline_s.map(|at| Duration::from_secs(at.saturating_sub(now_s)));
            tracing::info!(?left, "this node goes on being drained");
            driver.begin_drain(Duration::ZERO, left);
        }
        driver
    }

    /// Starts the thread that scans processes, with the privileges of the calling thread.
    ///
    /// # Errors
    /// There is no memory for a thread, or no descriptor for a socket.
    pub fn start(&mut self) -> std::io::Result<()> {
        self.scanner = Some(ProcessScanner::start(self.scan_sender.clone())?);
        Ok(())
    }

    /// Returns the next result of a scan. Dropping the future loses nothing.
    pub async fn next_scan(&mut self) -> Option<Scan> {
        self.scans.recv().await
    }

    /// Returns the PIDs of the managed processes.
    pub fn pids(&self) -> impl Iterator<Item = i32> {
        self.processes.values().map(|process| process.pid)
    }

    /// Returns true if this node chooses processes to move: it balances, or is being drained.
    pub fn chooses_processes(&self) -> bool {
        self.is_balancing || self.drain.is_some()
    }

    /// Returns true if it is time for a scan.
    pub fn is_scan_due(&self, now: Duration) -> bool {
        self.scanner.is_some() && now >= self.scan_at
    }

    /// Returns the number of the next scan, and the checks to make in it.
    pub fn next_scan_plan(&self) -> (u64, CheckScope) {
        let checks = match &self.drain {
            Some(NodeDrain {
                phase: DrainPhase::Surveying { scan },
                ..
            }) if *scan > self.last_scan => CheckScope::All,
            Some(_) => CheckScope::Outdated,
            None if self.is_balancing => CheckScope::One,
            None => CheckScope::None,
        };
        (self.last_scan + 1, checks)
    }

    /// Requests a scan of this node's managed processes.
    pub fn request_scan(&mut self, now: Duration, request: ScanRequest) {
        self.scan_at = now + SCAN_INTERVAL;
        let number = request.number;
        if let Some(scanner) = &self.scanner
            && scanner.request(request)
        {
            self.last_scan = number;
        }
    }

    /// Takes the result of a scan. A process that has moved away is not one of this node's any more.
    pub fn handle_scan(&mut self, now: Duration, mut scan: Scan, facts: &ScanFacts<'_>) {
        let identity = |process: &ScannedProcess| (process.pid, process.started_ticks);
        let listed: BTreeSet<_> = scan.processes.iter().map(identity).collect();
        self.departed.retain(|departed| listed.contains(departed));
        let departed = &self.departed;
        (scan.processes).retain(|process| !departed.contains(&identity(process)));
        let mut arrived = Vec::new();
        let mut processes = BTreeMap::new();
        for process in scan.processes {
            let from = (facts.resident_from)(process.pid);
            let key = self.key_of(&process, from);
            if from.is_some() {
                let (pid, started_ticks) = (process.pid, process.started_ticks);
                arrived.push(ArrivedKey {
                    pid,
                    started_ticks,
                    key,
                });
            }
            let load = facts
                .measured
                .and_then(|measured| load_of(&process, measured));
            let rules = self.rules_of(&process);
            let check = process.check;
            let checked = check.as_ref().and_then(|check| check.as_ref().ok());
            self.names.insert(key, process.name.clone());
            let managed = ManagedProcess {
                pid: process.pid,
                started_ticks: process.started_ticks,
                name: process.name,
                used: load.map_or(0, |(used, _)| used),
                memory_kib: load.map_or(0, |(_, memory_kib)| memory_kib),
                clients: clients_of(facts.clients, process.pid),
                has_moved_here: from.is_some(),
                freeze: checked.map_or(Duration::ZERO, facts.freeze_of),
                rules,
                check,
            };
            processes.insert(key, managed);
        }
        self.processes = processes;
        self.forget_names();
        self.forget_pins();
        if arrived != self.saved.arrived {
            self.saved.arrived = arrived;
            self.save();
        }
        // A node without a load gets no offers: it could take no process.
        if let Some(measured) = facts.measured
            && (facts.is_migration_enabled || self.drain.is_some())
        {
            self.memory_free_kib = measured.memory_free_kib;
            let sample = self.sample(measured, facts.is_migration_enabled);
            self.machine.handle_sample(now, sample);
            self.follow_survey(now, scan.number);
        }
        self.tell_contact(now, facts.contact);
    }

    /// Begins the drain once all processes are checked.
    fn follow_survey(&mut self, now: Duration, scan: u64) {
        if let Some(drain) = &mut self.drain
            && let DrainPhase::Surveying { scan: awaited } = drain.phase
            && scan >= awaited
        {
            drain.phase = DrainPhase::Moving;
            let status = self.machine.handle_drain(now, drain.deadline);
            tracing::info!(
                processes = status.remaining,
                stuck = status.stuck.len(),
                "this node is being drained"
            );
        }
    }

    /// Tells the contact node directly that this node is being drained, or no longer is: gossip reaches random nodes.
    fn tell_contact(&mut self, now: Duration, contact: NodeId) {
        let is_news = self.drain.is_some() || now < self.reopened_until;
        let (Some(demand), true) = (self.machine.own_demand(now), is_news) else {
            return;
        };
        if contact == self.own || contact == holdfast_proto::view::NO_NODE {
            return;
        }
        let report = LoadReport {
            node: self.own,
            demand,
            memory_free_kib: self.memory_free_kib,
            is_open: self.drain.is_none(),
            age_ms: 0,
        };
        let frame = ConductorFrame::Loads {
            reports: vec![report],
        };
        self.outputs
            .push_back(DriverOutput::Send { to: contact, frame });
    }

    /// Returns the key of a process: the one it had at the node that it came from, or a new one.
    fn key_of(&mut self, process: &ScannedProcess, from: Option<NodeId>) -> ProcessKey {
        let fresh = fresh_key(self.own, process);
        let Some(from) = from else {
            return fresh;
        };
        let identity = (process.pid, process.started_ticks);
        let mut known = self.saved.arrived.iter();
        if let Some(known) = known.find(|known| (known.pid, known.started_ticks) == identity) {
            return known.key;
        }
        let mut offers = self.offers.iter();
        let is_it = |offer: &OfferedProcess| offer.is_accepted && offer.donor == from;
        match offers.position(is_it) {
            Some(at) => self.offers.remove(at).map_or(fresh, |offer| offer.key),
            None => fresh,
        }
    }

    fn forget_names(&mut self) {
        if self.names.len() > NAMES_MAX {
            let processes = &self.processes;
            self.names.retain(|key, _| processes.contains_key(key));
        }
    }

    fn sample(&self, measured: &NodeMeasurement, is_migration_enabled: bool) -> LoadSample {
        let sample = |(key, process): (&ProcessKey, &ManagedProcess)| ProcessSample {
            key: *key,
            used: process.used,
            memory_kib: process.memory_kib,
            clients: process.clients,
            freeze: process.freeze,
            rules: process.rules,
            blocked: match is_migration_enabled {
                true => process.obstacle(),
                false => Some(refusal(
                    "migration is disabled on this node; set enabled = true in [migration] of its configuration, and \
                     restart its daemon",
                )),
            },
        };
        LoadSample {
            demand: measured.demand(),
            memory_free_kib: measured.memory_free_kib,
            processes: self.processes.iter().map(sample).collect(),
        }
    }

    /// Takes the view of the group.
    pub fn handle_view(&mut self, now: Duration, view: View) {
        self.draining_nodes.retain(|node| view.contains(*node));
        self.machine.handle_view(now, view);
    }

    /// Takes the removal of this node from the group.
    pub fn handle_removal(&mut self, now: Duration) {
        self.draining_nodes.clear();
        self.machine.handle_removal(now);
    }

    /// Takes a frame of another node.
    pub fn handle_frame(&mut self, now: Duration, from: NodeId, frame: ConductorFrame) {
        match &frame {
            ConductorFrame::Loads { reports } => {
                let own_word = reports.iter().find(|report| report.node == from);
                match own_word.map(|report| report.is_open) {
                    Some(true) => drop(self.draining_nodes.remove(&from)),
                    Some(false) => drop(self.draining_nodes.insert(from)),
                    None => {}
                }
            }
            ConductorFrame::Offer { id, process, .. } => {
                let is_known = |offer: &OfferedProcess| offer.donor == from && offer.id == *id;
                if !self.offers.iter().any(is_known) {
                    self.offers.truncate(OFFERS_MAX - 1);
                    self.offers.push_front(OfferedProcess {
                        donor: from,
                        id: *id,
                        key: process.key,
                        is_accepted: false,
                    });
                }
            }
            ConductorFrame::Ended { id, end } if *end != OfferEnd::Moved => {
                self.offers
                    .retain(|offer| offer.donor != from || offer.id != *id);
            }
            _ => {}
        }
        self.machine.handle_frame(now, from, frame);
    }

    /// Takes the number of moves from and to this node.
    pub fn handle_moves_under_way(&mut self, now: Duration, moves: usize) {
        self.moves_under_way = moves;
        self.machine.handle_moves_under_way(now, moves);
    }

    /// Takes the end of the move that [`DriverOutput::BeginMove`] requested.
    pub fn handle_move_ended(&mut self, now: Duration, result: MoveResult) {
        let Some((id, key, to)) = self.moving.take() else {
            return;
        };
        if let Some(drain) = &mut self.drain {
            let process = self.processes.get(&key);
            let process = process.map(|process| (process.pid, process.name.clone()));
            drain.record(process.unwrap_or_default(), to, &result);
        }
        if result.end.is_ok() {
            let process = self.processes.remove(&key);
            (self.departed).extend(process.map(|one| (one.pid, one.started_ticks)));
        }
        self.machine.handle_move_ended(now, id, result.end);
        self.scan_at = now;
    }

    /// Returns true while a process moves from or to this node, or an offer is open.
    fn is_moving(&self) -> bool {
        self.moving.is_some() || self.moves_under_way > 0 || !self.machine.is_idle()
    }

    /// Lets the machine do its due work.
    pub fn handle_timeout(&mut self, now: Duration) {
        if self.machine.poll_timeout() <= now {
            self.machine.handle_timeout(now);
        }
    }

    /// Returns the time at which to call [`ConductorDriver::handle_timeout`], or to request a scan.
    pub fn next_wake(&self) -> Duration {
        let machine = self.machine.poll_timeout();
        match self.scanner {
            Some(_) => machine.min(self.scan_at),
            None => machine,
        }
    }

    /// Returns the next action.
    pub fn next_output(&mut self, now: Duration) -> Option<DriverOutput> {
        loop {
            if let Some(output) = self.outputs.pop_front() {
                return Some(output);
            }
            match self.machine.poll_output()? {
                Output::Send { to, frame } => {
                    if let ConductorFrame::Accept { id, .. } = &frame {
                        let mut offers = self.offers.iter_mut();
                        let accepted = offers.find(|offer| offer.donor == to && offer.id == *id);
                        accepted
                            .into_iter()
                            .for_each(|offer| offer.is_accepted = true);
                    }
                    return Some(DriverOutput::Send { to, frame });
                }
                Output::BeginMove { id, process, to } => match self.processes.get(&process) {
                    Some(managed) => {
                        self.moving = Some((id, process, to));
                        let pid = managed.pid;
                        return Some(DriverOutput::BeginMove { pid, to });
                    }
                    None => {
                        let ended = refusal("the process has ended");
                        self.machine.handle_move_ended(now, id, Err(ended));
                    }
                },
                Output::Event(event) => self.on_event(now, event),
            }
        }
    }

    fn on_event(&mut self, now: Duration, event: Event) {
        match event {
            Event::HistoriesChanged => {
                self.saved.histories = self.machine.process_histories(now);
                self.save();
            }
            Event::Stays(reason) => tracing::info!(%reason, "no process moves"),
            Event::Audited(record) => {
                let (at, role, outcome) = (record.at, &record.role, &record.outcome);
                tracing::info!(?at, ?role, ?outcome, "a decision on a move has ended");
            }
            Event::Observed(record) => {
                let (id, observed) = (record.id, record.observed.map(|load| load.points()));
                tracing::info!(%id, ?observed, "the load after a move");
            }
            Event::DrainEnded(status) => tracing::info!(
                moved = status.moved,
                stuck = status.stuck.len(),
                safe = status.is_safe_to_reboot,
                "no process is left that can move off this node"
            ),
            Event::Declined { by, reason, .. } => {
                tracing::debug!(%by, %reason, "a node declined a process");
            }
            Event::DeclinedOffer { from, reason, .. } => {
                tracing::debug!(%from, %reason, "this node declined a process");
            }
            Event::Ignored {
                from,
                frame,
                reason,
            } => tracing::debug!(%from, frame, reason, "ignored a frame"),
        }
    }

    fn save(&mut self) {
        if let Err(error) = self.try_save() {
            tracing::warn!(%error, "cannot save the conductor's state, which a restart will lose");
        }
    }

    fn try_save(&mut self) -> std::io::Result<()> {
        self.saved.written_at_s = u64::from(monotonic_s());
        self.files.write(&self.saved)
    }

    /// Begins a drain, or changes the deadline of the present one. The processes are checked first.
    pub fn drain(&mut self, now: Duration, deadline: Option<Duration>) {
        let deadline_s = deadline.map(|left| u64::from(monotonic_s()) + left.as_secs());
        self.saved.drain = Some(SavedDrain { deadline_s });
        self.save();
        self.begin_drain(now, deadline);
    }

    fn begin_drain(&mut self, now: Duration, deadline: Option<Duration>) {
        let deadline = deadline.map(|left| now + left);
        let phase = DrainPhase::Surveying {
            scan: self.last_scan + 1,
        };
        match &mut self.drain {
            Some(drain) => (drain.deadline, drain.phase) = (deadline, phase),
            None => self.drain = Some(NodeDrain::new(deadline, phase)),
        }
        self.scan_at = now;
    }

    /// Ends a drain. A move under way is completed.
    pub fn undrain(&mut self, now: Duration) {
        if self.drain.take().is_some() {
            self.saved.drain = None;
            self.save();
            self.reopened_until = now + REOPENED_NEWS;
            self.machine.handle_undrain(now);
            tracing::info!("this node is no longer being drained");
        }
    }

    /// Returns true while this node is being drained.
    pub fn is_draining(&self) -> bool {
        self.drain.is_some()
    }

    /// Returns the nodes that are being drained, as far as this node knows, this one included.
    pub fn draining_nodes(&self) -> BTreeSet<NodeId> {
        let own = self.drain.is_some().then_some(self.own);
        self.draining_nodes.iter().copied().chain(own).collect()
    }

    /// Returns the handoff of connections in a drain.
    pub fn connections_handoff(&mut self) -> Option<&mut ConnectionsHandoff> {
        self.drain.as_mut().map(|drain| &mut drain.handoff)
    }

    /// Returns the known load of a node, in hundredths of a percent point.
    pub fn load_of(&self, now: Duration, node: NodeId) -> Option<u32> {
        let known = self.machine.known_loads(now).into_iter();
        let mut matching = known.filter(|report| report.node == node);
        matching.next().map(|report| report.demand.utilization().0)
    }

    /// Switches balancing on or off.
    ///
    /// # Errors
    /// The state directory cannot be written.
    pub fn set_balancing(&mut self, now: Duration, on: bool) -> std::io::Result<()> {
        self.files.set_balancing(on)?;
        self.is_balancing = on;
        self.machine.handle_balancing(now, on);
        Ok(())
    }

    /// Decides at once whether a process moves, without waiting for the next decision's time.
    pub fn balance_now(&mut self, now: Duration) -> Decision {
        self.machine.handle_balance_now(now)
    }
}

impl ManagedProcess {
    /// Returns the reason for which the process cannot move, if its last check found one. A process that was not checked
    /// waits for its check.
    fn obstacle(&self) -> Option<Failure> {
        match &self.check {
            None => Some(refusal("it has not been checked yet")),
            Some(Err(error)) => Some(refusal(error)),
            Some(Ok(check)) => check.blockers.first().cloned().map(blocker_failure),
        }
    }
}

fn refusal(text: impl std::fmt::Display) -> Failure {
    OperatorFault::RequestRefused(Text::of(text)).into()
}

/// Returns the demand for processor time and the memory, in KiB, of a measured process.
fn load_of(process: &ScannedProcess, measured: &NodeMeasurement) -> Option<(u32, u64)> {
    let tree = measured.trees.get(&process.pid)?;
    let is_same = tree.started_ticks == process.started_ticks;
    is_same.then(|| (measured.demand_of(tree.cpu_millis), tree.memory_kib))
}

fn clients_of(clients: &BTreeMap<i32, u64>, pid: i32) -> u32 {
    let clients = clients.get(&pid).copied().unwrap_or_default();
    u32::try_from(clients).unwrap_or(u32::MAX)
}

/// Returns the key of a process that has not moved: a hash of the host's boot, the node and the process.
fn fresh_key(own: NodeId, process: &ScannedProcess) -> ProcessKey {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let pid = process.pid.to_ne_bytes();
    let started = process.started_ticks.to_ne_bytes();
    let node = own.0.to_ne_bytes();
    let bytes = boot.iter().chain(&node).chain(&pid).chain(&started);
    ProcessKey(fnv_1a(bytes.copied()))
}

/// Returns the hash FNV-1a of 64 bits.
fn fnv_1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
