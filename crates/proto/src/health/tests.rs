//! Tests of the machine: signs in, shares of new clients out.

use super::*;
use holdfast_wire::Protocol;

const CONTACT: NodeId = NodeId(1);

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn web() -> ServiceEndpoint {
    ServiceEndpoint {
        protocol: Protocol::Tcp,
        address: ([10, 0, 0, 1], 80).into(),
    }
}

fn judged(weights: &[(u16, u32)]) -> JudgedService {
    JudgedService {
        endpoint: web(),
        weights: map(weights),
        stall_after: Some(ms(500)),
        fall: 2,
        rise: 3,
        checks: [CheckKind::Connect, CheckKind::Script].into(),
    }
}

fn map(weights: &[(u16, u32)]) -> BTreeMap<NodeId, u32> {
    let pair = |(node, weight): &(u16, u32)| (NodeId(*node), *weight);
    weights.iter().map(pair).collect()
}

fn listening(waiting: u32) -> ListenerSample {
    ListenerSample {
        queues: vec![QueueSample { socket: 7, waiting }],
        handshakes: Some(0),
    }
}

/// A machine with its time, and the outputs taken so far.
struct Node {
    machine: Health,
    now: Duration,
    shares: Vec<BTreeMap<NodeId, u32>>,
    sent: Vec<(NodeId, HealthFrame)>,
    events: Vec<Event>,
    probed: BTreeSet<NodeId>,
    /// Nodes that answer probes and send on their own.
    answering: BTreeSet<NodeId>,
}

impl Node {
    fn new(id: u16, weights: &[(u16, u32)]) -> Node {
        let config = HealthConfig::new(NodeId(id));
        Node {
            machine: Health::new(config, CONTACT, vec![judged(weights)]),
            now: Duration::ZERO,
            shares: Vec::new(),
            sent: Vec::new(),
            events: Vec::new(),
            probed: BTreeSet::new(),
            answering: BTreeSet::new(),
        }
    }

    /// A contact node with servers everywhere, and two other nodes.
    fn contact_of_three() -> Node {
        let mut node = Node::new(1, &[(1, 1), (2, 1), (3, 1)]);
        for other in [2, 3].map(NodeId) {
            node.answering.insert(other);
            node.machine.handle_peer_connected(node.now, other);
            node.report(other, ServerState::Serving);
        }
        node.sample(&listening(0));
        node.run(ms(1000));
        assert_eq!(node.shares, []);
        node.sent.clear();
        node.events.clear();
        node
    }

    fn sample(&mut self, sample: &ListenerSample) {
        self.machine.handle_sample(self.now, &web(), sample);
        self.drain();
    }

    /// The contact node announces that one node gets all new clients.
    fn hear_all_placed_at(&mut self, placed: NodeId) {
        let services = vec![ServiceShares {
            service: web(),
            weights: vec![(placed, 1)],
            is_served: true,
        }];
        let frame = HealthFrame::Placement { services };
        self.machine.handle_frame(self.now, CONTACT, frame);
    }

    fn report(&mut self, from: NodeId, state: ServerState) {
        let service = web();
        let servers = vec![ReportedServer { service, state }];
        let frame = HealthFrame::Report { servers };
        self.machine.handle_frame(self.now, from, frame);
        self.drain();
    }

    fn drain(&mut self) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Send { to, frame } => self.sent.push((to, frame)),
                Output::Probe { node } => drop(self.probed.insert(node)),
                Output::Place { service, weights } => {
                    assert_eq!(service, web());
                    self.shares.push(weights);
                }
                Output::Event(event) => self.events.push(event),
            }
        }
    }

    /// Lets time pass. Nodes that answer are heard once asked.
    fn run(&mut self, duration: Duration) {
        let end = self.now + duration;
        while self.now < end {
            let wake = self.machine.poll_timeout(self.now);
            assert!(
                wake > self.now || self.now.is_zero(),
                "no progress at {wake:?}"
            );
            self.now = wake.clamp(self.now + ms(1), end);
            let probed = std::mem::take(&mut self.probed);
            let heard = probed.intersection(&self.answering).copied().collect();
            self.machine.handle_timeout(self.now, &heard);
            self.drain();
        }
    }
}

