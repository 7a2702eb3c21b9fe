//! Results of the runs, beside the paper and the simulation.

use holdfast_sim::pools::{Window, run as simulate};
use holdfast_sim::{Time, seeds};

use super::{Experiment, POOLS, SETUP_ROUND_TRIPS};
use crate::repro::lu_dpf::live::user::Done;
use crate::repro::lu_dpf::{DPF, check, clearly_above};
use crate::repro::{Check, Estimate, Outcome, Row, Settings};

/// Simulations of each live run's network.
const SIMULATIONS: u64 = 4;
/// Largest difference between live and simulated times, in per cent.
const APART_MAX: f64 = 5.0;
/// Least gain of LU-DPF without failures, in per cent.
const GAIN_MIN: f64 = 12.0;

/// Means of a run for each pool, in seconds.
#[derive(Clone, Debug)]
pub(super) struct Means {
    /// Mean time from a request's generation to its end, by phase.
    handling: Vec<[f64; POOLS.len()]>,
    /// Mean time from a request's turn to its acceptance, over all phases.
    startup: [f64; POOLS.len()],
}

/// Returns the means of requests that ended within each window.
pub(super) fn means(windows: &[(Time, Time)], done: &[Done]) -> Means {
    let mean = |(from, to): (Time, Time), pool| {
        let within = done
            .iter()
            .filter(|one| one.pool == pool && (from..to).contains(&one.ended));
        let (count, sum) = within.fold((0.0, 0.0), |(count, sum), one| {
            let handling = one.ended.since(one.generated);
            (count + 1.0, sum + handling.as_secs_f64())
        });
        sum / count
    };
    let both = |window: &(Time, Time)| std::array::from_fn(|pool| mean(*window, pool));
    let within = |time: Time| {
        windows
            .iter()
            .any(|(from, to)| (*from..*to).contains(&time))
    };
    let startup = |pool| {
        let counted = done
            .iter()
            .filter(|one| one.pool == pool && within(one.ended));
        let (count, sum) = counted.fold((0.0, 0.0), |(count, sum), one| {
            (
                count + 1.0,
                sum + one.accepted.since(one.dequeued).as_secs_f64(),
            )
        });
        sum / count
    };
    Means {
        handling: windows.iter().map(both).collect(),
        startup: std::array::from_fn(startup),
    }
}

/// Prints lines for each run: its phases, and the mean queueing and start-up times of all its requests.
pub(super) fn progress(experiment: &Experiment, seed: u64, means: &Means, done: &[Done]) {
    let phases = experiment.phases.iter().zip(&means.handling);
    for ((name, _), [near, plain]) in phases {
        let gain = 100.0 * (1.0 - near / plain);
        eprintln!("run {seed}: {name}: {near:.3} s, LU {plain:.3} s, {gain:.1} %");
    }
    for (pool, (handle, _)) in POOLS.iter().enumerate() {
        let all = || done.iter().filter(|one| one.pool == pool);
        let count = all().count();
        let mean = |of: fn(&Done) -> Time| {
            all().map(|one| of(one).as_secs_f64()).sum::<f64>() / count as f64
        };
        let queued = mean(|one| one.dequeued.since(one.generated));
        let startup = mean(|one| one.accepted.since(one.dequeued));
        let again = all().filter(|one| one.attempts > 1).count();
        eprintln!(
            "run {seed}: {handle}: {count} requests, {queued:.3} s queued, {startup:.3} s start-up, {again} begun anew"
        );
    }
}

/// Simulates the same networks: for each live run, the means of several simulations in which hosts take this additional
/// time per request.
fn simulated(experiment: &Experiment, hosts_s: &[f64]) -> Vec<Means> {
    let mut jobs = Vec::new();
    for (seed, hosts_s) in (1..).zip(hosts_s) {
        for dpf in [DPF, 0.0] {
            jobs.extend((0..SIMULATIONS).map(|chance| (dpf, seed, chance, *hosts_s)));
        }
    }
    let of = |(dpf, seed, chance, hosts_s): &(f64, u64, u64, f64)| {
        let mut config = experiment.config(*dpf, *seed);
        config.delivery = Time::from_secs_f64(*hosts_s);
        simulate(&config, seed << 32 | chance).windows
    };
    let windows: Vec<Vec<Window>> = seeds::each(&jobs, of, |_| ());
    let each = SIMULATIONS as usize;
    let runs = windows.chunks(2 * each);
    let pool = |of: &[Vec<Window>]| {
        let phases = 0..experiment.phases.len();
        let of_phase = |phase| mean(of.iter().map(|windows| &windows[phase]), |w| w.handling_s);
        let handling: Vec<f64> = phases.map(of_phase).collect();
        (handling, mean(of.iter().flatten(), |w| w.startup_s))
    };
    runs.map(|both| {
        let (near, plain) = both.split_at(each);
        let ((near, near_startup), (plain, plain_startup)) = (pool(near), pool(plain));
        let both = near.into_iter().zip(plain);
        Means {
            handling: both.map(|(near, plain)| [near, plain]).collect(),
            startup: [near_startup, plain_startup],
        }
    })
    .collect()
}

