//! The report as text.

use super::{DemoReport, format_bytes};
use holdfast_testbed::capture::{CapturedConnection, DirectionStatistics};

type Rows = Vec<(&'static str, String)>;

impl DemoReport {
    /// Returns the report as text of several lines.
    pub fn text(&self) -> String {
        let rows = [self.arrival_rows(), self.time_rows(), self.packet_rows()];
        let rows = rows.iter().flatten();
        let mut text: String = rows
            .map(|(name, value)| format!("{name:<32}{value}\n"))
            .collect();
        for problem in &self.problems {
            text += &format!("NOT AS PROMISED: {problem}\n");
        }
        if self.passed {
            text += "As promised: the client noticed nothing.\n";
        }
        text
    }

    fn arrival_rows(&self) -> Rows {
        let equal = self.sha256_arrived == self.sha256_source;
        let equal = if equal { "equal" } else { "DIFFERENT" };
        let arrived = format!("{} in {:.1} s", format_bytes(self.bytes), self.transfer_s);
        let handoffs = format!("{} over {} nodes", self.handoffs.len(), self.spec.nodes);
        let mut rows = vec![
            ("received", arrived),
            ("sha256 of the source", self.sha256_source.clone()),
            (
                "sha256 of the received data",
                format!("{}   {equal}", self.sha256_arrived),
            ),
            ("handoffs", handoffs),
        ];
        if let Some(reason) = self.kept.first() {
            rows.push((
                "failed handoffs",
                format!("{}, first reason: {reason}", self.kept.len()),
            ));
        }
        rows
    }

    fn time_rows(&self) -> Rows {
        let pair = |median: Option<f64>, max: Option<f64>| match (median, max) {
            (Some(median), Some(max)) => format!("median {median:.0} us, longest {max:.0} us"),
            _ => "not measured".into(),
        };
        let undisturbed = self.control.data_gap_us_max.unwrap_or(0.0);
        vec![
            ("freeze", pair(self.freeze_us_median, self.freeze_us_max)),
            (
                "gap seen by the client",
                pair(self.client_gap_us_median, self.client_gap_us_max),
            ),
            (
                "longest gap without handoffs",
                format!("{undisturbed:.0} us"),
            ),
            ("total time", format!("{:.1} s", self.total_s)),
        ]
    }

    fn packet_rows(&self) -> Rows {
        let (wire, control) = (&self.wire, &self.control);
        let with_control =
            |seen: u64, undisturbed: u64| format!("{seen}   (control run: {undisturbed})");
        let retransmissions =
            |direction: &DirectionStatistics| direction.retransmitted + direction.late;
        let both_directions = |count: &dyn Fn(&CapturedConnection) -> u64| {
            with_control(count(&wire.connection), count(&control.connection))
        };
        vec![
            ("SYNs", with_control(wire.syns, control.syns)),
            ("resets", with_control(wire.resets, control.resets)),
            (
                "retransmissions to the client",
                both_directions(&|seen| retransmissions(&seen.to_client)),
            ),
            (
                "retransmissions to the server",
                both_directions(&|seen| retransmissions(&seen.to_server)),
            ),
            (
                "tail-loss probes of the client",
                both_directions(&|seen| seen.to_server.tail_loss_probes),
            ),
            (
                "tail-loss probes of the server",
                both_directions(&|seen| seen.to_client.tail_loss_probes),
            ),
        ]
    }
}