#[test]
fn node_whose_listener_closed_gets_no_new_clients() {
    let mut node = Node::contact_of_three();
    let problem = ServerProblem::ListenerClosed;
    node.report(NodeId(2), ServerState::Failing(problem));
    assert_eq!(node.shares, [map(&[(1, 1), (3, 1)])]);
    let excluded = Event::Excluded {
        service: web(),
        node: NodeId(2),
        reason: Exclusion::Problem(problem),
    };
    assert_eq!(node.events, [excluded]);
    node.shares.clear();
    node.report(NodeId(2), ServerState::Serving);
    assert_eq!(node.shares, [], "the other nodes learn the shares first");
    node.run(ms(21));
    assert_eq!(node.shares, [map(&[(1, 1), (2, 1), (3, 1)])]);
}

#[test]
fn silent_node_gets_no_new_clients_within_300_ms() {
    let mut node = Node::contact_of_three();
    node.answering.remove(&NodeId(3));
    node.run(ms(150));
    assert_eq!(node.shares, []);
    node.run(ms(150));
    assert_eq!(node.shares, [map(&[(1, 1), (2, 1)])]);
    assert!(node.machine.is_silent(NodeId(3)));
    node.answering.insert(NodeId(3));
    node.run(ms(150));
    assert_eq!(node.shares.last(), Some(&map(&[(1, 1), (2, 1), (3, 1)])));
}

#[test]
fn delay_of_the_own_daemon_is_not_the_silence_of_others() {
    let mut node = Node::contact_of_three();
    node.now += ms(3000);
    node.machine.handle_timeout(node.now, &BTreeSet::new());
    node.drain();
    assert_eq!(node.shares, []);
    node.run(ms(1000));
    assert_eq!(node.shares, []);
}

#[test]
fn lost_node_gets_no_new_clients() {
    let mut node = Node::contact_of_three();
    node.machine.handle_peer_lost(node.now, NodeId(2));
    node.drain();
    assert_eq!(node.shares, [map(&[(1, 1), (3, 1)])]);
}

#[test]
fn node_that_never_connected_is_excluded_after_the_grace() {
    let mut node = Node::new(1, &[(1, 1), (2, 1)]);
    node.sample(&listening(0));
    node.run(ms(499));
    assert_eq!(node.shares, []);
    node.run(ms(50));
    assert_eq!(node.shares, [map(&[(1, 1)])]);
}

#[test]
fn node_that_joins_gets_no_new_clients_before_its_report() {
    let mut node = Node::contact_of_three();
    let (joined, all) = (NodeId(4), [(1, 1), (2, 1), (3, 1), (4, 1)]);
    node.answering.insert(joined);
    node.machine.handle_services(node.now, vec![judged(&all)]);
    node.drain();
    node.machine.handle_peer_connected(node.now, joined);
    node.drain();
    node.run(ms(100));
    node.report(joined, ServerState::Absent);
    node.run(ms(100));
    assert_eq!(node.shares, []);
    node.report(joined, ServerState::Serving);
    node.run(ms(100));
    assert_eq!(node.shares, [map(&all)]);
}

#[test]
fn node_of_unknown_state_gets_clients_if_no_node_serves() {
    let mut node = Node::contact_of_three();
    let all = [(1, 1), (2, 1), (3, 1), (4, 1)];
    for other in [2, 3].map(NodeId) {
        node.report(other, ServerState::Absent);
    }
    node.sample(&ListenerSample::default());
    node.shares.clear();
    node.machine.handle_services(node.now, vec![judged(&all)]);
    node.machine.handle_peer_connected(node.now, NodeId(4));
    node.drain();
    node.run(ms(100));
    assert_eq!(node.shares.last(), Some(&map(&[(4, 1)])));
}

