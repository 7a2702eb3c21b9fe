//! The events of a replicated service: clients, the contact node with data plane and state machine, legs, and a backup.

use super::client::Client;
use super::data_plane::{ConnectionEnd, DataPlane, Packet, client_index};
use super::host::{Host, Process};
use super::oracle::Oracle;
use super::{ReplicationAction, ReplicationBug, ReplicationRunConfig};
use crate::Violation;
use crate::event_queue::FutureEvents;
use crate::machine_timer::MachineTimer;
use crate::node_group::GroupRunOutcome;
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::replication::{
    BackupCopy, DataPlaneEvent, Output, ReplicatedServiceConfig, Replication, WatchLimits,
};
use holdfast_proto::view::View;
use holdfast_wire::health_frames::{ServerProblem, ServerState, ServiceEndpoint};
use holdfast_wire::replication_frames::{LegIndex, LegSet, ReplicationFrame};
use holdfast_wire::{NodeId, Protocol};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Most events of a run; a run with more never comes to rest.
const EVENTS_MAX: u64 = 3_000_000;
const TICK: Time = Time::from_micros(5_000);
const HEARTBEAT: Time = Time::from_micros(50_000);
/// Time between two reads of a slow process.
const SLOW_STEP: Time = Time::from_micros(100_000);
/// Time of the daemon from an event to the state machine, and from an output to the data plane.
const DAEMON: Time = Time::from_micros(200);
/// Longest time of a frame to the backup or back.
const FRAME_MAX: u64 = 20_000;
/// Time until a killed server is reported without a question.
const HEALTH_REPORT: Time = Time::from_micros(100_000);
/// Time from the loss of the contact node to its successor.
const SUCCESSION: Time = Time::from_micros(300_000);
/// Time by which a leg with a dead process must have left.
const KILLED_MAX: Time = Time::from_micros(150_000);
/// Time by which a leg with a lost host must have left: heartbeats, probes, and some loss.
const LOST_MAX: Time = Time::from_micros(500_000);

const CONTACT: NodeId = NodeId(100);
const BACKUP: NodeId = NodeId(101);

/// Returns the node of a leg.
fn leg_node(leg: LegIndex) -> NodeId {
    NodeId(leg.position() as u16 + 1)
}

/// A queued event. Events at the contact node carry its incarnation: events of a lost incarnation are void.
#[derive(Debug)]
enum Event {
    ToReplicator(u32, ConnectionEnd, Packet),
    ToConnectionEnd(ConnectionEnd, Packet),
    ClientTimer(usize, Time),
    HostTimer(LegIndex, Time),
    Tick,
    Wake(u32, Time),
    Observe(u32, DataPlaneEvent),
    Execute(u32, Output),
    Heartbeat(LegIndex),
    Heard(u32, LegIndex),
    ServerChecked(u32, LegIndex),
    ToBackup(u32, ReplicationFrame),
    FromBackup(u32, ReplicationFrame),
    SlowStep,
    Planned(ReplicationAction),
    Successor,
}

/// The replicated service: clients, replicator, legs, contact node and backup.
pub(super) struct ReplicationWorld<'a> {
    config: &'a ReplicationRunConfig,
    now: Time,
    random: Random,
    queue: FutureEvents<Event>,
    clients: Vec<Client>,
    client_timers: Vec<MachineTimer>,
    hosts: Vec<Host>,
    host_timers: Vec<MachineTimer>,
    data_plane: DataPlane,
    machine: Option<Replication>,
    machine_timer: MachineTimer,
    copy: BackupCopy,
    /// Arrival of the last frame between contact node and backup.
    frames_until: Time,
    incarnation: u32,
    has_set_roles: bool,
    oracle: Oracle,
    violation: Option<Violation>,
    counts: BTreeMap<String, u64>,
    events: u64,
    digest: u64,
    trace: Option<Vec<String>>,
}

