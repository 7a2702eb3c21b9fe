//! Drains of other nodes: the contact node passes its operator's orders on, and the ordered node answers with its report.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_api::control::{DrainReport, DrainRequest, ErrorBody};
use holdfast_wire::drain_frames::{DrainAnswer, DrainFrame, DrainOrder, DrainReportJson};
use holdfast_wire::failure::Text;
use holdfast_wire::{Frame, NodeId};

use super::Engine;
use super::operator_view::error_body;
use crate::control::ReplySender;

/// Time within which the ordered node answers.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// Most orders without an answer.
const ORDERS_MAX: usize = 64;

/// An operator's request that waits for another node's answer.
struct WaitingRequest {
    node: NodeId,
    until: Duration,
    reply: ReplySender<DrainReport>,
}

/// The orders of this node's operator that other nodes have not answered.
#[derive(Default)]
pub(super) struct RemoteDrains {
    last_request: u64,
    waiting: BTreeMap<u64, WaitingRequest>,
}

impl RemoteDrains {
    /// Refuses the requests whose time is over.
    pub fn expire(&mut self, now: Duration) {
        self.refuse_where(|waiting| waiting.until <= now);
    }

    /// Refuses the requests to a node that is lost.
    pub fn handle_peer_lost(&mut self, node: NodeId) {
        self.refuse_where(|waiting| waiting.node == node);
    }

    fn refuse_where(&mut self, is_hopeless: impl Fn(&WaitingRequest) -> bool) {
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let (hopeless, waiting): (BTreeMap<_, _>, BTreeMap<_, _>) =
            waiting.partition(|(_, one)| is_hopeless(one));
        self.waiting = waiting;
        for one in hopeless.into_values() {
            drop(one.reply.send(Err(error_body(
                "the node does not answer; a drain that has begun there goes on",
                "check that its holdfastd runs, and run the command again",
            ))));
        }
    }

    fn take(&mut self, from: NodeId, request: u64) -> Option<ReplySender<DrainReport>> {
        let is_asked = self.waiting.get(&request)?.node == from;
        let waiting = is_asked.then(|| self.waiting.remove(&request))??;
        Some(waiting.reply)
    }
}

impl Engine {
    /// Carries out an order for the named node: here, or there if this is the contact node.
    pub(super) fn order_drain(
        &mut self,
        node: &str,
        order: DrainOrder,
        reply: ReplySender<DrainReport>,
    ) {
        let Some(id) = self.group.id_of(node) else {
            let refusal = error_body(
                format!("the group has no node {node}"),
                "name a node that `holdfast node list` shows",
            );
            return drop(reply.send(Err(refusal)));
        };
        if id == self.group.own() {
            return drop(reply.send(self.obey_drain_order(order)));
        }
        if !self.group.is_contact() {
            let contact = self.node_name(self.group.contact());
            let refusal = error_body(
                format!("only the contact node, {contact}, drains other nodes"),
                format!("run the command on {contact}, or on {node} itself"),
            );
            return drop(reply.send(Err(refusal)));
        }
        if self.remote_drains.waiting.len() >= ORDERS_MAX {
            let refusal = error_body("too many orders wait for answers", "try again later");
            return drop(reply.send(Err(refusal)));
        }
        self.remote_drains.last_request += 1;
        let request = self.remote_drains.last_request;
        let frame = Frame::Drain(DrainFrame::Order { request, order });
        if let Err(error) = self.peers.send(id, &frame) {
            let refusal = error_body(
                format!("node {node} cannot be reached: {error}"),
                "check that its holdfastd runs",
            );
            return drop(reply.send(Err(refusal)));
        }
        let waiting = WaitingRequest {
            node: id,
            until: self.now() + ANSWER_TIME_MAX,
            reply,
        };
        self.remote_drains.waiting.insert(request, waiting);
    }

    fn obey_drain_order(&mut self, order: DrainOrder) -> Result<DrainReport, ErrorBody> {
        match order {
            DrainOrder::Begin { deadline_s } => self.drain(DrainRequest { deadline_s }),
            DrainOrder::Report => Ok(self.drain_report()),
            DrainOrder::End => Ok(self.undrain()),
        }
    }

    /// Takes an order of the contact node, or an answer to an order of this node.
    pub(super) fn handle_drain_frame(&mut self, from: NodeId, frame: DrainFrame) {
        match frame {
            DrainFrame::Order { request, order } => {
                let answer = self.answer_drain_order(from, order);
                let frame = Frame::Drain(DrainFrame::Answer { request, answer });
                if let Err(error) = self.peers.send(from, &frame) {
                    tracing::debug!(%from, %error, "an answer to a drain's order was dropped");
                }
            }
            DrainFrame::Answer { request, answer } => {
                let Some(reply) = self.remote_drains.take(from, request) else {
                    return tracing::debug!(%from, request, "an answer that nobody waits for");
                };
                drop(reply.send(report_of(answer)));
            }
        }
    }

