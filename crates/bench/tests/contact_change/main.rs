//! The contact node changes under a steady load: planned, after the loss of its host, and in the middle of handoffs. The
//! test gives the views to the daemons instead of the group. Needs root.

#[path = "../common/mod.rs"]
mod common;

use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_api::FlowText;
use holdfast_api::control::{FlowOutcome, FlowSelection};
use holdfast_lab::ServiceReach;
use holdfast_sys::tcp_info::TcpInfo;
use holdfast_testbed::cluster::{Cluster, ClusterSpec, ExampleServer, IpFamily};
use holdfast_testbed::connection_load::{VerifiedByteCounters, open_connections};
use holdfast_testbed::latency_probe::{RoundTrip, ping_pong};

use common::test_views::{LONG_LEASE, View};
use common::{LoadedGroup, PORT, eventually, lock_lab};

/// Longest wait for one attempt to connect; below the first retransmission of a SYN.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);

/// Largest gap of a connection when the contact node's host dies, without the time until the next view.
const GAP_MAX: Duration = Duration::from_millis(800);

/// A group whose views come from the test.
struct ViewedGroup {
    group: LoadedGroup,
    epoch: u64,
    without: Vec<&'static str>,
}

impl ViewedGroup {
    /// Brings the group up with n1 as contact node, and servers at n2 and n3. None without root.
    fn up(name: &str, reach: ServiceReach) -> Option<Self> {
        let lab_lock = lock_lab()?;
        let mut spec = ClusterSpec::new(format!("{name}-{}", std::process::id()))
            .program(ExampleServer::Echo { port: PORT });
        spec.reach = reach;
        for (name, value) in [("HOLDFAST_TEST_VIEWS", "1"), ("HOLDFAST_TEST_FAULTS", "1")] {
            spec.daemon_environment.insert(name.into(), value.into());
        }
        for service in &mut spec.services {
            service.weights = [("n1", 0), ("n2", 1), ("n3", 1)]
                .map(|(node, weight)| (node.to_owned(), weight))
                .into();
        }
        let cluster = Cluster::up(spec).unwrap();
        let view = View {
            epoch: 2,
            contact: "n1",
            without: &[],
        };
        view.give(&cluster, LONG_LEASE);
        let service = SocketAddr::new(cluster.service_address(IpFamily::V4), PORT);
        wait_for_service(&cluster, service);
        // The first view tells the contact node of the other nodes' servers.
        cluster.wait_for_placement().unwrap();
        Some(Self {
            group: LoadedGroup::load(cluster, lab_lock),
            epoch: 2,
            without: Vec::new(),
        })
    }

    /// Makes another node contact node. Returns the time until a client can connect.
    fn change_contact(&mut self, contact: &str) -> Duration {
        self.epoch += 1;
        let start = Instant::now();
        let view = View {
            epoch: self.epoch,
            contact,
            without: &self.without,
        };
        view.give(&self.group.cluster, LONG_LEASE);
        wait_for_service(&self.group.cluster, self.group.service);
        start.elapsed()
    }

    /// Starts a probe that measures round trips all the time.
    fn probe(&self) -> Probe {
        let (cluster, service) = (&self.group.cluster, self.group.service);
        let stream = open_connections(cluster.lab(), "c1", service, 1)
            .unwrap()
            .remove(0);
        let shared = Arc::new(VerifiedByteCounters::default());
        let counters = shared.clone();
        let thread = std::thread::spawn(move || ping_pong(stream, &counters).unwrap());
        Probe { shared, thread }
    }

    /// Returns the flows of the load that a node owns, by the table of `holder`.
    fn flows_at(&self, holder: &str, owner: &str) -> Vec<FlowText> {
        let count = self.group.load.connections().len();
        let flows = (0..count).map(|member| self.group.flow(member));
        let is_owned =
            |flow: &FlowText| self.group.owner_at(holder, *flow).as_deref() == Some(owner);
        flows.filter(is_owned).collect()
    }

    fn set_fault(&self, node: &str, fault: &str) {
        let file = self.group.cluster.run_path(node, "fault").unwrap();
        std::fs::write(file, fault).unwrap();
    }
}

/// A probe connection.
struct Probe {
    shared: Arc<VerifiedByteCounters>,
    thread: std::thread::JoinHandle<Vec<RoundTrip>>,
}

impl Probe {
    /// Ends the probe and returns its longest round trip.
    fn longest_round_trip(self) -> Duration {
        self.shared
            .stop
            .store(true, std::sync::atomic::Ordering::Relaxed);
        let trips = self.thread.join().unwrap();
        assert_eq!(self.shared.wrong_bytes(), 0, "the probe lost bytes");
        trips.iter().map(|(_, trip)| *trip).max().unwrap()
    }
}

/// Connects from the client, with a short wait. Returns true if that succeeded.
fn can_connect(cluster: &Cluster, service: SocketAddr) -> bool {
    let connected = cluster.lab().run_in_net_namespace("c1", || {
        TcpStream::connect_timeout(&service, CONNECT_TIMEOUT)
    });
    connected.unwrap().is_ok()
}

