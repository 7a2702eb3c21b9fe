//! Results of the runs, beside the paper and the simulation.

use holdfast_sim::pools::{MeasurementWindow, run as simulate};
use holdfast_sim::{Time, seeds};

use super::{LiveExperiment, POOLS, SETUP_ROUND_TRIPS};
use crate::repro::lu_dpf::live::user::CompletedRequest;
use crate::repro::lu_dpf::{DPF, check_statement, clearly_above};
use crate::repro::{Estimate, ExperimentOutcome, ExperimentSettings, ResultRow, StatementCheck};

/// Simulations of each live run's network.
const SIMULATIONS_PER_RUN: u64 = 4;
/// Largest difference between live and simulated times, in per cent.
const DIFFERENCE_PCT_MAX: f64 = 5.0;
/// Least gain of LU-DPF without failures, in per cent.
const GAIN_PCT_MIN: f64 = 12.0;

/// Means of a run for each pool, in seconds.
#[derive(Clone, Debug)]
pub(super) struct RunMeans {
    /// Mean time from a request's generation to its end, by phase.
    handling_s: Vec<[f64; POOLS.len()]>,
    /// Mean time from a request's turn to its acceptance, over all phases.
    startup_s: [f64; POOLS.len()],
}

/// Returns the means of requests that ended within each window.
pub(super) fn window_means(windows: &[(Time, Time)], done: &[CompletedRequest]) -> RunMeans {
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
    RunMeans {
        handling_s: windows.iter().map(both).collect(),
        startup_s: std::array::from_fn(startup),
    }
}

/// Prints lines for each run: its phases, and the mean queueing and start-up times of all its requests.
pub(super) fn print_progress(
    experiment: &LiveExperiment,
    seed: u64,
    means: &RunMeans,
    done: &[CompletedRequest],
) {
    let phases = experiment.phases.iter().zip(&means.handling_s);
    for ((name, _), [near, plain]) in phases {
        let gain = 100.0 * (1.0 - near / plain);
        eprintln!("run {seed}: {name}: {near:.3} s, LU {plain:.3} s, {gain:.1} %");
    }
    for (pool, (handle, _)) in POOLS.iter().enumerate() {
        let all = || done.iter().filter(|one| one.pool == pool);
        let count = all().count();
        let mean = |of: fn(&CompletedRequest) -> Time| {
            all().map(|one| of(one).as_secs_f64()).sum::<f64>() / count as f64
        };
        let queued = mean(|one| one.dequeued.since(one.generated));
        let startup = mean(|one| one.accepted.since(one.dequeued));
        let retried = all().filter(|one| one.attempts > 1).count();
        eprintln!(
            "run {seed}: {handle}: {count} requests, {queued:.3} s queued, {startup:.3} s start-up, {retried} repeated"
        );
    }
}

/// Simulates the same networks: for each live run, the means of several simulations in which hosts take this additional
/// time per request.
fn simulate_means(experiment: &LiveExperiment, hosts_s: &[f64]) -> Vec<RunMeans> {
    let mut jobs = Vec::new();
    for (seed, hosts_s) in (1..).zip(hosts_s) {
        for dpf in [DPF, 0.0] {
            jobs.extend((0..SIMULATIONS_PER_RUN).map(|chance| (dpf, seed, chance, *hosts_s)));
        }
    }
    let of = |(dpf, seed, chance, hosts_s): &(f64, u64, u64, f64)| {
        let mut config = experiment.config(*dpf, *seed);
        config.delivery = Time::from_secs_f64(*hosts_s);
        simulate(&config, seed << 32 | chance).windows
    };
    let windows: Vec<Vec<MeasurementWindow>> = seeds::run_all(&jobs, of, |_| ());
    let each = SIMULATIONS_PER_RUN as usize;
    let runs = windows.chunks(2 * each);
    let pool = |of: &[Vec<MeasurementWindow>]| {
        let phases = 0..experiment.phases.len();
        let of_phase = |phase| mean(of.iter().map(|windows| &windows[phase]), |w| w.handling_s);
        let handling: Vec<f64> = phases.map(of_phase).collect();
        (handling, mean(of.iter().flatten(), |w| w.startup_s))
    };
    runs.map(|both| {
        let (near, plain) = both.split_at(each);
        let ((near, near_startup), (plain, plain_startup)) = (pool(near), pool(plain));
        let both = near.into_iter().zip(plain);
        RunMeans {
            handling_s: both.map(|(near, plain)| [near, plain]).collect(),
            startup_s: [near_startup, plain_startup],
        }
    })
    .collect()
}

