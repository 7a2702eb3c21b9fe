//! Flooders over TCP and TLS, each at its own address.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_api::control::RegistrarCounters;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, socket};
use nix::unistd::dup;
use rand::{Rng, RngCore};

use crate::daemon::Daemon as Registrar;
use crate::group::{PoolDaemon, tcp_address, tls_address};
use crate::{resolution_request, wait_for, wait_until_resolved};

/// Number of requests of the honest user during each flood.
const REQUESTS_PER_FLOOD: usize = 10;
/// Number of connections that a flooder keeps open.
const FLOOD_CONNECTIONS: usize = 200;

#[derive(Clone, Copy, Debug, PartialEq)]
enum FloodKind {
    /// Connections without any data.
    Idle,
    /// Random bytes.
    Garbage,
    /// Messages with valid framing and no meaning.
    Meaningless,
    /// Messages sent byte by byte, with pauses.
    Slow,
    /// Requests with answers that are never read.
    UnreadAnswers,
}

/// A flood that ends when dropped.
struct Flood {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    fn start(kind: FloodKind, from: &str, to: SocketAddr) -> Flood {
        let is_over = Arc::new(AtomicBool::new(false));
        let (is_over_in_thread, from) = (
            is_over.clone(),
            format!("{from}:0").parse().expect("an address"),
        );
        let thread = std::thread::spawn(move || run_flood(kind, from, to, &is_over_in_thread));
        Flood {
            is_over,
            thread: Some(thread),
        }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Opens a connection from an address chosen by the caller.
fn connect_from(from: SocketAddr, to: SocketAddr) -> Option<TcpStream> {
    let (family, kind) = (AddressFamily::Inet, SockType::Stream);
    let socket = socket(family, kind, SockFlag::SOCK_CLOEXEC, None).ok()?;
    let number = std::os::fd::AsRawFd::as_raw_fd(&socket);
    bind(number, &SockaddrStorage::from(from)).ok()?;
    connect(number, &SockaddrStorage::from(to)).ok()?;
    let socket: OwnedFd = dup(&socket).ok()?;
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(true).ok()?;
    Some(stream)
}

fn run_flood(kind: FloodKind, from: SocketAddr, to: SocketAddr, is_over: &AtomicBool) {
    let mut random = rand::rng();
    let mut streams: Vec<TcpStream> = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        while streams.len() < FLOOD_CONNECTIONS
            && let Some(stream) = connect_from(from, to)
        {
            streams.push(stream);
        }
        streams.retain_mut(|stream| {
            let bytes = match kind {
                FloodKind::Idle => Vec::new(),
                FloodKind::Garbage => {
                    let mut bytes = vec![0; random.random_range(1..2000)];
                    random.fill_bytes(&mut bytes);
                    bytes
                }
                FloodKind::Meaningless => {
                    [random.random_range(1..9), 0, 0, 8, 9, 9, 9, 9].repeat(20)
                }
                FloodKind::Slow => vec![0],
                FloodKind::UnreadAnswers => resolution_request().repeat(20),
            };
            let result = stream.write(&bytes);
            let is_closed =
                result.is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock);
            // True if the other side has ended the connection.
            let ended = kind != FloodKind::UnreadAnswers
                && match stream.read(&mut [0; 512]) {
                    Ok(read) => read == 0,
                    Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
                };
            !is_closed && !ended
        });
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs one flood after another until the registrar has noticed each, and asserts that honest users are served during
/// each, and new users during a combination.
pub fn run_all_floods(
    registrar: &Registrar,
    users: &PoolDaemon,
    start_user: &dyn Fn() -> PoolDaemon,
) {
    let (tcp, tls) = (tcp_address(registrar), tls_address(registrar));
    type CounterOf = fn(&RegistrarCounters) -> u64;
    let floods: [(FloodKind, SocketAddr, &str, CounterOf); 8] = [
        (FloodKind::Idle, tls, "127.0.0.66", |c| {
            c.connections_refused
        }),
        (FloodKind::Idle, tcp, "127.0.0.66", |c| {
            c.associations_refused
        }),
        (FloodKind::Idle, tcp, "127.0.0.67", |c| {
            c.associations_aborted
        }),
        (FloodKind::Garbage, tls, "127.0.0.66", |c| {
            c.connections_refused
        }),
        (FloodKind::Garbage, tcp, "127.0.0.66", |c| c.malformed),
        (FloodKind::Meaningless, tcp, "127.0.0.66", |c| c.malformed),
        (FloodKind::Slow, tcp, "127.0.0.66", |c| {
            c.associations_refused
        }),
        (FloodKind::UnreadAnswers, tcp, "127.0.0.7", |c| {
            c.rate_limited
        }),
    ];
    for (kind, to, from, counter_of) in floods {
        let counters = || registrar.status().expect("a registrar").counters;
        let before = counter_of(&counters());
        let flood = Flood::start(kind, from, to);
        let what = format!("{kind:?} from {from} at {to}");
        wait_for(&format!("{what}: noticed"), || {
            (counter_of(&counters()) > before).then_some(())
        });
        for _ in 0..REQUESTS_PER_FLOOD {
            let found = users.resolve();
            let found = found.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(found.elements.len(), 1, "{what}");
        }
        drop(flood);
        println!("{what}: {:?}", counters());
    }
    let _floods = [
        Flood::start(FloodKind::Idle, "127.0.0.66", tls),
        Flood::start(FloodKind::Garbage, "127.0.0.67", tls),
        Flood::start(FloodKind::UnreadAnswers, "127.0.0.7", tcp),
    ];
    wait_until_resolved(&start_user(), "a new user during floods");
}
