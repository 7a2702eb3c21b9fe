//! A group with busy connections, and the means to cause faults and to check its health.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_api::control::{
    FlowEntry, FlowFilter, FlowListQuery, FlowOutcome, FlowResult, FlowSelection, FlowState,
    HandoffRequest, HandoffState,
};
use holdfast_api::{Drain, FlowText};
use holdfast_testbed::capture::{RunningCapture, TcpSegment, read_capture_file};
use holdfast_testbed::cluster::{
    Cluster, ClusterSpec, ExampleServer, IpFamily, STALLS_MAX, is_node_stall,
};
use holdfast_testbed::connection_load::{ConnectionLoad, open_connections};

/// Number of busy connections.
pub const CONNECTIONS: usize = 64;

/// The node that has the connections at the beginning of a case, and the node that they move to.
pub const DONOR: &str = "n2";
pub const ACCEPTOR: &str = "n3";

/// The contact node, which keeps the steering table; at the end of a case all connections move there and back.
pub const HOLDER: &str = "n1";

const PORT: u16 = 7;

/// Longest wait for any condition, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Answers that each connection must receive before the group counts as healthy.
const ANSWERS_MIN: u64 = 3;

/// The group, its load and its service.
pub struct FaultGroup {
    pub cluster: Cluster,
    pub load: ConnectionLoad,
    pub service: SocketAddr,
    /// Number of sockets of each node's daemon and server program when they have no connections.
    idle_sockets: BTreeMap<String, (usize, usize)>,
}

