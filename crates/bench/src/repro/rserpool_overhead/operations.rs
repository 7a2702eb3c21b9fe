//! The operations of figures 6 and 7, measured as in paper 001 section 4.1: as many as possible on a pool set up in
//! advance.

use std::time::Duration;

use anyhow::Result;
use nix::time::{ClockId, clock_gettime};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::handlespaces::{HoldfastHandlespace, MeasuredHandlespace, PolicyClass, TreeHandlespace};
use crate::balanced_trees::{RedBlack, Treap};
use crate::repro::{Estimate, ExperimentOutcome, ExperimentSettings, Figure, Panel, Point, Series};

/// The operation of a curve.
#[derive(Clone, Copy, Debug)]
pub enum PaperOperation {
    /// Deregistration and registration in turns: "The deregistration of a randomly selected element if the pool has the
    /// configured size; otherwise, a new PE is registered."
    Replace(PolicyClass),
    /// Re-registration of a random element with a random load.
    Reregister(PolicyClass),
    /// Restart of a random element's lifetime timer, as at a registrar that is not its home.
    RestartLifetimeTimer,
    /// Transmission and answer of the next keep-alive, as at the home registrar.
    KeepAlive,
    /// Selection of this many elements.
    Resolve(PolicyClass, usize),
    /// Walk through all elements of a registrar.
    Synchronize,
}

/// A curve for each structure.
pub struct OperationCurve {
    /// Name of the curve in its panel.
    pub name: &'static str,
    /// Measured operation.
    pub operation: PaperOperation,
    /// The paper's value for the red-black tree: number of elements, and operations per element and second.
    pub paper_value: Option<(u32, f64)>,
}

/// Title of a panel, divisor of its operations, and its curves.
pub type PanelSpec = (&'static str, RateDivisor, &'static [OperationCurve]);

/// Divisor of the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateDivisor {
    /// Operations per element and second.
    Element,
    /// Operations per second.
    Second,
}

/// A function that returns the operations per second for an operation, a number of elements, a random seed and a
/// duration.
type MeasureFunction = fn(PaperOperation, u32, u64, Duration) -> f64;

const STRUCTURES: [(&str, MeasureFunction); 3] = [
    ("red-black tree", measure::<TreeHandlespace<RedBlack>>),
    ("treap", measure::<TreeHandlespace<Treap>>),
    ("Holdfast", measure::<HoldfastHandlespace>),
];
const SIZES: [u32; 5] = [1000, 5000, 10_000, 20_000, 30_000];
const MEASURE_MS_DEFAULT: u64 = 10;
/// Life of a timer, microseconds.
const LIFE_US: u64 = 30_000_000;
/// Operations between two readings of the clock.
const OPERATIONS_PER_CLOCK_READ: usize = 512;

/// Measures all panels of a figure, each with every structure and curve.
pub fn measure_figure(
    settings: &ExperimentSettings,
    title: &str,
    panels: &[PanelSpec],
) -> Result<ExperimentOutcome> {
    let milliseconds = settings.milliseconds.unwrap_or(MEASURE_MS_DEFAULT);
    let panels = panels.iter().map(|&(panel, per, curves)| Panel {
        title: panel.to_owned(),
        x: "elements".to_owned(),
        y: "operations".to_owned(),
        unit: match per {
            RateDivisor::Element => "per element and second".to_owned(),
            RateDivisor::Second => "per second".to_owned(),
        },
        y_log: true,
        series: STRUCTURES
            .iter()
            .flat_map(|structure| curves.iter().map(move |curve| (structure, curve)))
            .map(|(structure, curve)| {
                measure_series(settings, milliseconds, (panel, per), structure, curve)
            })
            .collect(),
    });
    let figure = Figure {
        title: title.to_owned(),
        panels: panels.collect(),
    };
    let notes = vec![
        format!(
            "{} repeats of {milliseconds} ms of processor time each, each on a separate pool; this machine, one core",
            settings.repeats_or(super::REPEATS)
        ),
        "paper: values stated in its text, for its red-black tree on a 1.3 GHz Athlon".to_owned(),
    ];
    Ok(ExperimentOutcome::from_figure(figure, notes))
}

fn measure_series(
    settings: &ExperimentSettings,
    milliseconds: u64,
    (panel, per): (&str, RateDivisor),
    &(structure, measure): &(&'static str, MeasureFunction),
    curve: &OperationCurve,
) -> Series {
    let name = format!("{structure}, {}", curve.name);
    let point = |elements: u32| {
        eprintln!("{panel}: {name}, {elements} elements");
        let repeat = |seed: u32| {
            let duration = Duration::from_millis(milliseconds);
            let rate = measure(curve.operation, elements, u64::from(seed), duration);
            match per {
                RateDivisor::Element => rate / f64::from(elements),
                RateDivisor::Second => rate,
            }
        };
        let repeats: Vec<f64> = (0..settings.repeats_or(super::REPEATS))
            .map(repeat)
            .collect();
        let stated = curve.paper_value.filter(|_| structure == STRUCTURES[0].0);
        Point {
            x: f64::from(elements),
            ours: Estimate::from_repeats(&repeats),
            paper: stated
                .filter(|&(at, _)| at == elements)
                .map(|(_, rate)| rate),
        }
    };
    Series {
        points: settings.sizes_or(&SIZES).into_iter().map(point).collect(),
        name,
    }
}

/// Returns the processor time of this thread, which other programs do not affect.
fn processor_time() -> Duration {
    let Ok(time) = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID) else {
        unreachable!("every thread has this clock");
    };
    Duration::from(time)
}

