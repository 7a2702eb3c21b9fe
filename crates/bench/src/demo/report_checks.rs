//! Comparison of the results with the promises.

use std::collections::BTreeSet;

use super::report::{DemoReport, WireStatistics};

/// Pause from which the client sends its tail-loss probe.
const PROBE_AFTER_US: f64 = 4000.0;

/// Returns a text for each broken promise.
pub fn find_problems(report: &DemoReport) -> Vec<String> {
    let spec = &report.spec;
    let mut problems = Vec::new();
    let mut expect = |kept: bool, problem: String| {
        if !kept {
            problems.push(problem);
        }
    };
    expect(
        report.bytes == spec.bytes && report.sha256_arrived == report.sha256_source,
        format!(
            "the received data ({} bytes, sha256 {}) differ from the source ({} bytes, sha256 {})",
            report.bytes, report.sha256_arrived, spec.bytes, report.sha256_source
        ),
    );
    let handoffs_done = report.handoffs.len();
    expect(
        handoffs_done >= spec.handoffs_min,
        format!(
            "{handoffs_done} handoffs instead of at least {}",
            spec.handoffs_min
        ),
    );
    let nodes_served: BTreeSet<&str> = report
        .handoffs
        .iter()
        .map(|handoff| handoff.to.as_str())
        .collect();
    expect(
        handoffs_done < usize::from(spec.nodes) || nodes_served.len() == usize::from(spec.nodes),
        format!(
            "only {} of {} nodes took the connection",
            nodes_served.len(),
            spec.nodes
        ),
    );
    // A probe needs a pause, so there are at most as many probes as handoffs with a pause.
    let is_probe_gap = |gap: Option<f64>| gap.is_some_and(|gap| gap >= PROBE_AFTER_US);
    let probes_max = report
        .handoffs
        .iter()
        .filter(|handoff| is_probe_gap(handoff.client_gap_us))
        .count() as u64;
    check_wire(
        &report.wire,
        "the transfer",
        spec.loss_pct,
        probes_max,
        &mut expect,
    );
    check_wire(
        &report.control,
        "the control run",
        spec.loss_pct,
        0,
        &mut expect,
    );
    problems
}

/// Words that begin each problem that names retransmissions. The client and the server retransmit on their own after
/// some milliseconds in which the machine runs neither, so whoever tests may repeat a run with no other problem.
pub const RETRANSMISSIONS: &str = "retransmissions";

fn check_wire(
    statistics: &WireStatistics,
    transfer_name: &str,
    loss_pct: f64,
    probes_max: u64,
    expect: &mut impl FnMut(bool, String),
) {
    expect(
        statistics.resets == 0,
        format!("{} resets in {transfer_name}", statistics.resets),
    );
    let (to_client, to_server) = (
        &statistics.connection.to_client,
        &statistics.connection.to_server,
    );
    let clock_back = to_client.clock_back + to_server.clock_back;
    expect(
        clock_back == 0,
        format!("{clock_back} segments in {transfer_name} have timestamps that go back"),
    );
    if loss_pct > 0.0 {
        // With loss, a SYN can be lost, too.
        return expect(statistics.syns >= 1, format!("no SYN in {transfer_name}"));
    }
    expect(
        statistics.syns == 1,
        format!("{} SYNs in {transfer_name} instead of one", statistics.syns),
    );
    expect(
        statistics.sent_again == 0,
        format!(
            "{RETRANSMISSIONS} in {transfer_name}: to the client {} seen before, {} late, {} as probes; to the server {} \
             seen before, {} late",
            to_client.retransmitted,
            to_client.late,
            to_client.tail_loss_probes - to_client.probes_before_answer,
            to_server.retransmitted,
            to_server.late
        ),
    );
    expect(
        statistics.client_probes <= probes_max,
        format!(
            "{RETRANSMISSIONS} in {transfer_name}: {} tail-loss probes of the client, but only {probes_max} handoffs \
             paused for 4 ms",
            statistics.client_probes
        ),
    );
}