#[test]
fn only_node_with_a_server_gets_all_clients() {
    let mut node = Node::contact_of_three();
    node.report(NodeId(2), ServerState::Absent);
    node.sample(&ListenerSample::default());
    assert_eq!(node.shares.last(), Some(&map(&[(3, 1)])));
}

#[test]
fn all_nodes_get_clients_if_none_can_serve() {
    let mut node = Node::contact_of_three();
    let failing = ServerState::Failing(ServerProblem::ListenerClosed);
    node.report(NodeId(2), failing);
    node.report(NodeId(3), failing);
    node.sample(&ListenerSample::default());
    node.run(ms(50));
    assert_eq!(node.shares.last(), Some(&map(&[(1, 1), (2, 1), (3, 1)])));
    assert!(node.machine.is_unserved(&web()));
    let nobody = Event::NobodyServes { service: web() };
    assert_eq!(node.events.iter().filter(|e| **e == nobody).count(), 1);
    node.report(NodeId(3), ServerState::Serving);
    assert_eq!(node.shares.last(), Some(&map(&[(3, 1)])));
}

#[test]
fn last_server_that_hangs_keeps_its_clients() {
    let mut node = Node::contact_of_three();
    node.report(NodeId(2), ServerState::Absent);
    node.sample(&ListenerSample::default());
    assert_eq!(node.shares.last(), Some(&map(&[(3, 1)])));
    let problem = ServerProblem::QueueStalled { waiting: 1 };
    node.report(NodeId(3), ServerState::Failing(problem));
    node.run(ms(100));
    assert_eq!(node.shares.last(), Some(&map(&[(3, 1)])));
    assert!(node.machine.is_unserved(&web()));
}

#[test]
fn node_without_weight_never_gets_clients() {
    let mut node = Node::new(1, &[(1, 1), (2, 0)]);
    node.machine.handle_peer_connected(node.now, NodeId(2));
    node.report(NodeId(2), ServerState::Serving);
    node.sample(&ListenerSample::default());
    node.run(ms(100));
    assert_eq!(node.shares, []);
    assert!(node.machine.is_unserved(&web()));
}

#[test]
fn operators_weights_count_among_healthy_nodes() {
    let mut node = Node::contact_of_three();
    node.report(NodeId(2), ServerState::Absent);
    let weights = map(&[(1, 0), (2, 5), (3, 2)]);
    node.machine.handle_weights(node.now, &web(), weights);
    node.drain();
    assert_eq!(node.shares.last(), Some(&map(&[(3, 2)])));
}

#[test]
fn shares_are_announced_before_they_grow() {
    let mut node = Node::contact_of_three();
    node.report(NodeId(2), ServerState::Absent);
    node.sent.clear();
    node.shares.clear();
    node.report(NodeId(2), ServerState::Serving);
    let to: Vec<NodeId> = node.sent.iter().map(|(to, _)| *to).collect();
    assert_eq!((to, node.shares.len()), (vec![NodeId(2), NodeId(3)], 0));
    let Some((_, announcement)) = node.sent.pop() else {
        panic!("nothing was sent");
    };
    let mut other = Node::new(3, &[(1, 1), (2, 1), (3, 1)]);
    other
        .machine
        .handle_frame(ms(1), CONTACT, announcement.clone());
    other.drain();
    assert_eq!(
        other.shares,
        [],
        "the shares are those of the configuration"
    );
    let mut lonely = Node::new(3, &[(1, 1), (2, 0), (3, 1)]);
    lonely
        .machine
        .handle_frame(ms(1), NodeId(2), announcement.clone());
    lonely.drain();
    assert_eq!(lonely.shares, [], "only the contact node decides");
    lonely.machine.handle_frame(ms(1), CONTACT, announcement);
    lonely.drain();
    assert_eq!(lonely.shares, [map(&[(1, 1), (2, 1), (3, 1)])]);
}

