//! A pool of stock web servers, used through the failure of a server and of a registrar.

mod client;
mod demo_lab;
mod display;
mod report;

use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use demo_lab::PoolDemoLab;
pub use display::PoolDisplay;
pub use report::PoolReport;

/// Parameters of the demonstration.
#[derive(Clone, Debug, Serialize)]
pub struct PoolDemoSpec {
    /// Name of the lab.
    pub name: String,
    /// Number of web servers; at least two.
    pub elements: u16,
    /// Pause of the client after a request.
    pub pause: Duration,
    /// Undisturbed time before and after each failure.
    pub calm: Duration,
}

impl Default for PoolDemoSpec {
    fn default() -> Self {
        PoolDemoSpec {
            name: format!("demo-{}", std::process::id()),
            elements: 3,
            pause: Duration::from_millis(20),
            calm: Duration::from_secs(4),
        }
    }
}

/// An event of the running demonstration.
#[derive(Clone, Debug)]
pub enum PoolEvent {
    /// A step of the demonstration begins, with this text.
    Step(String),
    /// The elements, by host.
    Elements(Vec<String>),
    /// The element of this host answered a request.
    Served(String),
    /// An element was not reached, and the client tries another at once.
    Retried(String),
    /// An element was killed.
    ElementKilled(String),
    /// The pool has recovered, after this many seconds.
    Recovered(String, f64),
    /// The demonstration has ended.
    Ended,
}

/// A function that receives the events.
pub type EventHandler<'a> = &'a (dyn Fn(&PoolEvent) + Sync);

/// Longest wait for any expected event.
const EVENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `holdfast demo pool`, and passes each event to `watch`.
///
/// # Errors
/// The demonstration came to no result. A result that breaks a promise is no error: [`field@PoolReport::problems`]
/// lists it.
pub fn run(spec: &PoolDemoSpec, watch: EventHandler<'_>) -> Result<PoolReport> {
    let started = Instant::now();
    watch(&PoolEvent::Step(format!(
        "starting 2 registrars, {} nginx servers, and a client",
        spec.elements
    )));
    let scene = PoolDemoLab::up(spec)?;
    watch(&PoolEvent::Elements(scene.elements().to_vec()));
    let client = client::PoolClient::new(&scene, spec)?;
    let (deaths, counts) = scope(|threads| {
        let working = threads.spawn(|| client.run_requests(watch));
        let deaths = run_failures(&scene, spec, watch);
        client.stop();
        (deaths, working.join())
    });
    let deaths = deaths?;
    let counts = counts.map_err(|_| anyhow::anyhow!("the client's thread panicked"))?;
    watch(&PoolEvent::Ended);
    Ok(PoolReport::new(spec, counts, deaths, started.elapsed()))
}

/// Recovery times, and the elements listed in between.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FailureResults {
    /// Seconds until the killed element had left the pool.
    pub element_s: f64,
    /// Seconds until the other registrar was the home of the killed registrar's elements.
    pub registrar_s: f64,
    /// The fewest living elements that the living registrar listed after the other's failure.
    pub elements_min: usize,
}

fn run_failures(
    scene: &PoolDemoLab,
    spec: &PoolDemoSpec,
    watch: EventHandler<'_>,
) -> Result<FailureResults> {
    sleep(spec.calm);
    let victim = scene.elements()[0].clone();
    watch(&PoolEvent::Step(format!(
        "kill -9 of the server and the pool daemon at {victim}"
    )));
    let killed = Instant::now();
    scene.kill(&victim)?;
    watch(&PoolEvent::ElementKilled(victim.clone()));
    scene.wait_until_delisted(&victim)?;
    let element_s = killed.elapsed().as_secs_f64();
    let message = format!("{victim} has left the pool");
    watch(&PoolEvent::Recovered(message, element_s));
    sleep(spec.calm);
    let (registrar, other) = scene.busiest_registrar()?;
    watch(&PoolEvent::Step(format!(
        "kill -9 of the registrar at {registrar}"
    )));
    let killed = Instant::now();
    scene.kill(&registrar)?;
    let elements_min = scene.wait_for_takeover(&other, usize::from(spec.elements) - 1)?;
    let registrar_s = killed.elapsed().as_secs_f64();
    let message = format!("{other} has taken over all elements");
    watch(&PoolEvent::Recovered(message, registrar_s));
    sleep(spec.calm);
    Ok(FailureResults {
        element_s,
        registrar_s,
        elements_min,
    })
}
