//! `holdfast bench steer`: the rate at which the contact node forwards packets to owners, beside the kernel's IP
//! forwarding.
//!
//! Generator, contact node and two owners are namespaces. One generator (XDP live frames of 60 bytes, UDP, pinned to
//! processor 0) feeds two interfaces of the contact node in turns: the kernel's IP forwarding serves one, the steering
//! program the other. Each has a NAPI thread of its own, pinned to processor 1, at nice -20. The thread forwards a
//! packet, and then performs the owner's receipt: for `link`, XDP at the owner counts; for `encap`, the owner's own
//! steering program decapsulates, and the packet is counted at the beginning of the owner's stack, as are packets
//! forwarded by the kernel. The generator sends more than can be forwarded, so the rate is the capacity of one
//! processor; the processor time per packet is that thread's, including the owner's part.
//!
//! Before the timing, packets of every flow arrive and are all checked (addresses, ports, checksums, content, owner);
//! during the timing, all are counted and one in 64 is checked. The steering table always holds all flows of the
//! largest row, and the rows are measured in turn, round by round, so that other work of the machine affects all alike.

mod rate_meter;
mod steer_group;
mod test_network;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_bpf::traffic::MAX_FLOWS;
use serde::Serialize;

use rate_meter::{ForwardingPath, ForwardingRate, RateMeter};
use steer_group::SteerGroup;
use test_network::TestNetwork;

/// Flags of `holdfast bench steer`.
#[derive(Debug, clap::Args)]
pub struct SteerArgs {
    /// Flows that the packets alternate between; several numbers, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,1000,100000")]
    flows: Vec<u32>,
    /// Measurements of each kind; the results are medians.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Duration of each measurement, milliseconds.
    #[arg(long, default_value_t = 300)]
    milliseconds: u64,
    /// Write the rows to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Form in which a packet gets from the contact node to the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeliveryForm {
    /// By link address, on one segment.
    Link,
    /// IP in IP, across segments; decapsulated by the owner.
    Encap,
}

impl DeliveryForm {
    fn name(self) -> &'static str {
        match self {
            DeliveryForm::Link => "link",
            DeliveryForm::Encap => "encap",
        }
    }
}

/// Result of one combination: medians, and the lowest and highest value of each rate.
#[derive(Clone, Debug, Serialize)]
pub struct SteerRow {
    flows: u32,
    form: DeliveryForm,
    kernel_forward_pps: f64,
    steer_pps: f64,
    ratio: f64,
    kernel_cpu_ns_per_packet: f64,
    steer_cpu_ns_per_packet: f64,
    kernel_forward_pps_spread: [f64; 2],
    steer_pps_spread: [f64; 2],
    packets_verified: u64,
}

#[derive(Serialize)]
struct Report<'a> {
    bench: &'static str,
    rows: &'a [SteerRow],
}

/// Measurements of one row.
struct CombinationRates {
    flows: u32,
    form: DeliveryForm,
    packets_verified: u64,
    kernel: Vec<ForwardingRate>,
    steer: Vec<ForwardingRate>,
}