/// A pool of the configured size with its workload.
struct MeasuredPool<S> {
    subject: S,
    /// Registered elements.
    ids: Vec<u32>,
    size: usize,
    random: SmallRng,
    now_us: u64,
    ids_assigned: u32,
}

fn measure<S: MeasuredHandlespace>(
    operation: PaperOperation,
    elements: u32,
    seed: u64,
    duration: Duration,
) -> f64 {
    let (PaperOperation::Replace(kind)
    | PaperOperation::Reregister(kind)
    | PaperOperation::Resolve(kind, _)) = operation
    else {
        return MeasuredPool::<S>::new(PolicyClass::RoundRobin, elements, seed)
            .measure(operation, duration);
    };
    MeasuredPool::<S>::new(kind, elements, seed).measure(operation, duration)
}

impl<S: MeasuredHandlespace> MeasuredPool<S> {
    fn new(kind: PolicyClass, elements: u32, seed: u64) -> MeasuredPool<S> {
        let mut run = MeasuredPool {
            subject: S::new(kind),
            ids: Vec::new(),
            size: elements as usize,
            random: SmallRng::seed_from_u64(seed),
            now_us: 0,
            ids_assigned: 0,
        };
        while run.ids.len() < run.size {
            run.register();
        }
        run
    }

    fn measure(mut self, operation: PaperOperation, duration: Duration) -> f64 {
        let batch = match operation {
            PaperOperation::Synchronize => 1,
            _ => OPERATIONS_PER_CLOCK_READ,
        };
        let start = processor_time();
        let mut operations = 0;
        loop {
            for _ in 0..batch {
                self.perform_once(operation);
            }
            operations += batch;
            let spent = processor_time().saturating_sub(start);
            if spent >= duration {
                return operations as f64 / spent.as_secs_f64();
            }
        }
    }

    #[inline]
    fn perform_once(&mut self, operation: PaperOperation) {
        match operation {
            PaperOperation::Replace(_) if self.ids.len() == self.size => {
                let at = self.random.random_range(0..self.size);
                let id = self.ids.swap_remove(at);
                self.subject.deregister(id);
            }
            PaperOperation::Replace(_) => self.register(),
            PaperOperation::Reregister(_) => {
                let (id, load) = (self.random_id(), self.random.random());
                self.subject.register(id, load);
            }
            PaperOperation::RestartLifetimeTimer => {
                let id = self.random_id();
                self.now_us += 1;
                self.subject.set_timer(id, self.now_us + LIFE_US);
            }
            PaperOperation::KeepAlive => self.now_us = self.subject.expire_keep_alive(LIFE_US),
            PaperOperation::Resolve(_, items) => {
                assert_eq!(self.subject.resolve(items), items.min(self.size));
            }
            PaperOperation::Synchronize => assert_eq!(self.subject.synchronize(), self.size),
        }
    }

    fn register(&mut self) {
        // Ids that look random and never repeat.
        self.ids_assigned += 1;
        let id = self.ids_assigned.wrapping_mul(0x9e37_79b1);
        let load = self.random.random();
        self.subject.register(id, load);
        let at_us = self.now_us + self.random.random_range(1..=LIFE_US);
        self.subject.set_timer(id, at_us);
        self.ids.push(id);
    }

    fn random_id(&mut self) -> u32 {
        self.ids[self.random.random_range(0..self.ids.len())]
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::repro::Experiment;

    /// Checks that the experiment has `series` positive rows for each of two sizes, and `stated` values of the paper at
    /// the paper's sizes.
    pub fn check_experiment(experiment: Experiment, series: usize, stated: usize) {
        let settings = ExperimentSettings {
            repeats: Some(2),
            milliseconds: Some(1),
            sizes: vec![10, 300],
            elements: None,
            live: false,
            lapse: 1.0,
        };
        let outcome = (experiment.run)(&settings).unwrap();
        assert_eq!(outcome.rows.len(), 2 * series);
        for row in &outcome.rows {
            assert!(row.ours > 0.0 && row.ci95.is_some(), "{row:?}");
        }
        let settings = ExperimentSettings {
            repeats: Some(1),
            sizes: vec![10_000, 20_000, 30_000],
            ..settings
        };
        let outcome = (experiment.run)(&settings).unwrap();
        let papers = outcome.rows.iter().filter(|row| row.paper.is_some());
        assert_eq!(papers.count(), stated);
    }
}
