//! Datagram associations move between servers while their clients go on. Needs root.
//!
//! Every datagram has a number, and its answer repeats it: so what a handoff loses or doubles is counted.

mod common;

use std::collections::BTreeSet;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use holdfast_api::app::{Channel, FromDaemon, HandOffItem, Piece, ToDaemon, decode, encode};
use holdfast_api::control::{
    FlowFilter, FlowOutcome, FlowQuery, FlowState, HandoffRequest, HandoffState, HandoffStatus,
    Selection,
};
use holdfast_api::{Drain, FlowText, Protocol};
use holdfast_bench::cluster::{Cluster, ClusterSpec, Family, Program, Service};
use holdfast_lab::Reach;

use common::{PATIENCE, PORT, alone, eventually, says};

/// Clients.
const ASSOCIATIONS: usize = 24;
/// The most datagrams of a client.
const NUMBERS: usize = 20_000;
/// Each client sends one so often.
const INTERVAL: Duration = Duration::from_millis(10);
/// Bytes of a datagram.
const SIZE: usize = 200;
/// The port of a service that only tests serve.
const ODD_PORT: u16 = 8007;

#[test]
fn associations_move_over_ipv4() {
    associations_move("udp4", Reach::Steer, Family::V4);
}

#[test]
fn associations_move_over_ipv6() {
    associations_move("udp6", Reach::Steer, Family::V6);
}

#[test]
fn associations_move_with_broadcast() {
    associations_move("udpb", Reach::Broadcast, Family::V4);
}

/// Placed on several nodes, moved one by one and many at once: no datagram is lost. None is doubled where only the owner
/// receives it; with broadcast, acceptor and donor both receive what comes while the handoff is prepared.
fn associations_move(name: &str, reach: Reach, family: Family) {
    let Some(_alone) = alone() else { return };
    let cluster = group(name, reach, &[]);
    let load = Datagrams::start(&cluster, family, ASSOCIATIONS);
    load.all_answered_again();
    let owners = owners(&cluster, &load);
    assert!(owners.len() > 1, "all are placed on {owners:?}");

    for client in 0..6 {
        let flow = load.flow(client);
        let from = owner(&cluster, flow).unwrap();
        let to = if from == "n2" { "n3" } else { "n2" };
        let status = hand_off(&cluster, &from, Selection::Flows(vec![flow]), to);
        assert_eq!(status.summary.moved, 1, "{status:#?}");
        assert_eq!(owner(&cluster, flow).as_deref(), Some(to));
        load.all_answered_again();
    }
    for to in ["n2", "n3", "n1", "n2"] {
        for from in ["n1", "n2", "n3"].into_iter().filter(|from| *from != to) {
            if owners_now(&cluster, &load, from) == 0 {
                continue;
            }
            let all = Selection::AllOf(FlowFilter {
                protocol: Some(Protocol::Udp),
                ..FlowFilter::default()
            });
            let status = hand_off(&cluster, from, all, to);
            assert_eq!(status.summary.kept, 0, "{status:#?}");
        }
        assert_eq!(owners_now(&cluster, &load, to), ASSOCIATIONS);
        load.all_answered_again();
    }
    let counts = load.end(name);
    assert_eq!(counts.lost, [], "{counts:?}");
    if reach == Reach::Steer {
        assert_eq!(counts.doubled, 0, "{counts:?}");
    }
}