/// Returns the mean per request, in seconds.
fn mean<'a>(windows: impl Iterator<Item = &'a Window>, of: fn(&Window) -> f64) -> f64 {
    let (count, sum) = windows.fold((0.0, 0.0), |(count, sum), window| {
        (count + window.requests as f64, sum + of(window))
    });
    sum / count
}

/// Returns the differences of live to simulated start-up times, as the mean of both pools of each run: the time taken
/// by the hosts, which no simulation knows.
fn hosts_s(live: &[Means], simulated: &[Means]) -> Vec<f64> {
    let more = |(live, simulated): (&Means, &Means)| {
        let each = live.startup.iter().zip(simulated.startup);
        let sum: f64 = each.map(|(live, simulated)| live - simulated).sum();
        (sum / POOLS.len() as f64).max(0.0)
    };
    live.iter().zip(simulated).map(more).collect()
}

/// Returns the table and the bars.
pub(super) fn outcome(settings: &Settings, experiment: &Experiment, runs: &[Means]) -> Outcome {
    let ideal = simulated(experiment, &vec![0.0; runs.len()]);
    let hosts_s = hosts_s(runs, &ideal);
    let busy = simulated(experiment, &hosts_s);
    let mut outcome = Outcome {
        notes: notes(settings, runs.len(), &hosts_s),
        ..Outcome::default()
    };
    for (place, (name, paper)) in experiment.phases.iter().enumerate() {
        let of = |all: &[Means], value: Value| {
            let values: Vec<f64> = all
                .iter()
                .map(|means| value(&means.handling[place]))
                .collect();
            Estimate::of(&values)
        };
        for ((what, value, unit), paper) in VALUES.into_iter().zip(*paper) {
            for (how, all) in [
                ("", runs),
                (", simulated", &ideal[..]),
                (", simulated with slow hosts", &busy[..]),
            ] {
                let point = format!("{name}: {what}{how}");
                outcome
                    .rows
                    .push(Row::new(point, Some(paper), of(all, value), unit));
            }
        }
        let [near, plain, gain] = VALUES.map(|(_, value, _)| of(runs, value));
        let apart = [(&ideal[..], ""), (&busy[..], " that knows what hosts took")];
        for ((what, value, unit), (all, how)) in VALUES.iter().flat_map(|v| apart.map(|a| (v, a))) {
            outcome.checks.push(is_near(
                format!("{name}: {what} live is within {APART_MAX} % of the simulation{how}"),
                of(runs, *value),
                of(all, *value),
                unit,
            ));
        }
        outcome.checks.push(check(
            format!("{name}: LU-DPF is faster, with disjoint intervals"),
            clearly_above(plain, near),
            format!("{:.3} s, and {:.3} s with LU", near.mean, plain.mean),
        ));
        if name.starts_with("normal") {
            outcome.checks.push(check(
                format!("{name}: by at least {GAIN_MIN} %"),
                gain.mean >= GAIN_MIN,
                format!("{:.1} %", gain.mean),
            ));
        }
    }
    outcome
}

type Value = fn(&[f64; POOLS.len()]) -> f64;

/// Values reported for each phase, and their units.
const VALUES: [(&str, Value, &str); 3] = [
    ("LU-DPF", |[near, _]| *near, "s"),
    ("LU", |[_, plain]| *plain, "s"),
    (
        "improvement",
        |[near, plain]| 100.0 * (1.0 - near / plain),
        "%",
    ),
];

fn is_near(statement: String, live: Estimate, simulated: Estimate, unit: &str) -> Check {
    let apart = 100.0 * (live.mean / simulated.mean - 1.0);
    check(
        statement,
        apart.abs() <= APART_MAX,
        format!(
            "{:.3} {unit} and {:.3} {unit}, {apart:+.1} %",
            live.mean, simulated.mean
        ),
    )
}

fn notes(settings: &Settings, runs: usize, hosts_s: &[f64]) -> Vec<String> {
    let lapse = settings.lapse;
    vec![
        format!(
            "live: {runs} runs in a lab; every time is 1/{lapse} of the paper's, DistanceStep and all delays too, and told as the paper's;"
        ),
        "delays by the lab's own link program, in user space: it needs no netem, which not every kernel has;".to_owned(),
        format!(
            "users of both pools make the same requests; {SETUP_ROUND_TRIPS} round trips before each, here and in the simulation beside it"
        ),
        format!(
            "({SIMULATIONS} simulations of each run's network); by start-ups, hosts took {:.3} s for a request, {:.1} ms of the wall clock's",
            Estimate::of(hosts_s).mean,
            1e3 * Estimate::of(hosts_s).mean / lapse
        ),
    ]
}