impl<'a> ReplicationWorld<'a> {
    pub fn new(config: &'a ReplicationRunConfig, seed: u64, is_traced: bool) -> Self {
        let mut random = Random::new(seed);
        let connect_at = |random: &mut Random| Time(random.between(0, config.runtime.0 / 2));
        let clients: Vec<Client> = (0..config.clients)
            .map(|_| {
                let at = connect_at(&mut random);
                Client::new(&mut random, at)
            })
            .collect();
        let limits = machine_config(config, CONTACT).limits;
        let mut world = ReplicationWorld {
            config,
            now: Time::ZERO,
            queue: FutureEvents::default(),
            client_timers: vec![MachineTimer::default(); clients.len()],
            clients,
            hosts: (0..config.legs).map(|_| Host::new()).collect(),
            host_timers: vec![MachineTimer::default(); config.legs],
            data_plane: DataPlane::new(limits, config.bug),
            machine: None,
            machine_timer: MachineTimer::default(),
            copy: BackupCopy::new(service(), 1_000),
            frames_until: Time::ZERO,
            incarnation: 1,
            has_set_roles: false,
            oracle: Oracle::default(),
            violation: None,
            counts: BTreeMap::new(),
            events: 0,
            digest: seed,
            random,
            trace: is_traced.then(Vec::new),
        };
        let nodes: Vec<NodeId> = world.legs().map(leg_node).collect();
        let view = view(1, CONTACT, &[BACKUP], config.legs);
        let machine = Replication::new(
            Duration::ZERO,
            machine_config(config, CONTACT),
            &nodes,
            &view,
        );
        match machine {
            Ok(machine) => world.machine = Some(machine),
            Err(error) => world.set_violation(error.to_string()),
        }
        for (at, action) in &config.plan {
            world.queue.push(*at, Event::Planned(*action));
        }
        for leg in world.legs().collect::<Vec<_>>() {
            world.queue.push(Time::ZERO, Event::Heartbeat(leg));
        }
        world.queue.push(Time::ZERO, Event::Tick);
        world.queue.push(SLOW_STEP, Event::SlowStep);
        world.pump();
        world
    }

    /// Runs until all clients have ended.
    pub fn run(&mut self) -> Result<GroupRunOutcome, Violation> {
        while self.violation.is_none() && !self.clients.iter().all(Client::has_ended) {
            let Some((at, event)) = self.queue.pop_until(self.config.deadline) else {
                break;
            };
            self.now = at;
            self.events += 1;
            if self.events > EVENTS_MAX {
                self.set_violation("activity never ends".to_owned());
                break;
            }
            self.digest = (self.digest ^ at.0).wrapping_mul(0x0100_0000_01b3);
            self.add_to_trace(|| format!("{event:?}"));
            self.handle(event);
            self.collect_wrong_bytes();
            self.pump();
            self.check_clients();
        }
        if self.violation.is_none() {
            self.now = self.now.max(self.config.deadline);
            for (number, client) in self.clients.iter().enumerate() {
                if let Err(what) = self.oracle.check_end(number, client, &self.hosts) {
                    let at = self.now;
                    self.violation = Some(Violation {
                        at,
                        description: what,
                    });
                    break;
                }
            }
        }
        match self.violation.take() {
            Some(violation) => Err(violation),
            None => {
                for state in self.clients.iter().map(|client| client.state) {
                    *self.counts.entry(format!("client {state:?}")).or_default() += 1;
                }
                Ok(GroupRunOutcome {
                    counts: std::mem::take(&mut self.counts),
                    events: self.events,
                    digest: self.digest,
                })
            }
        }
    }

    pub fn take_trace(&mut self) -> Vec<String> {
        self.trace.take().unwrap_or_default()
    }

    fn legs(&self) -> impl Iterator<Item = LegIndex> + use<> {
        LegIndex::all().take(self.config.legs)
    }

    fn set_violation(&mut self, description: String) {
        let at = self.now;
        self.violation.get_or_insert(Violation { at, description });
    }

    fn check(&mut self, result: Result<(), String>) {
        if let Err(description) = result {
            self.set_violation(description);
        }
    }

    fn count(&mut self, what: impl Into<String>) {
        *self.counts.entry(what.into()).or_default() += 1;
    }