/// Waits until the client can connect.
#[track_caller]
fn wait_for_service(cluster: &Cluster, service: SocketAddr) {
    eventually("a client can connect", || can_connect(cluster, service));
}

#[test]
fn connections_survive_planned_changes() {
    let Some(mut viewed) = ViewedGroup::up("planned", ServiceReach::Steer) else {
        return;
    };
    for contact in ["n2", "n3", "n1", "n2"] {
        let probe = viewed.probe();
        std::thread::sleep(Duration::from_millis(300));
        let accepted = viewed.change_contact(contact);
        viewed.group.assert_unharmed();
        let gap = probe.longest_round_trip();
        eprintln!("{contact}: new clients after {accepted:?}, longest round trip {gap:?}");
        assert!(gap < GAP_MAX, "{gap:?}");
        let owned = ["n2", "n3"].map(|owner| viewed.flows_at(contact, owner).len());
        assert_eq!(
            owned.iter().sum::<usize>(),
            common::CONNECTIONS,
            "{owned:?}"
        );
    }
    viewed.group.finish();
}

#[test]
fn connections_survive_changes_with_broadcast() {
    let Some(mut viewed) = ViewedGroup::up("shared", ServiceReach::Broadcast) else {
        return;
    };
    viewed.change_contact("n2");
    viewed.group.assert_unharmed();
    // Handoffs are decided by the new holder.
    let flow = viewed.flows_at("n2", "n2")[0];
    viewed.group.assert_moves("n2", flow, "n3");
    viewed.change_contact("n3");
    assert_eq!(viewed.group.owner_at("n3", flow).as_deref(), Some("n3"));
    viewed.group.finish();
}

#[test]
fn connections_survive_loss_of_contact_host() {
    let Some(mut viewed) = ViewedGroup::up("lost", ServiceReach::Steer) else {
        return;
    };
    let probe = viewed.probe();
    std::thread::sleep(Duration::from_millis(300));
    viewed.group.cluster.lab().cut("n1").unwrap();
    viewed.without = vec!["n1"];
    let accepted = viewed.change_contact("n2");
    viewed.group.assert_unharmed();
    let gap = probe.longest_round_trip();
    eprintln!("new clients after {accepted:?}, longest round trip {gap:?}");
    assert!(gap < GAP_MAX, "{gap:?}");
    viewed.group.finish();
}

#[test]
fn contact_node_without_lease_forwards_known_flows_alone() {
    let Some(mut viewed) = ViewedGroup::up("lease", ServiceReach::Steer) else {
        return;
    };
    viewed.group.cluster.set_daemon_restart("n1", false);
    viewed.epoch += 1;
    let view = View {
        epoch: viewed.epoch,
        contact: "n1",
        without: &[],
    };
    view.give(&viewed.group.cluster, Duration::from_millis(1500));
    let cluster = &viewed.group.cluster;
    assert!(can_connect(cluster, viewed.group.service));
    cluster.kill_daemon("n1").unwrap();
    // The kernel serves on behalf of the dead daemon until the lease ends.
    assert!(can_connect(cluster, viewed.group.service));
    std::thread::sleep(Duration::from_millis(1600));
    assert!(!can_connect(cluster, viewed.group.service));
    viewed.group.assert_unharmed();
    // The next daemon adopts the table, and serves with the next lease.
    cluster.set_daemon_restart("n1", true);
    cluster.wait_ready().unwrap();
    assert!(!can_connect(cluster, viewed.group.service));
    view.give_to(cluster, "n1", LONG_LEASE);
    wait_for_service(cluster, viewed.group.service);
    viewed.group.assert_unharmed();
    let owned = ["n2", "n3"].map(|owner| viewed.flows_at("n1", owner).len());
    assert_eq!(
        owned.iter().sum::<usize>(),
        common::CONNECTIONS,
        "{owned:?}"
    );
    viewed.group.finish();
}

/// Gives views in which no node serves for a moment, and returns how often a client that connects meanwhile has repeated a
/// packet. `without_service` ends the service of n1, and `next` lets n2 serve.
fn retransmissions_of_waiting_client(
    viewed: &ViewedGroup,
    without_service: impl FnOnce(&Cluster),
    next: impl FnOnce(&Cluster),
) -> u32 {
    let (cluster, service) = (&viewed.group.cluster, viewed.group.service);
    without_service(cluster);
    let connect = || {
        let stream = TcpStream::connect_timeout(&service, common::PATIENCE).unwrap();
        TcpInfo::read(stream.as_fd()).unwrap().total_retrans
    };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| cluster.lab().run_in_net_namespace("c1", connect).unwrap());
        std::thread::sleep(Duration::from_millis(100));
        assert!(!client.is_finished(), "no node serves");
        next(cluster);
        client.join().unwrap()
    })
}

