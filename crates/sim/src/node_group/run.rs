//! A run from beginning to end, and the shrinking of a failing one.

use super::group_core::{Daemon, Event};
use super::protocol_machine::ProtocolMachine;
use super::{FaultFrequencies, GroupAction, GroupRunConfig, GroupWorld, node_id};
use crate::Violation;
use crate::shrink::shrink_plan;
use crate::time::Time;
use std::collections::BTreeMap;

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupRunOutcome {
    /// Number of occurrences by kind: results of moves, answers of the holder, states in which daemons died.
    pub counts: BTreeMap<String, u64>,
    /// Number of frames, timers, steps of commands, and actions.
    pub events: u64,
    /// A digest of the times of all events: equal for equal runs.
    pub digest: u64,
}

/// A failing seed, shrunk; `C` is the type of the config.
#[derive(Debug, Clone)]
pub struct ShrunkSeedFailure<C> {
    /// The shortest plan and the fewest faults that still fail.
    pub config: C,
    /// The violated invariant.
    pub violation: Violation,
    /// All events up to the violation.
    pub trace: Vec<String>,
}

/// Runs a config. With `trace`, every event and every output of a state machine becomes a line of it.
pub(crate) fn try_run<W: GroupWorld>(
    config: &GroupRunConfig<W::Specific>,
    seed: u64,
    trace: Option<&mut Vec<String>>,
) -> Result<GroupRunOutcome, Violation> {
    let mut world = W::new(config, seed);
    world.core().trace = trace.is_some().then(Vec::new);
    for (at, action) in &config.plan {
        world.core().queue.push(*at, Event::Planned(*action));
    }
    world.core().queue.push(config.faults_end, Event::Heal);
    while world.handle_next(config.idle_deadline) {}
    if world.core().violation.is_none()
        && let Err(what) = check_end(&mut world)
    {
        world.core().now = config.idle_deadline;
        world.core().set_violation(what);
    }
    let core = world.core();
    if let Some(trace) = trace {
        *trace = core.trace.take().unwrap_or_default();
    }
    if let Some(violation) = core.violation.take() {
        return Err(violation);
    }
    Ok(GroupRunOutcome {
        counts: std::mem::take(&mut core.counts),
        events: core.events,
        digest: core.digest,
    })
}

fn check_end<W: GroupWorld>(world: &mut W) -> Result<(), String> {
    if !world.core().queue.is_empty() {
        return Err("activity never ends: events are left in the queue".to_owned());
    }
    check_all_idle(world)?;
    world.check_end()
}

/// Checks that no state machine waits for anything.
fn check_all_idle<W: GroupWorld>(world: &mut W) -> Result<(), String> {
    let core = world.core();
    let is_waiting = |daemon: &Daemon<W::Machine>| {
        let machine = daemon.machine.as_ref();
        !machine.is_some_and(ProtocolMachine::is_idle)
    };
    let Some(node) = core.daemons.iter().position(is_waiting) else {
        return Ok(());
    };
    let state = format!("node {}: {:?}", node_id(node), core.daemons[node].machine);
    core.add_to_trace(|| state);
    Err(format!("node {} hangs", node_id(node)))
}

/// Returns the smallest part of a failing config that still fails. None if the config does not fail.
pub(crate) fn shrink<W: GroupWorld>(
    config: GroupRunConfig<W::Specific>,
    seed: u64,
) -> Option<ShrunkSeedFailure<GroupRunConfig<W::Specific>>>
where
    W::Specific: Clone,
{
    let fails = |config: &GroupRunConfig<W::Specific>| try_run::<W>(config, seed, None).err();
    let mut violation = fails(&config)?;
    let mut config = config;
    let with_fewer_faults: [fn(&mut GroupRunConfig<W::Specific>); 3] = [
        |config| config.hostile = false,
        |config| config.failing = false,
        |config| config.faults = FaultFrequencies::NONE,
    ];
    for calm in with_fewer_faults {
        let mut with = config.clone();
        calm(&mut with);
        if let Some(again) = fails(&with) {
            (config, violation) = (with, again);
        }
    }
    let with = |plan: &[(Time, GroupAction)]| GroupRunConfig {
        plan: plan.to_vec(),
        ..config.clone()
    };
    let (plan, violation) = shrink_plan(config.plan.clone(), violation, |plan| fails(&with(plan)));
    let config = with(&plan);
    let mut trace = Vec::new();
    let _ = try_run::<W>(&config, seed, Some(&mut trace));
    Some(ShrunkSeedFailure {
        config,
        violation,
        trace,
    })
}
