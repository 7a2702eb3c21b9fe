//! The report of a node's flows to a new holder, in parts of which one is under way at a time.
//!
//! A part has the claims at the time of its sending: a flow that ends between two parts has told the holder so already,
//! over the same channel, and must not come back.

use super::{Claim, Command, CommandToken, TableRebuild};
use holdfast_wire::flow_report_frames::FlowReportFrame;
use holdfast_wire::{Flow, NodeId};

/// Stage of this node's report to the holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReportStage {
    Listing,
    Reading,
    AwaitingAck,
}

/// A report of this node's claims that is under way.
#[derive(Debug)]
pub(super) struct OutboundReport {
    /// Receiver; may be this node.
    pub holder: NodeId,
    term: u64,
    /// Number of the report, different from those of all reports of this node.
    number: u64,
    /// Token of the open command.
    token: CommandToken,
    stage: ReportStage,
    flows: Vec<Flow>,
    /// Number of the current part.
    part: u32,
    /// Index of the first flow after the current part.
    end: usize,
}

impl TableRebuild {
    /// Starts this node's report from the beginning.
    pub(super) fn start_report(&mut self, holder: NodeId, term: u64) {
        let token = self.next_token();
        self.report = Some(OutboundReport {
            holder,
            term,
            number: self.config.boot.wrapping_add(token.0),
            token,
            stage: ReportStage::Listing,
            flows: Vec::new(),
            part: 0,
            end: 0,
        });
        self.outputs.execute(Command::ListFlows { token });
    }

    pub(super) fn on_request(&mut self, from: NodeId, term: u64) {
        if term > self.view.epoch {
            self.early_request = Some((from, term));
            return;
        }
        if from != self.view.contact_node || from == self.config.node {
            return (self.outputs).report_ignored(
                from,
                "FlowReportRequest",
                "the sender is not the contact node",
            );
        }
        match &self.report {
            // The holder may have restarted before the first part arrived, and flows may have begun since.
            Some(report) if report.holder == from && report.term == term && report.part > 0 => {
                // Report or answer were lost with a channel.
                if report.stage == ReportStage::AwaitingAck {
                    self.read_part(
                        report.part,
                        report.end.saturating_sub(self.config.flows_per_part),
                    );
                }
            }
            _ => self.start_report(from, term),
        }
    }

    pub(super) fn on_flows_listed(&mut self, token: CommandToken, flows: Vec<Flow>) {
        let Some(report) = self.report.as_mut() else {
            return;
        };
        if report.token == token && report.stage == ReportStage::Listing {
            report.flows = flows;
            self.read_part(0, 0);
        }
    }

    /// Reads the claims of a part that begins with the flow at `first`.
    fn read_part(&mut self, part: u32, first: usize) {
        let token = self.next_token();
        let Some(report) = self.report.as_mut() else {
            return;
        };
        let end = (first + self.config.flows_per_part).min(report.flows.len());
        (report.token, report.stage) = (token, ReportStage::Reading);
        (report.part, report.end) = (part, end);
        let flows = report.flows[first..end].to_vec();
        self.outputs.execute(Command::ReadClaims { token, flows });
    }

    pub(super) fn on_claims_read(&mut self, token: CommandToken, claims: Vec<Claim>) {
        let Some(report) = self.report.as_mut() else {
            return;
        };
        if report.token != token || report.stage != ReportStage::Reading {
            return;
        }
        let is_last = report.end == report.flows.len();
        let (holder, term, number) = (report.holder, report.term, report.number);
        let (part, end) = (report.part, report.end);
        if holder == self.config.node {
            match is_last {
                true => self.report = None,
                false => self.read_part(part + 1, end),
            }
            return self.add_report(holder, claims, is_last);
        }
        report.stage = ReportStage::AwaitingAck;
        let frame = FlowReportFrame::Report {
            term,
            report: number,
            part,
            claims,
            is_last,
        };
        self.send(holder, frame);
    }

    pub(super) fn on_ack(&mut self, from: NodeId, (term, number): (u64, u64), next_part: u32) {
        let Some(report) = self.report.as_ref().filter(|report| {
            (report.holder, report.term, report.number) == (from, term, number)
                && report.stage == ReportStage::AwaitingAck
        }) else {
            return self.outputs.report_ignored(
                from,
                "FlowReportAck",
                "no part of a report waits for this answer",
            );
        };
        let (part, end) = (report.part, report.end);
        match next_part.checked_sub(1) {
            // The holder has begun again.
            None if part > 0 => return self.start_report(from, term),
            Some(acknowledged) if acknowledged == part => {}
            // The answer to an earlier transmission.
            _ => return,
        }
        match end == report.flows.len() {
            true => self.report = None,
            false => self.read_part(next_part, end),
        }
    }
}
