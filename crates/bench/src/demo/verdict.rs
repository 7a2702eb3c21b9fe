//! Comparison of the results with the promises.

use std::collections::BTreeSet;

use super::report::{Report, Wire};

/// Pause from which the client sends its tail-loss probe.
const PROBE_AFTER_US: f64 = 4000.0;

/// Returns a text for each broken promise.
pub fn problems(report: &Report) -> Vec<String> {
    let spec = &report.spec;
    let mut problems = Vec::new();
    let mut expect = |kept: bool, otherwise: String| {
        if !kept {
            problems.push(otherwise);
        }
    };
    expect(
        report.bytes == spec.bytes && report.sha256_arrived == report.sha256_source,
        format!(
            "what arrived ({} bytes, sha256 {}) is not the source ({} bytes, sha256 {})",
            report.bytes, report.sha256_arrived, spec.bytes, report.sha256_source
        ),
    );
    let done = report.handoffs.len();
    expect(
        done >= spec.handoffs_min,
        format!("{done} handoffs instead of at least {}", spec.handoffs_min),
    );
    let served: BTreeSet<&str> = report
        .handoffs
        .iter()
        .map(|handoff| handoff.to.as_str())
        .collect();
    expect(
        done < usize::from(spec.nodes) || served.len() == usize::from(spec.nodes),
        format!(
            "only {} of {} nodes took the connection",
            served.len(),
            spec.nodes
        ),
    );
    // A probe needs a pause, so there are at most as many probes as handoffs with a pause.
    let paused = |gap: Option<f64>| gap.is_some_and(|gap| gap >= PROBE_AFTER_US);
    let probes_max = report
        .handoffs
        .iter()
        .filter(|handoff| paused(handoff.client_gap_us))
        .count() as u64;
    wire(
        &report.wire,
        "the transfer",
        spec.loss_pct,
        probes_max,
        &mut expect,
    );
    wire(
        &report.control,
        "the control run",
        spec.loss_pct,
        0,
        &mut expect,
    );
    problems
}

fn wire(
    seen: &Wire,
    which: &str,
    loss_pct: f64,
    probes_max: u64,
    expect: &mut impl FnMut(bool, String),
) {
    expect(
        seen.resets == 0,
        format!("{} resets in {which}", seen.resets),
    );
    let (to_client, to_server) = (&seen.connection.to_client, &seen.connection.to_server);
    let back = to_client.clock_back + to_server.clock_back;
    expect(
        back == 0,
        format!("{back} segments in {which} whose timestamps go back"),
    );
    if loss_pct > 0.0 {
        // With loss, a SYN can be lost, too.
        return expect(seen.syns >= 1, format!("no SYN in {which}"));
    }
    expect(
        seen.syns == 1,
        format!("{} SYNs in {which} instead of one", seen.syns),
    );
    expect(
        seen.sent_again == 0,
        format!(
            "segments sent again in {which}: to the client {} seen before, {} late, {} as probes; to the server {} seen \
             before, {} late",
            to_client.retransmitted,
            to_client.late,
            to_client.tail_loss_probes - to_client.probes_before_answer,
            to_server.retransmitted,
            to_server.late
        ),
    );
    expect(
        seen.client_probes <= probes_max,
        format!(
            "segments sent again in {which}: {} of the client as tail-loss probes, where {probes_max} handoffs paused for 4 ms",
            seen.client_probes
        ),
    );
}