#[test]
fn stopped_server_is_reported_within_a_second() {
    let mut node = Node::new(2, &[(1, 1), (2, 1)]);
    node.sample(&listening(0));
    let serving = (CONTACT, report_of(ServerState::Serving));
    assert_eq!(node.sent, [serving]);
    node.sent.clear();
    for waiting in 0..7 {
        node.sample(&listening(waiting * 30));
        node.now += ms(100);
    }
    let problem = ServerProblem::QueueStalled { waiting: 180 };
    let stalled = (CONTACT, report_of(ServerState::Failing(problem)));
    assert_eq!(node.sent, [stalled]);
}

fn report_of(state: ServerState) -> HealthFrame {
    let service = web();
    HealthFrame::Report {
        servers: vec![ReportedServer { service, state }],
    }
}

#[test]
fn reports_are_repeated_and_follow_the_contact_node() {
    let mut node = Node::new(3, &[(1, 1), (3, 1)]);
    node.sample(&listening(0));
    node.sent.clear();
    node.run(ms(2500));
    assert_eq!(node.sent.len(), 2);
    node.sent.clear();
    node.machine.handle_contact_node(node.now, NodeId(2));
    node.drain();
    assert_eq!(node.sent, [(NodeId(2), report_of(ServerState::Serving))]);
}

#[test]
fn flapping_server_is_held_down() {
    let mut node = Node::new(2, &[(1, 1), (2, 1)]);
    node.sample(&listening(0));
    let mut downtimes = Vec::new();
    for _ in 0..4 {
        node.sample(&ListenerSample::default());
        let began = node.now;
        node.now += ms(10);
        node.sample(&listening(0));
        while node.machine.own_server(&web()) != Some(ServerState::Serving) {
            node.run(ms(10));
        }
        downtimes.push((node.now - began).as_millis());
    }
    assert_eq!(downtimes, [10, 1000, 2000, 4000]);
}

#[test]
fn removed_check_has_no_effect() {
    let mut node = Node::new(2, &[(1, 1), (2, 1)]);
    node.sample(&listening(0));
    let problem = ServerProblem::ScriptFailed { exit_code: 1 };
    let fail = |node: &mut Node| {
        for _ in 0..2 {
            let now = node.now;
            node.machine
                .handle_check(now, &web(), CheckKind::Script, Err(problem));
        }
        node.machine.own_server(&web())
    };
    assert_eq!(fail(&mut node), Some(ServerState::Failing(problem)));
    let mut without = judged(&[(1, 1), (2, 1)]);
    without.checks.remove(&CheckKind::Script);
    node.machine.handle_services(node.now, vec![without]);
    node.sample(&listening(0));
    let state = node.machine.own_server(&web());
    assert_eq!(state, Some(ServerState::Serving));
    // The last run of the script may end later.
    assert_eq!(fail(&mut node), Some(ServerState::Serving));
}

#[test]
fn checks_count_after_fall_and_rise() {
    let mut node = Node::new(2, &[(1, 1), (2, 1)]);
    node.sample(&listening(0));
    let mut check = |result| {
        let now = node.now;
        node.machine
            .handle_check(now, &web(), CheckKind::Script, result);
        node.machine.own_server(&web())
    };
    let problem = ServerProblem::ScriptFailed { exit_code: 1 };
    let serving = Some(ServerState::Serving);
    let failing = Some(ServerState::Failing(problem));
    assert_eq!(check(Err(problem)), serving);
    assert_eq!(check(Ok(())), serving);
    assert_eq!(check(Err(problem)), serving);
    assert_eq!(check(Err(problem)), failing);
    assert_eq!(check(Ok(())), failing);
    assert_eq!(check(Ok(())), failing);
    assert_eq!(check(Ok(())), serving);
}

#[test]
fn unread_requests_of_several_clients_show_a_hanging_server() {
    let mut node = Node::new(2, &[(1, 1), (2, 1)]);
    node.sample(&listening(0));
    let mut unread = |connections| {
        let now = node.now;
        node.machine
            .handle_unread_connections(now, &web(), connections);
        node.machine.own_server(&web())
    };
    assert_eq!(unread(2), Some(ServerState::Serving));
    let problem = ServerProblem::RequestsUnread { connections: 3 };
    assert_eq!(unread(3), Some(ServerState::Failing(problem)));
    assert_eq!(unread(0), Some(ServerState::Serving));
}

