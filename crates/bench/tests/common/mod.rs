//! A group with busy connections. Every byte of the connections is verified while a test acts on the group.

#![allow(dead_code, reason = "each test uses a part of the module")]

pub mod compromised_node;
pub mod test_views;

use std::net::{SocketAddr, TcpStream};
use std::process::Output;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use holdfast_api::control::{
    ClientError, ErrorBody, FlowListQuery, FlowOutcome, FlowSelection, HandoffAccepted,
    HandoffRequest, HandoffState, HandoffStatus,
};
use holdfast_api::{Drain, FlowText, Protocol};
use holdfast_checkpoint::procfs::{ProcStat, threads};
use holdfast_testbed::cluster::{
    Cluster, ClusterService, ClusterSpec, ExampleServer, IpFamily, STALLS_MAX, is_node_stall,
};
use holdfast_testbed::connection_load::{ConnectionLoad, open_connections};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Number of busy connections.
pub const CONNECTIONS: usize = 64;
/// The port of the echo server.
pub const PORT: u16 = 7;
/// The port of the pool `odd`, which nothing serves unless a test does.
pub const ODD_PORT: u16 = 8007;

/// Longest wait for any condition, with a margin for a heavily loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Returns a guard that makes labs run one after another, since labs would disturb each other's timing. None without
/// root.
pub fn lock_lab() -> Option<MutexGuard<'static, ()>> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return None;
    }
    Some(ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Three nodes with echo servers, and client connections, all of them at n2 in the beginning.
pub struct LoadedGroup {
    pub cluster: Cluster,
    pub load: ConnectionLoad,
    pub service: SocketAddr,
    _lab_lock: MutexGuard<'static, ()>,
}

impl LoadedGroup {
    /// Brings the group and its load up; none without root.
    pub fn up(name: &str) -> Option<Self> {
        let lab_lock = lock_lab()?;
        let mut spec = ClusterSpec::new(format!("{name}-{}", std::process::id()))
            .program(ExampleServer::Echo { port: PORT });
        spec.services
            .push(ClusterService::new("odd", Protocol::Tcp, ODD_PORT));
        for service in &mut spec.services {
            service.weights = [("n1", 0), ("n2", 1), ("n3", 0)]
                .map(|(node, weight)| (node.to_owned(), weight))
                .into();
        }
        Some(Self::load(Cluster::up(spec).unwrap(), lab_lock))
    }

    /// Opens the connections to the echo servers of a group that serves.
    pub fn load(cluster: Cluster, lab_lock: MutexGuard<'static, ()>) -> Self {
        let service = SocketAddr::new(cluster.service_address(IpFamily::V4), PORT);
        let streams = open_connections(cluster.lab(), "c1", service, CONNECTIONS).unwrap();
        let load = ConnectionLoad::start(streams, Duration::from_millis(50)).unwrap();
        let world = Self {
            cluster,
            load,
            service,
            _lab_lock: lab_lock,
        };
        world.assert_unharmed();
        world
    }

    /// Asserts that every connection answers data sent after this call, that no byte was wrong, and that no connection
    /// was reset.
    #[track_caller]
    pub fn assert_unharmed(&self) {
        let exchange_counts = || {
            self.load
                .connections()
                .iter()
                .map(|member| member.answers_received())
        };
        let before: Vec<u64> = exchange_counts().collect();
        // One exchange may have been under way already, so two are needed.
        eventually("every connection goes on", || {
            let broken = self.load.connections().iter().filter(|m| m.is_broken());
            assert_eq!(broken.count(), 0, "connections are broken");
            exchange_counts()
                .zip(&before)
                .all(|(count_now, count_before)| count_now >= count_before + 2)
        });
        assert_eq!(self.load.compared.wrong.load(Ordering::Relaxed), 0);
        assert_eq!(self.count_resets(), 0, "the client saw resets");
    }

    /// Returns the number of the client's established connections that were reset (`EstabResets` of RFC 4022).
    fn count_resets(&self) -> u64 {
        let pid = self.cluster.lab().init_process("c1").unwrap();
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/snmp")).unwrap();
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let mut pairs = names.split(' ').zip(values.split(' '));
        let found = pairs.find(|(name, _)| *name == "EstabResets").unwrap();
        found.1.parse().unwrap()
    }

    /// Ends the load after checking that no connection is broken and no byte is wrong.
    pub fn finish(self) {
        self.assert_unharmed();
        let compared = self.load.compared.clone();
        self.load.stop().unwrap();
        assert_eq!(compared.wrong.load(Ordering::Relaxed), 0);
    }

    /// Returns the flow of one connection of the load.
    pub fn flow(&self, member: usize) -> FlowText {
        self.flow_of(self.service, self.load.connections()[member].client)
    }

    /// Returns the flow of a client's TCP connection to a service.
    pub fn flow_of(&self, service: SocketAddr, client: SocketAddr) -> FlowText {
        FlowText::new(Protocol::Tcp, service, client).unwrap()
    }

    /// Opens a client's connection to the pool `odd`.
    pub fn connect_to_odd(&self) -> TcpStream {
        let stream = open_connections(self.cluster.lab(), "c1", self.odd_address(), 1)
            .unwrap()
            .remove(0);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Returns the address of the pool `odd`.
    pub fn odd_address(&self) -> SocketAddr {
        SocketAddr::new(self.service.ip(), ODD_PORT)
    }

    /// Asks a node to hand flows off.
    pub fn hand_off(
        &self,
        node: &str,
        flows: &[FlowText],
        to: &str,
    ) -> Result<HandoffAccepted, ErrorBody> {
        self.hand_off_selection(node, FlowSelection::Flows(flows.to_vec()), to)
    }

    /// As [`LoadedGroup::hand_off`], for any selection of flows.
    pub fn hand_off_selection(
        &self,
        node: &str,
        selection: FlowSelection,
        to: &str,
    ) -> Result<HandoffAccepted, ErrorBody> {
        let request = HandoffRequest {
            selection,
            to: to.to_owned(),
            drain: Drain::None,
        };
        let control = self.cluster.blocking_control_client(node).unwrap();
        match control.run(async |client| client.hand_off(&request).await) {
            Ok(accepted) => Ok(accepted),
            Err(ClientError::Refused { body, .. }) => Err(body),
            Err(other) => panic!("{other}"),
        }
    }

    /// Waits for the end of a handoff and returns the result for each flow.
    #[track_caller]
    pub fn wait_for_handoff(&self, node: &str, id: u64) -> HandoffStatus {
        let control = self.cluster.blocking_control_client(node).unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = control
                .run(async |client| client.handoff(id).await)
                .unwrap();
            if status.summary.state == HandoffState::Finished {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "exceeded time: the handoff does not end: {status:#?}"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Hands one flow off and asserts that the flow moves.
    #[track_caller]
    pub fn assert_moves(&self, node: &str, flow: FlowText, to: &str) {
        let mut late_attempts = 0;
        loop {
            // A program serves a client before the daemon has processed its message about the connection.
            let mut accepted = None;
            eventually("the node takes the handoff", || {
                accepted = self.hand_off(node, &[flow], to).ok();
                accepted.is_some()
            });
            let id = accepted.unwrap().id;
            let results = self.wait_for_handoff(node, id).results;
            match &results[0].outcome {
                FlowOutcome::Moved => return,
                FlowOutcome::Kept { reason, .. }
                    if is_node_stall(reason) && late_attempts < STALLS_MAX =>
                {
                    late_attempts += 1
                }
                _ => panic!("{results:#?}"),
            }
        }
    }

    /// Hands one flow off, asserts that the flow stays, and returns the reason.
    #[track_caller]
    pub fn assert_stays(&self, node: &str, flow: FlowText, to: &str) -> String {
        let id = self.hand_off(node, &[flow], to).unwrap().id;
        match self.wait_for_handoff(node, id).results.remove(0).outcome {
            FlowOutcome::Kept { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the owner of a flow according to the holder of the steering table.
    pub fn owner(&self, flow: FlowText) -> Option<String> {
        self.owner_at("n1", flow)
    }

    /// Returns the owner of a flow according to the steering table of `holder`.
    pub fn owner_at(&self, holder: &str, flow: FlowText) -> Option<String> {
        let control = self.cluster.blocking_control_client(holder).unwrap();
        let query = FlowListQuery {
            limit: Some(100_000),
            ..FlowListQuery::default()
        };
        let list = control
            .run(async |client| client.flows(&query).await)
            .unwrap();
        let entry = list.flows.into_iter().find(|entry| entry.flow == flow)?;
        match entry.state {
            holdfast_api::control::FlowState::Owned { owner } => Some(owner),
            _ => None,
        }
    }

    /// Returns the value of a node's metric, or 0 if no line has this name and these labels.
    pub fn metric(&self, node: &str, line: &str) -> u64 {
        let control = self.cluster.blocking_control_client(node).unwrap();
        let text = control.run(async |client| client.metrics().await).unwrap();
        let value = text
            .lines()
            .find_map(|text| text.strip_prefix(line)?.strip_prefix(' '));
        value.map_or(0, |value| value.parse().unwrap())
    }

    /// Runs a command on a host to its end.
    pub fn run(&self, host: &str, command: &[&str]) -> Output {
        let mut run = self.cluster.lab().command(host).unwrap();
        run.args(command).output().unwrap()
    }
}

/// Waits until a condition is true.
#[track_caller]
pub fn eventually(awaited: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(
            Instant::now() < deadline,
            "exceeded time: not within {PATIENCE:?}: {awaited}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Stops a process and waits until all its threads are stopped. SIGSTOP reaches one thread first, and that thread
/// signals the others, so on a busy machine the others run on for a while.
#[track_caller]
pub fn stop_process(process: Pid) {
    kill(process, Signal::SIGSTOP).unwrap();
    eventually("the process is stopped", || {
        let threads = threads(process.as_raw()).unwrap();
        let is_stopped = |tid: &i32| ProcStat::read(*tid).is_ok_and(|stat| stat.state == 'T');
        threads.iter().all(is_stopped)
    });
}

/// Asserts that a text contains all these words.
#[track_caller]
pub fn assert_contains(text: impl ToString, parts: &[&str]) {
    let text = text.to_string();
    for word in parts {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}
