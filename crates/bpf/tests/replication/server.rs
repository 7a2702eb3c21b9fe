//! A deterministic server: it answers each byte by another one that depends on the byte and its position.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::Host;
use super::driver::spawn_inside;

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Returns the server's answer to a byte of input at a position.
pub fn answer(byte: u8, position: u64) -> u8 {
    byte.wrapping_mul(5) ^ (position % 251) as u8
}

#[derive(Default)]
struct State {
    stop: AtomicBool,
    resets: AtomicBool,
    closes: AtomicBool,
    input_bytes: Mutex<Vec<u64>>,
    accepted: Mutex<Vec<TcpStream>>,
    /// Position of an answer that is wrong; none with `u64::MAX`.
    wrong_at: u64,
}

/// The server of one leg.
pub struct Server {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the server in a host. Its answer at the position `wrong_at` is wrong; none with `u64::MAX`.
    pub fn start(host: &Host, address: SocketAddr, wrong_at: u64) -> Self {
        let state = Arc::new(State {
            wrong_at,
            ..State::default()
        });
        let own = Arc::clone(&state);
        let listener = host.run(|| TcpListener::bind(address).expect("listen"));
        listener.set_nonblocking(true).expect("nonblocking");
        let thread = spawn_inside(host, move || accept_loop(&listener, &own));
        Self {
            state,
            thread: Some(thread),
        }
    }

    /// Returns the number of input bytes that each ended connection had.
    pub fn input_bytes(&self) -> Vec<u64> {
        self.state.input_bytes.lock().expect("lock").clone()
    }

    /// Makes the server close all connections, as the kernel does when a process is killed.
    pub fn close_connections(&self) {
        self.state.closes.store(true, Ordering::Relaxed);
    }

    /// Makes the server reset all connections, as the kernel does when a process with unread input is killed.
    pub fn reset_connections(&self) {
        self.state.resets.store(true, Ordering::Relaxed);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        for stream in self.state.accepted.lock().expect("lock").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept_loop(listener: &TcpListener, state: &Arc<State>) {
    let mut threads = Vec::new();
    while !state.stop.load(Ordering::Relaxed) {
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(POLL_INTERVAL);
            continue;
        };
        stream.set_nonblocking(false).expect("blocking");
        stream.set_nodelay(true).expect("no delay");
        stream
            .set_read_timeout(Some(Duration::from_millis(100)))
            .expect("timeout");
        let copy = stream.try_clone().expect("clone");
        state.accepted.lock().expect("lock").push(copy);
        let own = Arc::clone(state);
        threads.push(std::thread::spawn(move || answer_loop(stream, &own)));
    }
    for thread in threads {
        let _ = thread.join();
    }
}

fn answer_loop(mut stream: TcpStream, state: &State) {
    let mut buffer = vec![0; 65536];
    let mut position = 0u64;
    let flags = [&state.stop, &state.resets, &state.closes];
    while !flags.iter().any(|flag| flag.load(Ordering::Relaxed)) {
        let count = match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(_) => break,
        };
        for byte in &mut buffer[..count] {
            *byte = answer(*byte, position) ^ u8::from(position == state.wrong_at);
            position += 1;
        }
        if stream.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    state.input_bytes.lock().expect("lock").push(position);
    if state.resets.load(Ordering::Relaxed) {
        state.accepted.lock().expect("lock").clear();
        return reset(&stream);
    }
    if state.closes.load(Ordering::Relaxed) {
        state.accepted.lock().expect("lock").clear();
        return;
    }
    let _ = stream.shutdown(Shutdown::Write);
}

/// Makes the last close of the socket a reset.
fn reset(stream: &TcpStream) {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    // SAFETY: the option's value is a `linger` that outlives the call.
    let set = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of::<libc::linger>() as u32,
        )
    };
    assert_eq!(set, 0, "linger");
}
