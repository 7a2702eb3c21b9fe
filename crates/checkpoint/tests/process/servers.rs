//! Servers move with their sockets; their clients, on another host, notice only a pause.

use crate::migration::{self, Host};
use crate::program::Program;
use holdfast_lab::testing::{
    RouteTarget, SERVICE_V4, SERVICE_V6, TestNetwork, WAIT_LIMIT, pattern, wait_for,
};
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const ECHO_PORT: u16 = 8080;
const LATE_READER_PORT: u16 = 8081;
const DATAGRAM_PORTS: [u16; 2] = [9090, 9091];
/// Number of connections of each family.
const CONNECTIONS: usize = 8;

#[test]
fn server_moves_with_its_connections() {
    let net = Arc::new(TestNetwork::new());
    let [here, there] = server_hosts(&net);
    let addresses = [SERVICE_V4.to_string(), SERVICE_V6.to_string()];
    let program = net
        .a
        .run(|| Program::start_with("server", &[&addresses[0], &addresses[1]]));
    let clients = BackgroundClients::start(&net);
    let late_readers = net.client.run(LateReaderClient::start);
    let moved = migration::migrate(program.tree(&here), &there).expect("moves");
    program.assert_runs_on();
    clients.assert_all_progress();
    let back = migration::migrate(moved, &here).expect("moves back");
    program.assert_runs_on();
    clients.assert_all_progress();
    program.create_file("read");
    late_readers
        .into_iter()
        .for_each(LateReaderClient::assert_all_received);
    clients.stop_all();
    // A new client of the listener after its two moves.
    net.client
        .run(|| EchoClient::start(SERVICE_V4.into()).exchange());
    program.assert_good_verdict(back);
}

/// A move that is abandoned at any step leaves all connections as they were.
#[test]
fn connections_survive_rollback_at_each_step() {
    let net = Arc::new(TestNetwork::new());
    let [here, there] = server_hosts(&net);
    let addresses = [SERVICE_V4.to_string(), SERVICE_V6.to_string()];
    let program = net
        .a
        .run(|| Program::start_with("server", &[&addresses[0], &addresses[1]]));
    let clients = BackgroundClients::start(&net);
    for step in migration::MoveStep::BEFORE_COMMIT {
        let tree = program.tree(&here);
        let there = there.clone();
        let moving = move || {
            let (tree, partial_move) =
                migration::migrate_until(tree, &there, step).expect("reaches the step");
            drop(partial_move);
            tree
        };
        let tree = std::thread::spawn(moving).join().expect("a thread");
        net.route(RouteTarget::A);
        program.assert_runs_on();
        clients.assert_all_progress();
        assert!(
            !tree.has_traces(),
            "traces of the move are left after {step:?}"
        );
    }
    clients.stop_all();
    let tree = program.tree(&here);
    program.assert_good_verdict(tree);
}

/// Datagrams that arrived before a move, and were not read, can be read after two moves.
#[test]
fn unread_datagrams_move() {
    let net = Arc::new(TestNetwork::new());
    let [here, there] = server_hosts(&net);
    let addresses = [SERVICE_V4.to_string(), SERVICE_V6.to_string()];
    let program = net
        .a
        .run(|| Program::start_with("unread_datagrams", &[&addresses[0], &addresses[1]]));
    net.client.run(|| {
        send_datagrams(SERVICE_V4.into(), "0.0.0.0:0");
        send_datagrams(SERVICE_V6.into(), "[::]:0");
    });
    wait_for("datagrams at both sockets", || {
        program.has_written("peeked")
    });
    let moved = migration::migrate(program.tree(&here), &there).expect("moves");
    program.assert_runs_on();
    let back = migration::migrate(moved, &here).expect("moves back");
    program.assert_runs_on();
    program.assert_good_verdict(back);
}

/// Sends datagrams from two sockets in turn; each contains its source port and its number.
fn send_datagrams(to: IpAddr, from: &str) {
    let sockets = [(); 2].map(|()| UdpSocket::bind(from).expect("bound"));
    for number in 0..40usize {
        let socket = &sockets[number % 2];
        let port = socket.local_addr().expect("an address").port();
        let mut text = format!("{port} {number} ").into_bytes();
        text.resize(20, b' ');
        text.resize(20 + 37 * number, b'a' + (number % 26) as u8);
        socket
            .send_to(&text, (to, DATAGRAM_PORTS[0]))
            .expect("sent");
    }
}

/// Returns both servers of a net as hosts; packets reach the host that has the tree.
pub fn server_hosts(net: &Arc<TestNetwork>) -> [Host; 2] {
    let [to_a, to_b] = [RouteTarget::A, RouteTarget::B].map(|to| {
        let net = Arc::clone(net);
        move |open: bool| net.route(if open { to } else { RouteTarget::Unreachable })
    });
    [
        net.a.run(Host::local).with_packet_director(to_a),
        net.b.run(Host::local).with_packet_director(to_b),
    ]
}

