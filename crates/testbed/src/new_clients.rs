//! New clients at a steady rate: each connects, sends a request, waits for its answer, and ends.

mod exchange;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use holdfast_lab::Lab;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::connection_load::RequestProtocol;
use crate::longest_waits::LongestWaits;
use exchange::Exchange;

/// Descriptors for clients that wait for an answer.
const DESCRIPTORS_WANTED: u64 = 16_384;
/// Events taken at once.
const EVENTS: usize = 256;
/// Bytes taken from a socket at once.
const BUFFER_BYTES: usize = 4096;
/// Number of the first client. The connections of a load at the same server have lower numbers.
const FIRST_NUMBER: u64 = 1 << 32;
/// Shortest delay of the clients' thread that counts as a lack of CPU time. Clients missed in a shorter one are made up
/// for.
const DELAY_MIN: Duration = Duration::from_millis(20);

/// A client that has ended.
#[derive(Debug, Clone, Copy)]
pub struct EndedClient {
    /// Time at which the client began to connect.
    pub started: Instant,
    /// The client's port.
    pub port: u16,
    /// Result of the client.
    pub outcome: ClientOutcome,
    /// Time of the client's life for which its thread was ready to run and had no CPU.
    pub without_cpu: Duration,
}

/// Result of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientOutcome {
    /// The right answer came, this long after the start.
    Answered(Duration),
    /// An answer came, of which this number of bytes was wrong.
    WrongAnswer(u64),
    /// The connection was refused or reset before the handshake had ended.
    ConnectFailed(Errno),
    /// The connection was reset after the handshake.
    ExchangeFailed(Errno),
    /// The handshake had no answer.
    HandshakeUnanswered,
    /// The message had no answer.
    MessageUnanswered,
}

impl EndedClient {
    /// Returns true if the answer did not come within `limit`. A late answer is no failure if it took less than half the limit
    /// apart from the time for which this client had no CPU: a client whose SYN was lost fails in spite of a short
    /// lack of CPU.
    pub fn has_failed(&self, limit: Duration) -> bool {
        match self.outcome {
            ClientOutcome::Answered(after) => {
                after > limit && after.saturating_sub(self.without_cpu) > limit / 2
            }
            _ => true,
        }
    }

    /// Returns true if the answer came later than `limit` only because the client had no CPU.
    pub fn is_late_without_cpu(&self, limit: Duration) -> bool {
        let is_late = matches!(self.outcome, ClientOutcome::Answered(after) if after > limit);
        is_late && !self.has_failed(limit)
    }
}

/// Parameters of a load of new clients.
#[derive(Clone, Copy, Debug)]
pub struct NewClientSpec {
    /// Address that the clients connect to.
    pub service: SocketAddr,
    /// Number of clients per second.
    pub rate_per_s: u32,
    /// Time after which a client gives up.
    pub patience: Duration,
    /// Protocol of the server.
    pub protocol: RequestProtocol,
}

impl NewClientSpec {
    /// Returns the parameters of clients of an echo server.
    #[must_use]
    pub fn of_echo(service: SocketAddr, rate_per_s: u32, patience: Duration) -> NewClientSpec {
        NewClientSpec {
            service,
            rate_per_s,
            patience,
            protocol: RequestProtocol::ECHO,
        }
    }
}

/// Counters of a running load.
#[derive(Debug, Default)]
pub struct NewClientCounters {
    /// Clients that have ended.
    pub ended: AtomicU64,
    /// Clients of these without the right answer.
    pub failed: AtomicU64,
    /// Bytes of answers that differed from the expected ones.
    pub wrong_bytes: AtomicU64,
    /// Times from the start of a client to its answer.
    pub waits: LongestWaits,
    first_failure: OnceLock<String>,
}

impl NewClientCounters {
    /// Returns a description of the first failed client.
    #[must_use]
    pub fn first_failure(&self) -> String {
        self.first_failure.get().cloned().unwrap_or_default()
    }

