//! Clients that send numbered datagrams all the time, and count the answers to each.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use holdfast_api::{FlowText, Protocol};
use holdfast_testbed::cluster::{Cluster, IpFamily};

use crate::common::{PORT, eventually};

/// Largest number of datagrams of a client.
const NUMBERS_MAX: usize = 20_000;
/// Interval between two datagrams of a client.
const INTERVAL: Duration = Duration::from_millis(10);
/// Largest number of unanswered datagrams of a client. The unanswered datagrams of all clients fit into the server's
/// socket buffer, however long its program is stopped.
const UNANSWERED_MAX: u64 = 4;
/// Age after which an unanswered datagram may be lost, and does not delay the next one.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(1);
/// Size of a datagram in bytes.
const DATAGRAM_BYTES: usize = 200;

/// Opens a client's socket, connected to a service.
pub fn client_socket(cluster: &Cluster, service: SocketAddr) -> UdpSocket {
    let any: SocketAddr = match service {
        SocketAddr::V4(_) => "0.0.0.0:0".parse().unwrap(),
        SocketAddr::V6(_) => "[::]:0".parse().unwrap(),
    };
    let open = || {
        let socket = UdpSocket::bind(any)?;
        socket.connect(service)?;
        std::io::Result::Ok(socket)
    };
    cluster
        .lab()
        .run_in_net_namespace("c1", open)
        .unwrap()
        .unwrap()
}

/// Counters of one client.
struct ClientCounters {
    sent: AtomicU64,
    /// Number of answers to each datagram.
    answers: Vec<AtomicU8>,
    /// Number of datagrams with an answer.
    answered: AtomicU64,
    /// Number of answers that arrived after the answer to a later datagram.
    out_of_order: AtomicU64,
}

/// Clients that send numbered datagrams all the time.
pub struct DatagramLoad {
    pub flows: Vec<FlowText>,
    clients: Arc<Vec<ClientCounters>>,
    stop: Arc<AtomicBool>,
    finish: Arc<AtomicBool>,
    sender: JoinHandle<()>,
    receivers: Vec<JoinHandle<()>>,
}

