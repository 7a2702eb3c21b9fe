//! The client: asks the pool daemon of its host for an element, fetches a page from the element, and tries another one
//! after a failure.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_api::control::{BlockingClient, UnreachableReport};
use holdfast_lab::Lab;
use serde::Serialize;

use super::scene::{POOL, Scene};
use super::{PoolDemoSpec, PoolEvent, Watch};

/// Time limit for the answer of an element.
const ANSWER: Duration = Duration::from_millis(1000);
/// Time limit for a request, including all retries.
const REQUEST: Duration = Duration::from_secs(20);
/// Pause while no element is known.
const PAUSE: Duration = Duration::from_millis(50);

/// Results of the client.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counts {
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
pub struct Client<'a> {
    daemon: BlockingClient,
    lab: &'a Lab,
    pause: Duration,
    over: AtomicBool,
}

impl<'a> Client<'a> {
    /// Creates a client in c1.
    ///
    /// # Errors
    /// The system gives no descriptors.
    pub fn new(scene: &'a Scene, spec: &PoolDemoSpec) -> Result<Client<'a>> {
        Ok(Client {
            daemon: scene.daemon()?,
            lab: scene.lab().lab(),
            pause: spec.pause,
            over: AtomicBool::new(false),
        })
    }

    /// Makes [`Client::work`] return.
    pub fn stop(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Makes requests until [`Client::stop`]. Needs a thread of its own, because it moves the thread into c1's network.
    pub fn work(&self, watch: Watch<'_>) -> Counts {
        let mut counts = Counts::default();
        if self.lab.enter_net("c1").is_err() {
            counts.failures = 1;
            return counts;
        }
        while !self.over.load(Ordering::Relaxed) {
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
    fn request(&self, counts: &mut Counts, watch: Watch<'_>) -> Option<String> {
        let deadline = Instant::now() + REQUEST;
        while Instant::now() < deadline {
            let Some((id, address)) = self.select() else {
                sleep(PAUSE);
                continue;
            };
            match get(address) {
                Ok(host) => return Some(host),
                Err(error) => {
                    counts.retries += 1;
                    watch(&PoolEvent::Retried(format!("{address}: {error:#}")));
                    self.report(id);
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

    fn report(&self, id: String) {
        let handle = POOL.to_owned();
        let report = UnreachableReport { handle, id };
        // If the daemon has failed, the next selection fails, too.
        let _ = self.daemon.run(|client| client.report_unreachable(&report));
    }
}

/// Returns the body of `GET /`.
fn get(address: SocketAddr) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, ANSWER)?;
    stream.set_read_timeout(Some(ANSWER))?;
    write!(stream, "GET / HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    if !head.contains(" 200 ") {
        bail!("{}", head.lines().next().unwrap_or("an empty answer"));
    }
    Ok(body.trim_end().to_owned())
}
