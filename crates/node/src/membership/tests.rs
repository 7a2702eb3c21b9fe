//! Groups of real drivers with their sockets, disks and TLS, on loopback addresses in one process.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use holdfast_api::ca::{CertificateAuthority, NODE_DAYS};
use holdfast_api::control::{ErrorBody, MembershipChange};
use holdfast_daemon::config::TlsConfig;
use holdfast_daemon::tls::Tls;
use holdfast_proto::membership::{RemovalCause, Standing};
use holdfast_wire::NodeId;
use holdfast_wire::authenticated_datagram::{DatagramFrame, DatagramSender, PairKeys};
use holdfast_wire::membership_frames::{Heartbeat, JoinRole, NodeName, ServerListVersion};
use tokio::sync::{mpsc, oneshot};

use super::{
    GroupEvent, GroupEvents, GroupMembership, KernelLease, MembershipOptions, OperatorRequest,
    RECEIVED_FRAMES_MAX, create_group,
};
use crate::config::ChannelConfig;
use crate::metrics::Metrics;
use crate::peer_channel::{PeerChannel, PeerChannelOptions, Peers};

/// Time limit far above any real duration; only a failing test waits so long.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const PORT: u16 = 7400;

/// Certificates, state directories and loopback addresses of a group.
struct TestGroup {
    directory: tempfile::TempDir,
    subnet: u16,
    boots: AtomicU64,
}

/// A running node without an engine.
struct TestNode {
    name: String,
    boot: u64,
    peers: Peers,
    membership: GroupMembership,
    events: GroupEvents,
    metrics: Metrics,
    /// All leases that the driver wrote to the kernel.
    leases: Arc<Mutex<Vec<KernelLease>>>,
}

impl TestGroup {
    fn new(nodes: u16) -> TestGroup {
        static TESTS: AtomicU16 = AtomicU16::new(0);
        let group = TestGroup {
            directory: tempfile::tempdir().unwrap(),
            // Differs between processes and between tests in a process; 127.0/16 is left to other uses.
            subnet: (std::process::id() as u16)
                .wrapping_mul(31)
                .wrapping_add(TESTS.fetch_add(1, Ordering::Relaxed))
                | 0x8000,
            boots: AtomicU64::new(1),
        };
        let authority = CertificateAuthority::init(&group.ca(), "files").unwrap();
        for node in 1..=nodes {
            authority
                .issue(&format!("n{node}"), &[], NODE_DAYS)
                .unwrap();
        }
        group
    }

    fn ca(&self) -> PathBuf {
        self.directory.path().join("ca")
    }

    fn address(&self, node: u16) -> SocketAddr {
        let [high, low] = self.subnet.to_be_bytes();
        SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, high, low, node as u8)), PORT)
    }

    fn options(&self, node: u16, role: JoinRole) -> MembershipOptions {
        MembershipOptions {
            name: format!("n{node}").parse().unwrap(),
            group: "files".to_owned(),
            address: self.address(node),
            role,
            seeds: vec![self.address(1), self.address(2)],
            boot: self.boots.fetch_add(1, Ordering::Relaxed),
            state_dir: self.directory.path().join(format!("n{node}")),
            realtime: false,
            store: None,
        }
    }

    /// Returns certificate and revocation list of a node, as they are on the disk.
    fn tls(&self, name: &str) -> Tls {
        let ca = self.ca();
        let files = TlsConfig {
            ca: ca.join("ca.pem"),
            cert: ca.join(format!("{name}.pem")),
            key: ca.join(format!("{name}.key")),
            crl: Some(ca.join("ca.crl")),
        };
        Tls::from_files(&files, name).unwrap()
    }

    /// Starts a daemon's channels and membership, without an engine.
    fn start(&self, node: u16, role: JoinRole) -> TestNode {
        let options = self.options(node, role);
        let (name, boot) = (options.name.to_string(), options.boot);
        let tls = self.tls(&name);
        let (frame_sender, frames) = mpsc::channel(RECEIVED_FRAMES_MAX);
        let channel = PeerChannelOptions {
            name: name.clone(),
            node: NodeId(0),
            boot,
            group: options.group.clone(),
            address: options.address,
            peers: Vec::new(),
            timing: ChannelConfig {
                ping_interval: Duration::from_millis(250),
                silent_after: Duration::from_millis(200),
                dead_after: Duration::from_secs(1),
                queue_bytes: 64 << 20,
            },
            membership: Some(frame_sender),
            mode: Some(holdfast_wire::greeting::GroupMode::SelfRunning),
        };
        let metrics = Metrics::new();
        let (peers, _) = PeerChannel::start(channel, tls, metrics.clone()).unwrap();
        let (membership, events) =
            GroupMembership::start(options, frames, peers.clone(), metrics.clone()).unwrap();
        let leases = Arc::new(Mutex::new(Vec::new()));
        let written = leases.clone();
        membership.set_lease_writer(Box::new(move |lease| written.lock().unwrap().push(lease)));
        TestNode {
            name,
            boot,
            peers,
            membership,
            events,
            metrics,
            leases,
        }
    }

    /// Starts a group of these voters, the first of which is the contact node.
    async fn start_voters(&self, count: u16) -> Vec<TestNode> {
        create_group(&self.options(1, JoinRole::Backup)).unwrap();
        let mut nodes = Vec::new();
        for node in 1..=count {
            nodes.push(self.start(node, JoinRole::Backup));
        }
        let all: Vec<&TestNode> = nodes.iter().collect();
        let count = usize::from(count);
        eventually("all backups join", || {
            all.iter()
                .all(|node| node.membership.status().voters.len() == count)
        })
        .await;
        nodes
    }
}

