//! `holdfast bench sim`: measures the simulator in events per second.
//!
//! An event is a delivered message or a fired timer. Each scenario is simulated on one processor.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use holdfast_sim::Time;
use holdfast_sim::pools::{ElementChoice, PoolRunConfig, Workload, ZoneConfig, run as simulate};
use serde::Serialize;

/// Flags of `holdfast bench sim`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  holdfast bench sim --scenario lans,thousands --json rows.json")]
pub struct SimulatorSpeedArgs {
    /// Scenarios, separated by commas; all by default.
    #[arg(long, value_delimiter = ',')]
    scenario: Vec<String>,
    /// Write the rows to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Result of one scenario.
#[derive(Clone, Debug, Serialize)]
pub struct SimulatorSpeedRow {
    scenario: &'static str,
    events: u64,
    wall_s: f64,
    events_per_s: f64,
    simulated_s: f64,
    peak_mib: f64,
}

#[derive(Serialize)]
struct SimulatorSpeedReport<'a> {
    bench: &'static str,
    rows: &'a [SimulatorSpeedRow],
}

/// The scenarios: name, zones, elements per zone, users per element, virtual seconds.
const SCENARIOS: [(&str, usize, u32, u32, f64); 4] = [
    // The points of paper 004's Figure 4 with the fewest and most users.
    ("lans", 3, 10, 3, 3_600.0),
    ("lans-busy", 3, 10, 10, 3_600.0),
    ("thousands", 3, 1_000, 10, 60.0),
    ("million", 4, 25_000, 10, 20.0),
];

fn scenario_config(zones: usize, elements: u32, ratio: u32, runtime_s: f64) -> PoolRunConfig {
    let users = elements * ratio;
    let zones = vec![ZoneConfig { elements, users }; zones];
    let workload = Workload::for_utilisation(1e6, 1e6, f64::from(ratio), 0.6);
    let mut config = PoolRunConfig::new(
        zones,
        10.0,
        100.0,
        ElementChoice::LeastUsedDpf(1e-5),
        workload,
    );
    config.runtime = Time::from_secs_f64(runtime_s);
    config
}

/// Runs `holdfast bench sim`: measures the simulator's speed in each wanted scenario.
///
/// # Errors
/// A scenario is unknown, or the file cannot be written.
pub fn run(args: &SimulatorSpeedArgs) -> Result<()> {
    for name in &args.scenario {
        let known = SCENARIOS.iter().any(|(known, ..)| known == name);
        ensure!(
            known,
            "unknown scenario {name}; possible are lans, lans-busy, thousands and million"
        );
    }
    let wanted =
        |name: &str| args.scenario.is_empty() || args.scenario.iter().any(|one| one == name);
    let mut rows = Vec::new();
    for (name, zones, elements, ratio, runtime_s) in SCENARIOS {
        if wanted(name) {
            let row = measure(name, &scenario_config(zones, elements, ratio, runtime_s))?;
            println!(
                "{name:<10} {:>11} events in {:>6.2} s: {:>9.0} per second; {:.0} virtual s, {:.0} MiB",
                row.events, row.wall_s, row.events_per_s, row.simulated_s, row.peak_mib
            );
            rows.push(row);
        }
    }
    if let Some(path) = &args.json {
        let report = SimulatorSpeedReport {
            bench: "sim",
            rows: &rows,
        };
        let text = serde_json::to_string_pretty(&report)? + "\n";
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn measure(scenario: &'static str, config: &PoolRunConfig) -> Result<SimulatorSpeedRow> {
    // Resets the peak memory (VmHWM); see `clear_refs` in proc(5).
    std::fs::write("/proc/self/clear_refs", "5").context("reset the peak memory counter")?;
    let begin = Instant::now();
    let outcome = simulate(config, 1);
    let wall_s = begin.elapsed().as_secs_f64();
    Ok(SimulatorSpeedRow {
        scenario,
        events: outcome.events,
        wall_s,
        events_per_s: outcome.events as f64 / wall_s,
        simulated_s: outcome.simulated_s,
        peak_mib: peak_mib()?,
    })
}

fn peak_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    let kib: f64 = kib.context("/proc/self/status has no VmHWM")?.parse()?;
    Ok(kib / 1024.0)
}
