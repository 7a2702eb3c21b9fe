//! `holdfast repro`: repeats the measurements of the papers' tables and figures.
//!
//! An experiment is a module with a `pub(crate) const EXPERIMENT: Experiment`, listed in `EXPERIMENTS`. The experiment
//! measures as [`ExperimentSettings`] say and returns an [`ExperimentOutcome`]; flags, table, JSON and plot are the same for all.

mod dve;
mod experiment_outcome;
mod lu_dpf;
mod plot;
mod rserpool_overhead;

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::builder::PossibleValue;
use serde::Serialize;

pub use experiment_outcome::{ExperimentOutcome, ResultRow, StatementCheck};
pub use holdfast_sim::Estimate;
pub use plot::{Figure, Panel, Point, Series};

/// Argument that asks for the names instead of an experiment.
const LIST_ARGUMENT: &str = "list";

/// All experiments, one line each, in the order of papers and figures.
const EXPERIMENTS: &[Experiment] = &[
    rserpool_overhead::figure6::EXPERIMENT,
    rserpool_overhead::figure7::EXPERIMENT,
    rserpool_overhead::figure8::EXPERIMENT,
    rserpool_overhead::figure9::EXPERIMENT,
    dve::figure4::EXPERIMENT,
    dve::figure5b::EXPERIMENT,
    dve::figure5c::EXPERIMENT,
    lu_dpf::figure4_left::EXPERIMENT,
    lu_dpf::figure4_right::EXPERIMENT,
    lu_dpf::figure5::EXPERIMENT,
    lu_dpf::table1::EXPERIMENT,
    lu_dpf::policy_comparison::EXPERIMENT,
];

/// A table or figure of a paper.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// `PAPER/EXPERIMENT`.
    pub name: &'static str,
    /// Description in one line.
    pub about: &'static str,
    /// Runs the measurements. Progress goes to standard error.
    pub run: fn(&ExperimentSettings) -> Result<ExperimentOutcome>,
}

/// Settings of an experiment.
#[derive(Clone, Debug, clap::Args)]
pub struct ExperimentSettings {
    /// Repeats of each measurement (each simulation with another seed), for the confidence intervals; by default the
    /// paper's number
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeats: Option<u32>,
    /// Duration of each measurement, milliseconds (virtual time in simulations); by default the experiment's own
    /// choice, with which the whole takes some minutes
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    pub milliseconds: Option<u64>,
    /// Numbers of elements or users (of paper 004: users per element) along the abscissa instead of the experiment's
    /// own, separated by commas
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub sizes: Vec<u32>,
    /// Elements of a pool that the experiment does not vary in size, instead of the paper's number
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub elements: Option<u32>,
    /// Measure in a lab instead of in simulation, with real daemons (lu-dpf/table1; needs root)
    #[arg(long)]
    pub live: bool,
    /// Factor by which every time of a live experiment is shorter than the paper's, 1 to 20
    #[arg(long, value_name = "FACTOR", default_value_t = 15.0, requires = "live")]
    pub lapse: f64,
}

impl ExperimentSettings {
    /// Returns the requested repeats, or a default.
    #[must_use]
    pub fn repeats_or(&self, default: u32) -> u32 {
        self.repeats.unwrap_or(default)
    }

    /// Returns the requested sizes, or a default.
    #[must_use]
    pub fn sizes_or(&self, default: &[u32]) -> Vec<u32> {
        if self.sizes.is_empty() {
            default.to_vec()
        } else {
            self.sizes.clone()
        }
    }
}

/// Measure a paper's table or figure on this machine, and show the stated numbers beside ours
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  holdfast repro list
  holdfast repro rserpool-overhead/fig8 --json fig8.json --plot fig8.svg
  holdfast repro dve/figure4 --json figure4.json --plot figure4.svg
  holdfast repro rserpool-overhead/fig8 --repeats 3 --milliseconds 500 --sizes 1000,2000")]
