//! Servers move with their sockets; their clients, on another host, notice only a pause.

use crate::common::{Net, PATIENCE, SERVICE_V4, SERVICE_V6, To, pattern, wait_for};
use crate::moving::{self, Host};
use crate::program::Program;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const ECHO: u16 = 8080;
const LAZY: u16 = 8081;
const DATAGRAMS: [u16; 2] = [9090, 9091];
/// Number of connections of each family.
const CONNECTIONS: usize = 8;

#[test]
fn a_server_moves_with_its_connections() {
    let net = Arc::new(Net::new());
    let [here, there] = hosts(&net);
    let addresses = [SERVICE_V4.to_string(), SERVICE_V6.to_string()];
    let program = net
        .a
        .run(|| Program::start_with("server", &[&addresses[0], &addresses[1]]));
    let clients = Clients::start(&net);
    let lazy = net.client.run(Lazy::start);
    let moved = moving::migrate(program.tree(&here), &there).expect("moves");
    program.goes_on();
    clients.all_go_on();
    let back = moving::migrate(moved, &here).expect("moves back");
    program.goes_on();
    clients.all_go_on();
    program.leave("read");
    lazy.into_iter().for_each(Lazy::ends_well);
    clients.end();
    // A new client of the listener after its two moves.
    net.client.run(|| Echo::start(SERVICE_V4.into()).exchange());
    program.ends_well(back);
}

/// A move that is abandoned at any step leaves all connections as they were.
#[test]
fn connections_go_on_after_a_rollback() {
    let net = Arc::new(Net::new());
    let [here, there] = hosts(&net);
    let addresses = [SERVICE_V4.to_string(), SERVICE_V6.to_string()];
    let program = net
        .a
        .run(|| Program::start_with("server", &[&addresses[0], &addresses[1]]));
    let clients = Clients::start(&net);
    for step in moving::Step::BEFORE_COMMIT {
        let tree = program.tree(&here);
        let there = there.clone();
        let moving = move || {
            let (tree, left) = moving::migrate_until(tree, &there, step).expect("comes so far");
            drop(left);
            tree
        };
        let tree = std::thread::spawn(moving).join().expect("a thread");
        net.route(To::A);
        program.goes_on();
        clients.all_go_on();
        assert!(!tree.has_traces(), "something is left after {step:?}");
    }
    clients.end();
    let tree = program.tree(&here);
    program.ends_well(tree);
}

/// Datagrams that arrived before a move, and were not read, can be read after two moves.
#[test]
fn unread_datagrams_move() {
    let net = Arc::new(Net::new());
    let [here, there] = hosts(&net);
    let addresses = [SERVICE_V4.to_string(), SERVICE_V6.to_string()];
    let program = net
        .a
        .run(|| Program::start_with("unread_datagrams", &[&addresses[0], &addresses[1]]));
    net.client.run(|| {
        send_datagrams(SERVICE_V4.into(), "0.0.0.0:0");
        send_datagrams(SERVICE_V6.into(), "[::]:0");
    });
    wait_for("datagrams at both sockets", || program.said("peeked"));
    let moved = moving::migrate(program.tree(&here), &there).expect("moves");
    program.goes_on();
    let back = moving::migrate(moved, &here).expect("moves back");
    program.goes_on();
    program.ends_well(back);
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
        socket.send_to(&text, (to, DATAGRAMS[0])).expect("sent");
    }
}

/// Returns both servers of a net as hosts; packets reach the host that has the tree.
pub fn hosts(net: &Arc<Net>) -> [Host; 2] {
    let [to_a, to_b] = [To::A, To::B].map(|to| {
        let net = Arc::clone(net);
        move |open: bool| net.route(if open { to } else { To::Nowhere })
    });
    [
        net.a.run(Host::own).reached_by(to_a),
        net.b.run(Host::own).reached_by(to_b),
    ]
}

/// A connection to the echo server.
struct Echo {
    stream: TcpStream,
    turn: u32,
}

