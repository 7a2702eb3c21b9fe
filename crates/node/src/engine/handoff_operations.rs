//! Handoff operations of the control API: requested flows and their outcomes.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use holdfast_api::Drain;
use holdfast_api::control::{
    FlowOutcome, FlowResult, HandoffState, HandoffStatus, HandoffSummary, PhasesUs,
};
use holdfast_proto::handoff::{BatchPhaseTimes, FlowHandoffOutcome};
use holdfast_wire::Flow;
use holdfast_wire::failure::{Failure, ProgramFault};
use holdfast_wire::frame::BatchId;

use super::flow_text;
use crate::dataplane::monotonic_ns;
use crate::failure_conversion::blame_of;

/// Number of finished handoffs that are remembered, and number of their results in total: a handoff of all flows of a busy
/// node has a result of some hundred bytes for each. The last handoff to finish is remembered in any case.
const FINISHED_MAX: usize = 64;
const FINISHED_RESULTS_MAX: usize = 16_384;

/// Batches of one handoff that may be requested from programs without an outcome: one in its freeze and one in
/// preparation. No program serves a connection after its request, so more batches would lengthen the outage.
const REQUESTED_BATCHES_MAX: usize = 2;

/// Connections of one handoff that may be requested at once if send queues drain first, because draining takes longer
/// than a batch.
const DRAINING_FLOWS_MAX: usize = 192;

/// Time limit for a server program to reach a safe point after a request.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A handoff of one or more flows.
struct HandoffOperation {
    status: HandoffStatus,
    index: HashMap<Flow, usize>,
    /// Flows not yet requested from their programs.
    unrequested: VecDeque<Flow>,
    outstanding: usize,
    drain: Drain,
}

impl HandoffOperation {
    fn result(&mut self, flow: &Flow) -> Option<&mut FlowResult> {
        self.status.results.get_mut(*self.index.get(flow)?)
    }
}

/// All handoffs of this daemon; finished ones up to a limit.
#[derive(Default)]
pub struct HandoffOperations {
    operations: BTreeMap<u64, HandoffOperation>,
    last_id: u64,
    by_flow: HashMap<Flow, u64>,
    by_batch: HashMap<BatchId, Vec<(u64, usize)>>,
    /// Requested flows without an answer, with the time of the request.
    unanswered: HashMap<Flow, Duration>,
    /// Flows whose programs missed the deadline, with the destination. A late answer moves nothing.
    timed_out: HashMap<Flow, String>,
}

impl HandoffOperations {
    /// Begins a handoff. [`HandoffOperations::next_requests`] selects the flows to request.
    pub fn begin(&mut self, flows: Vec<Flow>, to: String, drain: Drain, by_operator: bool) -> u64 {
        self.last_id += 1;
        let id = self.last_id;
        let index = flows
            .iter()
            .enumerate()
            .map(|(index, flow)| (*flow, index))
            .collect();
        for flow in &flows {
            self.by_flow.insert(*flow, id);
        }
        let started_at_ns = monotonic_ns();
        let (state, finished_at_ns) = match flows.is_empty() {
            true => (HandoffState::Finished, Some(started_at_ns)),
            false => (HandoffState::Running, None),
        };
        let summary = HandoffSummary {
            id,
            to,
            requested_by_operator: by_operator,
            state,
            total: flows.len() as u64,
            moved: 0,
            kept: 0,
            started_at_ns,
            finished_at_ns,
        };
        let results = flows.iter().map(pending_result).collect();
        let status = HandoffStatus { summary, results };
        let (unrequested, outstanding) = if by_operator {
            (flows.into(), 0)
        } else {
            (VecDeque::new(), flows.len())
        };
        self.operations.insert(
            id,
            HandoffOperation {
                status,
                index,
                unrequested,
                outstanding,
                drain,
            },
        );
        self.remove_old();
        id
    }

    /// Returns true if a running handoff names this flow.
    pub fn has_flow(&self, flow: &Flow) -> bool {
        self.by_flow.contains_key(flow)
    }

    /// Returns the flows to request next from their programs, with the acceptor's name, for a given batch size.
    pub fn next_requests(&mut self, id: u64, batch_size: usize) -> (Vec<Flow>, String, Drain) {
        let Some(operation) = self.operations.get_mut(&id) else {
            return (Vec::new(), String::new(), Drain::default());
        };
        let limit = match operation.drain {
            Drain::None => REQUESTED_BATCHES_MAX * batch_size,
            Drain::First { .. } => DRAINING_FLOWS_MAX,
        };
        let room = limit
            .saturating_sub(operation.outstanding)
            .min(operation.unrequested.len());
        // Few free places would make small batches, so the next request waits until there are enough for a full one.
        if room < operation.unrequested.len().min(batch_size) {
            return (Vec::new(), String::new(), Drain::default());
        }
        operation.outstanding += room;
        let flows = operation.unrequested.drain(..room).collect();
        (flows, operation.status.summary.to.clone(), operation.drain)
    }

