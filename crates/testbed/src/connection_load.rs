//! Connections that exchange small messages with a server all the time, and verify every byte.

mod event_loop;

use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use holdfast_lab::Lab;

use crate::longest_waits::LongestWaits;

/// Bytes of a message.
pub const MESSAGE_BYTES: usize = 256;

/// Time without an answer after which a connection counts as hung.
pub const HANG_TIMEOUT: Duration = Duration::from_secs(20);

/// Number of connections from which each exchanges 2 messages per second instead of 20.
const SLOW_LOAD_CONNECTIONS: usize = 5_000;

/// Returns the time between two messages of a connection, by the number of connections.
#[must_use]
pub fn message_interval(connections: usize) -> Duration {
    Duration::from_millis(if connections >= SLOW_LOAD_CONNECTIONS {
        500
    } else {
        50
    })
}

/// Counters of the compared bytes, and the stop flag.
#[derive(Debug, Default)]
pub struct VerifiedByteCounters {
    /// Set to end the load.
    pub stop: AtomicBool,
    /// Bytes that were compared, in both directions.
    pub verified: AtomicU64,
    /// Bytes that differed or never arrived.
    pub wrong: AtomicU64,
}

impl VerifiedByteCounters {
    /// Compares an answer with the expected one of the same length.
    pub fn compare(&self, expected: &[u8], answer: &[u8]) {
        let wrong = expected.iter().zip(answer).filter(|(a, b)| a != b).count() as u64;
        self.count(expected.len(), wrong);
    }

    /// Counts an answer of `length` bytes, of which `wrong` differed.
    pub fn count(&self, length: usize, wrong: u64) {
        self.wrong.fetch_add(wrong, Ordering::Relaxed);
        self.verified
            .fetch_add(2 * length as u64, Ordering::Relaxed);
    }

    /// Counts a message that had no answer.
    pub fn count_lost(&self) {
        self.wrong
            .fetch_add(MESSAGE_BYTES as u64, Ordering::Relaxed);
    }

    /// Returns the number of bytes that differed or never arrived.
    pub fn wrong_bytes(&self) -> u64 {
        self.wrong.load(Ordering::Relaxed)
    }