impl Echo {
    fn start(address: IpAddr) -> Self {
        let stream = TcpStream::connect((address, ECHO)).expect("connects");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        stream.set_nodelay(true).expect("no delay");
        Self { stream, turn: 0 }
    }

    fn exchange(&mut self) {
        self.turn += 1;
        let text = pattern(self.turn, 100 + self.turn as usize % 1000);
        self.stream.write_all(&text).expect("written");
        let mut answer = vec![0; text.len()];
        self.stream.read_exact(&mut answer).expect("answered");
        assert!(answer == text, "bytes changed on the way");
    }
}

/// Clients that send all the time.
struct Clients {
    stop: Arc<AtomicBool>,
    turns: Vec<Arc<AtomicU64>>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Clients {
    fn start(net: &Net) -> Self {
        let mut clients = Self {
            stop: Arc::default(),
            turns: Vec::new(),
            threads: Vec::new(),
        };
        net.client.run(|| {
            for address in [IpAddr::from(SERVICE_V4), SERVICE_V6.into()] {
                for _ in 0..CONNECTIONS {
                    let mut echo = Echo::start(address);
                    clients.begin(move || echo.exchange());
                }
                for port in DATAGRAMS {
                    let mut asker = Asker::start((address, port).into());
                    clients.begin(move || asker.ask());
                }
            }
        });
        clients
    }

    fn begin(&mut self, mut turn: impl FnMut() + Send + 'static) {
        let (stop, turns) = (Arc::clone(&self.stop), Arc::new(AtomicU64::new(0)));
        self.turns.push(Arc::clone(&turns));
        self.threads.push(std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                turn();
                turns.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        }));
    }

    fn all_go_on(&self) {
        let now = || self.turns.iter().map(|turns| turns.load(Ordering::Relaxed));
        let before: Vec<u64> = now().collect();
        wait_for("every client to go on", || {
            now().zip(&before).all(|(now, before)| now > before + 2)
        });
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("a client that has seen nothing wrong");
        }
    }
}

/// A client that repeats its datagrams until they are answered, since datagrams may be lost.
struct Asker {
    socket: UdpSocket,
    server: SocketAddr,
    turn: u64,
}

impl Asker {
    fn start(server: SocketAddr) -> Self {
        let any: IpAddr = match server {
            SocketAddr::V4(_) => [0; 4].into(),
            SocketAddr::V6(_) => [0; 16].into(),
        };
        let socket = UdpSocket::bind((any, 0)).expect("bound");
        let patience = Duration::from_millis(100);
        socket.set_read_timeout(Some(patience)).expect("timeout");
        Self {
            socket,
            server,
            turn: 0,
        }
    }

    fn ask(&mut self) {
        self.turn += 1;
        wait_for("an answer", || {
            // While no host has the server, a router may report an error.
            let _ = self.socket.send_to(&self.turn.to_ne_bytes(), self.server);
            let mut answer = [0; 8];
            // A server socket bound to no address may answer from the host's own address, so the source is not checked.
            let received = self.socket.recv(&mut answer);
            received.is_ok_and(|length| length == 8) && answer == self.turn.to_ne_bytes()
        });
    }
}

/// A connection with a server that reads late: the client's data and its FIN stay queued during all moves.
struct Lazy {
    stream: TcpStream,
    said: Vec<u8>,
}

impl Lazy {
    fn start() -> Vec<Self> {
        let addresses = [IpAddr::from(SERVICE_V4), SERVICE_V6.into()];
        let all = addresses.iter().zip(1..);
        all.map(|(address, seed)| {
            let mut stream = TcpStream::connect((*address, LAZY)).expect("connects");
            stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
            let said = pattern(seed, 20_000);
            stream.write_all(&said).expect("written");
            stream.shutdown(Shutdown::Write).expect("shut");
            Self { stream, said }
        })
        .collect()
    }

    fn ends_well(mut self) {
        let mut answer = Vec::new();
        self.stream.read_to_end(&mut answer).expect("answered");
        assert!(answer == self.said, "bytes changed on the way");
    }
}