impl DatagramLoad {
    pub fn start(cluster: &Cluster, family: IpFamily, count: usize) -> Self {
        let service = SocketAddr::new(cluster.service_address(family), PORT);
        let sockets: Vec<_> = (0..count)
            .map(|_| Arc::new(client_socket(cluster, service)))
            .collect();
        let flow = |socket: &Arc<UdpSocket>| {
            FlowText::new(Protocol::Udp, service, socket.local_addr().unwrap()).unwrap()
        };
        let empty = |_: &Arc<UdpSocket>| ClientCounters {
            sent: AtomicU64::new(0),
            answers: (0..NUMBERS_MAX).map(|_| AtomicU8::new(0)).collect(),
            answered: AtomicU64::new(0),
            out_of_order: AtomicU64::new(0),
        };
        let clients: Arc<Vec<ClientCounters>> = Arc::new(sockets.iter().map(empty).collect());
        let (stop, finish) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicBool::new(false)),
        );
        let mut receivers = Vec::new();
        for (number, socket) in sockets.iter().cloned().enumerate() {
            let (clients, finish) = (clients.clone(), finish.clone());
            receivers.push(std::thread::spawn(move || {
                receive_loop(&socket, number, &clients[number], &finish);
            }));
        }
        let flows = sockets.iter().map(flow).collect();
        let sender = std::thread::spawn({
            let (clients, stop) = (clients.clone(), stop.clone());
            move || send_loop(&sockets, &clients, &stop)
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

    pub fn sent_count(&self, client: usize) -> u64 {
        self.clients[client].sent.load(Ordering::Relaxed)
    }

    /// Waits until every client has an answer to a datagram sent after this call.
    pub fn wait_until_all_answered(&self) {
        let sent: Vec<usize> = (0..self.clients.len())
            .map(|client| self.sent_count(client) as usize)
            .collect();
        eventually("all clients get answers", || {
            let mut clients = self.clients.iter().zip(&sent);
            clients.all(|(client, sent)| {
                let later_answers = client.answers[*sent..].iter();
                later_answers
                    .take(100)
                    .any(|answers| answers.load(Ordering::Relaxed) > 0)
            })
        });
    }

    /// Stops the load, and counts the datagrams without exactly one answer.
    pub fn finish(self, name: &str) -> DatagramCounts {
        self.stop.store(true, Ordering::Relaxed);
        self.sender.join().expect("all datagrams were sent");
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
            receiver
                .join()
                .expect("every answer matches a datagram sent");
        }
        let mut counts = DatagramCounts {
            total,
            ..DatagramCounts::default()
        };
        for (number, client) in self.clients.iter().enumerate() {
            let sent = client.sent.load(Ordering::Relaxed) as usize;
            for (datagram_number, answers) in client.answers[..sent].iter().enumerate() {
                match u64::from(answers.load(Ordering::Relaxed)) {
                    0 => counts.lost.push((number, datagram_number)),
                    more => counts.duplicated += more - 1,
                }
            }
            counts.out_of_order += client.out_of_order.load(Ordering::Relaxed);
        }
        let DatagramCounts {
            total,
            duplicated: doubled,
            out_of_order: overtaken,
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
pub struct DatagramCounts {
    pub total: u64,
    /// Datagrams without an answer, as pairs of client and number.
    pub lost: Vec<(usize, usize)>,
    /// Number of answers beyond the first.
    pub duplicated: u64,
    /// Number of answers that arrived after the answer to a later datagram.
    pub out_of_order: u64,
}

fn send_loop(sockets: &[Arc<UdpSocket>], clients: &[ClientCounters], stop: &AtomicBool) {
    let mut last = vec![Instant::now(); clients.len()];
    while !stop.load(Ordering::Relaxed) {
        for (number, (socket, client)) in sockets.iter().zip(clients).enumerate() {
            let next = client.sent.load(Ordering::Relaxed);
            let unanswered = next - client.answered.load(Ordering::Relaxed);
            if unanswered >= UNANSWERED_MAX && last[number].elapsed() < ANSWER_TIME_MAX {
                continue;
            }
            last[number] = Instant::now();
            assert!((next as usize) < NUMBERS_MAX, "the test takes too long");
            // Counted before sending, because the answer may arrive before a later count.
            client.sent.store(next + 1, Ordering::Relaxed);
            socket.send(&datagram_bytes(number, next)).unwrap();
        }
        std::thread::sleep(INTERVAL);
    }
}

fn receive_loop(socket: &UdpSocket, number: usize, client: &ClientCounters, finish: &AtomicBool) {
    socket
        .set_read_timeout(Some(Duration::from_millis(50)))
        .unwrap();
    let mut buffer = [0; 2 * DATAGRAM_BYTES];
    let mut latest = 0;
    while !finish.load(Ordering::Relaxed) {
        let Ok(length) = socket.recv(&mut buffer) else {
            continue;
        };
        let number_in_answer = u64::from_be_bytes(buffer[..8].try_into().unwrap());
        assert_eq!(
            buffer[..length],
            datagram_bytes(number, number_in_answer)[..]
        );
        assert!(number_in_answer < client.sent.load(Ordering::Relaxed));
        let before = client.answers[number_in_answer as usize].fetch_add(1, Ordering::Relaxed);
        client
            .answered
            .fetch_add(u64::from(before == 0), Ordering::Relaxed);
        client
            .out_of_order
            .fetch_add(u64::from(number_in_answer < latest), Ordering::Relaxed);
        latest = latest.max(number_in_answer);
    }
}

/// Returns the content of a datagram, different for each datagram.
fn datagram_bytes(client: usize, number: u64) -> [u8; DATAGRAM_BYTES] {
    let mut bytes = [client as u8; DATAGRAM_BYTES];
    bytes[..8].copy_from_slice(&number.to_be_bytes());
    for (at, byte) in bytes[8..].iter_mut().enumerate() {
        *byte = byte.wrapping_add((number as u8).wrapping_mul(at as u8));
    }
    bytes
}
