//! Results of the demonstration.

use std::time::Duration;

use holdfast_api::control::PhasesUs;
use serde::Serialize;

use super::spec::DemoSpec;
use super::{MeasuredTransfer, report_checks};
use holdfast_testbed::capture::{CapturedConnection, DirectionStatistics};

/// Time after a freeze in which the client's gap is searched: the packet after the freeze may arrive late.
const GAP_SEARCH_NS: u64 = 20_000_000;

/// Results of the demonstration.
#[derive(Debug, Serialize)]
pub struct DemoReport {
    /// Parameters of the demonstration.
    pub spec: DemoSpec,
    /// True if every promise is kept.
    pub passed: bool,
    /// Promises of the demonstration that were broken.
    pub problems: Vec<String>,
    /// Bytes of the transfer that arrived.
    pub bytes: u64,
    /// Digest of the source, computed independently.
    pub sha256_source: String,
    /// Digest of the bytes that arrived.
    pub sha256_arrived: String,
    /// Duration of the transfer, seconds.
    pub transfer_s: f64,
    /// Duration of the demonstration, seconds.
    pub total_s: f64,
    /// Every handoff of the transfer's connection.
    pub handoffs: Vec<HandoffResult>,
    /// Reasons of the failed handoffs.
    pub kept: Vec<String>,
    /// Median of the freezes, microseconds.
    pub freeze_us_median: Option<f64>,
    /// Longest freeze, microseconds.
    pub freeze_us_max: Option<f64>,
    /// Median of the longest pause in the client's data around each freeze, microseconds.
    pub client_gap_us_median: Option<f64>,
    /// Longest pause in the client's data around a freeze, microseconds.
    pub client_gap_us_max: Option<f64>,
    /// The capture of the transfer with handoffs.
    pub wire: WireStatistics,
    /// The capture of the control transfer, without handoffs.
    pub control: WireStatistics,
}

/// One handoff.
#[derive(Clone, Debug, Serialize)]
pub struct HandoffResult {
    /// Number of the handoff, from 1.
    pub number: usize,
    /// Name of the node that gave the connection.
    pub from: String,
    /// Name of the node that took the connection.
    pub to: String,
    /// Duration of the handoff's freeze, microseconds.
    pub freeze_us: Option<f64>,
    /// Phases of the freeze, and the preparation.
    pub phases_us: PhasesUs,
    /// Bytes sent from the donor to the acceptor.
    pub bytes_transferred: u64,
    /// Time from the operator's request to the answer that it is done, milliseconds.
    pub total_ms: f64,
    /// Longest pause in the client's data around the freeze, microseconds.
    pub client_gap_us: Option<f64>,
    /// Begin of the freeze, CLOCK_MONOTONIC.
    pub frozen_at_ns: Option<u64>,
}

/// Statistics of one transfer from a capture at the client's interface.
#[derive(Debug, Serialize)]
pub struct WireStatistics {
    /// SYNs to the service, of all connections.
    pub syns: u64,
    /// Resets in both directions.
    pub resets: u64,
    /// Segments sent again in both directions. Not counted: tail-loss probes of the client, and tail-loss probes of the
    /// server for data that had reached the client 4 ms before without an acknowledgement.
    pub sent_again: u64,
    /// The client's tail-loss probes.
    pub client_probes: u64,
    /// Longest pause between two segments with data, microseconds.
    pub data_gap_us_max: Option<f64>,
    /// All counters of the connection.
    pub connection: CapturedConnection,
}

impl WireStatistics {
    fn new(passage: &mut MeasuredTransfer, upload: bool) -> Self {
        let connection = std::mem::replace(&mut passage.connection, CapturedConnection::empty());
        let data = data_direction(&connection, upload);
        Self {
            syns: passage.syns,
            resets: connection.to_server.resets + connection.to_client.resets,
            // A probe of the server after a late acknowledgement of the client is no fault of the group.
            sent_again: connection.retransmissions() + connection.to_client.tail_loss_probes
                - connection.to_client.probes_before_answer,
            client_probes: connection.to_server.tail_loss_probes,
            data_gap_us_max: data.gap_max.map(|gap| gap.length_ns as f64 / 1e3),
            connection,
        }
    }
}

/// Returns the direction of the data.
fn data_direction(connection: &CapturedConnection, upload: bool) -> &DirectionStatistics {
    if upload {
        &connection.to_server
    } else {
        &connection.to_client
    }
}

impl DemoReport {
    pub(super) fn new(
        spec: &DemoSpec,
        sha256_source: String,
        (mut control, mut measured): (MeasuredTransfer, MeasuredTransfer),
        total: Duration,
    ) -> Self {
        let mut handoffs = std::mem::take(&mut measured.round.handoffs);
        for handoff in &mut handoffs {
            handoff.client_gap_us = client_gap_us(&measured, handoff, spec.upload);
        }
        let freezes: Vec<f64> = handoffs
            .iter()
            .filter_map(|handoff| handoff.freeze_us)
            .collect();
        let gaps: Vec<f64> = handoffs
            .iter()
            .filter_map(|handoff| handoff.client_gap_us)
            .collect();
        let mut report = Self {
            spec: spec.clone(),
            passed: false,
            problems: Vec::new(),
            bytes: measured.transfer.bytes,
            sha256_source,
            sha256_arrived: measured.transfer.sha256.clone(),
            transfer_s: measured.transfer.elapsed.as_secs_f64(),
            total_s: total.as_secs_f64(),
            handoffs,
            kept: std::mem::take(&mut measured.round.failure_reasons),
            freeze_us_median: median(&freezes),
            freeze_us_max: freezes.iter().copied().reduce(f64::max),
            client_gap_us_median: median(&gaps),
            client_gap_us_max: gaps.iter().copied().reduce(f64::max),
            wire: WireStatistics::new(&mut measured, spec.upload),
            control: WireStatistics::new(&mut control, spec.upload),
        };
        report.problems = report_checks::find_problems(&report);
        report.passed = report.problems.is_empty();
        report
    }
}

fn client_gap_us(passage: &MeasuredTransfer, handoff: &HandoffResult, upload: bool) -> Option<f64> {
    let frozen_at = i128::from(handoff.frozen_at_ns?) + passage.clock_offset_ns;
    let from = u64::try_from(frozen_at).ok()?;
    let freeze_ns = (handoff.freeze_us.unwrap_or(0.0) * 1e3) as u64;
    let until = from + freeze_ns + GAP_SEARCH_NS;
    let gap = data_direction(&passage.connection, upload).gap_within(from, until)?;
    Some(gap.length_ns as f64 / 1e3)
}

/// Returns the median: the middle value, or the mean of the two middle ones.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        length if length % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn median_of_even_and_odd_counts() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
