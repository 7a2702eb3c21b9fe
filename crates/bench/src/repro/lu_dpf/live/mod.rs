//! Table 1, live: registrars, elements and users as daemons and programs in the hosts of a lab, with SCTP over links of
//! the simulation's delays. Every time is shorter than in the paper by one factor, the time-lapse.

mod clock;
mod element;
mod regions;
mod report;
mod user;

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use holdfast_api::control::PolicyDetail;
use holdfast_sim::Time;
use holdfast_sim::pools::{PoolAction, PoolRunConfig, RequestGenerator};

use super::DPF;
use crate::repro::{ExperimentOutcome, ExperimentSettings};
use clock::VirtualClock;
use element::RunningElement;
use regions::{HostRole, RegionsLab};
use user::CompletedRequest;

/// Number of runs by default.
const RUNS: u32 = 6;
/// Time between the registration of the elements and the first request, in which the measured distances settle.
const SETTLE_TIME: Duration = Duration::from_secs(10);
/// Round trips until the pool daemon reports a session's association.
const SETUP_ROUND_TRIPS: u32 = 2;
/// Handles of the pools; true if distance counts.
const POOLS: [(&str, bool); 2] = [("lu-dpf", true), ("lu", false)];

/// Parameters of the experiment.
pub(super) struct LiveExperiment {
    /// Returns the simulation to be run live, by DPF and seed.
    pub(super) config: fn(f64, u64) -> PoolRunConfig,
    /// Names of the simulation's windows, and the paper's values: seconds with LU-DPF and LU, improvement in per cent.
    pub(super) phases: Vec<(&'static str, [f64; 3])>,
}

impl LiveExperiment {
    /// Returns the simulation with the differences of a live run.
    fn config(&self, dpf: f64, seed: u64) -> PoolRunConfig {
        let mut config = (self.config)(dpf, seed);
        config.setup_round_trips = SETUP_ROUND_TRIPS;
        config.requests = Some(seed);
        config
    }
}

/// Runs the experiment live in a lab, once for each seed.
///
/// # Errors
/// The machine lacks a requirement, or a run failed.
pub(super) fn run(
    settings: &ExperimentSettings,
    experiment: &LiveExperiment,
) -> Result<ExperimentOutcome> {
    ensure!(
        (1.0..=20.0).contains(&settings.lapse),
        "--lapse must be 1 to 20"
    );
    let mut runs = Vec::new();
    for seed in 1..=u64::from(settings.repeats_or(RUNS)) {
        let done = run_once(&experiment.config(DPF, seed), settings.lapse, seed)?;
        let means = report::window_means(&experiment.config(DPF, seed).windows, &done);
        report::print_progress(experiment, seed, &means, &done);
        runs.push(means);
    }
    Ok(report::build_outcome(settings, experiment, &runs))
}

/// Performs one run; returns every completed request.
fn run_once(config: &PoolRunConfig, lapse: f64, seed: u64) -> Result<Vec<CompletedRequest>> {
    let regions = RegionsLab::up(config, lapse)?;
    let clock = VirtualClock::new(Instant::now() + SETTLE_TIME, lapse);
    let mut players = Participants {
        regions: &regions,
        config,
        clock,
        lapse,
        running_elements: BTreeMap::new(),
    };
    for (zone, count) in players.initial_elements() {
        for element in 0..count {
            players.start(zone, element)?;
        }
    }
    std::thread::sleep(clock.wall_time_until(Time::ZERO));
    let distances = regions.element_distances(config.zones.len(), POOLS[0].0)?;
    eprintln!("run {seed}: distances of elements at each registrar, ms: {distances:?}");
    let (sender, receiver) = channel();
    let users = players.start_users(seed, &sender)?;
    drop(sender);
    players.execute_plan()?;
    let mut failed = None;
    for user in users {
        let ended = user.join().map_err(|_| anyhow!("a user's thread failed"))?;
        failed = failed.or(ended.err());
    }
    match failed {
        Some(error) => Err(error.context(regions.log_tails())),
        None => Ok(receiver.try_iter().collect()),
    }
}

/// Elements and users of a run.
struct Participants<'a> {
    regions: &'a RegionsLab,
    config: &'a PoolRunConfig,
    clock: VirtualClock,
    lapse: f64,
    /// Running elements by zone and place in it: one element for each pool.
    running_elements: BTreeMap<(u16, u32), Vec<RunningElement>>,
}

impl Participants<'_> {
    fn initial_elements(&self) -> Vec<(u16, u32)> {
        let all = self.config.zones.iter().map(|zone| zone.elements);
        let first = self.config.initial_elements.clone();
        let counts = first.unwrap_or_else(|| all.collect());
        (0..).zip(counts).collect()
    }

    /// Starts the elements of one host: "On each of the PE hosts, two PE instances have been started: one registering
    /// into the LU pool, the other one registering into the LU-DPF pool" (section 7.2).
    fn start(&mut self, zone: u16, element: u32) -> Result<()> {
        let socket = self
            .regions
            .pool_daemon_socket(zone.into(), HostRole::Elements)?;
        let start = |(handle, counts_distance): (&str, bool)| {
            let policy = PolicyDetail {
                name: if counts_distance { "LU-DPF" } else { "LU" }.to_owned(),
                // One millisecond here stands for `lapse` milliseconds of the paper.
                delay_penalty: counts_distance.then_some(DPF * self.lapse),
                ..PolicyDetail::default()
            };
            let plan = element::ElementPlan {
                socket: socket.clone(),
                handle: handle.to_owned(),
                policy,
                load_per_request: self.config.load_per_request,
                capacity: self.config.workload.capacity,
            };
            RunningElement::start(&plan, self.clock)
        };
        let started = POOLS.map(start).into_iter().collect::<Result<Vec<_>>>()?;
        self.running_elements.insert((zone, element), started);
        Ok(())
    }

    /// Starts the users: "Analogously, each PU host runs two PU instances"; here, both make the same requests.
    fn start_users(
        &self,
        seed: u64,
        done: &std::sync::mpsc::Sender<CompletedRequest>,
    ) -> Result<Vec<JoinHandle<Result<()>>>> {
        let mut users = Vec::new();
        for (zone, players) in self.config.zones.iter().enumerate() {
            let socket = self.regions.pool_daemon_socket(zone, HostRole::Users)?;
            for (number, pool) in
                (0..players.users).flat_map(|n| (0..POOLS.len()).map(move |p| (n, p)))
            {
                let plan = user::UserPlan {
                    socket: socket.clone(),
                    handle: POOLS[pool].0.to_owned(),
                    pool,
                    requests: RequestGenerator::new(
                        self.config.workload,
                        seed,
                        zone as u16,
                        number,
                    ),
                    end: self.config.runtime,
                };
                let (clock, done) = (self.clock, done.clone());
                users.push(std::thread::spawn(move || user::run(&plan, clock, &done)));
            }
        }
        Ok(users)
    }

    fn execute_plan(&mut self) -> Result<()> {
        let mut plan = self.config.plan.clone();
        plan.sort_by_key(|(at, _)| *at);
        for (at, action) in plan {
            std::thread::sleep(self.clock.wall_time_until(at));
            match action {
                PoolAction::Start { zone, element } => self.start(zone, element)?,
                PoolAction::Stop { zone, element } => {
                    let stopped = self.running_elements.remove(&(zone, element));
                    stopped.iter().flatten().for_each(RunningElement::stop);
                }
                other => return Err(anyhow!("a live experiment does not support {other:?}")),
            }
        }
        Ok(())
    }
}
