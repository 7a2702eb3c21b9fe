//! A pool of stock web servers, used through the failure of a server and of a registrar.

mod client;
mod report;
mod scene;
mod screen;

use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

pub use report::PoolReport;
use scene::Scene;
pub use screen::PoolScreen;

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
    /// A step begins.
    Step(String),
    /// The elements, by host.
    Elements(Vec<String>),
    /// The element of this host answered a request.
    Served(String),
    /// An element was not reached, and the client tries another at once.
    Retried(String),
    /// An element was killed.
    Dead(String),
    /// The pool has recovered, after this many seconds.
    Recovered(String, f64),
    /// The demonstration has ended.
    Ended,
}

/// A function that receives the events.
pub type Watch<'a> = &'a (dyn Fn(&PoolEvent) + Sync);

/// Longest wait for any expected event.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the demonstration.
///
/// # Errors
/// The demonstration came to no result. A result that breaks a promise is no error: [`field@PoolReport::problems`]
/// lists it.
pub fn run(spec: &PoolDemoSpec, watch: Watch<'_>) -> Result<PoolReport> {
    let started = Instant::now();
    watch(&PoolEvent::Step(format!(
        "starting 2 registrars, {} nginx servers, and a client",
        spec.elements
    )));
    let scene = Scene::up(spec)?;
    watch(&PoolEvent::Elements(scene.elements().to_vec()));
    let client = client::Client::new(&scene, spec)?;
    let (deaths, counts) = scope(|threads| {
        let working = threads.spawn(|| client.work(watch));
        let deaths = deaths(&scene, spec, watch);
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
pub struct Deaths {
    /// Seconds until the killed element had left the pool.
    pub element_s: f64,
    /// Seconds until the other registrar was the home of the killed registrar's elements.
    pub registrar_s: f64,
    /// The fewest living elements that the living registrar listed after the other's failure.
    pub elements_min: usize,
}

fn deaths(scene: &Scene, spec: &PoolDemoSpec, watch: Watch<'_>) -> Result<Deaths> {
    sleep(spec.calm);
    let victim = scene.elements()[0].clone();
    watch(&PoolEvent::Step(format!(
        "kill -9 of the server at {victim}, with its daemon"
    )));
    let killed = Instant::now();
    scene.kill(&victim)?;
    watch(&PoolEvent::Dead(victim.clone()));
    scene.wait_until_gone(&victim)?;
    let element_s = killed.elapsed().as_secs_f64();
    let words = format!("{victim} is out of the pool");
    watch(&PoolEvent::Recovered(words, element_s));
    sleep(spec.calm);
    let (registrar, other) = scene.busiest_registrar()?;
    watch(&PoolEvent::Step(format!(
        "kill -9 of the registrar at {registrar}"
    )));
    let killed = Instant::now();
    scene.kill(&registrar)?;
    let elements_min = scene.wait_for_takeover(&other, usize::from(spec.elements) - 1)?;
    let registrar_s = killed.elapsed().as_secs_f64();
    let words = format!("{other} has all elements");
    watch(&PoolEvent::Recovered(words, registrar_s));
    sleep(spec.calm);
    Ok(Deaths {
        element_s,
        registrar_s,
        elements_min,
    })
}
