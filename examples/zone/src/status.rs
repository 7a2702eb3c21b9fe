//! The program's counters, sent to every connection.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters since the start.
#[derive(Debug, Default)]
pub struct Counts {
    /// Number of open connections.
    pub connections: AtomicU64,
    /// Bytes sent back.
    pub bytes: AtomicU64,
    /// Transactions with the expected result.
    pub queries: AtomicU64,
    /// Transactions with another result or an error.
    pub query_errors: AtomicU64,
    /// Pages written.
    pub pages: AtomicU64,
    /// Pages that did not contain the data written to them.
    pub pages_wrong: AtomicU64,
}

/// Adds to a counter.
pub fn add(count: &AtomicU64, number: u64) {
    count.fetch_add(number, Ordering::Relaxed);
}

/// Subtracts from a counter.
pub fn subtract(count: &AtomicU64, number: u64) {
    count.fetch_sub(number, Ordering::Relaxed);
}

/// Creates the counters, and a thread that sends them.
pub fn serve(address: SocketAddr) -> io::Result<&'static Counts> {
    // Kept for the life of the program, like its threads.
    let counts: &Counts = Box::leak(Box::default());
    let listener = TcpListener::bind(address)?;
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // A client that has left needs no answer.
            let _ = stream.write_all(counts.line().as_bytes());
        }
    });
    Ok(counts)
}

impl Counts {
    fn line(&self) -> String {
        let fields = [
            ("connections", &self.connections),
            ("bytes", &self.bytes),
            ("queries", &self.queries),
            ("query_errors", &self.query_errors),
            ("pages", &self.pages),
            ("pages_wrong", &self.pages_wrong),
        ];
        let fields =
            fields.map(|(name, count)| format!("\"{name}\":{}", count.load(Ordering::Relaxed)));
        format!("{{{}}}\n", fields.join(","))
    }
}
