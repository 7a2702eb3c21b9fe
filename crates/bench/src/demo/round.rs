//! The operator of the demonstration: hands the connection from node to node until the transfer is over.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_api::control::{
    FlowEntry, FlowOutcome, FlowQuery, FlowResult, FlowState, HandoffRequest, HandoffState,
    HandoffStatus, Selection,
};
use holdfast_api::{Drain, FlowText};

use super::{DemoSpec, Event, Handoff, Watch};
use crate::cluster::Cluster;

/// Time limit of every wait for the group.
const LIMIT: Duration = Duration::from_secs(60);
/// Interval between two queries.
const LOOK: Duration = Duration::from_millis(5);

/// Schedule of the handoffs.
pub struct Plan {
    interval: Duration,
}

/// Results of the handoffs.
#[derive(Default)]
pub struct Round {
    pub handoffs: Vec<Handoff>,
    pub kept: Vec<String>,
}

/// Flag that the transfer has ended.
#[derive(Default)]
pub struct Over {
    over: Mutex<bool>,
    changed: Condvar,
}

impl Over {
    pub fn set(&self) {
        *self.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn is_set(&self) -> bool {
        self.wait(Duration::ZERO)
    }

    /// Waits until the flag is set, but at most this long; returns true if it is set.
    fn wait(&self, at_most: Duration) -> bool {
        let over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .changed
            .wait_timeout_while(over, at_most, |over| !*over);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Plan {
    pub fn new(spec: &DemoSpec) -> Self {
        Self {
            interval: spec.interval,
        }
    }
}

/// Returns the flows that the contact node knows.
pub fn flows(cluster: &Cluster) -> Result<BTreeSet<FlowText>> {
    Ok(list(cluster)?.into_iter().map(|entry| entry.flow).collect())
}

fn list(cluster: &Cluster) -> Result<Vec<FlowEntry>> {
    let query = FlowQuery {
        pool: Some("files".into()),
        ..FlowQuery::default()
    };
    let control = cluster.control_blocking("n1")?;
    Ok(control
        .run(|client| client.all_flows(&query))
        .context("ask n1 for its flows")?
        .flows)
}

/// Finds the connection that is not among the `known`, and hands it from node to node until the transfer is over.
///
/// # Errors
/// The group does not answer, or a handoff does not end.
pub fn go(
    cluster: &Cluster,
    plan: &Plan,
    known: &BTreeSet<FlowText>,
    over: &Over,
    watch: Watch<'_>,
) -> Result<Round> {
    let mut round = Round::default();
    let Some((flow, mut owner)) = find(cluster, known, over)? else {
        return Ok(round);
    };
    let nodes = cluster.nodes();
    watch(&Event::Connected {
        flow: flow.to_string(),
        owner: owner.clone(),
        nodes: nodes.clone(),
    });
    loop {
        let begun = Instant::now();
        let here = nodes.iter().position(|node| *node == owner).unwrap_or(0);
        let to = &nodes[(here + 1) % nodes.len()];
        match hand_off(cluster, &flow, &owner, to, over)? {
            Some(Ok(mut handoff)) => {
                handoff.number = round.handoffs.len() + 1;
                owner.clone_from(to);
                watch(&Event::Moved(handoff.clone()));
                round.handoffs.push(handoff);
            }
            Some(Err(reason)) if !over.is_set() => {
                watch(&Event::Kept {
                    at: owner.clone(),
                    reason: reason.clone(),
                });
                round.kept.push(reason);
            }
            // The connection ended during the request.
            _ => return Ok(round),
        }
        if over.wait(plan.interval.saturating_sub(begun.elapsed())) {
            return Ok(round);
        }
    }
}

/// Returns the new flow and its owner; none if the transfer ended before the flow was seen.
fn find(
    cluster: &Cluster,
    known: &BTreeSet<FlowText>,
    over: &Over,
) -> Result<Option<(FlowText, String)>> {
    let deadline = Instant::now() + LIMIT;
    loop {
        for entry in list(cluster)? {
            if let FlowState::Owned { owner } = entry.state
                && !known.contains(&entry.flow)
            {
                return Ok(Some((entry.flow, owner)));
            }
        }
        if over.wait(LOOK) {
            return Ok(None);
        }
        if Instant::now() > deadline {
            bail!(
                "exceeded time: n1 does not know the client's connection after {} s",
                LIMIT.as_secs()
            );
        }
    }
}

/// Performs one handoff; returns its result, or the reason of its failure. Returns none if the transfer is over.
fn hand_off(
    cluster: &Cluster,
    flow: &FlowText,
    from: &str,
    to: &str,
    over: &Over,
) -> Result<Option<Result<Handoff, String>>> {
    let control = cluster.control_blocking(from)?;
    let request = HandoffRequest {
        selection: Selection::Flows(vec![*flow]),
        to: to.into(),
        drain: Drain::None,
    };
    let deadline = Instant::now() + LIMIT;
    let asked = Instant::now();
    let accepted = loop {
        match control.run(|client| client.hand_off(&request)) {
            Ok(accepted) => break accepted,
            Err(_) if over.is_set() => return Ok(None),
            // The server program has not reported yet that it has the connection.
            Err(_) if Instant::now() < deadline => over.wait(LOOK),
            Err(error) => {
                return Err(error).with_context(|| format!("ask {from} to hand {flow} to {to}"));
            }
        };
    };
    loop {
        let status = control.run(|client| client.handoff(accepted.id));
        let status = status.with_context(|| format!("ask {from} what became of the handoff"))?;
        if status.summary.state == HandoffState::Finished {
            return Ok(Some(outcome(&status, from, to, asked.elapsed())));
        }
        if Instant::now() > deadline {
            bail!("the handoff of {flow} from {from} to {to} does not end: {status:?}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn outcome(
    status: &HandoffStatus,
    from: &str,
    to: &str,
    total: Duration,
) -> Result<Handoff, String> {
    match status.results.first() {
        Some(
            result @ FlowResult {
                outcome: FlowOutcome::Moved,
                ..
            },
        ) => Ok(Handoff {
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
            outcome: FlowOutcome::Kept { reason },
            ..
        }) => Err(reason.clone()),
        other => Err(format!("a finished handoff with the result {other:?}")),
    }
}