    /// Records that a flow is requested from its program.
    pub fn on_request(&mut self, flow: &Flow, now: Duration) {
        self.timed_out.remove(flow);
        self.unanswered.insert(*flow, now);
    }

    /// Records that a flow's program hands it off, or has ended. Returns true if the answer is too late, because the
    /// operator was notified that the flow stays.
    pub fn on_answer(&mut self, flow: &Flow, to: &str) -> bool {
        self.unanswered.remove(flow);
        self.timed_out
            .remove(flow)
            .is_some_and(|lapsed| lapsed == to)
    }

    /// Takes the flows that were requested more than [`ANSWER_TIMEOUT`] ago.
    pub fn take_overdue(&mut self, now: Duration) -> Vec<Flow> {
        let unanswered = self.unanswered.iter();
        let overdue = unanswered.filter(|(_, since)| now.saturating_sub(**since) >= ANSWER_TIMEOUT);
        let overdue: Vec<Flow> = overdue.map(|(flow, _)| *flow).collect();
        for flow in &overdue {
            self.unanswered.remove(flow);
            let id = self.by_flow.get(flow);
            if let Some(operation) = id.and_then(|id| self.operations.get(id)) {
                let to = operation.status.summary.to.clone();
                self.timed_out.insert(*flow, to);
            }
        }
        overdue
    }

    /// Forgets a flow that its program has closed. Returns true if a request was unanswered.
    pub fn forget_flow(&mut self, flow: &Flow) -> bool {
        self.timed_out.remove(flow);
        self.unanswered.remove(flow).is_some()
    }

    /// Records the time of a flow's freeze and the bytes in its send queue.
    pub fn on_frozen(&mut self, flow: &Flow, at_ns: u64, send_queue_bytes: u64) {
        if let Some(result) = self.result(flow) {
            result.frozen_at_ns = Some(at_ns);
            result.send_queue_bytes = send_queue_bytes;
        }
    }

    fn result(&mut self, flow: &Flow) -> Option<&mut FlowResult> {
        self.operations
            .get_mut(self.by_flow.get(flow)?)?
            .result(flow)
    }

    /// Records the end of a flow's handoff. Returns the id of the operation.
    pub fn on_flow_end(
        &mut self,
        batch: Option<BatchId>,
        flow: &Flow,
        outcome: &FlowHandoffOutcome,
    ) -> Option<u64> {
        let outcome = match outcome {
            FlowHandoffOutcome::Moved { .. } => FlowOutcome::Moved,
            FlowHandoffOutcome::Kept { reason } => kept(&reason.failure()),
            FlowHandoffOutcome::Closed => kept(&ProgramFault::FlowClosed.into()),
        };
        let (id, index) = self.end_flow(flow, outcome)?;
        if let Some(batch) = batch {
            self.by_batch.entry(batch).or_default().push((id, index));
        }
        Some(id)
    }

    /// Records that a flow was refused before it reached the machine. Returns the id of the operation.
    pub fn on_refused(&mut self, flow: &Flow, why: &Failure) -> Option<u64> {
        let (id, _) = self.end_flow(flow, kept(why))?;
        Some(id)
    }

    /// Sets the outcome of a flow. Returns the id of the operation and the position of the flow's result.
    fn end_flow(&mut self, flow: &Flow, outcome: FlowOutcome) -> Option<(u64, usize)> {
        self.unanswered.remove(flow);
        let id = self.by_flow.remove(flow)?;
        let operation = self.operations.get_mut(&id)?;
        let index = *operation.index.get(flow)?;
        let summary = &mut operation.status.summary;
        match outcome {
            FlowOutcome::Moved => summary.moved += 1,
            _ => summary.kept += 1,
        }
        operation.status.results.get_mut(index)?.outcome = outcome;
        operation.outstanding = operation.outstanding.saturating_sub(1);
        if summary.moved + summary.kept == summary.total {
            summary.state = HandoffState::Finished;
            summary.finished_at_ns = Some(monotonic_ns());
            operation.index = HashMap::new();
        }
        Some((id, index))
    }