#[test]
fn server_that_moved_away_is_no_failure() {
    let mut node = Node::new(2, &[(1, 1), (2, 1)]);
    node.sample(&listening(0));
    node.machine.handle_departure(node.now, &web());
    // The sockets stay until all handshakes have ended.
    node.sample(&listening(0));
    node.sample(&ListenerSample::default());
    assert_eq!(node.machine.own_server(&web()), Some(ServerState::Absent));
    node.sample(&listening(0));
    node.sample(&ListenerSample::default());
    let problem = ServerProblem::ListenerClosed;
    assert_eq!(
        node.machine.own_server(&web()),
        Some(ServerState::Failing(problem))
    );
}

#[test]
fn node_whose_server_moved_away_has_new_clients_until_another_node_serves() {
    let mut node = Node::contact_of_three();
    node.machine.handle_departure(node.now, &web());
    node.sample(&ListenerSample::default());
    node.report(NodeId(3), ServerState::Absent);
    node.run(ms(300));
    assert_eq!(node.shares.last(), Some(&map(&[(2, 1)])));
    node.shares.clear();
    // The server has moved to node 3, which has not said so yet; node 2 forwards.
    node.report(NodeId(2), ServerState::Absent);
    node.run(ms(300));
    assert_eq!(node.shares, []);
    node.report(NodeId(3), ServerState::Serving);
    node.run(ms(300));
    assert_eq!(node.shares, [map(&[(3, 1)])]);
}

#[test]
fn broadcast_group_places_no_clients() {
    let config = HealthConfig {
        places_clients: false,
        ..HealthConfig::new(CONTACT)
    };
    let mut machine = Health::new(config, CONTACT, vec![judged(&[(1, 1), (2, 1)])]);
    machine.handle_peer_connected(ms(1), NodeId(2));
    machine.handle_peer_lost(ms(2), NodeId(2));
    let mut outputs = std::iter::from_fn(|| machine.poll_output());
    assert!(outputs.all(|output| matches!(output, Output::Event(_))));
    let health = machine.nodes_of_service(&web());
    assert_eq!(health[1].exclusion, Some(Exclusion::NotConnected));
}

#[test]
fn new_contact_node_places_by_what_it_knows() {
    let mut node = Node::new(2, &[(1, 1), (2, 1), (3, 1)]);
    node.machine.handle_peer_connected(node.now, NodeId(3));
    node.report(NodeId(3), ServerState::Absent);
    node.sample(&listening(0));
    node.now = ms(1000);
    node.machine.handle_contact_node(node.now, NodeId(2));
    node.drain();
    assert_eq!(node.shares, [map(&[(2, 1)])]);
}

/// Node 2 of three nodes, with no server of its own, after it became the contact node; the former one had placed all new
/// clients at node 3.
fn successor_without_server() -> Node {
    let mut node = Node::new(2, &[(1, 1), (2, 1), (3, 1)]);
    for other in [1, 3].map(NodeId) {
        node.answering.insert(other);
        node.machine.handle_peer_connected(node.now, other);
    }
    node.sample(&ListenerSample {
        queues: Vec::new(),
        handshakes: Some(0),
    });
    node.now = ms(1000);
    node.hear_all_placed_at(NodeId(3));
    node.drain();
    assert_eq!(node.shares, [map(&[(3, 1)])]);
    node.shares.clear();
    node.machine.handle_contact_node(node.now, NodeId(2));
    node.drain();
    node
}

#[test]
fn shares_of_the_former_contact_node_hold_until_nodes_report() {
    let mut node = successor_without_server();
    node.run(ms(300));
    assert_eq!(node.shares, [], "nothing is known of nodes 1 and 3");
    node.report(NodeId(1), ServerState::Absent);
    node.run(ms(300));
    assert_eq!(node.shares, []);
    node.report(NodeId(3), ServerState::Absent);
    node.report(NodeId(1), ServerState::Serving);
    node.run(ms(300));
    assert_eq!(node.shares.last(), Some(&map(&[(1, 1)])));
}