#[test]
fn new_client_between_two_contact_nodes_repeats_nothing() {
    /// A slow machine may let a client wait until it repeats its first packet.
    const ATTEMPTS: usize = 5;
    let Some(mut viewed) = ViewedGroup::up("between", ServiceReach::Steer) else {
        return;
    };
    let view = |epoch, contact| View {
        epoch,
        contact,
        without: &[],
    };
    // The client reaches the former contact node past its lease, or the next one before its lease.
    for is_decided_before in [false, true] {
        let repeated = (0..ATTEMPTS).map(|_| {
            let (former, next) = (viewed.epoch, viewed.epoch + 1);
            viewed.epoch += 2;
            let count = retransmissions_of_waiting_client(
                &viewed,
                |cluster| match is_decided_before {
                    true => view(next, "n2").give(cluster, Duration::ZERO),
                    false => view(former, "n1").give_to(cluster, "n1", Duration::ZERO),
                },
                |cluster| match is_decided_before {
                    true => view(next, "n2").give_to(cluster, "n2", LONG_LEASE),
                    false => view(next, "n2").give(cluster, LONG_LEASE),
                },
            );
            view(viewed.epoch, "n1").give(&viewed.group.cluster, LONG_LEASE);
            wait_for_service(&viewed.group.cluster, viewed.group.service);
            count
        });
        let repeated: Vec<u32> = repeated.take_while(|count| *count > 0).collect();
        assert!(repeated.len() < ATTEMPTS, "{repeated:?}");
    }
    viewed.group.assert_unharmed();
    viewed.group.finish();
}

#[test]
fn handoff_ends_in_one_place_when_contact_node_changes() {
    let Some(mut viewed) = ViewedGroup::up("handoff", ServiceReach::Steer) else {
        return;
    };
    let mut contacts = ["n2", "n1"].into_iter().cycle();
    for (node, fault) in [
        ("n2", "freeze before pause 300"),
        ("n2", "freeze after pause 300"),
        ("n3", "restore before pause 300"),
        ("n3", "restore after pause 300"),
        ("n3", "activate before pause 300"),
        ("n2", "close before pause 300"),
    ] {
        let contact = contacts.next().unwrap();
        let holder = if contact == "n2" { "n1" } else { "n2" };
        let flows = viewed.flows_at(holder, "n2");
        // Some are left for the later faults, however few clients n2 was given.
        let flows = flows[..flows.len().div_ceil(6).min(4)].to_vec();
        assert!(!flows.is_empty(), "n2 has no flows left");
        viewed.set_fault(node, fault);
        let accepted = viewed
            .group
            .hand_off_selection("n2", FlowSelection::Flows(flows.clone()), "n3")
            .unwrap();
        std::thread::sleep(Duration::from_millis(100));
        viewed.change_contact(contact);
        let results = viewed.group.wait_for_handoff("n2", accepted.id).results;
        viewed.group.assert_unharmed();
        for result in &results {
            let owner = match &result.outcome {
                FlowOutcome::Moved => "n3",
                _ => "n2",
            };
            eventually("the new holder knows the owner", || {
                viewed.group.owner_at(contact, result.flow).as_deref() == Some(owner)
            });
        }
        let moved = results
            .iter()
            .filter(|result| matches!(result.outcome, FlowOutcome::Moved));
        eprintln!(
            "{node} {fault}: {} of {} moved",
            moved.count(),
            results.len()
        );
    }
    viewed.group.finish();
}

#[test]
fn handoff_ends_in_one_place_when_contact_host_is_lost_at_its_decision() {
    for point in ["before", "after"] {
        let Some(mut viewed) = ViewedGroup::up("decision", ServiceReach::Steer) else {
            return;
        };
        let flows = viewed.flows_at("n1", "n2");
        let flows = flows[..flows.len().min(4)].to_vec();
        // The acceptor's pause lets the divert be decided first.
        viewed.set_fault("n3", "restore before pause 200");
        viewed.group.cluster.set_daemon_restart("n1", false);
        let accepted = viewed
            .group
            .hand_off_selection("n2", FlowSelection::Flows(flows.clone()), "n3")
            .unwrap();
        std::thread::sleep(Duration::from_millis(100));
        viewed.set_fault("n1", &format!("arbitrate {point} die"));
        std::thread::sleep(Duration::from_millis(300));
        viewed.group.cluster.lab().cut("n1").unwrap();
        viewed.without = vec!["n1"];
        viewed.change_contact("n2");
        let results = viewed.group.wait_for_handoff("n2", accepted.id).results;
        viewed.group.assert_unharmed();
        eprintln!("{point} the decision: {results:?}");
        for result in &results {
            let owner = match &result.outcome {
                FlowOutcome::Moved => "n3",
                _ => "n2",
            };
            eventually("the new holder knows the owner", || {
                viewed.group.owner_at("n2", result.flow).as_deref() == Some(owner)
            });
        }
        viewed.group.finish();
    }
}
