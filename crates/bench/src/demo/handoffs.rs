//! The operator of the demonstration: hands the connection from node to node until the transfer is over.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_api::control::{
    FlowEntry, FlowListQuery, FlowOutcome, FlowResult, FlowSelection, FlowState, HandoffRequest,
    HandoffState, HandoffStatus,
};
use holdfast_api::{Drain, FlowText};

use super::{DemoEvent, DemoSpec, EventHandler, HandoffResult};
use holdfast_testbed::cluster::Cluster;

/// Time limit of every wait for the group.
const GROUP_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between two queries.
const QUERY_INTERVAL: Duration = Duration::from_millis(5);

/// Schedule of the handoffs.
pub struct HandoffSchedule {
    interval: Duration,
}

/// Results of the handoffs.
#[derive(Default)]
pub struct HandoffResults {
    pub handoffs: Vec<HandoffResult>,
    pub failure_reasons: Vec<String>,
}

/// Flag that the transfer has ended.
#[derive(Default)]
pub struct TransferEndFlag {
    has_ended: Mutex<bool>,
    changed: Condvar,
}

impl TransferEndFlag {
    pub fn set(&self) {
        *self
            .has_ended
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn is_set(&self) -> bool {
        self.wait(Duration::ZERO)
    }

    /// Waits until the flag is set, but at most this long; returns true if it is set.
    fn wait(&self, at_most: Duration) -> bool {
        let over = self
            .has_ended
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .changed
            .wait_timeout_while(over, at_most, |over| !*over);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl HandoffSchedule {
    pub fn new(spec: &DemoSpec) -> Self {
        Self {
            interval: spec.interval,
        }
    }
}

/// Returns the flows that the contact node knows.
pub fn known_flows(cluster: &Cluster) -> Result<BTreeSet<FlowText>> {
    Ok(list_flows(cluster)?
        .into_iter()
        .map(|entry| entry.flow)
        .collect())
}

fn list_flows(cluster: &Cluster) -> Result<Vec<FlowEntry>> {
    let query = FlowListQuery {
        pool: Some("files".into()),
        ..FlowListQuery::default()
    };
    let control = cluster.blocking_control_client("n1")?;
    Ok(control
        .run(|client| client.all_flows(&query))
        .context("ask n1 for its flows")?
        .flows)
}

/// Finds the connection that is not among the `known_flows`, and hands it from node to node until the transfer is over.
///
/// # Errors
/// The group does not answer, or a handoff does not end.
pub fn run(
    cluster: &Cluster,
    plan: &HandoffSchedule,
    known_flows: &BTreeSet<FlowText>,
    end_flag: &TransferEndFlag,
    watch: EventHandler<'_>,
) -> Result<HandoffResults> {
    let mut round = HandoffResults::default();
    let Some((flow, mut owner)) = find_new_flow(cluster, known_flows, end_flag)? else {
        return Ok(round);
    };
    let nodes = cluster.nodes();
    watch(&DemoEvent::Connected {
        flow: flow.to_string(),
        owner: owner.clone(),
        nodes: nodes.clone(),
    });
    loop {
        let begun = Instant::now();
        let owner_index = nodes.iter().position(|node| *node == owner).unwrap_or(0);
        let to = &nodes[(owner_index + 1) % nodes.len()];
        match hand_off_flow(cluster, &flow, &owner, to, end_flag)? {
            Some(Ok(mut handoff)) => {
                handoff.number = round.handoffs.len() + 1;
                owner.clone_from(to);
                watch(&DemoEvent::HandedOff(handoff.clone()));
                round.handoffs.push(handoff);
            }
            Some(Err(reason)) if !end_flag.is_set() => {
                watch(&DemoEvent::HandoffFailed {
                    owner: owner.clone(),
                    reason: reason.clone(),
                });
                round.failure_reasons.push(reason);
            }
            // The connection ended during the request.
            _ => return Ok(round),
        }
        if end_flag.wait(plan.interval.saturating_sub(begun.elapsed())) {
            return Ok(round);
        }
    }
}

/// Returns the new flow and its owner; none if the transfer ended before the flow was seen.
fn find_new_flow(
    cluster: &Cluster,
    known_flows: &BTreeSet<FlowText>,
    end_flag: &TransferEndFlag,
) -> Result<Option<(FlowText, String)>> {
    let deadline = Instant::now() + GROUP_TIMEOUT;
    loop {
        for entry in list_flows(cluster)? {
            if let FlowState::Owned { owner } = entry.state
                && !known_flows.contains(&entry.flow)
            {
                return Ok(Some((entry.flow, owner)));
            }
        }
        if end_flag.wait(QUERY_INTERVAL) {
            return Ok(None);
        }
        if Instant::now() > deadline {
            bail!(
                "exceeded time: n1 does not know the client's connection after {} s",
                GROUP_TIMEOUT.as_secs()
            );
        }
    }
}

/// Performs one handoff; returns its result, or the reason of its failure. Returns none if the transfer is over.
fn hand_off_flow(
    cluster: &Cluster,
    flow: &FlowText,
    from: &str,
    to: &str,
    end_flag: &TransferEndFlag,
) -> Result<Option<Result<HandoffResult, String>>> {
    let control = cluster.blocking_control_client(from)?;
    let request = HandoffRequest {
        selection: FlowSelection::Flows(vec![*flow]),
        to: to.into(),
        drain: Drain::None,
    };
    let deadline = Instant::now() + GROUP_TIMEOUT;
    let requested_at = Instant::now();
    let accepted = loop {
        match control.run(|client| client.hand_off(&request)) {
            Ok(accepted) => break accepted,
            Err(_) if end_flag.is_set() => return Ok(None),
            // The server program has not reported yet that it has the connection.
            Err(_) if Instant::now() < deadline => end_flag.wait(QUERY_INTERVAL),
            Err(error) => {
                return Err(error).with_context(|| format!("ask {from} to hand {flow} to {to}"));
            }
        };
    };
    loop {
        let status = control.run(|client| client.handoff(accepted.id));
        let status = status.with_context(|| format!("ask {from} for the result of the handoff"))?;
        if status.summary.state == HandoffState::Finished {
            return Ok(Some(handoff_outcome(
                &status,
                from,
                to,
                requested_at.elapsed(),
            )));
        }
        if Instant::now() > deadline {
            bail!("the handoff of {flow} from {from} to {to} does not end: {status:?}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn handoff_outcome(
    status: &HandoffStatus,
    from: &str,
    to: &str,
    total: Duration,
) -> Result<HandoffResult, String> {
    match status.results.first() {
        Some(
            result @ FlowResult {
                outcome: FlowOutcome::Moved,
                ..
            },
        ) => Ok(HandoffResult {
            number: 0,
            from: from.into(),
            to: to.into(),
            freeze_us: result.freeze_us,
            phases_us: result.phases_us,
            bytes_transferred: result.bytes_transferred,
            total_ms: total.as_secs_f64() * 1e3,
            client_gap_us: None,
            frozen_at_ns: result.frozen_at_ns,
        }),
        Some(FlowResult {
            outcome: FlowOutcome::Kept { reason, .. },
            ..
        }) => Err(reason.clone()),
        other => Err(format!("a finished handoff has the result {other:?}")),
    }
}