/// Returns the mean per request, in seconds.
fn mean<'a>(
    windows: impl Iterator<Item = &'a MeasurementWindow>,
    of: fn(&MeasurementWindow) -> f64,
) -> f64 {
    let (count, sum) = windows.fold((0.0, 0.0), |(count, sum), window| {
        (count + window.requests as f64, sum + of(window))
    });
    sum / count
}

/// Returns the differences of live to simulated start-up times, as the mean of both pools of each run: the time taken
/// by the hosts, which no simulation knows.
fn host_times_s(live: &[RunMeans], simulated: &[RunMeans]) -> Vec<f64> {
    let more = |(live, simulated): (&RunMeans, &RunMeans)| {
        let each = live.startup_s.iter().zip(simulated.startup_s);
        let sum: f64 = each.map(|(live, simulated)| live - simulated).sum();
        (sum / POOLS.len() as f64).max(0.0)
    };
    live.iter().zip(simulated).map(more).collect()
}

/// Returns the table and the bars.
pub(super) fn build_outcome(
    settings: &ExperimentSettings,
    experiment: &LiveExperiment,
    runs: &[RunMeans],
) -> ExperimentOutcome {
    let ideal = simulate_means(experiment, &vec![0.0; runs.len()]);
    let hosts_s = host_times_s(runs, &ideal);
    let busy = simulate_means(experiment, &hosts_s);
    let mut outcome = ExperimentOutcome {
        notes: notes(settings, runs.len(), &hosts_s),
        ..ExperimentOutcome::default()
    };
    for (place, (name, paper)) in experiment.phases.iter().enumerate() {
        let of = |all: &[RunMeans], value: ValueOfPools| {
            let values: Vec<f64> = all
                .iter()
                .map(|means| value(&means.handling_s[place]))
                .collect();
            Estimate::from_repeats(&values)
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
                    .push(ResultRow::new(point, Some(paper), of(all, value), unit));
            }
        }
        let [near, plain, gain] = VALUES.map(|(_, value, _)| of(runs, value));
        let apart = [(&ideal[..], ""), (&busy[..], " with the hosts' times")];
        for ((what, value, unit), (all, how)) in VALUES.iter().flat_map(|v| apart.map(|a| (v, a))) {
            outcome.checks.push(check_difference(
                format!(
                    "{name}: {what} live is within {DIFFERENCE_PCT_MAX} % of the simulation{how}"
                ),
                of(runs, *value),
                of(all, *value),
                unit,
            ));
        }
        outcome.checks.push(check_statement(
            format!("{name}: LU-DPF is faster, with disjoint intervals"),
            clearly_above(plain, near),
            format!("{:.3} s, and {:.3} s with LU", near.mean, plain.mean),
        ));
        if name.starts_with("normal") {
            outcome.checks.push(check_statement(
                format!("{name}: by at least {GAIN_PCT_MIN} %"),
                gain.mean >= GAIN_PCT_MIN,
                format!("{:.1} %", gain.mean),
            ));
        }
    }
    outcome
}

type ValueOfPools = fn(&[f64; POOLS.len()]) -> f64;

/// Values reported for each phase of the experiment: request times with LU-DPF and with LU, and the improvement; with their
/// units.
const VALUES: [(&str, ValueOfPools, &str); 3] = [
    ("LU-DPF", |[near, _]| *near, "s"),
    ("LU", |[_, plain]| *plain, "s"),
    (
        "improvement",
        |[near, plain]| 100.0 * (1.0 - near / plain),
        "%",
    ),
];

fn check_difference(
    statement: String,
    live: Estimate,
    simulated: Estimate,
    unit: &str,
) -> StatementCheck {
    let apart = 100.0 * (live.mean / simulated.mean - 1.0);
    check_statement(
        statement,
        apart.abs() <= DIFFERENCE_PCT_MAX,
        format!(
            "{:.3} {unit} and {:.3} {unit}, {apart:+.1} %",
            live.mean, simulated.mean
        ),
    )
}

fn notes(settings: &ExperimentSettings, runs: usize, hosts_s: &[f64]) -> Vec<String> {
    let lapse = settings.lapse;
    vec![
        format!(
            "live: {runs} runs in a lab; every time, also DistanceStep and all delays, is 1/{lapse} of the paper's, \
             and is shown multiplied by {lapse};"
        ),
        "delays come from the lab's link program in user space, because not every kernel has netem;".to_owned(),
        format!(
            "users of both pools make the same requests; {SETUP_ROUND_TRIPS} round trips before each, here and in the simulation beside it"
        ),
        format!(
            "({SIMULATIONS_PER_RUN} simulations of each run's network); by the start-up times, hosts took {:.3} s per \
             request, {:.1} ms of real time",
            Estimate::from_repeats(hosts_s).mean,
            1e3 * Estimate::from_repeats(hosts_s).mean / lapse
        ),
    ]
}