impl TestNode {
    fn names_lost_majority(&self) -> bool {
        let status = self.membership.status();
        status
            .problems()
            .any(|problem| problem.contains("holdfast group takeover --force"))
    }

    /// Returns the keys of datagrams that this node has agreed on with another one.
    fn keys_with(&self, name: &str) -> Option<PairKeys> {
        let table = self.peers.watch_datagram_keys();
        table.borrow().get(&name.parse().unwrap())
    }

    /// Returns a heartbeat of this node to another one, as it passes in a datagram.
    fn heartbeat_to(&self, receiver: &TestNode) -> Vec<u8> {
        let keys = self.keys_with(&receiver.name).unwrap();
        seal_heartbeat(self, receiver, &keys)
    }

    fn standing(&self) -> Standing {
        self.membership.status().standing
    }

    fn contact(&self) -> Option<String> {
        let status = self.membership.status();
        status.contact().map(|contact| contact.name.to_string())
    }

    fn is_serving(&self) -> bool {
        self.membership.status().lease_left().is_some()
    }

    /// Ends the node at once, as a crash of its daemon does.
    async fn kill(self) {
        self.peers.shutdown();
        drop(self.membership);
        // The channel's tasks close their sockets when they next run.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }

    async fn request(&self, request: OperatorRequest) -> Result<MembershipChange, ErrorBody> {
        let (reply, answer) = oneshot::channel();
        self.membership.request(request, reply);
        let answer = tokio::time::timeout(TEST_TIMEOUT, answer).await;
        answer
            .expect("an answer in time")
            .expect("a running driver")
    }

    /// Returns the events that have come so far.
    fn take_events(&mut self) -> Vec<GroupEvent> {
        std::iter::from_fn(|| self.events.try_recv()).collect()
    }
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

/// Returns a heartbeat that claims to be of `sender`, under the outbound key of these keys.
fn seal_heartbeat(sender: &TestNode, receiver: &TestNode, keys: &PairKeys) -> Vec<u8> {
    let heartbeat = DatagramFrame::Heartbeat(Heartbeat {
        epoch: sender.membership.status().epoch,
        boot: sender.boot,
        sequence: 1,
        has_lease: true,
        server_list: ServerListVersion::default(),
    });
    let name = |node: &TestNode| -> NodeName { node.name.parse().unwrap() };
    let mut datagrams = DatagramSender::new(name(sender), sender.boot);
    let key = keys.outbound.unwrap();
    datagrams.seal(&name(receiver), receiver.boot, &key, &heartbeat)
}

fn send_datagram(bytes: &[u8], to: SocketAddr) {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.send_to(bytes, to).unwrap();
}

async fn wait_for_keys(nodes: &[TestNode]) {
    let have_keys = |node: &TestNode, other: &TestNode| {
        let keys = node.keys_with(&other.name);
        node.name == other.name || keys.is_some_and(|keys| keys.outbound.is_some())
    };
    eventually("each node has keys with each other one", || {
        (nodes.iter()).all(|node| nodes.iter().all(|other| have_keys(node, other)))
    })
    .await;
}

async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TEST_TIMEOUT, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[test]
fn nodes_join_and_one_has_a_lease() {
    let group = TestGroup::new(4);
    run(async {
        let mut nodes = group.start_voters(3).await;
        nodes.push(group.start(4, JoinRole::ServerNode));
        eventually("the server node joins", || {
            nodes[3].standing() == Standing::ServerNode
        })
        .await;
        eventually("one node serves", || nodes[0].is_serving()).await;
        assert!(nodes[1..].iter().all(|node| !node.is_serving()));
        let last = nodes[0].leases.lock().unwrap().last().copied().unwrap();
        assert!(last.until_ns > 0 && last.epoch == nodes[0].membership.status().epoch);
        for node in &nodes[1..] {
            let leases = node.leases.lock().unwrap();
            assert!(
                leases.iter().all(|lease| lease.until_ns == 0),
                "{}",
                node.name
            );
        }
        wait_for_keys(&nodes).await;
        eventually("all nodes are connected", || {
            nodes.iter().all(|node| {
                let up = node.peers.ids().filter(|id| node.peers.is_up(*id)).count();
                up == nodes.len() - 1
            })
        })
        .await;
        let events = nodes[3].take_events();
        assert!(
            events
                .iter()
                .any(|event| matches!(event, GroupEvent::Joined { .. }))
        );
        let mut views = events.iter().filter_map(|event| match event {
            GroupEvent::View { view, own, members } => Some((view, own, members)),
            _ => None,
        });
        let (view, own, members) = views.next_back().expect("a view");
        assert!(view.server_nodes.contains(own));
        assert_eq!(members.len(), 4);
    });
}

#[test]
fn restarted_contact_node_leaves_the_kernel_its_lease_until_it_renews_it() {
    let group = TestGroup::new(2);
    run(async {
        // A backup alone cannot replace the contact node, however slow this machine is.
        let mut nodes = group.start_voters(2).await;
        eventually("the first node serves", || nodes[0].is_serving()).await;
        let epoch = nodes[0].membership.status().epoch;
        nodes.remove(0).kill().await;
        let contact = group.start(1, JoinRole::Backup);
        eventually("the restarted node serves", || contact.is_serving()).await;
        let first = contact.leases.lock().unwrap()[0];
        assert!(first.until_ns > 0 && first.epoch >= epoch, "{first:?}");
    });
}

#[test]
fn heartbeats_travel_in_datagrams_and_forgeries_change_nothing() {
    let group = TestGroup::new(2);
    run(async {
        let nodes = group.start_voters(2).await;
        wait_for_keys(&nodes).await;
        let epoch = nodes[0].membership.status().epoch;
        for bytes in [&b"Hd"[..], &[0; 64], &[0x48; 1_500]] {
            send_datagram(bytes, group.address(2));
        }
        eventually("the forgeries are counted", || {
            nodes[1].metrics.refused_datagrams("malformed") == 3
        })
        .await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(nodes[0].is_serving());
        assert_eq!(nodes[0].membership.status().epoch, epoch);
        assert_eq!(nodes[1].metrics.refused_datagrams("forged"), 0);
    });
}

#[test]
fn node_cannot_send_heartbeats_of_another_one() {
    let group = TestGroup::new(3);
    run(async {
        let nodes = group.start_voters(3).await;
        wait_for_keys(&nodes).await;
        // The third node knows no key of datagrams to the second one but its own.
        let keys = nodes[2].keys_with("n2").unwrap();
        let forgery = seal_heartbeat(&nodes[0], &nodes[1], &keys);
        send_datagram(&forgery, group.address(2));
        let refused = |reason| nodes[1].metrics.refused_datagrams(reason);
        eventually("the forgery is counted", || refused("forged") == 1).await;
        // The forgery has not used up a counter of the first node.
        assert_eq!(refused("replayed"), 0);
    });
}

#[test]
fn recorded_heartbeat_is_refused_after_a_restart_of_the_receiver() {
    let group = TestGroup::new(2);
    run(async {
        let mut nodes = group.start_voters(2).await;
        wait_for_keys(&nodes).await;
        let record = nodes[0].heartbeat_to(&nodes[1]);
        for node in nodes.drain(..) {
            node.kill().await;
        }
        let receiver = group.start(2, JoinRole::Backup);
        let refused = |reason| receiver.metrics.refused_datagrams(reason);
        send_datagram(&record, group.address(2));
        eventually("the record is refused", || refused("unknown_sender") == 1).await;
        let status = receiver.membership.status();
        assert_eq!(status.silence(&"n1".parse().unwrap()), None);
        let returned = group.start(1, JoinRole::Backup);
        eventually("both are connected", || receiver.keys_with("n1").is_some()).await;
        send_datagram(&record, group.address(2));
        eventually("the record is stale", || refused("stale") > 0).await;
        eventually("the contact node serves", || returned.is_serving()).await;
    });
}

#[test]
fn heartbeats_pass_while_the_channel_is_broken() {
    let group = TestGroup::new(2);
    run(async {
        let nodes = group.start_voters(2).await;
        wait_for_keys(&nodes).await;
        nodes[0].peers.shutdown();
        eventually("the nodes have no channel", || {
            nodes
                .iter()
                .all(|node| !node.peers.ids().any(|id| node.peers.is_up(id)))
        })
        .await;
        let renewals = || nodes[0].leases.lock().unwrap().len();
        let before = renewals();
        eventually("the lease is renewed", || renewals() > before + 20).await;
        assert!(nodes[0].is_serving());
    });
}

#[test]
fn backup_takes_over_when_the_contact_node_dies_and_the_dead_node_returns() {
    let group = TestGroup::new(3);
    run(async {
        let mut nodes = group.start_voters(3).await;
        eventually("the first node serves", || nodes[0].is_serving()).await;
        nodes.remove(0).kill().await;
        eventually("a backup serves", || nodes.iter().any(TestNode::is_serving)).await;
        eventually("both agree", || {
            let contacts: Vec<_> = nodes.iter().map(TestNode::contact).collect();
            contacts[0] == contacts[1] && contacts[0].as_deref() != Some("n1")
        })
        .await;
        let returned = group.start(1, JoinRole::Backup);
        eventually("the dead node joins again", || {
            let status = returned.membership.status();
            status.standing == Standing::Backup && status.voters.len() == 3
        })
        .await;
        assert_ne!(returned.membership.status().own, Some(NodeId(1)));
    });
}

#[test]
fn daemon_that_restarts_keeps_its_place() {
    let group = TestGroup::new(3);
    run(async {
        let mut nodes = group.start_voters(3).await;
        let backup = nodes.remove(2);
        let own = backup.membership.status().own;
        backup.kill().await;
        let returned = group.start(3, JoinRole::Backup);
        eventually("the backup knows its place", || {
            returned.membership.status().own.is_some()
        })
        .await;
        // A slow machine may have removed the backup meanwhile, and then it has joined again.
        let status = returned.membership.status();
        assert!(status.own == own || status.epoch > 3, "{status:?}");
    });
}

#[test]
fn operator_changes_the_group() {
    let group = TestGroup::new(3);
    run(async {
        let nodes = group.start_voters(3).await;
        eventually("the first node serves", || nodes[0].is_serving()).await;
        let refusal = nodes[1]
            .request(OperatorRequest::Promote("n2".to_owned()))
            .await;
        let refusal = refusal.unwrap_err();
        assert_eq!(refusal.error, "node n1 is the contact node");
        assert_eq!(refusal.what_to_do, "send the request there");
        let refusal = nodes[0]
            .request(OperatorRequest::Remove("n9".to_owned()))
            .await;
        assert!(refusal.unwrap_err().error.contains("no node n9"));
        let refusal = nodes[1].request(OperatorRequest::ForceTakeover).await;
        assert!(refusal.unwrap_err().error.contains("sign of life"));

        nodes[0]
            .request(OperatorRequest::Promote("n2".to_owned()))
            .await
            .unwrap();
        eventually("the promoted node serves", || nodes[1].is_serving()).await;
        assert!(!nodes[0].is_serving());
        assert_eq!(nodes[0].standing(), Standing::Backup);

        nodes[1]
            .request(OperatorRequest::Remove("n3".to_owned()))
            .await
            .unwrap();
        eventually("the removed node knows", || {
            nodes[2].membership.status().removal == Some(RemovalCause::Operator)
        })
        .await;

        nodes[1].request(OperatorRequest::Leave).await.unwrap();
        eventually("the other node serves", || nodes[0].is_serving()).await;
        assert_eq!(nodes[1].standing(), Standing::Outside);
        let refusal = nodes[0].request(OperatorRequest::Leave).await.unwrap_err();
        assert!(refusal.error.contains("only voter"), "{refusal}");
    });
}

#[test]
fn survivor_of_two_serves_only_after_a_forced_takeover() {
    let group = TestGroup::new(2);
    run(async {
        let mut nodes = group.start_voters(2).await;
        eventually("the first node serves", || nodes[0].is_serving()).await;
        nodes.remove(0).kill().await;
        let survivor = &nodes[0];
        eventually("the survivor names the problem", || {
            survivor.names_lost_majority()
        })
        .await;
        assert!(!survivor.is_serving());
        survivor
            .request(OperatorRequest::ForceTakeover)
            .await
            .unwrap();
        eventually("the survivor serves", || survivor.is_serving()).await;
    });
}

#[test]
fn survivor_of_three_names_the_lost_majority() {
    let group = TestGroup::new(3);
    run(async {
        let mut nodes = group.start_voters(3).await;
        eventually("the first node serves", || nodes[0].is_serving()).await;
        nodes.remove(0).kill().await;
        nodes.remove(0).kill().await;
        eventually("the survivor names the problem", || {
            nodes[0].names_lost_majority()
        })
        .await;
        // Each attempt to take the place writes to the disk, which takes no problem away.
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(nodes[0].names_lost_majority() && !nodes[0].is_serving());
        let returned = group.start(2, JoinRole::Backup);
        eventually("two of three serve", || {
            nodes[0].is_serving() || returned.is_serving()
        })
        .await;
        assert!(!nodes[0].names_lost_majority());
    });
}

#[test]
fn second_group_is_not_begun_over_a_saved_membership() {
    let group = TestGroup::new(1);
    create_group(&group.options(1, JoinRole::Backup)).unwrap();
    let error = create_group(&group.options(1, JoinRole::Backup)).unwrap_err();
    assert!(
        error.to_string().contains("has a saved membership"),
        "{error}"
    );
}

#[test]
fn settings_of_another_release_are_a_problem_until_there_are_others() {
    run(async {
        let group = TestGroup::new(1);
        let options = group.options(1, JoinRole::Backup);
        create_group(&options).unwrap();
        let file = options.state_file();
        let mut state = file.read().unwrap().unwrap();
        let view = state.committed.as_mut().unwrap();
        view.group_data.version = 7;
        view.group_data.bytes = vec![9].into();
        file.write(state).unwrap();
        let mut node = group.start(1, JoinRole::Backup);
        eventually("the node serves its group", || {
            node.standing() == Standing::ContactNode
                && node.membership.status().lease_left().is_some()
        })
        .await;
        let status = node.membership.status();
        let problem = status.problems().next().unwrap_or_default();
        assert!(problem.contains("settings have version 9"), "{problem}");
        // Without an event with settings, no engine begins, which would remove the services.
        while let Some(event) = node.events.try_recv() {
            assert!(!matches!(event, GroupEvent::Settings { .. }), "{event:?}");
        }
    });
}

#[test]
fn revoked_contact_node_loses_lease_and_place_although_no_channel_is_left_to_close() {
    let group = TestGroup::new(3);
    run(async {
        let nodes = group.start_voters(3).await;
        wait_for_keys(&nodes).await;
        nodes[0].peers.shutdown();
        let others = &nodes[1..];
        eventually("the contact node sends datagrams alone", || {
            others.iter().all(|node| !node.peers.is_up(NodeId(1)))
        })
        .await;
        CertificateAuthority::open(&group.ca())
            .unwrap()
            .revoke("n1")
            .unwrap();
        for node in others {
            node.peers.set_tls(group.tls(&node.name));
            assert_eq!(node.keys_with("n1"), None);
        }
        eventually("the contact node has no lease", || !nodes[0].is_serving()).await;
        eventually("another node has its place", || {
            others.iter().all(|node| {
                let status = node.membership.status();
                status.voters.len() == 2 && status.contact().unwrap().name.as_str() != "n1"
            })
        })
        .await;
        let refused = others
            .iter()
            .map(|node| node.metrics.refused_datagrams("unknown_sender"));
        assert!(refused.sum::<u64>() > 0);
    });
}