/// What the donor's program has not read goes along, and is read at the acceptor before what came later.
#[test]
fn queued_datagrams_move() {
    let Some(_alone) = alone() else { return };
    let cluster = group("udpq", Reach::Steer, &["n2"]);
    let load = Datagrams::start(&cluster, Family::V4, 4);
    load.all_answered_again();
    let odd = Odd::new(&cluster);
    let at_acceptor = socket_in(&cluster, "n3", odd.service);
    for number in 0..5u8 {
        odd.client.send(&[number]).unwrap();
    }
    let id = odd.give();
    let unread = (0..5).map(|_| {
        let mut byte = [0];
        odd.server.recv_from(&mut byte).unwrap();
        Piece {
            bytes: byte.to_vec(),
            more: false,
        }
    });
    let collected = ToDaemon::Collected {
        flow: odd.flow,
        unread: unread.collect(),
        last: true,
    };
    say(&odd.giver, &collected);
    let gone = hear(&odd.giver);
    assert!(matches!(gone, FromDaemon::Gone { .. }), "{gone:?}");
    let go = hear(&odd.taker);
    assert!(
        matches!(&go, FromDaemon::Go { ids } if *ids == [id]),
        "{go:?}"
    );
    assert_eq!(owner(&cluster, odd.flow).as_deref(), Some("n3"));
    odd.client.send(&[5]).unwrap();
    let mut byte = [0];
    for number in 0..6u8 {
        at_acceptor.recv_from(&mut byte).unwrap();
        assert_eq!(byte, [number]);
    }
    at_acceptor
        .send_to(&[6], odd.client.local_addr().unwrap())
        .unwrap();
    odd.client.recv(&mut byte).unwrap();
    assert_eq!(byte, [6]);
    let counts = load.end("udpq");
    assert_eq!((counts.lost.len(), counts.doubled), (0, 0), "{counts:?}");
}

/// A program that never says what it has not read keeps its association, and keeps up nobody else.
#[test]
fn a_program_that_hangs_when_frozen() {
    let Some(_alone) = alone() else { return };
    let cluster = group("udph", Reach::Steer, &["n2"]);
    let load = Datagrams::start(&cluster, Family::V4, 4);
    load.all_answered_again();
    let odd = Odd::new(&cluster);
    odd.give();
    // And no answer.
    match hear(&odd.giver) {
        FromDaemon::Kept { reason, .. } => says(reason, &["did not say what it had not read"]),
        other => panic!("{other:?}"),
    }
    assert!(matches!(hear(&odd.taker), FromDaemon::Cancel { .. }));
    assert_eq!(owner(&cluster, odd.flow).as_deref(), Some("n2"));
    let all = Selection::Flows((0..4).map(|client| load.flow(client)).collect());
    let status = hand_off(&cluster, "n2", all, "n3");
    assert_eq!(status.summary.moved, 4, "{status:#?}");
    let counts = load.end("udph");
    assert_eq!((counts.lost.len(), counts.doubled), (0, 0), "{counts:?}");
}

/// An association of the pool `odd`, with programs on n2 and n3 that the test drives by hand.
struct Odd {
    service: SocketAddr,
    client: UdpSocket,
    /// The program's socket on n2.
    server: UdpSocket,
    flow: FlowText,
    /// The session of the program on n2.
    giver: Channel,
    /// On n3.
    taker: Channel,
}

impl Odd {
    fn new(cluster: &Cluster) -> Self {
        let service = SocketAddr::new(cluster.service_address(Family::V4), ODD_PORT);
        let client = client(cluster, service);
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let (giver, taker) = (session(cluster, "n2"), session(cluster, "n3"));
        for (program, node) in [(&giver, "n2"), (&taker, "n3")] {
            let serve = ToDaemon::Serve {
                service: 1,
                pool: "odd".into(),
                protocol: Protocol::Udp,
                addresses: vec![service],
            };
            say(program, &serve);
            eventually("it is served", || serves(cluster, node, "odd"));
        }
        // An association begins with the server's first answer.
        let server = socket_in(cluster, "n2", service);
        client.send(b"?").unwrap();
        let (_, remote) = server.recv_from(&mut [0; 16]).unwrap();
        server.send_to(b"!", remote).unwrap();
        client.recv(&mut [0; 16]).unwrap();
        let flow = FlowText::new(Protocol::Udp, service, remote).unwrap();
        eventually("it is placed", || {
            owner(cluster, flow).as_deref() == Some("n2")
        });
        let flows = vec![flow];
        say(&giver, &ToDaemon::Accepted { service: 1, flows });
        Self {
            service,
            client,
            server,
            flow,
            giver,
            taker,
        }
    }

