//! Clients that send numbered datagrams all the time, and count the answers to each.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use holdfast_api::{FlowText, Protocol};
use holdfast_bench::cluster::{Cluster, Family};

use crate::common::{PORT, eventually};

/// Largest number of datagrams of a client.
const NUMBERS: usize = 20_000;
/// Interval between two datagrams of a client.
const INTERVAL: Duration = Duration::from_millis(10);
/// Largest number of unanswered datagrams of a client. The unanswered datagrams of all clients fit into the server's
/// socket buffer, however long its program is stopped.
const WAITING_MAX: u64 = 4;
/// Age after which an unanswered datagram may be lost, and does not delay the next one.
const LOST_AFTER: Duration = Duration::from_secs(1);
/// Size of a datagram in bytes.
const SIZE: usize = 200;

/// Opens a client's socket, connected to a service.
pub fn client(cluster: &Cluster, service: SocketAddr) -> UdpSocket {
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

/// Counters of one client.
struct Client {
    sent: AtomicU64,
    /// Number of answers to each datagram.
    answers: Vec<AtomicU8>,
    /// Number of datagrams with an answer.
    answered: AtomicU64,
    /// Number of answers that arrived after the answer to a later datagram.
    overtaken: AtomicU64,
}

/// Clients that send numbered datagrams all the time.
pub struct Datagrams {
    pub flows: Vec<FlowText>,
    clients: Arc<Vec<Client>>,
    stop: Arc<AtomicBool>,
    finish: Arc<AtomicBool>,
    sender: JoinHandle<()>,
    receivers: Vec<JoinHandle<()>>,
}

impl Datagrams {
    pub fn start(cluster: &Cluster, family: Family, count: usize) -> Self {
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
        let mut receivers = Vec::new();
        for (number, socket) in sockets.iter().cloned().enumerate() {
            let (clients, finish) = (clients.clone(), finish.clone());
            receivers.push(std::thread::spawn(move || {
                receive(&socket, number, &clients[number], &finish);
            }));
        }
        let flows = sockets.iter().map(flow).collect();
        let sender = std::thread::spawn({
            let (clients, stop) = (clients.clone(), stop.clone());
            move || send(&sockets, &clients, &stop)
        });
        Self {
            flows,
            clients,
            stop,
            finish,
            sender,
            receivers,
        }
    }

    pub fn flow(&self, client: usize) -> FlowText {
        self.flows[client]
    }

    pub fn sent(&self, client: usize) -> u64 {
        self.clients[client].sent.load(Ordering::Relaxed)
    }

    /// Waits until every client has an answer to a datagram sent after this call.
    pub fn all_answered_again(&self) {
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

    /// Stops the load, and counts the datagrams without exactly one answer.
    pub fn end(self, name: &str) -> Counts {
        self.stop.store(true, Ordering::Relaxed);
        self.sender.join().expect("everything was sent");
        let clients = self.clients.iter();
        let total: u64 = clients
            .map(|client| client.sent.load(Ordering::Relaxed))
            .sum();
        let answered = || -> u64 {
            let clients = self.clients.iter();
            clients
                .map(|client| client.answered.load(Ordering::Relaxed))
                .sum()
        };
        // Lost datagrams get no answer, so the wait ends after 3 s without any answer.
        let mut last = (answered(), Instant::now());
        while answered() < total && last.1.elapsed() < Duration::from_secs(3) {
            if answered() > last.0 {
                last = (answered(), Instant::now());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.finish.store(true, Ordering::Relaxed);
        for receiver in self.receivers {
            receiver.join().expect("every answer is to something sent");
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

/// Counts of the results of all datagrams.
#[derive(Debug, Default)]
pub struct Counts {
    pub total: u64,
    /// Datagrams without an answer, as pairs of client and number.
    pub lost: Vec<(usize, usize)>,
    /// Number of answers beyond the first.
    pub doubled: u64,
    /// Number of answers that arrived after the answer to a later datagram.
    pub overtaken: u64,
}

fn send(sockets: &[Arc<UdpSocket>], clients: &[Client], stop: &AtomicBool) {
    let mut last = vec![Instant::now(); clients.len()];
    while !stop.load(Ordering::Relaxed) {
        for (number, (socket, client)) in sockets.iter().zip(clients).enumerate() {
            let next = client.sent.load(Ordering::Relaxed);
            let waiting = next - client.answered.load(Ordering::Relaxed);
            if waiting >= WAITING_MAX && last[number].elapsed() < LOST_AFTER {
                continue;
            }
            last[number] = Instant::now();
            assert!((next as usize) < NUMBERS, "the test takes too long");
            // Counted before sending, because the answer may arrive before a later count.
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
        let before = client.answers[turn as usize].fetch_add(1, Ordering::Relaxed);
        client
            .answered
            .fetch_add(u64::from(before == 0), Ordering::Relaxed);
        client
            .overtaken
            .fetch_add(u64::from(turn < latest), Ordering::Relaxed);
        latest = latest.max(turn);
    }
}

/// Returns the content of a datagram, different for each datagram.
fn datagram(client: usize, turn: u64) -> [u8; SIZE] {
    let mut bytes = [client as u8; SIZE];
    bytes[..8].copy_from_slice(&turn.to_be_bytes());
    for (at, byte) in bytes[8..].iter_mut().enumerate() {
        *byte = byte.wrapping_add((turn as u8).wrapping_mul(at as u8));
    }
    bytes
}
