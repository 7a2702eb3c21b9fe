//! New clients keep coming while a server is killed, a server is stopped, and a node is cut off. Needs root.
//!
//! By default 300 clients come per second and the time limits are doubled, for a machine with other work. With
//! `HOLDFAST_WHOLE`, 1,000 clients come per second, and the limits are the promised ones.

#[path = "../common/mod.rs"]
mod common;
mod returning_clients;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use holdfast_api::Protocol;
use holdfast_api::control::{FlowEntry, FlowListQuery, ServerHealth, ServiceStatus, Status};
use holdfast_testbed::cluster::{Cluster, ClusterSpec, ExampleServer, IpFamily};
use holdfast_testbed::new_clients::{ClientOutcome, EndedClient, NewClientLoad, NewClientSpec};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use common::{PORT, eventually, lock_lab, stop_process};
use returning_clients::ReturningClients;

/// Time within which a client must have its answer.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// Time from a fault after which no client may fail: the server or its node is gone.
const GONE_MAX: Duration = Duration::from_millis(300);
/// Time from a fault after which no client may fail: the kernel still completes handshakes for the stopped server.
const STOPPED_MAX: Duration = Duration::from_secs(1);
/// Clients that began this long before a fault may fail with it.
const BEFORE_FAULT: Duration = Duration::from_millis(100);

/// Connections before a server is stopped; about a quarter of them are at that server.
const RETURNING_CLIENTS: usize = 40;

/// Extent of the test.
#[derive(Debug, Clone, Copy)]
struct Extent {
    clients_per_s: u32,
    /// Time with clients before and after each fault.
    before: Duration,
    after: Duration,
    /// Time after which a client gives up.
    give_up_after: Duration,
    /// Factor of the time limits.
    patience: u32,
}

fn extent() -> Extent {
    match std::env::var_os("HOLDFAST_WHOLE") {
        Some(_) => Extent {
            clients_per_s: 1_000,
            before: Duration::from_secs(2),
            after: Duration::from_secs(5),
            // Two retransmissions of a SYN fit.
            give_up_after: Duration::from_millis(3_500),
            patience: 1,
        },
        None => Extent {
            clients_per_s: 300,
            before: Duration::from_millis(500),
            after: Duration::from_millis(2_300),
            give_up_after: Duration::from_millis(2_500),
            patience: 2,
        },
    }
}

/// Four nodes with echo servers; the first is the contact node.
struct Group {
    cluster: Cluster,
    service: SocketAddr,
    extent: Extent,
}

impl Group {
    fn up() -> Group {
        let mut spec = ClusterSpec::new(format!("health-{}", std::process::id()))
            .program(ExampleServer::Echo { port: PORT });
        spec.nodes = 4;
        let cluster = Cluster::up(spec).unwrap();
        let service = SocketAddr::new(cluster.service_address(IpFamily::V4), PORT);
        let group = Group {
            cluster,
            service,
            extent: extent(),
        };
        group.wait_for_clients_at(&["n1", "n2", "n3", "n4"]);
        group
    }

    fn status(&self, node: &str) -> Status {
        let control = self.cluster.blocking_control_client(node).unwrap();
        control.run(|client| client.status()).unwrap()
    }

    fn service_status(&self, node: &str) -> ServiceStatus {
        let services = self.status(node).services.into_iter();
        let mut matching = services
            .filter(|known| known.protocol == Protocol::Tcp && known.address == self.service);
        matching.next().unwrap()
    }

    /// Waits until exactly these nodes get new clients.
    #[track_caller]
    fn wait_for_clients_at(&self, nodes: &[&str]) {
        eventually(&format!("new clients go to {nodes:?}"), || {
            let status = self.service_status("n1");
            let placed = status.nodes.iter().filter(|node| node.placed_weight > 0);
            placed
                .map(|node| node.node.as_str())
                .eq(nodes.iter().copied())
        });
    }

    fn server(&self, node: &str) -> Pid {
        let pid = self.cluster.program_pid(node, "echo").unwrap();
        Pid::from_raw(pid.expect("the server runs"))
    }

    /// Lets clients come while a fault begins. Returns the time of the fault and the clients.
    fn run_fault(&self, fault: impl FnOnce()) -> (Instant, Vec<EndedClient>) {
        let rate = self.extent.clients_per_s;
        let lab = self.cluster.lab();
        let give_up_after = self.extent.give_up_after;
        let of_echo = NewClientSpec::of_echo(self.service, rate, give_up_after);
        let load = NewClientLoad::start(lab, "c1", of_echo).unwrap();
        std::thread::sleep(self.extent.before);
        let began = Instant::now();
        fault();
        std::thread::sleep(self.extent.after);
        let clients = load.stop().unwrap();
        let expected = (self.extent.before + self.extent.after).as_secs_f64() * f64::from(rate);
        assert!(
            clients.len() as f64 > expected / 2.0,
            "only {} clients of {expected:.0}",
            clients.len()
        );
        (began, clients)
    }