    fn count(&self, client: EndedClient) {
        match client.outcome {
            ClientOutcome::Answered(after) => self.waits.record(Instant::now(), after),
            outcome => {
                if let ClientOutcome::WrongAnswer(bytes) = outcome {
                    self.wrong_bytes.fetch_add(bytes, Ordering::Relaxed);
                }
                self.failed.fetch_add(1, Ordering::Relaxed);
                // Later failures are only counted.
                self.first_failure.get_or_init(|| {
                    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
                    let (port, now_s) =
                        (client.port, since_epoch.unwrap_or_default().as_secs_f64());
                    let age_s = client.started.elapsed().as_secs_f64();
                    format!("{outcome:?} (port {port}, at {now_s:.3} since the epoch, {age_s:.3} s after its start)")
                });
            }
        }
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// Clients that keep coming until the load is stopped.
#[derive(Debug)]
pub struct NewClientLoad {
    /// Counters of the load.
    pub counters: Arc<NewClientCounters>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<io::Result<Vec<EndedClient>>>,
}

impl NewClientLoad {
    /// Starts clients in a host of a lab.
    ///
    /// # Errors
    /// The host does not exist, or the system gives no thread.
    pub fn start(lab: &Lab, host: &str, spec: NewClientSpec) -> Result<NewClientLoad> {
        raise_descriptor_limit();
        let stop = Arc::new(AtomicBool::new(false));
        let counters = Arc::new(NewClientCounters::default());
        let (stopped, counted) = (stop.clone(), counters.clone());
        let run = move || ClientLoop::new(spec, &counted)?.run(&stopped);
        // A thread begins in the network namespace of the thread that starts it.
        let thread = lab.run_in_net_namespace(host, || {
            let builder = std::thread::Builder::new().name("new-clients".to_owned());
            builder.spawn(run)
        })??;
        Ok(NewClientLoad {
            counters,
            stop,
            thread,
        })
    }

    /// Starts no more clients, and waits for the others. Returns all clients in the order of their ends.
    ///
    /// # Errors
    /// The client host's system gives no sockets.
    pub fn stop(self) -> Result<Vec<EndedClient>> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.join();
        ended
            .unwrap_or_else(|_| Err(io::Error::other("the thread of the clients panicked")))
            .context("open connections for new clients")
    }
}

fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let maximum = limit.maximum.unwrap_or(DESCRIPTORS_WANTED);
    let current = Some(
        maximum
            .min(DESCRIPTORS_WANTED)
            .max(limit.current.unwrap_or(0)),
    );
    // A lower limit shows in the number of clients.
    let _ = setrlimit(Resource::Nofile, Rlimit { current, ..limit });
}

struct ClientLoop<'a> {
    epoll: OwnedFd,
    spec: NewClientSpec,
    counters: &'a NewClientCounters,
    interval: Duration,
    open: BTreeMap<u64, OpenClient>,
    /// Clients by their starts, which is the order in which their time ends.
    order: VecDeque<u64>,
    ended: Vec<EndedClient>,
    cpu_probe: CpuProbe,
}

struct OpenClient {
    socket: OwnedFd,
    started: Instant,
    /// Reading of the probe at the start.
    without_cpu_before: Duration,
    port: u16,
    is_connected: bool,
    exchange: Exchange,
}

