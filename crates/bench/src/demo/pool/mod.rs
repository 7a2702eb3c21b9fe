//! A pool of stock web servers, used through the death of a server and of a registrar.

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

/// What is to be shown.
#[derive(Clone, Debug, Serialize)]
pub struct PoolDemoSpec {
    /// The lab's name.
    pub name: String,
    /// How many web servers; at least two.
    pub elements: u16,
    /// The client's pause after a request.
    pub pause: Duration,
    /// How long the client works undisturbed before and after each death.
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

/// What happens, as it happens.
#[derive(Clone, Debug)]
pub enum PoolEvent {
    /// A step begins.
    Step(String),
    /// The elements, by host.
    Elements(Vec<String>),
    /// A request was answered by the element of this host.
    Served(String),
    /// An element was not reached, and another tried at once.
    Retried(String),
    /// An element is dead, or there again in the pool.
    Dead(String),
    /// Something has come right again after so many seconds.
    Recovered(String, f64),
    /// All is done.
    Ended,
}

/// Who is told.
pub type Watch<'a> = &'a (dyn Fn(&PoolEvent) + Sync);

/// Longest wait for anything that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the demonstration.
///
/// # Errors
/// Something kept it from coming to a result. A result that is not as promised is no error: [`field@PoolReport::problems`] tells.
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

/// How long it took to recover, seconds, and what was there then.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Deaths {
    /// Until the dead element was out of the pool.
    pub element_s: f64,
    /// Until the elements of the dead registrar were the other one's.
    pub registrar_s: f64,
    /// The fewest living elements that a living registrar listed after a registrar's death.
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