/// A connection to the echo server.
struct EchoClient {
    stream: TcpStream,
    round: u32,
}

impl EchoClient {
    fn start(address: IpAddr) -> Self {
        let stream = TcpStream::connect((address, ECHO_PORT)).expect("connects");
        stream.set_read_timeout(Some(WAIT_LIMIT)).expect("timeout");
        stream.set_nodelay(true).expect("no delay");
        Self { stream, round: 0 }
    }

    fn exchange(&mut self) {
        self.round += 1;
        let text = pattern(self.round, 100 + self.round as usize % 1000);
        self.stream.write_all(&text).expect("written");
        let mut answer = vec![0; text.len()];
        self.stream.read_exact(&mut answer).expect("answered");
        assert!(answer == text, "bytes changed in transit");
    }
}

/// Clients that send all the time.
struct BackgroundClients {
    stop: Arc<AtomicBool>,
    round_counts: Vec<Arc<AtomicU64>>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl BackgroundClients {
    fn start(net: &TestNetwork) -> Self {
        let mut clients = Self {
            stop: Arc::default(),
            round_counts: Vec::new(),
            threads: Vec::new(),
        };
        net.client.run(|| {
            for address in [IpAddr::from(SERVICE_V4), SERVICE_V6.into()] {
                for _ in 0..CONNECTIONS {
                    let mut echo = EchoClient::start(address);
                    clients.spawn(move || echo.exchange());
                }
                for port in DATAGRAM_PORTS {
                    let mut client = DatagramClient::start((address, port).into());
                    clients.spawn(move || client.ask());
                }
            }
        });
        clients
    }

    fn spawn(&mut self, mut exchange: impl FnMut() + Send + 'static) {
        let (stop, turns) = (Arc::clone(&self.stop), Arc::new(AtomicU64::new(0)));
        self.round_counts.push(Arc::clone(&turns));
        self.threads.push(std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                exchange();
                turns.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        }));
    }

    fn assert_all_progress(&self) {
        let counts = || {
            self.round_counts
                .iter()
                .map(|turns| turns.load(Ordering::Relaxed))
        };
        let before: Vec<u64> = counts().collect();
        wait_for("every client to continue", || {
            counts().zip(&before).all(|(now, before)| now > before + 2)
        });
    }

    fn stop_all(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("a client without errors");
        }
    }
}

/// A client that repeats its datagrams until they are answered, since datagrams may be lost.
struct DatagramClient {
    socket: UdpSocket,
    server: SocketAddr,
    round: u64,
}

impl DatagramClient {
    fn start(server: SocketAddr) -> Self {
        let any: IpAddr = match server {
            SocketAddr::V4(_) => [0; 4].into(),
            SocketAddr::V6(_) => [0; 16].into(),
        };
        let socket = UdpSocket::bind((any, 0)).expect("bound");
        let timeout = Duration::from_millis(100);
        socket.set_read_timeout(Some(timeout)).expect("timeout");
        Self {
            socket,
            server,
            round: 0,
        }
    }

    fn ask(&mut self) {
        self.round += 1;
        wait_for("an answer", || {
            // While no host has the server, a router may report an error.
            let _ = self.socket.send_to(&self.round.to_ne_bytes(), self.server);
            let mut answer = [0; 8];
            // A server socket bound to no address may answer from the host's own address, so the source is not checked.
            let received = self.socket.recv(&mut answer);
            received.is_ok_and(|length| length == 8) && answer == self.round.to_ne_bytes()
        });
    }
}

/// A connection with a server that reads late: the client's data and its FIN stay queued during all moves.
struct LateReaderClient {
    stream: TcpStream,
    sent: Vec<u8>,
}

impl LateReaderClient {
    fn start() -> Vec<Self> {
        let addresses = [IpAddr::from(SERVICE_V4), SERVICE_V6.into()];
        let all = addresses.iter().zip(1..);
        all.map(|(address, seed)| {
            let mut stream = TcpStream::connect((*address, LATE_READER_PORT)).expect("connects");
            stream.set_read_timeout(Some(WAIT_LIMIT)).expect("timeout");
            let sent = pattern(seed, 20_000);
            stream.write_all(&sent).expect("written");
            stream.shutdown(Shutdown::Write).expect("shut");
            Self { stream, sent }
        })
        .collect()
    }

    fn assert_all_received(mut self) {
        let mut answer = Vec::new();
        self.stream.read_to_end(&mut answer).expect("answered");
        assert!(answer == self.sent, "bytes changed in transit");
    }
}
