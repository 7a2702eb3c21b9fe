//! Servers that send their node's number, then echo.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::host::Host;
use super::lab::eventually;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Default)]
struct ServerState {
    stop: AtomicBool,
    accepted: Mutex<Vec<TcpStream>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl ServerState {
    fn spawn(&self, work: impl FnOnce() + Send + 'static) {
        self.threads
            .lock()
            .expect("lock")
            .push(std::thread::spawn(work));
    }
}

/// The servers of a node, ended when dropped.
#[derive(Default)]
pub struct Server {
    shared: Arc<ServerState>,
}

impl Server {
    /// Starts a TCP server: the first byte sent is `node`, then all received bytes are echoed.
    pub fn start_tcp(&self, host: &Host, address: SocketAddr, node: u8) {
        let shared = Arc::clone(&self.shared);
        host.run(|| {
            let listener = TcpListener::bind(address).expect("listen");
            listener.set_nonblocking(true).expect("nonblocking");
            let own = Arc::clone(&shared);
            shared.spawn(move || accept_loop(&listener, &own, node));
        });
    }

    /// Starts a UDP server: each datagram is returned after one byte, `node`.
    pub fn start_udp(&self, host: &Host, address: SocketAddr, node: u8) {
        let shared = Arc::clone(&self.shared);
        host.run(|| {
            let socket = UdpSocket::bind(address).expect("bind");
            socket
                .set_read_timeout(Some(POLL_INTERVAL))
                .expect("timeout");
            let own = Arc::clone(&shared);
            shared.spawn(move || answer_loop(&socket, &own, node));
        });
    }

    /// Ends the servers: nothing listens afterwards.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // The shutdown wakes a thread that waits to write.
        if let Ok(mut accepted) = self.shared.accepted.lock() {
            for stream in accepted.drain(..) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        // An acceptor may start one more thread before it ends.
        loop {
            let next = self
                .shared
                .threads
                .lock()
                .map_or(None, |mut threads| threads.pop());
            let Some(thread) = next else { break };
            let _ = thread.join();
        }
    }

    /// Returns the server's end of the connection from `client`.
    pub fn connection(&self, client: SocketAddr) -> TcpStream {
        let accepted = self.shared.accepted.lock().expect("lock");
        let of_client = |stream: &&TcpStream| stream.peer_addr().ok() == Some(client);
        let found = accepted.iter().find(of_client).expect("accepted here");
        found.try_clone().expect("clone")
    }

    /// Waits until `client` has acknowledged all sent data: a late acknowledgement would be held ahead of the client's
    /// data.
    pub fn wait_until_acknowledged(&self, client: SocketAddr) {
        let connection = self.connection(client);
        eventually("all acknowledged", || {
            queued_bytes(&connection, libc::TIOCOUTQ) == 0
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the number of bytes that TCP has accepted and not sent.
pub fn unsent_bytes(socket: &impl AsRawFd) -> i32 {
    const SIOCOUTQNSD: libc::c_ulong = 0x894b;
    queued_bytes(socket, SIOCOUTQNSD)
}

/// Returns the number of bytes in a queue of a socket.
fn queued_bytes(socket: &impl AsRawFd, request: libc::c_ulong) -> i32 {
    let mut bytes = 0i32;
    // SAFETY: the requests used here write one int.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw mut bytes) };
    assert_eq!(
        result,
        0,
        "ioctl {request:#x}: {}",
        std::io::Error::last_os_error()
    );
    bytes
}

fn accept_loop(listener: &TcpListener, shared: &Arc<ServerState>, node: u8) {
    while !shared.stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => {
                let clone = stream.try_clone().expect("clone");
                shared.accepted.lock().expect("lock").push(clone);
                let own = Arc::clone(shared);
                shared.spawn(move || echo_loop(stream, &own, node));
            }
            Err(_) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

fn echo_loop(mut stream: TcpStream, shared: &ServerState, node: u8) {
    stream.set_nonblocking(false).expect("blocking");
    stream.set_nodelay(true).expect("no delay");
    stream
        .set_read_timeout(Some(POLL_INTERVAL))
        .expect("timeout");
    let mut buffer = vec![0; 65536];
    let mut alive = stream.write_all(&[node]).is_ok();
    while alive && !shared.stop.load(Ordering::Relaxed) {
        alive = match stream.read(&mut buffer) {
            Ok(0) => false,
            Ok(length) => stream.write_all(&buffer[..length]).is_ok(),
            Err(e) => matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
        };
    }
    let peer = stream.peer_addr().ok();
    shared
        .accepted
        .lock()
        .expect("lock")
        .retain(|other| other.peer_addr().ok() != peer);
}

fn answer_loop(socket: &UdpSocket, shared: &ServerState, node: u8) {
    let mut buffer = vec![0; 65536];
    while !shared.stop.load(Ordering::Relaxed) {
        if let Ok((length, client)) = socket.recv_from(&mut buffer[1..]) {
            buffer[0] = node;
            // The network may lose an answer; the test repeats its request.
            let _ = socket.send_to(&buffer[..=length], client);
        }
    }
}