/// Runs `holdfast bench steer`: measures how fast the contact node forwards packets.
///
/// # Errors
/// The user is not root, there are fewer than two processors, the kernel lacks a feature, or packets did not arrive as
/// sent.
pub fn run(args: SteerArgs) -> Result<()> {
    let processors = std::thread::available_parallelism()?.get();
    ensure!(
        processors >= 2,
        "two processors are needed: one to generate packets, one to forward them"
    );
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    let is_possible = |flows: &u32| (1..=MAX_FLOWS).contains(flows);
    ensure!(
        args.flows.iter().all(is_possible),
        "--flows must be 1 to {MAX_FLOWS}"
    );
    let place = TestNetwork::new()?;
    // The threads come before the programs: a measurement without its own thread would be worthless.
    let mut meter = RateMeter::new(&place)?;
    let group = SteerGroup::new(&place, args.flows.iter().copied().max().unwrap_or(1))?;
    let mut cells = Vec::new();
    for &flows in &args.flows {
        for form in [DeliveryForm::Link, DeliveryForm::Encap] {
            eprintln!("verifying {flows} flows, {}", form.name());
            let packets_verified = verify(&place, &mut meter, &group, flows, form)?;
            cells.push(CombinationRates {
                flows,
                form,
                packets_verified,
                kernel: Vec::new(),
                steer: Vec::new(),
            });
        }
    }
    for round in 0..args.rounds {
        eprintln!("round {} of {}", round + 1, args.rounds);
        for cell in &mut cells {
            measure(&args, &place, &mut meter, &group, cell, round)?;
        }
    }
    let rows: Vec<SteerRow> = cells.iter().map(build_row).collect();
    print_rows(&rows);
    if let Some(path) = &args.json {
        let report = Report {
            bench: "steer",
            rows: &rows,
        };
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// Checks that every flow arrives at its owner, unchanged and in the expected form; returns the number of checked
/// packets.
fn verify(
    place: &TestNetwork,
    meter: &mut RateMeter,
    group: &SteerGroup,
    flows: u32,
    form: DeliveryForm,
) -> Result<u64> {
    group.set_delivery_form(form)?;
    let before = group.counter(counter_name(form));
    let steered = meter.verify(place, ForwardingPath::SteeringProgram, flows)?;
    let forwarded = group.counter(counter_name(form)) - before;
    ensure!(
        forwarded >= steered,
        "{steered} packets arrived, but the steering program forwarded only {forwarded}"
    );
    Ok(steered + meter.verify(place, ForwardingPath::KernelRouting, flows)?)
}

fn measure(
    args: &SteerArgs,
    place: &TestNetwork,
    meter: &mut RateMeter,
    group: &SteerGroup,
    cell: &mut CombinationRates,
    round: usize,
) -> Result<()> {
    group.set_delivery_form(cell.form)?;
    let duration = Duration::from_millis(args.milliseconds);
    // Each way goes first in every other round.
    let ways = if round.is_multiple_of(2) {
        [
            ForwardingPath::KernelRouting,
            ForwardingPath::SteeringProgram,
        ]
    } else {
        [
            ForwardingPath::SteeringProgram,
            ForwardingPath::KernelRouting,
        ]
    };
    for way in ways {
        let rate = meter.measure(place, way, cell.flows, duration)?;
        let (name, rates) = match way {
            ForwardingPath::KernelRouting => ("kernel", &mut cell.kernel),
            ForwardingPath::SteeringProgram => (cell.form.name(), &mut cell.steer),
        };
        eprintln!(
            "  {:>6} flows, {name:>6}: {:.2} Mpps, {:.0} ns",
            cell.flows,
            rate.pps / 1e6,
            rate.cpu_ns
        );
        rates.push(rate);
    }
    Ok(())
}

fn build_row(cell: &CombinationRates) -> SteerRow {
    let (kernel_pps, steer_pps) = (
        median(&cell.kernel, |r| r.pps),
        median(&cell.steer, |r| r.pps),
    );
    SteerRow {
        flows: cell.flows,
        form: cell.form,
        kernel_forward_pps: kernel_pps,
        steer_pps,
        ratio: steer_pps / kernel_pps,
        kernel_cpu_ns_per_packet: median(&cell.kernel, |r| r.cpu_ns),
        steer_cpu_ns_per_packet: median(&cell.steer, |r| r.cpu_ns),
        kernel_forward_pps_spread: spread(&cell.kernel),
        steer_pps_spread: spread(&cell.steer),
        packets_verified: cell.packets_verified,
    }
}

fn counter_name(form: DeliveryForm) -> &'static str {
    match form {
        DeliveryForm::Link => "steered_link",
        DeliveryForm::Encap => "steered_encap",
    }
}

fn median(rates: &[ForwardingRate], value_of: impl Fn(&ForwardingRate) -> f64) -> f64 {
    let mut values: Vec<f64> = rates.iter().map(value_of).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}

fn spread(rates: &[ForwardingRate]) -> [f64; 2] {
    let fold =
        |choose: fn(f64, f64) -> f64, start| rates.iter().map(|rate| rate.pps).fold(start, choose);
    [fold(f64::min, f64::INFINITY), fold(f64::max, 0.0)]
}

fn print_rows(rows: &[SteerRow]) {
    println!(
        "{:>7} {:>6} {:>22} {:>22} {:>6} {:>10} {:>10}",
        "flows",
        "form",
        "kernel Mpps (spread)",
        "steer Mpps (spread)",
        "ratio",
        "kernel ns",
        "steer ns"
    );
    let rate = |pps: f64, [low, high]: [f64; 2]| {
        format!("{:.2} ({:.2}-{:.2})", pps / 1e6, low / 1e6, high / 1e6)
    };
    for row in rows {
        println!(
            "{:>7} {:>6} {:>22} {:>22} {:>6.2} {:>10.0} {:>10.0}",
            row.flows,
            row.form.name(),
            rate(row.kernel_forward_pps, row.kernel_forward_pps_spread),
            rate(row.steer_pps, row.steer_pps_spread),
            row.ratio,
            row.kernel_cpu_ns_per_packet,
            row.steer_cpu_ns_per_packet,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(pps: &[f64]) -> Vec<ForwardingRate> {
        pps.iter()
            .map(|&pps| ForwardingRate { pps, cpu_ns: 0.0 })
            .collect()
    }

    #[test]
    fn median_is_the_middle_value() {
        assert_eq!(median(&rates(&[5.0, 1.0, 3.0]), |r| r.pps), 3.0);
        assert_eq!(median(&rates(&[5.0, 1.0, 3.0, 4.0]), |r| r.pps), 3.5);
        assert_eq!(spread(&rates(&[5.0, 1.0, 3.0])), [1.0, 5.0]);
    }
}
