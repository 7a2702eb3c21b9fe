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
use crate::group::{Pool, tcp_of, tls_of};
use crate::{is_resolved, resolution, until};

/// Number of requests of the honest user during each flood.
const ROUNDS: usize = 10;
/// Number of connections that a flooder keeps open.
const MANY: usize = 200;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Connections without any data.
    Idle,
    /// Random bytes.
    Garbage,
    /// Messages with valid framing and no meaning.
    Nonsense,
    /// Messages sent byte by byte, with pauses.
    Slow,
    /// Requests with answers that are never read.
    Questions,
}

/// A flood that ends when dropped.
struct Flood {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    fn start(kind: Kind, from: &str, to: SocketAddr) -> Flood {
        let over = Arc::new(AtomicBool::new(false));
        let (seen, from) = (
            over.clone(),
            format!("{from}:0").parse().expect("an address"),
        );
        let thread = std::thread::spawn(move || run(kind, from, to, &seen));
        Flood {
            over,
            thread: Some(thread),
        }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Opens a connection from an address chosen by the caller.
fn dial(from: SocketAddr, to: SocketAddr) -> Option<TcpStream> {
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

fn run(kind: Kind, from: SocketAddr, to: SocketAddr, over: &AtomicBool) {
    let mut random = rand::rng();
    let mut streams: Vec<TcpStream> = Vec::new();
    while !over.load(Ordering::Relaxed) {
        while streams.len() < MANY
            && let Some(stream) = dial(from, to)
        {
            streams.push(stream);
        }
        streams.retain_mut(|stream| {
            let bytes = match kind {
                Kind::Idle => Vec::new(),
                Kind::Garbage => {
                    let mut bytes = vec![0; random.random_range(1..2000)];
                    random.fill_bytes(&mut bytes);
                    bytes
                }
                Kind::Nonsense => [random.random_range(1..9), 0, 0, 8, 9, 9, 9, 9].repeat(20),
                Kind::Slow => vec![0],
                Kind::Questions => resolution().repeat(20),
            };
            let wrote = stream.write(&bytes);
            let gone = wrote.is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock);
            // True if the other side has ended the connection.
            let ended = kind != Kind::Questions
                && match stream.read(&mut [0; 512]) {
                    Ok(read) => read == 0,
                    Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
                };
            !gone && !ended
        });
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs one flood after another until the registrar has noticed each, and asserts that honest users are served during
/// each, and new users during a combination.
pub fn all(registrar: &Registrar, users: &Pool, late: &dyn Fn() -> Pool) {
    let (tcp, tls) = (tcp_of(registrar), tls_of(registrar));
    type Noticed = fn(&RegistrarCounters) -> u64;
    let floods: [(Kind, SocketAddr, &str, Noticed); 8] = [
        (Kind::Idle, tls, "127.0.0.66", |c| c.connections_refused),
        (Kind::Idle, tcp, "127.0.0.66", |c| c.associations_refused),
        (Kind::Idle, tcp, "127.0.0.67", |c| c.aborted),
        (Kind::Garbage, tls, "127.0.0.66", |c| c.connections_refused),
        (Kind::Garbage, tcp, "127.0.0.66", |c| c.malformed),
        (Kind::Nonsense, tcp, "127.0.0.66", |c| c.malformed),
        (Kind::Slow, tcp, "127.0.0.66", |c| c.associations_refused),
        (Kind::Questions, tcp, "127.0.0.7", |c| c.limited),
    ];
    for (kind, to, from, noticed) in floods {
        let counters = || registrar.status().expect("a registrar").counters;
        let before = noticed(&counters());
        let flood = Flood::start(kind, from, to);
        let what = format!("{kind:?} from {from} at {to}");
        until(&format!("{what}: noticed"), || {
            (noticed(&counters()) > before).then_some(())
        });
        for _ in 0..ROUNDS {
            let found = users.resolve();
            let found = found.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(found.elements.len(), 1, "{what}");
        }
        drop(flood);
        println!("{what}: {:?}", counters());
    }
    let _floods = [
        Flood::start(Kind::Idle, "127.0.0.66", tls),
        Flood::start(Kind::Garbage, "127.0.0.67", tls),
        Flood::start(Kind::Questions, "127.0.0.7", tcp),
    ];
    is_resolved(&late(), "somebody who comes new during floods");
}