    fn answer_drain_order(&mut self, from: NodeId, order: DrainOrder) -> DrainAnswer {
        let answer = if from == self.group.contact() {
            if order != DrainOrder::Report {
                tracing::info!(%from, ?order, "an order of the contact node's operator");
            }
            self.obey_drain_order(order)
        } else {
            tracing::warn!(%from, ?order, "refused a drain's order: the sender is not the contact node");
            let contact = self.node_name(self.group.contact());
            Err(error_body(
                format!(
                    "node {} takes orders of {contact} alone, the contact node",
                    self.node_name(self.group.own())
                ),
                format!("run the command on {contact}"),
            ))
        };
        match answer.map(short_json) {
            Ok(json) => DrainAnswer::Report(json),
            Err(refusal) => DrainAnswer::Refused {
                error: Text::of(refusal.error),
                what_to_do: Text::of(refusal.what_to_do),
            },
        }
    }
}

/// Returns a report as JSON that fits a frame: long lists lose their first entries.
fn short_json(mut report: DrainReport) -> DrainReportJson {
    let mut left_off = 0;
    loop {
        let mut shown = report.clone();
        if left_off > 0 {
            shown.notes.push(format!(
                "{left_off} more processes cannot move; `holdfast drain` on the node names them"
            ));
        }
        let json = serde_json::to_vec(&shown).unwrap_or_default();
        if let Some(json) = DrainReportJson::new(json) {
            return json;
        }
        match (report.moves.len(), report.stuck.len()) {
            (moves @ 1.., _) => drop(report.moves.drain(..moves.div_ceil(2))),
            (_, stuck @ 1..) => {
                left_off += stuck.div_ceil(2);
                drop(report.stuck.drain(..stuck.div_ceil(2)));
            }
            _ => {
                report = DrainReport {
                    notes: vec![
                        "the report is too long; run `holdfast drain` on the node".to_owned(),
                    ],
                    ..DrainReport::default()
                };
            }
        }
    }
}

/// Returns the report of an answer, whose bytes another node has made.
fn report_of(answer: DrainAnswer) -> Result<DrainReport, ErrorBody> {
    match answer {
        DrainAnswer::Report(json) => serde_json::from_slice(json.as_bytes()).map_err(|error| {
            error_body(
                format!("the node's report cannot be read: {error}"),
                "run the same release on both nodes",
            )
        }),
        DrainAnswer::Refused { error, what_to_do } => {
            Err(error_body(error.as_str(), what_to_do.as_str()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::control::{DrainState, DrainedProcess, StuckProcess};

    fn report() -> DrainReport {
        DrainReport {
            node: "n2".to_owned(),
            state: DrainState::Ended,
            ..DrainReport::default()
        }
    }

    #[test]
    fn reports_arrive_as_they_were_sent() {
        let sent = report();
        let arrived = report_of(DrainAnswer::Report(short_json(sent.clone())));
        assert_eq!(arrived.expect("a report"), sent);
        let refused = report_of(DrainAnswer::Refused {
            error: "no".into(),
            what_to_do: "wait".into(),
        });
        assert_eq!(refused, Err(error_body("no", "wait")));
        let garbage = DrainReportJson::new(b"{\"node\": 3".to_vec()).expect("short");
        assert!(report_of(DrainAnswer::Report(garbage)).is_err());
    }

    #[test]
    fn long_report_loses_old_moves_first() {
        let moves = (1..=256).map(|number| DrainedProcess {
            number,
            pid: 1,
            name: "server".to_owned(),
            to: "n3".to_owned(),
            freeze_us: None,
            failure: Some("x".repeat(400)),
        });
        let stuck = StuckProcess {
            pid: 7,
            name: "game".to_owned(),
            reasons: vec!["a pipe".to_owned()],
        };
        let long = DrainReport {
            moves: moves.collect(),
            stuck: vec![stuck.clone()],
            ..report()
        };
        let arrived = report_of(DrainAnswer::Report(short_json(long))).expect("a report");
        assert_eq!(arrived.stuck, std::slice::from_ref(&stuck));
        assert_eq!(arrived.moves.last().map(|last| last.number), Some(256));
        assert!((1..256).contains(&arrived.moves.len()));
        let many = DrainReport {
            stuck: vec![stuck; 2_000],
            ..report()
        };
        let arrived = report_of(DrainAnswer::Report(short_json(many))).expect("a report");
        assert!((1..2_000).contains(&arrived.stuck.len()));
        assert!(
            arrived.notes[0].contains("more processes cannot move"),
            "{:?}",
            arrived.notes
        );
    }
}
