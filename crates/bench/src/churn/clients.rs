//! Clients: long connections, and short ones that are opened, used and closed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;
use holdfast_lab::Lab;

use super::protocols::{ProtocolConnection, ServerProtocol, WrongBytes};

/// Interval between messages of a long connection.
const MESSAGE_INTERVAL: Duration = Duration::from_millis(20);
/// Time after which a connection counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_secs(10);
/// Threads that open short connections: the most that can be open at once.
const OPENER_THREADS: u64 = 64;
/// Most failures that are reported with text.
const FAILURES_MAX: usize = 20;

/// Begin and end of a period.
pub type TimeSpan = (Instant, Instant);

/// Time of a request, and the time until its answer.
pub type RoundTrip = (Instant, Duration);

/// State shared by the clients.
#[derive(Debug)]
struct SharedClientState {
    began: Instant,
    address: SocketAddr,
    protocol: ServerProtocol,
    stop: AtomicBool,
    errors: AtomicU64,
    wrong_bytes: AtomicU64,
    /// Short connections that were opened.
    opened: AtomicU64,
    /// Number of long connections that have exchanged a message.
    exchanging: AtomicU64,
    /// Short connections that wait for their answer: the client's address, and the time of the request.
    waiting: Mutex<BTreeMap<SocketAddr, Instant>>,
    failures: Mutex<Vec<ClientFailure>>,
}

/// A connection that could not be opened, or ended, or hung.
#[derive(Clone, Debug)]
pub struct ClientFailure {
    /// The client's address; none if the connection was not opened.
    pub client: Option<SocketAddr>,
    /// The failure and its time.
    pub text: String,
}

/// Running clients of a server: long and short connections.
#[derive(Debug)]
pub struct ChurnClients {
    shared: Arc<SharedClientState>,
    long_connections: usize,
    threads: Vec<JoinHandle<Vec<RoundTrip>>>,
}

/// Results of the clients.
#[derive(Debug, Default)]
pub struct ClientResults {
    /// Round trips of all connections, openings included.
    pub trips: Vec<RoundTrip>,
    /// Connections that could not be opened, or ended, or hung.
    pub errors: u64,
    /// Bytes that differed from the expected ones.
    pub bytes_wrong: u64,
    /// Short connections that were opened.
    pub opened: u64,
    /// Text of the first failures.
    pub failures: Vec<String>,
}

impl ChurnClients {
    /// Starts the clients: `stay` long connections, and `new_per_s` short ones per second.
    ///
    /// # Errors
    /// The host does not exist, or the system gives no thread.
    pub fn start(
        lab: &Lab,
        host: &str,
        (address, speech): (SocketAddr, ServerProtocol),
        (stay, new_per_s): (usize, u32),
    ) -> Result<Self> {
        let shared = Arc::new(SharedClientState {
            began: Instant::now(),
            address,
            protocol: speech,
            stop: AtomicBool::new(false),
            errors: AtomicU64::new(0),
            wrong_bytes: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            exchanging: AtomicU64::new(0),
            waiting: Mutex::default(),
            failures: Mutex::default(),
        });
        let next = Arc::new(AtomicU64::new(0));
        let openers = if new_per_s == 0 { 0 } else { OPENER_THREADS };
        // Threads inherit the namespaces of the thread that starts them.
        let threads = lab.run_in_net_namespace(host, || -> std::io::Result<Vec<_>> {
            let mut threads = Vec::new();
            for number in 0..stay as u64 {
                let shared = shared.clone();
                let named = std::thread::Builder::new().name("stays".into());
                threads.push(named.spawn(move || shared.run_long_connection(number))?);
            }
            for _ in 0..openers {
                let (shared, next) = (shared.clone(), next.clone());
                let named = std::thread::Builder::new().name("comes".into());
                threads.push(named.spawn(move || shared.run_short_connections(&next, new_per_s))?);
            }
            Ok(threads)
        })??;
        Ok(Self {
            shared,
            long_connections: stay,
            threads,
        })
    }

    /// Returns true if all long connections have exchanged a message.
    #[must_use]
    pub fn have_all_exchanged(&self) -> bool {
        self.shared.exchanging.load(Ordering::Relaxed) == self.long_connections as u64
    }

    /// Returns the addresses of short connections that have waited at least this long for their answer.
    #[must_use]
    pub fn waiting_for(&self, at_least: Duration) -> Vec<SocketAddr> {
        let waiting = self.shared.lock_waiting();
        let late = waiting
            .iter()
            .filter(|(_, since)| since.elapsed() >= at_least);
        late.map(|(client, _)| *client).collect()
    }

    /// Returns the first failure, if there is one.
    #[must_use]
    pub fn first_failure(&self) -> Option<ClientFailure> {
        self.shared.lock_failures().first().cloned()
    }

    /// Ends all connections of the clients, and returns the results.
    ///
    /// # Panics
    /// The thread of a client panicked.
    #[must_use]
    pub fn end(self) -> ClientResults {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut seen = ClientResults::default();
        for thread in self.threads {
            seen.trips
                .extend(thread.join().expect("clients do not panic"));
        }
        seen.errors = self.shared.errors.load(Ordering::Relaxed);
        seen.bytes_wrong = self.shared.wrong_bytes.load(Ordering::Relaxed);
        seen.opened = self.shared.opened.load(Ordering::Relaxed);
        let failures = self.shared.lock_failures();
        seen.failures = failures
            .iter()
            .map(|failure| failure.text.clone())
            .collect();
        drop(failures);
        seen
    }
}