impl FaultGroup {
    /// Brings the group up, with all connections at the donor.
    pub fn up(name: &str) -> Result<Self> {
        let name = format!("f-{name}-{}", std::process::id());
        let mut spec = ClusterSpec::new(name).program(ExampleServer::Echo { port: PORT });
        for service in &mut spec.services {
            service.weights = [(HOLDER, 0), (DONOR, 1), (ACCEPTOR, 0)]
                .map(|(node, weight)| (node.to_owned(), weight))
                .into();
        }
        // Large batches, so that each fault affects most of the connections.
        spec.daemon_environment = [
            ("HOLDFAST_TEST_FAULTS", "1"),
            ("HOLDFAST_TEST_FREEZE_MS", "1000"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        spec.program_log = "warn".into();
        let cluster = Cluster::up(spec)?;
        let service = SocketAddr::new(cluster.service_address(IpFamily::V4), PORT);
        let idle = count_sockets(&cluster)?;
        let streams = open_connections(cluster.lab(), "c1", service, CONNECTIONS)?;
        let load = ConnectionLoad::start(streams, Duration::from_millis(50))?;
        let world = Self {
            cluster,
            load,
            service,
            idle_sockets: idle,
        };
        world.wait_until_healthy()?;
        Ok(world)
    }

    /// Returns all flows that a node knows.
    pub fn flows(&self, node: &str) -> Result<Vec<FlowEntry>> {
        let query = FlowListQuery {
            limit: Some(1_000_000),
            ..FlowListQuery::default()
        };
        let control = self.cluster.blocking_control_client(node)?;
        Ok(control
            .run(async |client| client.flows(&query).await)?
            .flows)
    }

    /// Returns the owner of each connection according to the holder, or none while the connection is in transit.
    pub fn owners(&self) -> Result<BTreeMap<SocketAddr, Option<String>>> {
        let flows = self.flows(HOLDER)?.into_iter();
        let owner = |entry: FlowEntry| match entry.state {
            FlowState::Owned { owner } => (entry.flow.remote(), Some(owner)),
            FlowState::Transit { .. } => (entry.flow.remote(), None),
        };
        Ok(flows.map(owner).collect())
    }

    /// Waits until the group is healthy: daemons and programs connected, nothing in transit, and every connection busy.
    pub fn wait_until_healthy(&self) -> Result<()> {
        self.cluster.wait_ready()?;
        self.wait_until_no_problem(|| self.find_problem())?;
        let before: Vec<u64> = self
            .load
            .connections()
            .iter()
            .map(|m| m.answers_received())
            .collect();
        self.wait_until_no_problem(|| {
            let members = self.load.connections().iter().zip(&before);
            let silent_members = members
                .filter(|(member, before)| member.answers_received() < *before + ANSWERS_MIN);
            let silent: Vec<String> = silent_members.map(|(m, _)| m.client.to_string()).collect();
            Ok((!silent.is_empty()).then(|| format!("silent: {}", silent.join(", "))))
        })?;
        let wrong = self.load.compared.wrong.load(Ordering::Relaxed);
        if wrong > 0 {
            bail!("{wrong} bytes differ");
        }
        Ok(())
    }

    fn find_problem(&self) -> Result<Option<String>> {
        let mut owned = 0;
        for node in self.cluster.nodes() {
            for entry in self.flows(&node)? {
                match &entry.state {
                    FlowState::Transit { .. } => {
                        return Ok(Some(format!("{} is in transit at {node}", entry.flow)));
                    }
                    FlowState::Owned { owner } => owned += usize::from(*owner == node),
                }
            }
        }
        // The holder lists the flows of all nodes; the other nodes' lists must agree with it.
        let holder_owners = self.owners()?;
        let not_at_holder = holder_owners
            .values()
            .filter(|owner| owner.as_deref() != Some(HOLDER));
        let expected = holder_owners.len() - not_at_holder.count();
        let missing_flows = owned.abs_diff(expected);
        Ok(match holder_owners.len() {
            CONNECTIONS if missing_flows + expected == CONNECTIONS => None,
            count => Some(format!(
                "the holder knows {count} connections; all owners together have {owned}"
            )),
        })
    }

    /// Calls `find_problem` until it reports no problem.
    pub fn wait_until_no_problem(
        &self,
        find_problem: impl Fn() -> Result<Option<String>>,
    ) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let problem = match find_problem() {
                Ok(None) => return Ok(()),
                Ok(Some(problem)) => problem,
                Err(error) => format!("{error:#}"),
            };
            let broken: Vec<_> = self
                .load
                .connections()
                .iter()
                .filter(|member| member.is_broken())
                .map(|member| member.client.to_string())
                .collect();
            if !broken.is_empty() {
                bail!("broken connections: {} ({problem})", broken.join(", "));
            }
            if Instant::now() > deadline {
                bail!("exceeded time: after {PATIENCE:?}: {problem}");
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Asks a node to hand all its flows to another, without waiting for the end.
    pub fn start_handoff(&self, from: &str, to: &str) -> Result<u64> {
        let request = HandoffRequest {
            selection: FlowSelection::AllOf(FlowFilter::default()),
            to: to.to_owned(),
            drain: Drain::None,
        };
        let control = self.cluster.blocking_control_client(from)?;
        Ok(control
            .run(async |client| client.hand_off(&request).await)?
            .id)
    }

    /// Hands all flows from one node to another, and asserts that all of them move.
    pub fn hand_over(&self, from: &str, to: &str) -> Result<()> {
        for retry in 0.. {
            let kept = self.hand_over_once(from, to)?;
            let Some((flow, reason)) = kept.first() else {
                break;
            };
            let are_all_late = kept.iter().all(|(_, reason)| is_node_stall(reason));
            if !are_all_late || retry == STALLS_MAX {
                bail!("{flow} stayed at {from}: {reason}");
            }
        }
        Ok(())
    }

    /// Returns the flows that stayed, and the reasons.
    fn hand_over_once(&self, from: &str, to: &str) -> Result<Vec<(FlowText, String)>> {
        let id = self.start_handoff(from, to)?;
        let control = self.cluster.blocking_control_client(from)?;
        self.wait_until_no_problem(|| {
            let status = control.run(async |client| client.handoff(id).await)?;
            let ended = status.summary.state == HandoffState::Finished;
            Ok((!ended).then(|| format!("the handoff from {from} to {to} does not end")))
        })?;
        let status = control.run(async |client| client.handoff(id).await)?;
        let kept = |result: FlowResult| match result.outcome {
            FlowOutcome::Kept { reason, .. } => Some((result.flow, reason)),
            _ => None,
        };
        Ok(status.results.into_iter().filter_map(kept).collect())
    }

    /// Moves all connections to one node.
    pub fn move_all_to(&self, to: &str) -> Result<()> {
        self.move_exactly_to(to, CONNECTIONS)
    }

    /// Moves the connections, exactly `count` of them, to one node.
    pub fn move_exactly_to(&self, to: &str, count: usize) -> Result<()> {
        let owners = self.owners()?;
        for from in self.cluster.nodes() {
            let has_connections = owners.values().flatten().any(|owner| *owner == from);
            if from != to && has_connections {
                self.hand_over(&from, to)?;
            }
        }
        let owners = self.owners()?;
        let is_at_target = |owner: &Option<String>| owner.as_deref() == Some(to);
        if owners.len() != count || !owners.values().all(is_at_target) {
            bail!("not everything is at {to}: {owners:?}");
        }
        Ok(())
    }

    /// Opens more connections, which stay idle.
    pub fn connect(&self, count: usize) -> Result<Vec<TcpStream>> {
        open_connections(self.cluster.lab(), "c1", self.service, count)
    }

    /// Waits until the holder knows exactly this number of connections.
    pub fn wait_for_known_count(&self, count: usize) -> Result<()> {
        self.wait_until_no_problem(|| {
            let known = self.owners()?.len();
            Ok((known != count)
                .then(|| format!("the holder knows {known} connections, not {count}")))
        })
    }

    /// Waits until the donor's kernel has freed the connections of clients that have closed.
    pub fn wait_until_closed(&self) -> Result<()> {
        let pid = self.cluster.lab().init_process(DONOR)?;
        self.wait_until_no_problem(|| {
            let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp"))?;
            let local = format!(":{PORT:04X}");
            let is_closing = |line: &&str| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                // Established (01) and listening (0A) sockets are not closing.
                fields.len() > 3
                    && fields[1].ends_with(&local)
                    && !["01", "0A"].contains(&fields[3])
            };
            let closing_count = table.lines().filter(is_closing).count();
            Ok((closing_count > 0).then(|| format!("{closing_count} sockets are ending")))
        })
    }

    /// Returns the number of starts of a node's daemon.
    pub fn daemon_starts(&self, node: &str) -> u32 {
        self.cluster.daemon_starts(node)
    }

    /// Sets a fault for a node's daemon.
    pub fn set_fault(&self, node: &str, text: &str) -> Result<()> {
        let file = self.fault_file(node)?;
        std::fs::write(&file, text).with_context(|| format!("write {}", file.display()))
    }

    /// Waits until a fault has happened.
    pub fn wait_for_fault(&self, node: &str) -> Result<()> {
        let file = self.fault_file(node)?;
        self.wait_until_no_problem(|| {
            Ok(file
                .exists()
                .then(|| format!("{node} did not reach the fault point")))
        })
    }

    fn fault_file(&self, node: &str) -> Result<PathBuf> {
        self.cluster.run_path(node, "fault")
    }

    /// Starts a capture at the client's interface.
    pub fn capture(&self, name: &str) -> Result<RunningCapture<'_>> {
        let file = self.cluster.directory().join(format!("{name}.pcap"));
        let filter = format!("tcp port {PORT}");
        RunningCapture::start(self.cluster.lab(), "c1", &filter, &file)
    }

    /// Waits until no handoff has left anything behind: no extra sockets, no files.
    pub fn wait_until_clean(&self) -> Result<()> {
        self.wait_until_no_problem(|| {
            let owners = self.owners()?;
            for (node, (daemon, program)) in count_sockets(&self.cluster)? {
                let (daemon_idle, program_idle) = self.idle_sockets[&node];
                let is_owned_here = |owner: &&Option<String>| owner.as_ref() == Some(&node);
                let flows = owners.values().filter(is_owned_here).count();
                if daemon > daemon_idle {
                    return Ok(Some(format!(
                        "the daemon of {node} has {daemon} sockets, initially {daemon_idle}"
                    )));
                }
                if program != program_idle + flows {
                    return Ok(Some(format!(
                        "the program on {node} has {program} sockets: initially {program_idle}, and {flows} connections"
                    )));
                }
                let journal = self.cluster.run_path(&node, "arrivals")?;
                let journal_entries = std::fs::read_dir(&journal)?.count();
                if journal_entries > 0 {
                    return Ok(Some(format!("{journal_entries} files in {}", journal.display())));
                }
                let control = self.cluster.blocking_control_client(&node)?;
                let text = control.run(async |client| client.metrics().await)?;
                let is_leftover_gauge = |line: &&str| {
                    line.starts_with("holdfast_hold_slots ")
                        || line.starts_with("holdfast_flows_in_transit{")
                };
                if let Some(line) = text
                    .lines()
                    .filter(is_leftover_gauge)
                    .find(|line| !line.ends_with(" 0"))
                {
                    return Ok(Some(format!("{node}: {line}")));
                }
            }
            Ok(None)
        })
    }
}

/// Ends a capture and returns its TCP segments.
pub fn finish_capture(capture: RunningCapture<'_>) -> Result<Vec<TcpSegment>> {
    read_capture_file(&capture.finish()?.file)
}

/// Counts the open sockets of each node's daemon and server program.
fn count_sockets(cluster: &Cluster) -> Result<BTreeMap<String, (usize, usize)>> {
    let count = |pid: Option<i32>| -> Result<usize> {
        let pid = pid.context("a daemon or program does not run")?;
        let files = std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
        let is_socket = |path: PathBuf| path.to_string_lossy().starts_with("socket:");
        Ok(files
            .filter_map(|file| std::fs::read_link(file.path()).ok())
            .filter(|path| is_socket(path.clone()))
            .count())
    };
    let counts = cluster.nodes().into_iter().map(|node| {
        let daemon = count(cluster.daemon_pid(&node)?)?;
        let program = count(cluster.program_pid(&node, "echo")?)?;
        Ok((node, (daemon, program)))
    });
    counts.collect()
}