    /// Returns true if the load is to end.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Opens connections from a client host of a lab.
///
/// # Errors
/// The host does not exist, or connect(2) fails.
pub fn open_connections(
    lab: &Lab,
    client: &str,
    service: SocketAddr,
    count: usize,
) -> Result<Vec<TcpStream>> {
    let open = || {
        let stream = TcpStream::connect(service)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    let streams = lab.run_in_net_namespace(client, || {
        (0..count).map(|_| open()).collect::<io::Result<Vec<_>>>()
    })?;
    streams.context("connect to the service address")
}

/// Protocol of a server that is more than an echo. Every answer must be known beforehand, to the byte.
#[derive(Clone, Copy, Debug)]
pub struct RequestProtocol {
    /// First words to the server, and the end of its answer to them.
    pub greeting: Option<(&'static str, &'static str)>,
    /// Wraps a connection's message into a request.
    pub make_request: fn(u64, &[u8; MESSAGE_BYTES]) -> Cow<'_, [u8]>,
    /// Returns the answer expected from the server.
    pub expected_answer: fn(u64, &[u8; MESSAGE_BYTES]) -> Cow<'_, [u8]>,
    /// Byte of an expected answer that stands for any byte, such as the bytes of a date. Must not be a byte of a message.
    pub any_byte: Option<u8>,
}

impl RequestProtocol {
    /// An echo: the bare message in both directions.
    pub const ECHO: Self = Self {
        greeting: None,
        make_request: |_, message| Cow::Borrowed(message),
        expected_answer: |_, message| Cow::Borrowed(message),
        any_byte: None,
    };

    /// Returns the number of bytes in which an answer differs from the expected one.
    #[must_use]
    pub fn count_wrong_bytes(&self, expected: &[u8], answer: &[u8]) -> u64 {
        let pairs = expected.iter().zip(answer);
        let wrong =
            pairs.filter(|(wanted, byte)| wanted != byte && Some(**wanted) != self.any_byte);
        (wrong.count() + expected.len().abs_diff(answer.len())) as u64
    }
}

/// One connection of a load.
#[derive(Debug)]
pub struct LoadConnection {
    /// Address of the client's end.
    pub client: SocketAddr,
    answers_received: AtomicU64,
    broken: AtomicBool,
}

impl LoadConnection {
    /// Returns the number of answers received.
    pub fn answers_received(&self) -> u64 {
        self.answers_received.load(Ordering::Relaxed)
    }

    /// Returns true if the connection ended or hung before the load did.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }
}

/// Connections driven by a thread of their own.
#[derive(Debug)]
pub struct ConnectionLoad {
    /// Counters of the load; other loads may add to them.
    pub compared: Arc<VerifiedByteCounters>,
    /// Times from the sending of a message to the end of its answer.
    pub waits: Arc<LongestWaits>,
    members: Arc<Vec<LoadConnection>>,
    thread: JoinHandle<Result<()>>,
}

impl ConnectionLoad {
    /// Starts a load on connections to an echo server. Each connection sends a message every `interval`, spread evenly,
    /// and waits for its answer.
    ///
    /// # Errors
    /// The system gives no thread, or a connection has ended.
    pub fn start(streams: Vec<TcpStream>, interval: Duration) -> Result<Self> {
        Self::start_with_protocol(streams, interval, RequestProtocol::ECHO)
    }

    /// Starts a load on connections to a server that speaks `protocol`.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with_protocol(
        streams: Vec<TcpStream>,
        interval: Duration,
        protocol: RequestProtocol,
    ) -> Result<Self> {
        if let Some(hello) = protocol.greeting {
            streams
                .iter()
                .try_for_each(|stream| exchange_greeting(stream, hello))?;
        }
        let compared = Arc::new(VerifiedByteCounters::default());
        let waits = Arc::new(LongestWaits::default());
        let member = |stream: &TcpStream| -> io::Result<LoadConnection> {
            Ok(LoadConnection {
                client: stream.local_addr()?,
                answers_received: AtomicU64::new(0),
                broken: AtomicBool::new(false),
            })
        };
        let members: Arc<Vec<_>> = Arc::new(streams.iter().map(member).collect::<io::Result<_>>()?);
        let thread = {
            let (compared, members) = (compared.clone(), members.clone());
            let waits = waits.clone();
            std::thread::Builder::new().spawn(move || {
                let watched = event_loop::WatchedLoad {
                    compared: &compared,
                    waits: &waits,
                    members: &members,
                };
                event_loop::run_load(streams, interval, protocol, watched)
            })?
        };
        Ok(Self {
            compared,
            waits,
            members,
            thread,
        })
    }

    /// Returns the connections, in the order in which they were passed in.
    pub fn connections(&self) -> &[LoadConnection] {
        &self.members
    }

    /// Returns the connections for use after the end of the load.
    #[must_use]
    pub fn shared_connections(&self) -> Arc<Vec<LoadConnection>> {
        self.members.clone()
    }

    /// Stops sending on all connections, and waits for the load's thread.
    ///
    /// # Errors
    /// The system gave the load no descriptors.
    ///
    /// # Panics
    /// The thread of the load panicked.
    pub fn stop(self) -> Result<()> {
        self.compared.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the load does not panic")
    }
}

/// Sends the first words, and reads to the end of the answer.
fn exchange_greeting(mut stream: &TcpStream, (greeting, end): (&str, &str)) -> io::Result<()> {
    stream.set_read_timeout(Some(HANG_TIMEOUT))?;
    stream.write_all(greeting.as_bytes())?;
    let mut answer = Vec::new();
    while !answer.ends_with(end.as_bytes()) {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        answer.extend(byte);
    }
    Ok(())
}

/// Fills a message with bytes that no other message has.
pub fn fill_message(message: &mut [u8; MESSAGE_BYTES], number: u64, message_number: u64) {
    let mut state = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ message_number) | 1;
    for chunk in message.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes());
    }
}