impl<'a> ClientLoop<'a> {
    fn new(spec: NewClientSpec, counters: &'a NewClientCounters) -> io::Result<ClientLoop<'a>> {
        Ok(ClientLoop {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            interval: Duration::from_secs(1) / spec.rate_per_s.max(1),
            spec,
            counters,
            open: BTreeMap::new(),
            order: VecDeque::new(),
            ended: Vec::new(),
            cpu_probe: CpuProbe::new(),
        })
    }

    fn run(mut self, stop: &AtomicBool) -> io::Result<Vec<EndedClient>> {
        let mut next_start = Instant::now();
        let mut number = FIRST_NUMBER;
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let now = Instant::now();
            let is_stopped = stop.load(Ordering::Relaxed);
            if is_stopped && self.open.is_empty() {
                return Ok(self.ended);
            }
            // After a longer delay of this thread, the missed clients are not made up for.
            if !is_stopped && now >= next_start {
                self.begin(number)?;
                number += 1;
                next_start = (next_start + self.interval).max(now - DELAY_MIN);
            }
            self.give_up(now);
            let wait = match is_stopped {
                true => Duration::from_millis(5),
                false => next_start.saturating_duration_since(Instant::now()),
            };
            let wait_timespec = Timespec::try_from(wait).map_err(io::Error::other)?;
            events.clear();
            epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                Some(&wait_timespec),
            )?;
            self.cpu_probe.measure(wait);
            for event in &events {
                self.advance(event.data.u64());
            }
        }
    }

    fn begin(&mut self, number: u64) -> io::Result<()> {
        let family = match self.spec.service {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        self.cpu_probe.measure(Duration::ZERO);
        let started = Instant::now();
        match rustix::net::connect(&socket, &self.spec.service) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let events = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(
            &self.epoll,
            &socket,
            epoll::EventData::new_u64(number),
            events,
        )?;
        let own_address = SocketAddr::try_from(rustix::net::getsockname(&socket)?);
        let client = OpenClient {
            socket,
            started,
            without_cpu_before: self.cpu_probe.without_cpu,
            port: own_address.map_or(0, |address| address.port()),
            is_connected: false,
            exchange: Exchange::new(self.spec.protocol, number),
        };
        self.open.insert(number, client);
        self.order.push_back(number);
        Ok(())
    }

    /// Takes a client's next step.
    fn advance(&mut self, number: u64) {
        let Some(client) = self.open.get_mut(&number) else {
            return;
        };
        let outcome = match client.advance() {
            Ok(Some(0)) => ClientOutcome::Answered(client.started.elapsed()),
            Ok(Some(wrong)) => ClientOutcome::WrongAnswer(wrong),
            Ok(None) | Err(Errno::AGAIN) => return,
            Err(error) if client.is_connected => ClientOutcome::ExchangeFailed(error),
            Err(error) => ClientOutcome::ConnectFailed(error),
        };
        self.end(number, outcome);
    }

    fn give_up(&mut self, now: Instant) {
        while let Some(number) = self.order.front().copied() {
            if let Some(client) = self.open.get(&number) {
                if now < client.started + self.spec.patience {
                    return;
                }
                let outcome = match client.is_connected {
                    true => ClientOutcome::MessageUnanswered,
                    false => ClientOutcome::HandshakeUnanswered,
                };
                self.end(number, outcome);
            }
            self.order.pop_front();
        }
    }

    fn end(&mut self, number: u64, outcome: ClientOutcome) {
        if let Some(client) = self.open.remove(&number) {
            self.cpu_probe.measure(Duration::ZERO);
            let ended = EndedClient {
                started: client.started,
                port: client.port,
                outcome,
                without_cpu: self.cpu_probe.without_cpu - client.without_cpu_before,
            };
            self.counters.count(ended);
            self.ended.push(ended);
        }
    }
}

/// Measures for how long a thread was ready to run and had no CPU.
struct CpuProbe {
    measured: Instant,
    cpu_time: Duration,
    /// Sum of the measured times.
    without_cpu: Duration,
}

impl CpuProbe {
    fn new() -> CpuProbe {
        CpuProbe {
            measured: Instant::now(),
            cpu_time: thread_cpu_time(),
            without_cpu: Duration::ZERO,
        }
    }

    /// Measures the time since the last measurement, of which the thread has waited for at most `wait` by its own will.
    fn measure(&mut self, wait: Duration) {
        let (now, cpu_time) = (Instant::now(), thread_cpu_time());
        let worked = cpu_time.saturating_sub(self.cpu_time);
        let delay = (now - self.measured).saturating_sub(worked + wait);
        if delay >= DELAY_MIN {
            self.without_cpu += delay;
        }
        (self.measured, self.cpu_time) = (now, cpu_time);
    }
}

fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

impl OpenClient {
    /// Connects, sends and receives as far as possible. Returns the number of wrong bytes after the whole answer.
    fn advance(&mut self) -> Result<Option<u64>, Errno> {
        if !self.is_connected {
            rustix::net::sockopt::socket_error(&self.socket)??;
        }
        loop {
            if !self.send()? {
                return Ok(None);
            }
            let mut buffer = [0; BUFFER_BYTES];
            let received = rustix::io::read(&self.socket, &mut buffer)?;
            if received == 0 {
                return Err(Errno::CONNRESET);
            }
            let wrong = self.exchange.handle_received(&buffer[..received]);
            if wrong.is_some() {
                return Ok(wrong);
            }
        }
    }

    /// Sends the bytes that are due. Returns false while the handshake has not ended.
    fn send(&mut self) -> Result<bool, Errno> {
        while !self.exchange.outgoing().is_empty() {
            match rustix::net::send(&self.socket, self.exchange.outgoing(), SendFlags::NOSIGNAL) {
                Ok(count) => self.exchange.handle_sent(count),
                Err(Errno::NOTCONN | Errno::PIPE | Errno::AGAIN) if !self.is_connected => {
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
            self.is_connected = true;
        }
        Ok(true)
    }
}