    /// Asserts that clients fail only until `limit` after a fault that began at `began`.
    #[track_caller]
    fn assert_failures(
        &self,
        fault: &str,
        (began, clients): &(Instant, Vec<EndedClient>),
        limit: Duration,
    ) {
        let failed: Vec<&EndedClient> = clients
            .iter()
            .filter(|client| client.has_failed(ANSWER_MAX))
            .collect();
        let ms_after =
            |client: &EndedClient| client.started.saturating_duration_since(*began).as_millis();
        let late = clients.iter();
        let late = late.filter(|client| client.is_late_without_cpu(ANSWER_MAX));
        let longest_delay = clients.iter().map(|client| client.without_cpu).max();
        let last_ms = failed.iter().map(|client| ms_after(client)).max();
        let mut outcomes: BTreeMap<String, usize> = BTreeMap::new();
        for client in &failed {
            let name = match client.outcome {
                ClientOutcome::Answered(_) => "answered late".to_owned(),
                other => format!("{other:?}"),
            };
            *outcomes.entry(name).or_default() += 1;
        }
        eprintln!(
            "{fault}: {} of {} clients failed, the last one began {last_ms:?} ms after the fault; {outcomes:?}; \
             {} were late because they had no CPU (up to {longest_delay:?})",
            failed.len(),
            clients.len(),
            late.count()
        );
        let limit = limit * self.extent.patience;
        let is_allowed = |client: &&&EndedClient| {
            client.started + BEFORE_FAULT >= *began && client.started <= *began + limit
        };
        let unexpected: Vec<String> = failed
            .iter()
            .filter(|client| !is_allowed(client))
            .map(|client| self.describe(*began, client))
            .collect();
        let logs = self.cluster.log_tails();
        assert!(unexpected.is_empty(), "{fault}: {unexpected:#?}\n{logs}");
    }

    /// Describes a client that failed, and the flows with its port that the nodes know.
    fn describe(&self, began: Instant, client: &EndedClient) -> String {
        let is_early = client.started < began;
        let offset = match is_early {
            true => began - client.started,
            false => client.started - began,
        };
        let mut text = format!(
            "port {}, {} ms {} the fault, {:?}, without a CPU for {:?}",
            client.port,
            offset.as_millis(),
            if is_early { "before" } else { "after" },
            client.outcome,
            client.without_cpu
        );
        for node in self.cluster.nodes() {
            text += &self
                .flows(&node, client.port)
                .iter()
                .map(|entry| format!("; {node} knows {} as {:?}", entry.flow, entry.state))
                .collect::<String>();
        }
        text
    }

    /// Returns the flows with this port of a client that a node knows.
    fn flows(&self, node: &str, port: u16) -> Vec<FlowEntry> {
        let control = self.cluster.blocking_control_client(node).unwrap();
        let query = FlowListQuery {
            limit: Some(100_000),
            ..FlowListQuery::default()
        };
        let list = control.run(async |client| client.flows(&query).await);
        let flows = list.map(|list| list.flows).unwrap_or_default().into_iter();
        flows
            .filter(|entry| entry.flow.remote().port() == port)
            .collect()
    }

    fn knows_flow(&self, node: &str, port: u16) -> bool {
        !self.flows(node, port).is_empty()
    }

    fn problems(&self, node: &str) -> String {
        self.status(node).problems.join("\n")
    }
}

/// One group suffers all faults, one after another, so that the test is short.
#[test]
fn new_clients_go_to_nodes_that_serve() {
    let Some(_lock) = lock_lab() else { return };
    let group = Group::up();
    let lab = group.cluster.lab();

    let clients = group.run_fault(|| lab.cut("n4").unwrap());
    group.assert_failures("cut node", &clients, GONE_MAX);
    let (began, ended) = &clients;
    // A SYN that had no answer is sent again after 1 s, and goes to another node then.
    let unanswered = ended.iter().filter(|client| {
        client.outcome == ClientOutcome::HandshakeUnanswered && client.started > *began
    });
    assert_eq!(
        unanswered.count(),
        0,
        "retransmitted SYNs went to the cut node"
    );
    group.wait_for_clients_at(&["n1", "n2", "n3"]);
    assert!(group.problems("n1").contains("n4 gets no new clients"));
    lab.heal("n4").unwrap();
    group.wait_for_clients_at(&["n1", "n2", "n3", "n4"]);

    let stopped = group.server("n3");
    let returning = ReturningClients::connect(lab, "c1", group.service, RETURNING_CLIENTS).unwrap();
    let ports = returning.ports().unwrap();
    eventually("n3 has some of the returning clients", || {
        ports.iter().any(|port| group.knows_flow("n3", *port))
    });
    let clients = group.run_fault(|| stop_process(stopped));
    group.assert_failures("stopped server", &clients, STOPPED_MAX);
    // The contact node still sends packets with these ports to n3, where a new connection would have no answer.
    let unanswered = returning.return_all(lab, "c1", ANSWER_MAX).unwrap();
    assert_eq!(
        unanswered,
        Vec::<u16>::new(),
        "{}",
        group.cluster.log_tails()
    );
    let problem = "the server hangs";
    assert!(group.problems("n1").contains(problem));
    assert!(group.problems("n3").contains(problem));
    kill(stopped, Signal::SIGCONT).unwrap();
    group.wait_for_clients_at(&["n1", "n2", "n3", "n4"]);
    assert_eq!(group.problems("n1"), "");

    let killed = group.server("n2");
    let clients = group.run_fault(|| kill(killed, Signal::SIGKILL).unwrap());
    group.assert_failures("killed server", &clients, GONE_MAX);
    assert!(group.problems("n1").contains("at n2: the server has ended"));
    assert!(matches!(
        group.service_status("n2").server,
        ServerHealth::Failing { .. }
    ));

    // A server that runs once gets all new clients, whatever the weights.
    for node in ["n1", "n3"] {
        kill(group.server(node), Signal::SIGKILL).unwrap();
    }
    group.wait_for_clients_at(&["n4"]);
    let (began, clients) = group.run_fault(|| {});
    group.assert_failures("one server", &(began, clients), Duration::ZERO);

    kill(group.server("n4"), Signal::SIGKILL).unwrap();
    group.wait_for_clients_at(&["n1", "n2", "n3", "n4"]);
    assert!(group.problems("n1").contains("no node serves echo"));
}