    /// Hands it to n3, as far as the freeze; gives its number there.
    fn give(&self) -> u64 {
        let item = HandOffItem {
            flow: self.flow,
            application_state: Vec::new(),
            descriptor: false,
        };
        let give = ToDaemon::HandOff {
            batch: 1,
            to: "n3".into(),
            drain: Drain::None,
            items: vec![item],
            last: true,
        };
        say(&self.giver, &give);
        let incoming = hear(&self.taker);
        let FromDaemon::Incoming { items } = incoming else {
            panic!("{incoming:?}")
        };
        assert!(matches!(hear(&self.taker), FromDaemon::State { .. }));
        let id = items[0].id;
        say(&self.taker, &ToDaemon::Received { ids: vec![id] });
        let collect = hear(&self.giver);
        assert!(matches!(collect, FromDaemon::Collect { .. }), "{collect:?}");
        id
    }
}

fn socket_in(cluster: &Cluster, node: &str, service: SocketAddr) -> UdpSocket {
    let socket = cluster.lab().in_net(node, || UdpSocket::bind(service));
    let socket = socket.unwrap().unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Three nodes with echo servers. New flows go to the nodes named, to all where none is.
fn group(name: &str, reach: Reach, places: &[&str]) -> Cluster {
    let name = format!("{name}-{}", std::process::id());
    let mut spec = ClusterSpec::new(name).program(Program::Echo { port: PORT });
    spec.reach = reach;
    let odd = Service::new("odd", Protocol::Udp, ODD_PORT);
    spec.services.push(odd);
    for service in spec.services.iter_mut().filter(|_| !places.is_empty()) {
        let weight = |node: &str| (node.to_owned(), u32::from(places.contains(&node)));
        service.weights = ["n1", "n2", "n3"].map(weight).into();
    }
    Cluster::up(spec).unwrap()
}

fn client(cluster: &Cluster, service: SocketAddr) -> UdpSocket {
    let any: SocketAddr = match service {
        SocketAddr::V4(_) => "0.0.0.0:0".parse().unwrap(),
        SocketAddr::V6(_) => "[::]:0".parse().unwrap(),
    };
    let open = || {
        let socket = UdpSocket::bind(any)?;
        socket.connect(service)?;
        std::io::Result::Ok(socket)
    };
    cluster.lab().in_net("c1", open).unwrap().unwrap()
}

fn begin(cluster: &Cluster, from: &str, selection: Selection, to: &str) -> u64 {
    let request = HandoffRequest {
        selection,
        to: to.to_owned(),
        drain: Drain::None,
    };
    let control = cluster.control_blocking(from).unwrap();
    let accepted = control.run(async |client| client.hand_off(&request).await);
    accepted.unwrap().id
}

fn ended(cluster: &Cluster, from: &str, id: u64) -> HandoffStatus {
    let control = cluster.control_blocking(from).unwrap();
    let status = || {
        control
            .run(async |client| client.handoff(id).await)
            .unwrap()
    };
    eventually("the handoff ends", || {
        status().summary.state == HandoffState::Finished
    });
    // The bytes of the last batch are told right after its outcomes.
    eventually("the times are told", || {
        let moved =
            |result: &holdfast_api::control::FlowResult| result.outcome == FlowOutcome::Moved;
        let mut results = status().results.into_iter().filter(moved);
        results.all(|result| result.freeze_us.is_some())
    });
    status()
}

fn hand_off(cluster: &Cluster, from: &str, selection: Selection, to: &str) -> HandoffStatus {
    ended(cluster, from, begin(cluster, from, selection, to))
}

/// Who owns each datagram flow, as the holder says.
fn flows(cluster: &Cluster) -> Vec<(FlowText, Option<String>)> {
    let query = FlowQuery {
        protocol: Some(Protocol::Udp),
        limit: Some(100_000),
        ..FlowQuery::default()
    };
    let control = cluster.control_blocking("n1").unwrap();
    let list = control
        .run(async |client| client.flows(&query).await)
        .unwrap();
    let entries = list.flows.into_iter().map(|entry| match entry.state {
        FlowState::Owned { owner } => (entry.flow, Some(owner)),
        FlowState::Transit { .. } => (entry.flow, None),
    });
    entries.collect()
}

fn owner(cluster: &Cluster, flow: FlowText) -> Option<String> {
    let mut flows = flows(cluster).into_iter();
    flows.find(|(other, _)| *other == flow)?.1
}

/// The nodes that own flows of the load.
fn owners(cluster: &Cluster, load: &Datagrams) -> BTreeSet<String> {
    let flows = flows(cluster).into_iter();
    let ours = flows.filter(|(flow, _)| load.flows.contains(flow));
    ours.filter_map(|(_, owner)| owner).collect()
}

/// How many flows of the load a node owns.
fn owners_now(cluster: &Cluster, load: &Datagrams, node: &str) -> usize {
    let flows = flows(cluster).into_iter();
    let ours = flows.filter(|(flow, _)| load.flows.contains(flow));
    ours.filter(|(_, owner)| owner.as_deref() == Some(node))
        .count()
}

fn serves(cluster: &Cluster, node: &str, pool: &str) -> bool {
    let control = cluster.control_blocking(node).unwrap();
    let status = control.run(async |client| client.status().await).unwrap();
    let mut pools = status.programs.iter().flat_map(|program| &program.pools);
    pools.any(|other| other == pool)
}

fn session(cluster: &Cluster, node: &str) -> Channel {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    let channel = Channel::connect(cluster.run_file(node, "app.sock").unwrap()).unwrap();
    set_socket_timeout(&channel, Timeout::Recv, Some(PATIENCE)).unwrap();
    let name = "strange".to_owned();
    say(&channel, &ToDaemon::Open { name });
    assert!(matches!(hear(&channel), FromDaemon::Opened { .. }));
    channel
}

fn say(channel: &Channel, message: &ToDaemon) {
    channel.send(&encode(message).unwrap(), &[]).unwrap();
}

fn hear(channel: &Channel) -> FromDaemon {
    let packet = channel.receive().unwrap().expect("a message");
    decode(&packet.bytes).unwrap()
}

/// What a client knows.
struct Client {
    sent: AtomicU64,
    /// Answers to each number.
    answers: Vec<AtomicU8>,
    answered: AtomicU64,
    /// Answers that came after a later one.
    overtaken: AtomicU64,
}

/// Clients that send numbered datagrams all the time.
struct Datagrams {
    flows: Vec<FlowText>,
    clients: Arc<Vec<Client>>,
    stop: Arc<AtomicBool>,
    finish: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Datagrams {
    fn start(cluster: &Cluster, family: Family, count: usize) -> Self {
        let service = SocketAddr::new(cluster.service_address(family), PORT);
        let sockets: Vec<_> = (0..count)
            .map(|_| Arc::new(client(cluster, service)))
            .collect();
        let flow = |socket: &Arc<UdpSocket>| {
            FlowText::new(Protocol::Udp, service, socket.local_addr().unwrap()).unwrap()
        };
        let empty = |_: &Arc<UdpSocket>| Client {
            sent: AtomicU64::new(0),
            answers: (0..NUMBERS).map(|_| AtomicU8::new(0)).collect(),
            answered: AtomicU64::new(0),
            overtaken: AtomicU64::new(0),
        };
        let clients: Arc<Vec<Client>> = Arc::new(sockets.iter().map(empty).collect());
        let (stop, finish) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicBool::new(false)),
        );
        let mut threads = Vec::new();
        for (number, socket) in sockets.iter().cloned().enumerate() {
            let (clients, finish) = (clients.clone(), finish.clone());
            threads.push(std::thread::spawn(move || {
                receive(&socket, number, &clients[number], &finish);
            }));
        }
        let flows = sockets.iter().map(flow).collect();
        threads.push(std::thread::spawn({
            let (clients, stop) = (clients.clone(), stop.clone());
            move || send(&sockets, &clients, &stop)
        }));
        Self {
            flows,
            clients,
            stop,
            finish,
            threads,
        }
    }

    fn flow(&self, client: usize) -> FlowText {
        self.flows[client]
    }

    fn sent(&self, client: usize) -> u64 {
        self.clients[client].sent.load(Ordering::Relaxed)
    }

    /// Waits until every client has had answers to what it sent from now on.
    fn all_answered_again(&self) {
        let sent: Vec<usize> = (0..self.clients.len())
            .map(|client| self.sent(client) as usize)
            .collect();
        eventually("all are answered", || {
            let mut clients = self.clients.iter().zip(&sent);
            clients.all(|(client, sent)| {
                let later = client.answers[*sent..].iter();
                later
                    .take(100)
                    .any(|answers| answers.load(Ordering::Relaxed) > 0)
            })
        });
    }

    /// Stops, and counts what has not exactly one answer.
    fn end(self, name: &str) -> Counts {
        self.stop.store(true, Ordering::Relaxed);
        let total: u64 = (0..self.clients.len())
            .map(|client| self.sent(client))
            .sum();
        let answered = || -> u64 {
            let clients = self.clients.iter();
            clients
                .map(|client| client.answered.load(Ordering::Relaxed))
                .sum()
        };
        // What is lost does not come: no need to wait longer once nothing comes any more.
        let mut last = (answered(), Instant::now());
        while answered() < total && last.1.elapsed() < Duration::from_secs(3) {
            if answered() > last.0 {
                last = (answered(), Instant::now());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.finish.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("every answer is to something sent");
        }
        let mut counts = Counts {
            total,
            ..Counts::default()
        };
        for (number, client) in self.clients.iter().enumerate() {
            let sent = client.sent.load(Ordering::Relaxed) as usize;
            for (turn, answers) in client.answers[..sent].iter().enumerate() {
                match u64::from(answers.load(Ordering::Relaxed)) {
                    0 => counts.lost.push((number, turn)),
                    more => counts.doubled += more - 1,
                }
            }
            counts.overtaken += client.overtaken.load(Ordering::Relaxed);
        }
        let Counts {
            total,
            doubled,
            overtaken,
            ..
        } = counts;
        let lost = counts.lost.len();
        eprintln!(
            "{name}: {total} datagrams: {lost} lost, {doubled} doubled, {overtaken} overtaken"
        );
        counts
    }
}

/// What became of the datagrams.
#[derive(Debug, Default)]
struct Counts {
    total: u64,
    /// Which had no answer, by client.
    lost: Vec<(usize, usize)>,
    /// Answers beyond the first.
    doubled: u64,
    /// Answers that came after a later one.
    overtaken: u64,
}

fn send(sockets: &[Arc<UdpSocket>], clients: &[Client], stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        for (number, (socket, client)) in sockets.iter().zip(clients).enumerate() {
            let next = client.sent.load(Ordering::Relaxed);
            assert!((next as usize) < NUMBERS, "the test takes too long");
            // Counted first: the answer may be faster than the count.
            client.sent.store(next + 1, Ordering::Relaxed);
            socket.send(&datagram(number, next)).unwrap();
        }
        std::thread::sleep(INTERVAL);
    }
}