    fn add_to_trace(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            let seconds = self.now.as_secs_f64();
            trace.push(format!("{seconds:.6} {}", line()));
        }
    }

    fn handle(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::ToReplicator(incarnation, from, packet) => {
                if incarnation == self.incarnation {
                    match from {
                        ConnectionEnd::Client(client) => {
                            self.data_plane.handle_client(now, client, packet);
                        }
                        ConnectionEnd::Leg(client, leg) => {
                            self.data_plane.handle_leg(now, client, leg, packet);
                        }
                    }
                }
            }
            Event::ToConnectionEnd(ConnectionEnd::Client(client), packet) => {
                self.clients[client].handle(now, &packet);
            }
            Event::ToConnectionEnd(ConnectionEnd::Leg(client, leg), packet) => {
                if self.hosts[leg.position()].is_reachable() {
                    self.hosts[leg.position()].handle(now, client, &packet);
                }
            }
            Event::ClientTimer(client, at) => {
                if self.client_timers[client].take(at) {
                    self.clients[client].handle_timer(now);
                }
            }
            Event::HostTimer(leg, at) => {
                if self.host_timers[leg.position()].take(at) && !self.hosts[leg.position()].is_lost
                {
                    self.hosts[leg.position()].handle_timer(now);
                }
            }
            Event::Tick => self.on_tick(),
            Event::Wake(incarnation, at) => {
                let is_due = incarnation == self.incarnation && self.machine_timer.take(at);
                if let Some(machine) = self.machine.as_mut().filter(|_| is_due) {
                    machine.handle_timeout(now.into());
                }
            }
            Event::Observe(incarnation, observation) => {
                self.on_observation(incarnation, observation)
            }
            Event::Execute(incarnation, output) => {
                if incarnation == self.incarnation {
                    self.execute(output);
                }
            }
            Event::Heartbeat(leg) => {
                self.queue.push(now + HEARTBEAT, Event::Heartbeat(leg));
                self.send_sign_of_life(leg, Time::ZERO);
            }
            Event::Heard(incarnation, leg) => self.on_heard(incarnation, leg),
            Event::ServerChecked(incarnation, leg) => self.on_server_checked(incarnation, leg),
            Event::ToBackup(incarnation, frame) => {
                if let Some(answer) = self.copy.handle_frame(frame) {
                    let at = self.next_frame_time();
                    self.queue.push(at, Event::FromBackup(incarnation, answer));
                }
            }
            Event::FromBackup(incarnation, frame) => {
                if let Some(machine) = self.current_machine(incarnation) {
                    machine.handle_frame(now.into(), BACKUP, &frame);
                }
            }
            Event::SlowStep => {
                self.queue.push(now + SLOW_STEP, Event::SlowStep);
                self.hosts.iter_mut().for_each(|host| host.run_slowly(now));
            }
            Event::Planned(action) => self.act(action),
            Event::Successor => self.succeed(),
        }
    }

    fn current_machine(&mut self, incarnation: u32) -> Option<&mut Replication> {
        let is_current = incarnation == self.incarnation;
        self.machine.as_mut().filter(|_| is_current)
    }

    fn on_tick(&mut self) {
        let now = self.now;
        self.queue.push(now + TICK, Event::Tick);
        if self.machine.is_none() {
            return;
        }
        self.data_plane.tick(now);
        let heard = std::mem::take(&mut self.data_plane.heard);
        for leg in heard.iter() {
            let incarnation = self.incarnation;
            if let Some(machine) = self.current_machine(incarnation) {
                machine.handle_heard(now.into(), leg_node(leg));
            }
        }
        let result = self.oracle.check_tick(now, &self.data_plane, &self.hosts);
        self.check(result);
    }

    fn on_observation(&mut self, incarnation: u32, observation: DataPlaneEvent) {
        let now = self.now;
        let is_progress = matches!(observation, DataPlaneEvent::Progress { .. });
        if is_progress && self.config.bug == Some(ReplicationBug::IgnoresProgress) {
            return;
        }
        if let DataPlaneEvent::Opened { record } = observation
            && self.config.bug == Some(ReplicationBug::ShowsBeforeBackup)
            && incarnation == self.incarnation
        {
            self.data_plane.show_syn_ack(client_index(record.client));
        }
        if let Some(machine) = self.current_machine(incarnation) {
            machine.handle_data_plane(now.into(), observation);
        }
    }

    fn on_heard(&mut self, incarnation: u32, leg: LegIndex) {
        let now = self.now;
        if self.config.bug == Some(ReplicationBug::IgnoresSignsOfLife) {
            return;
        }
        if let Some(machine) = self.current_machine(incarnation) {
            machine.handle_heard(now.into(), leg_node(leg));
        }
    }

    fn on_server_checked(&mut self, incarnation: u32, leg: LegIndex) {
        let now = self.now;
        let host = &self.hosts[leg.position()];
        if !host.is_reachable() {
            return;
        }
        let state = match host.process {
            Process::Killed => ServerState::Failing(ServerProblem::ListenerClosed),
            Process::Running | Process::Stopped => ServerState::Serving,
        };
        if let Some(machine) = self.current_machine(incarnation) {
            machine.handle_server(now.into(), leg_node(leg), &state);
        }
    }

    /// Lets a host answer after a time, over a link that may lose the answer.
    fn send_sign_of_life(&mut self, leg: LegIndex, after: Time) {
        if self.hosts[leg.position()].is_reachable() && !self.random.chance(self.config.loss) {
            let at = self.now + after + self.link_delay();
            self.queue.push(at, Event::Heard(self.incarnation, leg));
        }
    }

    /// Returns the arrival time of the next frame between contact node and backup. Frames arrive in order.
    fn next_frame_time(&mut self) -> Time {
        let delay = Time::from_micros(self.random.between(500, FRAME_MAX));
        self.frames_until = self.frames_until.max(self.now + delay);
        self.frames_until
    }

    fn link_delay(&mut self) -> Time {
        let delay = Time::from_micros(self.random.between(400, 600));
        match self.random.chance(self.config.reorder) {
            true => delay + Time::from_micros(self.random.between(500, 2_500)),
            false => delay,
        }
    }

    fn act(&mut self, action: ReplicationAction) {
        let now = self.now;
        self.count(
            format!("{action:?}")
                .split(['(', ' '])
                .next()
                .unwrap_or_default(),
        );
        match action {
            ReplicationAction::Kill(leg) => {
                self.hosts[leg].kill(now);
                let is_reachable = self.hosts[leg].is_reachable();
                if let Some(leg) = self.add_fault(leg) {
                    let time = if is_reachable { KILLED_MAX } else { LOST_MAX };
                    self.expect_drop(leg, time);
                    let report = Event::ServerChecked(self.incarnation, leg);
                    self.queue.push(now + HEALTH_REPORT, report);
                }
            }
            ReplicationAction::KillWorker { leg, draw } => {
                self.add_fault(leg);
                if let Some(client) = self.hosts[leg].kill_worker(now, draw) {
                    self.oracle.killed_workers.insert(client);
                }
            }
            ReplicationAction::Stop(leg) => {
                self.add_fault(leg);
                if self.hosts[leg].process == Process::Running {
                    self.hosts[leg].process = Process::Stopped;
                }
            }
            ReplicationAction::Continue(leg) => {
                if self.hosts[leg].process == Process::Stopped {
                    self.hosts[leg].process = Process::Running;
                    self.hosts[leg].run_all(now);
                }
            }
            ReplicationAction::LoseHost(leg) => {
                self.hosts[leg].is_lost = true;
                if let Some(leg) = self.add_fault(leg) {
                    self.expect_drop(leg, LOST_MAX);
                    self.postpone_drop(leg);
                }
            }
            ReplicationAction::Cut(leg) => {
                self.hosts[leg].is_cut = true;
                if let Some(leg) = self.add_fault(leg) {
                    self.postpone_drop(leg);
                }
            }
            ReplicationAction::Mend(leg) => self.hosts[leg].is_cut = false,
            ReplicationAction::Slow(leg) => {
                self.add_fault(leg);
                self.hosts[leg].is_slow = true;
            }
            ReplicationAction::Differ(leg) => {
                self.add_fault(leg);
                self.hosts[leg].differs_next = true;
            }
            ReplicationAction::LoseContact => {
                self.incarnation += 1;
                self.machine = None;
                self.machine_timer = MachineTimer::default();
                self.data_plane = DataPlane::new(self.data_plane.limits, self.config.bug);
                self.queue.push(now + SUCCESSION, Event::Successor);
                self.oracle.postpone(now + SUCCESSION + LOST_MAX);
            }
        }
    }

    fn add_fault(&mut self, index: usize) -> Option<LegIndex> {
        let leg = LegIndex::new(index)?;
        self.oracle.faulty.insert(leg);
        Some(leg)
    }

    /// Expects that a leg leaves the service in time.
    fn expect_drop(&mut self, leg: LegIndex, time: Time) {
        let due = match self.machine {
            Some(_) => self.now + time,
            None => self.now + SUCCESSION + LOST_MAX,
        };
        let own = self.oracle.due.entry(leg).or_insert(due);
        *own = (*own).min(due);
    }

    /// Gives a leg whose loss is expected as much time as one with a lost host: the kernel's answers and the reports no longer
    /// arrive.
    fn postpone_drop(&mut self, leg: LegIndex) {
        if let Some(due) = self.oracle.due.get_mut(&leg) {
            *due = (*due).max(self.now + LOST_MAX);
        }
    }

    /// Lets the backup become the contact node.
    fn succeed(&mut self) {
        let config = machine_config(self.config, BACKUP);
        let view = view(2, BACKUP, &[], self.config.legs);
        match Replication::succeed(self.now.into(), config, &self.copy, &view) {
            Ok(machine) => self.machine = Some(machine),
            // Nothing was shown to any client before the first snapshot.
            Err(error) => self.set_violation(error.to_string()),
        }
        for (index, host) in self.hosts.iter().enumerate() {
            if let Some(leg) = LegIndex::new(index).filter(|_| host.process == Process::Killed) {
                let report = Event::ServerChecked(self.incarnation, leg);
                self.queue.push(self.now + HEALTH_REPORT, report);
            }
        }
        self.count("succession");
    }

    fn execute(&mut self, output: Output) {
        let now = self.now;
        let first = |live: LegSet| live.iter().next();
        let bug = self.config.bug;
        match output {
            Output::SetRoles(roles) => {
                if bug == Some(ReplicationBug::LosesRoles) && self.has_set_roles {
                    return;
                }
                self.has_set_roles = true;
                let mut primary = roles.primary;
                if bug == Some(ReplicationBug::PromotesFirstLeg)
                    && primary != self.data_plane.primary
                {
                    primary = first(roles.live).unwrap_or(primary);
                }
                if primary != self.data_plane.primary {
                    let result = self.oracle.check_promotion(primary, roles.live);
                    self.check(result);
                }
                self.data_plane.set_roles(primary, roles.live);
            }
            Output::SetConnectionRoles {
                client,
                primary,
                live,
                follows_service_roles,
            } => {
                let own = (!follows_service_roles).then_some((primary, live));
                self.data_plane.set_own_roles(client_index(client), own);
            }
            Output::SendWindowUpdate { client } => {
                self.data_plane.send_window_update(client_index(client));
            }
            Output::SendAllWindowUpdates => self.data_plane.send_all_window_updates(),
            Output::ShowSynAck { client } => self.data_plane.show_syn_ack(client_index(client)),
            Output::ResetClient { client } => {
                if bug != Some(ReplicationBug::SwallowsLastReset) {
                    self.data_plane.reset_client(client_index(client));
                }
            }
            Output::Adopt(record) => self.data_plane.adopt(now, &record),
            Output::SetWatchLimits(limits) => self.data_plane.limits = limits,
            Output::Probe { node } => {
                if let Some(leg) = LegIndex::new(usize::from(node.0) - 1) {
                    let way = self.link_delay();
                    if !self.random.chance(self.config.loss) {
                        self.send_sign_of_life(leg, way);
                    }
                }
            }
            Output::CheckServer { node } => {
                if let Some(leg) = LegIndex::new(usize::from(node.0) - 1) {
                    let way = self.link_delay() + self.link_delay();
                    let check = Event::ServerChecked(self.incarnation, leg);
                    self.queue.push(now + way, check);
                }
            }
            Output::Send { frame, .. } => {
                let at = self.next_frame_time();
                self.queue
                    .push(at, Event::ToBackup(self.incarnation, frame));
            }
            Output::Event(_) => {}
        }
    }

    /// Passes on what all parties have to send, and arms their timers.
    fn pump(&mut self) {
        self.pump_machine();
        self.pump_data_plane();
        for client in 0..self.clients.len() {
            for packet in self.clients[client].take_packets() {
                self.send_to_replicator(ConnectionEnd::Client(client), packet);
            }
            let due = self.clients[client].timer().map(Duration::from);
            if let Some(at) = self.client_timers[client].arm(due) {
                self.queue.push(at, Event::ClientTimer(client, at));
            }
        }
        for leg in self.legs().collect::<Vec<_>>() {
            let host = &mut self.hosts[leg.position()];
            for (client, packet) in host.take_packets() {
                if self.hosts[leg.position()].is_reachable() {
                    self.send_to_replicator(ConnectionEnd::Leg(client, leg), packet);
                }
            }
            let host = &self.hosts[leg.position()];
            let due = host.timer().filter(|_| !host.is_lost);
            let due = due.map(Duration::from);
            if let Some(at) = self.host_timers[leg.position()].arm(due) {
                self.queue.push(at, Event::HostTimer(leg, at));
            }
        }
    }

    fn pump_machine(&mut self) {
        let Some(machine) = &mut self.machine else {
            return;
        };
        let outputs: Vec<Output> = std::iter::from_fn(|| machine.poll_output()).collect();
        let due = machine.poll_timeout();
        for output in outputs {
            self.add_to_trace(|| format!("  {output:?}"));
            if let Output::Event(event) = output {
                let kind = format!("{event:?}");
                let kind = kind.split(['(', ' ']).next().unwrap_or_default().to_owned();
                self.count(kind);
                if let holdfast_proto::replication::Event::Dropped { reason, .. } = event {
                    self.count(format!("dropped: {reason:?}"));
                }
                let result = self.oracle.check_event(&event);
                self.check(result);
            } else {
                let execute = Event::Execute(self.incarnation, output);
                self.queue.push(self.now + DAEMON, execute);
            }
        }
        let due = due.filter(|_| self.config.bug != Some(ReplicationBug::NoTimers));
        if let Some(at) = self.machine_timer.arm(due) {
            self.queue.push(at, Event::Wake(self.incarnation, at));
        }
    }

    fn pump_data_plane(&mut self) {
        for (end, packet) in self.data_plane.take_packets() {
            if let (ConnectionEnd::Client(client), Packet::Segment(segment)) = (end, &packet) {
                let live = self.data_plane.roles(client).1;
                let result =
                    self.oracle
                        .check_acknowledgement(client, segment.ack, live, &self.hosts);
                self.check(result);
            }
            if !self.random.chance(self.config.loss) {
                let at = self.now + self.link_delay();
                self.queue.push(at, Event::ToConnectionEnd(end, packet));
            }
        }
        for event in self.data_plane.take_events() {
            let observe = Event::Observe(self.incarnation, event);
            self.queue.push(self.now + DAEMON, observe);
        }
    }

    fn send_to_replicator(&mut self, from: ConnectionEnd, packet: Packet) {
        if !self.random.chance(self.config.loss) {
            let at = self.now + self.link_delay();
            self.queue
                .push(at, Event::ToReplicator(self.incarnation, from, packet));
        }
    }

    /// Tells the oracle which bytes the servers have falsified. Each is known before its segment is on its way.
    fn collect_wrong_bytes(&mut self) {
        for (index, host) in self.hosts.iter_mut().enumerate() {
            for wrong in host.wrong_bytes.drain(..) {
                if let Some(leg) = LegIndex::new(index) {
                    self.oracle
                        .add_wrong_byte(leg, wrong.client, wrong.position);
                }
            }
        }
    }

    fn check_clients(&mut self) {
        for (number, client) in self.clients.iter_mut().enumerate() {
            let result = self.oracle.check_client(number, client, self.config.legs);
            if let Err(description) = result {
                let at = self.now;
                self.violation.get_or_insert(Violation { at, description });
            }
        }
    }
}

fn service() -> ServiceEndpoint {
    ServiceEndpoint {
        protocol: Protocol::Tcp,
        address: SocketAddr::from(([10, 0, 0, 1], 80)),
    }
}

/// Returns the settings of the state machine: the defaults, but for the sizes of the simulated streams.
fn machine_config(config: &ReplicationRunConfig, node: NodeId) -> ReplicatedServiceConfig {
    ReplicatedServiceConfig {
        replicas: config.legs - 1,
        divergence: config.divergence,
        limits: WatchLimits {
            lag_bytes_max: 8_000,
            // Three losses in a row are rare, two are not.
            lag_time_max: Duration::from_millis(400),
            stall_max: Duration::from_millis(400),
            ..WatchLimits::default()
        },
        ..ReplicatedServiceConfig::new(node, service())
    }
}

fn view(epoch: u64, contact_node: NodeId, backups: &[NodeId], legs: usize) -> View {
    let legs = LegIndex::all().take(legs);
    View {
        epoch,
        backups: backups.to_vec(),
        ..View::configured(contact_node, legs.map(leg_node))
    }
}