pub struct ReproArgs {
    /// The experiment, or `list` for the names of all
    #[arg(value_name = "PAPER/EXPERIMENT", value_parser = possible_names())]
    experiment: String,
    /// Settings of the experiment.
    #[command(flatten)]
    settings: ExperimentSettings,
    /// Write the rows to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the curves into this file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

fn possible_names() -> Vec<PossibleValue> {
    let experiments = EXPERIMENTS
        .iter()
        .map(|each| PossibleValue::new(each.name).help(each.about));
    std::iter::once(PossibleValue::new(LIST_ARGUMENT).help("Name all experiments"))
        .chain(experiments)
        .collect()
}

#[derive(Serialize)]
struct ReproReport<'a> {
    repro: &'a str,
    rows: &'a [ResultRow],
    /// Checks of the paper's statements, if the experiment has any.
    #[serde(skip_serializing_if = "<[StatementCheck]>::is_empty")]
    checks: &'a [StatementCheck],
}

#[derive(Serialize)]
struct ExperimentListing {
    name: &'static str,
    about: &'static str,
}

/// Runs `holdfast repro`.
///
/// # Errors
/// The experiment fails, or a file cannot be written.
pub fn run(args: &ReproArgs) -> Result<()> {
    if args.experiment == LIST_ARGUMENT {
        return list(args);
    }
    let Some(experiment) = EXPERIMENTS.iter().find(|e| e.name == args.experiment) else {
        bail!(
            "unknown experiment {}; see `holdfast repro list`",
            args.experiment
        );
    };
    let supports_live = experiment.name == lu_dpf::table1::EXPERIMENT.name;
    ensure!(
        supports_live || !args.settings.live,
        "{} cannot be measured live; leave out --live",
        experiment.name
    );
    let table_experiments = [
        &lu_dpf::table1::EXPERIMENT,
        &lu_dpf::policy_comparison::EXPERIMENT,
    ];
    let is_table = table_experiments
        .iter()
        .any(|each| each.name == experiment.name);
    ensure!(
        args.plot.is_none() || !is_table,
        "{} is a table and has no plot; use --json for its numbers",
        experiment.name
    );
    // The files are opened before some minutes of measurement, not after.
    for path in [&args.json, &args.plot].into_iter().flatten() {
        let opened = OpenOptions::new().create(true).append(true).open(path);
        opened.with_context(|| format!("write {}", path.display()))?;
    }
    let outcome = (experiment.run)(&args.settings)?;
    println!("{}: {}", experiment.name, experiment.about);
    print!("{}", outcome.text());
    if let Some(path) = &args.json {
        let report = ReproReport {
            repro: experiment.name,
            rows: &outcome.rows,
            checks: &outcome.checks,
        };
        write_json(path, &report)?;
    }
    if let Some(path) = &args.plot {
        let figure = outcome.figure.as_ref();
        let figure = figure.context("this experiment has no curves")?;
        let written = figure.write(path);
        written.with_context(|| format!("write {}", path.display()))?;
    }
    let failed = outcome.checks.iter().filter(|check| !check.holds).count();
    let checks = outcome.checks.len();
    ensure!(failed == 0, "{failed} of {checks} statements do not hold");
    Ok(())
}

fn list(args: &ReproArgs) -> Result<()> {
    ensure!(args.plot.is_none(), "a list of experiments has no plot");
    let width = EXPERIMENTS.iter().map(|e| e.name.len()).max().unwrap_or(0);
    for Experiment { name, about, .. } in EXPERIMENTS {
        println!("{name:<width$}  {about}");
    }
    if let Some(path) = &args.json {
        let listed = EXPERIMENTS
            .iter()
            .map(|&Experiment { name, about, .. }| ExperimentListing { name, about });
        write_json(path, &listed.collect::<Vec<_>>())?;
    }
    Ok(())
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}