    /// Records a finished batch. Its phases apply to each of its flows.
    pub fn on_batch_end(&mut self, batch: BatchId, bytes: usize, phases: &BatchPhaseTimes) {
        let us = |duration: Duration| duration.as_secs_f64() * 1e6;
        let members = self.by_batch.remove(&batch).unwrap_or_default();
        let share = bytes as u64 / members.len().max(1) as u64;
        for (id, index) in members {
            let Some(operation) = self.operations.get_mut(&id) else {
                continue;
            };
            let Some(result) = operation.status.results.get_mut(index) else {
                continue;
            };
            result.freeze_us = Some(us(phases.freeze()));
            result.phases_us = PhasesUs {
                prepare: us(phases.prepare),
                divert: us(phases.divert),
                extract: us(phases.extract),
                transfer: us(phases.transfer),
                restore: us(phases.restore),
                commit: us(phases.commit),
            };
            result.bytes_transferred = share;
            result.drained = !phases.drain.is_zero();
            let freeze_ns = u64::try_from(phases.freeze().as_nanos()).unwrap_or(u64::MAX);
            result.active_at_ns = result.frozen_at_ns.map(|at| at.saturating_add(freeze_ns));
        }
    }

    /// Returns the status of one handoff.
    pub fn get(&self, id: u64) -> Option<&HandoffStatus> {
        self.operations.get(&id).map(|operation| &operation.status)
    }

    /// Returns all remembered handoffs, the oldest first.
    pub fn summaries(&self) -> Vec<HandoffSummary> {
        self.operations
            .values()
            .map(|operation| operation.status.summary.clone())
            .collect()
    }

    /// Forgets the oldest finished handoffs if there are too many, or too many results of theirs.
    fn remove_old(&mut self) {
        let finished = self
            .operations
            .iter()
            .filter(|(_, operation)| operation.status.summary.state == HandoffState::Finished);
        let (mut count, mut results) = (0, 0);
        // From the newest on.
        let surplus = finished.rev().filter_map(|(id, operation)| {
            count += 1;
            results += operation.status.results.len();
            let is_surplus = count > FINISHED_MAX || results > FINISHED_RESULTS_MAX;
            (count > 1 && is_surplus).then_some(*id)
        });
        for id in surplus.collect::<Vec<_>>() {
            self.operations.remove(&id);
        }
    }
}

/// Returns the result of a flow that stays because of this failure.
fn kept(why: &Failure) -> FlowOutcome {
    FlowOutcome::Kept {
        reason: why.to_string(),
        blame: blame_of(why),
    }
}

fn pending_result(flow: &Flow) -> FlowResult {
    FlowResult {
        flow: flow_text(flow),
        outcome: FlowOutcome::Pending,
        freeze_us: None,
        phases_us: PhasesUs::default(),
        bytes_transferred: 0,
        send_queue_bytes: 0,
        drained: false,
        frozen_at_ns: None,
        active_at_ns: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flows(count: u16) -> Vec<Flow> {
        let flow = |port| format!("tcp:10.0.0.1:80-10.0.0.2:{port}").parse().unwrap();
        (1..=count).map(flow).collect()
    }

    /// Begins a handoff of this many flows, all of which move.
    fn finish_handoff(operations: &mut HandoffOperations, count: u16) -> u64 {
        let flows = flows(count);
        let id = operations.begin(flows.clone(), "n2".to_owned(), Drain::None, false);
        for flow in &flows {
            let epoch = 2;
            operations.on_flow_end(None, flow, &FlowHandoffOutcome::Moved { epoch });
        }
        id
    }

    #[test]
    fn large_handoffs_are_forgotten_early() {
        let mut operations = HandoffOperations::default();
        let ids: Vec<u64> = (0..10)
            .map(|_| finish_handoff(&mut operations, 5_000))
            .collect();
        let remembered: Vec<u64> = operations.summaries().iter().map(|one| one.id).collect();
        // The next handoff forgets what the last one made too much.
        assert_eq!(remembered, ids[6..]);
        let huge = finish_handoff(&mut operations, 40_000);
        let status = operations.get(huge).expect("the last one is remembered");
        assert_eq!(status.summary.state, HandoffState::Finished);
        assert_eq!(status.results.len(), 40_000);
        assert!(operations.operations[&huge].index.is_empty());
    }

    #[test]
    fn small_handoffs_are_remembered_up_to_a_number() {
        let mut operations = HandoffOperations::default();
        for _ in 0..100 {
            finish_handoff(&mut operations, 1);
        }
        assert_eq!(operations.summaries().len(), FINISHED_MAX + 1);
    }

    #[test]
    fn handoff_of_no_flow_is_finished_at_once() {
        let mut operations = HandoffOperations::default();
        let id = operations.begin(Vec::new(), "n2".to_owned(), Drain::None, true);
        let summary = &operations.summaries()[0];
        assert_eq!((summary.id, summary.total), (id, 0));
        assert_eq!(summary.state, HandoffState::Finished);
    }
}
