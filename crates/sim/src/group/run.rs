//! A run from beginning to end, and the shrinking of a failing one.

use super::core::{Daemon, Event};
use super::machine::Machine;
use super::{Action, Config, Faults, World, id};
use crate::Violation;
use crate::shrink::shortest;
use crate::time::Time;
use std::collections::BTreeMap;

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Number of occurrences by kind: results of moves, answers of the holder, states in which daemons died.
    pub counts: BTreeMap<String, u64>,
    /// Number of frames, timers, steps of commands, and actions.
    pub events: u64,
    /// A digest of the times of all events: equal for equal runs.
    pub digest: u64,
}

/// A failing seed, shrunk.
#[derive(Debug, Clone)]
pub struct Failure<K> {
    /// The shortest plan and the fewest faults that still fail.
    pub config: Config<K>,
    /// The violated invariant.
    pub violation: Violation,
    /// All events up to the violation.
    pub trace: Vec<String>,
}

/// Runs a config. With `trace`, every event and every output of a state machine becomes a line of it.
pub(crate) fn try_run<W: World>(
    config: &Config<W::Own>,
    seed: u64,
    trace: Option<&mut Vec<String>>,
) -> Result<Outcome, Violation> {
    let mut world = W::new(config, seed);
    world.core().trace = trace.is_some().then(Vec::new);
    for (at, action) in &config.plan {
        world.core().queue.push(*at, Event::Act(*action));
    }
    world.core().queue.push(config.heals, Event::Heal);
    while world.next(config.rest) {}
    if world.core().violation.is_none()
        && let Err(what) = check_end(&mut world)
    {
        world.core().now = config.rest;
        world.core().violated(what);
    }
    let core = world.core();
    if let Some(trace) = trace {
        *trace = core.trace.take().unwrap_or_default();
    }
    if let Some(violation) = core.violation.take() {
        return Err(violation);
    }
    Ok(Outcome {
        counts: std::mem::take(&mut core.counts),
        events: core.events,
        digest: core.digest,
    })
}

fn check_end<W: World>(world: &mut W) -> Result<(), String> {
    if !world.core().queue.is_empty() {
        return Err("something goes on for ever".to_owned());
    }
    all_idle(world)?;
    world.check_end()
}

/// Checks that no state machine waits for anything.
fn all_idle<W: World>(world: &mut W) -> Result<(), String> {
    let core = world.core();
    let hangs = |daemon: &Daemon<W::Machine>| {
        let machine = daemon.machine.as_ref();
        !machine.is_some_and(Machine::is_at_rest)
    };
    let Some(node) = core.daemons.iter().position(hangs) else {
        return Ok(());
    };
    let state = format!("node {}: {:?}", id(node), core.daemons[node].machine);
    core.note(|| state);
    Err(format!("node {} hangs", id(node)))
}

/// Returns the smallest part of a failing config that still fails. None if the config does not fail.
pub(crate) fn shrink<W: World>(config: Config<W::Own>, seed: u64) -> Option<Failure<W::Own>>
where
    W::Own: Clone,
{
    let fails = |config: &Config<W::Own>| try_run::<W>(config, seed, None).err();
    let mut violation = fails(&config)?;
    let mut config = config;
    let calmer: [fn(&mut Config<W::Own>); 3] = [
        |config| config.hostile = false,
        |config| config.failing = false,
        |config| config.faults = Faults::NONE,
    ];
    for calm in calmer {
        let mut with = config.clone();
        calm(&mut with);
        if let Some(again) = fails(&with) {
            (config, violation) = (with, again);
        }
    }
    let with = |plan: &[(Time, Action)]| Config {
        plan: plan.to_vec(),
        ..config.clone()
    };
    let (plan, violation) = shortest(config.plan.clone(), violation, |plan| fails(&with(plan)));
    let config = with(&plan);
    let mut trace = Vec::new();
    let _ = try_run::<W>(&config, seed, Some(&mut trace));
    Some(Failure {
        config,
        violation,
        trace,
    })
}