fn receive(socket: &UdpSocket, number: usize, client: &Client, finish: &AtomicBool) {
    socket
        .set_read_timeout(Some(Duration::from_millis(50)))
        .unwrap();
    let mut buffer = [0; 2 * SIZE];
    let mut latest = 0;
    while !finish.load(Ordering::Relaxed) {
        let Ok(length) = socket.recv(&mut buffer) else {
            continue;
        };
        let turn = u64::from_be_bytes(buffer[..8].try_into().unwrap());
        assert_eq!(buffer[..length], datagram(number, turn)[..]);
        assert!(turn < client.sent.load(Ordering::Relaxed));
        client.answers[turn as usize].fetch_add(1, Ordering::Relaxed);
        client.answered.fetch_add(1, Ordering::Relaxed);
        client
            .overtaken
            .fetch_add(u64::from(turn < latest), Ordering::Relaxed);
        latest = latest.max(turn);
    }
}

/// Bytes that no other datagram has.
fn datagram(client: usize, turn: u64) -> [u8; SIZE] {
    let mut bytes = [client as u8; SIZE];
    bytes[..8].copy_from_slice(&turn.to_be_bytes());
    for (at, byte) in bytes[8..].iter_mut().enumerate() {
        *byte = byte.wrapping_add((turn as u8).wrapping_mul(at as u8));
    }
    bytes
}
