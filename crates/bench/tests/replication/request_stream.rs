//! One connection with requests to redis, many at a time; each answer is compared with the expected one.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::common::eventually;

/// Number of keys that are set in one round.
const ROUND: u64 = 16;
/// Length of a value: a round's requests fill several segments.
const VALUE_BYTES: usize = 400;

/// Pause between two rounds: on a busy machine, replicas would fall behind the primary without it.
const PAUSE: Duration = Duration::from_millis(2);

/// A client with one connection.
pub struct RequestStream {
    thread: Option<JoinHandle<u64>>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    is_ending: AtomicBool,
    rounds: AtomicU64,
    longest_us: AtomicU64,
}

impl RequestStream {
    /// Starts to send requests.
    pub fn start(connection: BufReader<TcpStream>) -> RequestStream {
        let shared = Arc::new(Shared::default());
        let seen = Arc::clone(&shared);
        let thread = std::thread::spawn(move || send_requests(connection, &seen));
        RequestStream {
            thread: Some(thread),
            shared,
        }
    }

    /// Waits for this time, and until a round that began afterwards has its answers.
    #[track_caller]
    pub fn run_for(&mut self, time: Duration) {
        std::thread::sleep(time);
        let before = self.shared.rounds.load(Ordering::SeqCst);
        eventually("the stream goes on", || {
            if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                self.finish();
            }
            self.shared.rounds.load(Ordering::SeqCst) >= before + 2
        });
    }

    /// Returns the longest time of a round since the last call.
    pub fn take_longest(&self) -> Duration {
        Duration::from_micros(self.shared.longest_us.swap(0, Ordering::SeqCst))
    }

    /// Ends the connection. Returns the number of keys that were set, which the counter has, too.
    pub fn finish(&mut self) -> u64 {
        self.shared.is_ending.store(true, Ordering::SeqCst);
        let thread = self.thread.take().expect("finished once");
        thread.join().expect("all answers were right")
    }
}

fn send_requests(mut connection: BufReader<TcpStream>, shared: &Shared) -> u64 {
    let mut count = 0;
    while !shared.is_ending.load(Ordering::SeqCst) {
        let keys = count + 1..=count + ROUND;
        let requests: String = keys
            .clone()
            .map(|key| {
                format!(
                    "INCR counter\r\nSET key{key} {0}\r\nGET key{key}\r\n",
                    value(key)
                )
            })
            .collect();
        let started = Instant::now();
        connection.get_mut().write_all(requests.as_bytes()).unwrap();
        for key in keys {
            let expected = [
                format!(":{key}"),
                "+OK".to_owned(),
                format!("${VALUE_BYTES}"),
                value(key),
            ];
            for expected in expected {
                let mut line = String::new();
                connection.read_line(&mut line).expect("an answer");
                assert_eq!(line.trim_end(), expected);
            }
        }
        count += ROUND;
        let took_us = started.elapsed().as_micros() as u64;
        shared.longest_us.fetch_max(took_us, Ordering::SeqCst);
        shared.rounds.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(PAUSE);
    }
    count
}

fn value(key: u64) -> String {
    let text = format!("{key:016x}");
    text.repeat(VALUE_BYTES / text.len())
}