impl SharedClientState {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn lock_waiting(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Instant>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_failures(&self) -> MutexGuard<'_, Vec<ClientFailure>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_connection(&self) -> std::io::Result<ProtocolConnection> {
        ProtocolConnection::open(self.address, self.protocol, HANG_TIMEOUT)
    }

    fn count_wrong(&self, WrongBytes(bytes): WrongBytes) {
        self.wrong_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn record_failure(
        &self,
        connection_name: &str,
        local: Option<SocketAddr>,
        error: &std::io::Error,
    ) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        let mut failures = self.lock_failures();
        if failures.len() < FAILURES_MAX {
            let at = self.began.elapsed().as_secs_f64();
            let port = local.map_or(0, |local| local.port());
            failures.push(ClientFailure {
                client: local,
                text: format!("{at:.2} s: {connection_name} (port {port}): {error}"),
            });
        }
    }

    /// Exchanges messages until the end; replaces a connection that breaks.
    fn run_long_connection(&self, number: u64) -> Vec<RoundTrip> {
        let mut trips = Vec::new();
        let (mut connection, mut exchanged) = (None, false);
        let mut next = Instant::now();
        for turn in 0.. {
            if self.is_stopped() {
                break;
            }
            let sent = Instant::now();
            let mut local = None;
            let outcome = match connection.take().map_or_else(|| self.open_connection(), Ok) {
                Ok(mut open) => {
                    local = open.local().ok();
                    let exchanged = open.exchange(number, turn);
                    exchanged.map(|wrong| (open, wrong))
                }
                Err(error) => Err(error),
            };
            match outcome {
                Ok((open, wrong)) => {
                    self.count_wrong(wrong);
                    connection = Some(open);
                    if !std::mem::replace(&mut exchanged, true) {
                        self.exchanging.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Err(error) => self.record_failure("long connection", local, &error),
            }
            trips.push((sent, sent.elapsed()));
            next = (next + MESSAGE_INTERVAL).max(Instant::now());
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        trips
    }

    /// Opens each connection at its time, even if the one before has not ended.
    fn run_short_connections(&self, next: &AtomicU64, per_s: u32) -> Vec<RoundTrip> {
        let mut trips = Vec::new();
        loop {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            let due = self.began + Duration::from_secs_f64(turn as f64 / f64::from(per_s));
            while !self.is_stopped() && Instant::now() < due {
                let left = due.saturating_duration_since(Instant::now());
                std::thread::sleep(left.min(Duration::from_millis(100)));
            }
            if self.is_stopped() {
                return trips;
            }
            let began = Instant::now();
            let mut local = None;
            let outcome = self.open_connection().and_then(|mut open| {
                local = open.local().ok();
                let client = open.local()?;
                self.lock_waiting().insert(client, Instant::now());
                // The numbers of short connections begin above the numbers of long ones.
                let exchanged = open.exchange(u64::from(u32::MAX) + turn, turn);
                self.lock_waiting().remove(&client);
                open.close()?;
                exchanged
            });
            trips.push((began, began.elapsed()));
            self.opened.fetch_add(1, Ordering::Relaxed);
            match outcome {
                Ok(wrong) => self.count_wrong(wrong),
                Err(error) => self.record_failure("new connection", local, &error),
            }
        }
    }
}

/// Returns the longest round trip that overlaps a period, minus the median one of all, in milliseconds.
pub fn added_delay_ms(trips: &[RoundTrip], (begin, end): TimeSpan) -> f64 {
    longest_minus_median_ms(trips, |sent, answered| sent <= end && answered >= begin)
}

/// Returns the longest round trip within a period, minus the median one of all, in milliseconds: the control of a move that
/// follows the period. A round trip that lasts into the move may be an effect of the move, and one that began before the
/// period an effect of the move before.
pub fn control_delay_ms(trips: &[RoundTrip], (begin, end): TimeSpan) -> f64 {
    longest_minus_median_ms(trips, |sent, answered| begin <= sent && answered <= end)
}

fn longest_minus_median_ms(trips: &[RoundTrip], counts: impl Fn(Instant, Instant) -> bool) -> f64 {
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    let mut all: Vec<Duration> = trips.iter().map(|(_, trip)| *trip).collect();
    all.sort_unstable();
    let median = all.get(all.len() / 2).copied().unwrap_or_default();
    let counted = trips
        .iter()
        .filter(|(sent, trip)| counts(*sent, *sent + *trip));
    counted.map(|(_, trip)| ms(*trip)).fold(0.0, f64::max) - ms(median)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_into_and_out_of_a_move_are_no_control() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let trip = |from, to| (at(from), Duration::from_millis(to - from));
        // The median round trip takes 1 ms. One lasts from a move into the period, and one from the period into a move.
        let trips = [
            trip(50, 250),
            trip(300, 301),
            trip(310, 311),
            trip(320, 325),
            trip(330, 331),
            trip(340, 341),
            trip(380, 480),
        ];
        let period = (at(200), at(400));
        assert_eq!(control_delay_ms(&trips, period), 4.0);
        assert_eq!(added_delay_ms(&trips, period), 199.0);
    }
}
