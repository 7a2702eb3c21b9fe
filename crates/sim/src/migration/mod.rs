//! Migration of processes: the unmodified migration state machines of `holdfast-proto` on all nodes of a group, and the
//! actions of their daemons in steps, between which a daemon may die. Two processes are connected to each other, all
//! may have clients.
//!
//! A process's state is the number of its work steps. After every event the oracle checks that no process runs
//! twice, that each has all its work steps, that exactly the node in the record may send for a flow, and that epochs do
//! not decrease. At the end every live process runs at one node, with its flows and connections, and no traces of moves
//! are left.

mod bug;
mod commands;
mod frames;
mod give;
mod holder;
mod host;
mod oracle;
mod people;
mod take;
#[cfg(test)]
mod tests;
mod world;

pub use bug::Bug;

use crate::Violation;
use crate::group::{self, Action, Faults, Outcome, Setting as Shared, Span, WithRequest};
use crate::time::Time;
use world::World;

/// The possible actions and faults.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// The settings common to all groups.
    pub group: Shared,
    /// Number of processes: at least two.
    pub processes: Span,
    /// Probability, per request, that an operator cancels it soon after.
    pub cancel: f64,
    /// Probability, per request, that a process is killed soon after.
    pub kill: f64,
    /// Share of requests for a clone.
    pub copies: f64,
}

/// The part of a config specific to migrations.
#[derive(Debug, Clone, PartialEq)]
pub struct Own {
    /// Initial node of each process.
    pub homes: Vec<usize>,
    /// Share of requests for a clone.
    pub copies: f64,
    /// The deliberate bug, if any.
    pub bug: Option<Bug>,
}

/// Configuration of a run.
pub type Config = group::Config<Own>;

/// Three to five nodes, with two or three processes that are moved around for two seconds.
pub const DEFAULT: Setting = Setting {
    group: Shared {
        nodes: Span::new(3, 5),
        flows: Span::new(0, 6),
        requests: Span::new(3, 13),
        runtime: Time::from_micros(2_000_000),
        rest: Time::from_micros(2_000_000_000),
        soon: Time::from_micros(15_000),
        crash: 0.4,
        cut: 0.25,
        close: 0.4,
        open: 0.4,
        faults: Faults::DEFAULT,
    },
    processes: Span::new(2, 3),
    cancel: 0.08,
    kill: 0.03,
    copies: 0.12,
};

/// Derives a config from a setting and a seed.
#[must_use]
pub fn schedule(setting: &Setting, seed: u64, bug: Option<Bug>) -> Config {
    let with_requests: [WithRequest; 2] = [
        (setting.kill, |draw| Action::Kill { draw }),
        (setting.cancel, |_| Action::Cancel),
    ];
    group::schedule(&setting.group, seed, &with_requests, |random, nodes| {
        let count = setting.processes.draw(random);
        Own {
            homes: (0..count).map(|_| random.below(nodes)).collect(),
            copies: setting.copies,
            bug,
        }
    })
}

/// Simulates a config with a seed: the same two always give the same outcome. With `trace`, every event and every
/// output of a state machine becomes a line of it.
///
/// # Errors
/// The first violated invariant.
pub fn try_run(
    config: &Config,
    seed: u64,
    trace: Option<&mut Vec<String>>,
) -> Result<Outcome, Violation> {
    group::try_run::<World>(config, seed, trace)
}

/// Returns the smallest part of a failing seed's config that still fails. None if the seed does not fail.
#[must_use]
pub fn shrink(setting: &Setting, seed: u64, bug: Option<Bug>) -> Option<group::Failure<Own>> {
    group::shrink::<World>(schedule(setting, seed, bug), seed)
}
