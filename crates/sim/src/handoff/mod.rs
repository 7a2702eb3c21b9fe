//! Handoff of flows: the unmodified handoff state machines of `holdfast-proto` on all nodes of a group, and the actions
//! of their daemons in steps, between which a daemon may die.
//!
//! A socket's state is the number of bytes it has processed. After every event the oracle checks that exactly the node
//! in the record may send for a flow, that this node has every byte of the flow, and that epochs only grow. At the end
//! every live flow has one owner. While a new contact node rebuilds the records, a sender need not agree with them yet.
//!
//! In some runs a node lies: it claims flows of other nodes. No such flow may become the node's.

mod actors;
mod bug;
mod contact_change;
mod daemon;
mod frame_delivery;
mod liar;
mod node;
mod oracle;
#[cfg(test)]
mod tests;
mod world;

pub use bug::HandoffBug;

use crate::Violation;
use crate::node_group::{
    self, AccompanyingAction, CountRange, FaultFrequencies, GroupAction, GroupRunOutcome,
    PlanDistribution,
};
use crate::time::Time;
use world::HandoffWorld;

/// The part of a config specific to handoffs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandoffSpecificConfig {
    /// Maximum number of flows per batch, a setting of the state machines.
    pub batch_flows_max: usize,
    /// The deliberate bug, if any.
    pub bug: Option<HandoffBug>,
    /// Index of the node that claims flows of other nodes, if any.
    pub liar: Option<usize>,
}

/// Configuration of a run.
pub type HandoffRunConfig = node_group::GroupRunConfig<HandoffSpecificConfig>;

/// Three to five nodes, with a few flows that are handed around for two seconds.
pub const DEFAULT: PlanDistribution = PlanDistribution {
    nodes: CountRange::new(3, 5),
    flows: CountRange::new(2, 8),
    requests: CountRange::new(3, 13),
    runtime: Time::from_micros(2_000_000),
    idle_deadline: Time::from_micros(200_000_000),
    action_delay_max: Time::from_micros(2_500),
    crash: 0.4,
    cut: 0.25,
    close: 0.3,
    open: 0.1,
    faults: FaultFrequencies::DEFAULT,
};

/// Probability, per request, that the contact node changes soon after.
const CONTACT_CHANGE: f64 = 0.3;

/// Derives a config from a setting and a seed.
#[must_use]
pub fn draw_run_config(
    setting: &PlanDistribution,
    seed: u64,
    bug: Option<HandoffBug>,
) -> HandoffRunConfig {
    let with_requests: &[AccompanyingAction] =
        &[(CONTACT_CHANGE, |draw| GroupAction::ChangeContact { draw })];
    node_group::draw_run_config(setting, seed, with_requests, |random, nodes| {
        HandoffSpecificConfig {
            batch_flows_max: random.between(1, 5) as usize,
            bug,
            // Nothing but lies shows this bug.
            liar: (bug == Some(HandoffBug::BelievesHighestEpoch)).then_some(seed as usize % nodes),
        }
    })
}

/// As [`draw_run_config`], with a node that claims flows of other nodes.
#[must_use]
pub fn draw_run_config_with_liar(setting: &PlanDistribution, seed: u64) -> HandoffRunConfig {
    let mut config = draw_run_config(setting, seed, None);
    config.specific.liar = Some(seed as usize % config.nodes);
    config
}

/// Simulates a config with a seed: the same two always give the same outcome. With `trace`, every event and every
/// output of a state machine becomes a line of it.
///
/// # Errors
/// The first violated invariant.
pub fn try_run(
    config: &HandoffRunConfig,
    seed: u64,
    trace: Option<&mut Vec<String>>,
) -> Result<GroupRunOutcome, Violation> {
    node_group::try_run::<HandoffWorld>(config, seed, trace)
}

/// Returns the smallest part of a failing seed's config that still fails. None if the seed does not fail.
#[must_use]
pub fn shrink(
    setting: &PlanDistribution,
    seed: u64,
    bug: Option<HandoffBug>,
) -> Option<node_group::ShrunkSeedFailure<HandoffRunConfig>> {
    node_group::shrink::<HandoffWorld>(draw_run_config(setting, seed, bug), seed)
}

/// As [`shrink`], with a node that claims flows of other nodes.
#[must_use]
pub fn shrink_with_liar(
    setting: &PlanDistribution,
    seed: u64,
) -> Option<node_group::ShrunkSeedFailure<HandoffRunConfig>> {
    node_group::shrink::<HandoffWorld>(draw_run_config_with_liar(setting, seed), seed)
}
