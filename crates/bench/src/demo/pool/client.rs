//! The client: asks the pool daemon of its host for an element, fetches a page from the element, and tries another one
//! after a failure.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_api::control::{BlockingControlClient, UnreachableReport};
use holdfast_lab::Lab;
use serde::Serialize;

use super::demo_lab::{POOL, PoolDemoLab};
use super::{EventHandler, PoolDemoSpec, PoolEvent};

/// Time limit for the answer of an element.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(1000);
/// Time limit for a request, including all retries.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Pause while no element is known.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Results of the client.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ClientCounts {
    /// Requests.
    pub requests: u64,
    /// Failed attempts at an element.
    pub retries: u64,
    /// Requests without an answer, after all retries.
    pub failures: u64,
    /// Answers by the host that gave them.
    pub answers: std::collections::BTreeMap<String, u64>,
    /// The longest request, seconds.
    pub longest_s: f64,
}

/// The client of the demonstration.
pub struct PoolClient<'a> {
    daemon: BlockingControlClient,
    lab: &'a Lab,
    pause: Duration,
    is_stopped: AtomicBool,
}

impl<'a> PoolClient<'a> {
    /// Creates a client in c1.
    ///
    /// # Errors
    /// The system gives no descriptors.
    pub fn new(scene: &'a PoolDemoLab, spec: &PoolDemoSpec) -> Result<PoolClient<'a>> {
        Ok(PoolClient {
            daemon: scene.daemon()?,
            lab: scene.lab().lab(),
            pause: spec.pause,
            is_stopped: AtomicBool::new(false),
        })
    }

    /// Makes [`PoolClient::run_requests`] return.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    /// Makes requests until [`PoolClient::stop`]. Needs a thread of its own, because it moves the thread into c1's network.
    pub fn run_requests(&self, watch: EventHandler<'_>) -> ClientCounts {
        let mut counts = ClientCounts::default();
        if self.lab.enter_net_namespace("c1").is_err() {
            counts.failures = 1;
            return counts;
        }
        while !self.is_stopped.load(Ordering::Relaxed) {
            let begun = Instant::now();
            counts.requests += 1;
            match self.request(&mut counts, watch) {
                Some(host) => {
                    *counts.answers.entry(host.clone()).or_default() += 1;
                    watch(&PoolEvent::Served(host));
                }
                None => counts.failures += 1,
            }
            counts.longest_s = counts.longest_s.max(begun.elapsed().as_secs_f64());
            sleep(self.pause);
        }
        counts
    }

    /// Fetches one page from any element; returns the host that served it.
    fn request(&self, counts: &mut ClientCounts, watch: EventHandler<'_>) -> Option<String> {
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        while Instant::now() < deadline {
            let Some((id, address)) = self.select() else {
                sleep(RETRY_PAUSE);
                continue;
            };
            match fetch_page(address) {
                Ok(host) => return Some(host),
                Err(error) => {
                    counts.retries += 1;
                    watch(&PoolEvent::Retried(format!("{address}: {error:#}")));
                    self.report_unreachable(id);
                }
            }
        }
        None
    }

    fn select(&self) -> Option<(String, SocketAddr)> {
        let chosen = self.daemon.run(|client| client.select(POOL)).ok()?;
        let element = chosen.elements.into_iter().next()?;
        Some((element.id, *element.addresses.first()?))
    }

    fn report_unreachable(&self, id: String) {
        let handle = POOL.to_owned();
        let report = UnreachableReport { handle, id };
        // If the daemon has failed, the next selection fails, too.
        let _ = self.daemon.run(|client| client.report_unreachable(&report));
    }
}

/// Returns the body of `GET /`.
fn fetch_page(address: SocketAddr) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    write!(stream, "GET / HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("the server sent no HTTP answer")?;
    if !head.contains(" 200 ") {
        bail!(
            "{}",
            head.lines()
                .next()
                .unwrap_or("the server sent an empty answer")
        );
    }
    Ok(body.trim_end().to_owned())
}