#[test]
fn reports_of_an_earlier_time_as_contact_node_do_not_count() {
    let mut node = successor_without_server();
    node.report(NodeId(1), ServerState::Serving);
    node.report(NodeId(3), ServerState::Absent);
    node.run(ms(300));
    assert_eq!(node.shares.last(), Some(&map(&[(1, 1)])));
    // The server moves to node 3 while node 1 is the contact node.
    node.machine.handle_contact_node(node.now, CONTACT);
    node.run(ms(2000));
    node.hear_all_placed_at(NodeId(3));
    node.machine.handle_contact_node(node.now, NodeId(2));
    node.run(ms(300));
    assert_eq!(node.shares.last(), Some(&map(&[(3, 1)])));
}

#[test]
fn every_node_learns_whether_anybody_serves() {
    let mut contact = Node::contact_of_three();
    let mut other = Node::new(2, &[(1, 1), (2, 1), (3, 1)]);
    let mut tell = |contact: &mut Node| {
        for (to, frame) in std::mem::take(&mut contact.sent) {
            if to == NodeId(2) {
                other.machine.handle_frame(other.now, CONTACT, frame);
            }
        }
        other.machine.is_served(&web())
    };
    assert!(tell(&mut contact), "true as long as nothing is known");
    let failing = ServerState::Failing(ServerProblem::ListenerClosed);
    contact.report(NodeId(2), failing);
    contact.report(NodeId(3), failing);
    contact.run(ms(100));
    assert!(tell(&mut contact), "the contact node itself serves");
    let closed = ListenerSample {
        queues: Vec::new(),
        handshakes: Some(0),
    };
    contact.sample(&closed);
    contact.run(ms(300));
    assert!(contact.machine.is_unserved(&web()));
    assert!(!tell(&mut contact));
    contact.report(NodeId(3), ServerState::Serving);
    contact.run(ms(100));
    assert!(tell(&mut contact));
}

#[test]
fn node_that_reports_without_pause_changes_few_shares() {
    let mut node = Node::contact_of_three();
    let failing = ServerState::Failing(ServerProblem::ListenerClosed);
    for _ in 0..500 {
        node.report(NodeId(2), ServerState::Serving);
        node.report(NodeId(2), failing);
    }
    assert!(node.events.len() <= 8, "{:?}", node.events);
    node.report(NodeId(2), ServerState::Serving);
    node.run(ms(50));
    assert_eq!(
        node.shares.last(),
        Some(&map(&[(1, 1), (2, 1), (3, 1)])),
        "the last report counts"
    );
}

#[test]
fn drained_nodes_get_new_clients_only_if_no_other_node_serves() {
    let mut node = Node::contact_of_three();
    let drain = |node: &mut Node, nodes: &[u16]| {
        let nodes = nodes.iter().copied().map(NodeId).collect();
        node.machine.handle_draining_nodes(node.now, nodes);
        node.drain();
        node.run(ms(500));
    };
    drain(&mut node, &[2]);
    assert_eq!(node.shares.last(), Some(&map(&[(1, 1), (3, 1)])));
    // The server of the drained node is the last one: clients must not be refused.
    node.report(NodeId(3), ServerState::Absent);
    drain(&mut node, &[1, 2]);
    node.run(ms(500));
    assert_eq!(node.shares.last(), Some(&map(&[(1, 1), (2, 1)])));
    assert!(!node.machine.is_unserved(&web()));
    // A server that has left a drained node gets none.
    node.report(NodeId(2), ServerState::Absent);
    node.run(ms(500));
    assert_eq!(node.shares.last(), Some(&map(&[(1, 1)])));
    node.report(NodeId(2), ServerState::Serving);
    drain(&mut node, &[]);
    node.run(ms(500));
    assert_eq!(node.shares.last(), Some(&map(&[(1, 1), (2, 1)])));
}
