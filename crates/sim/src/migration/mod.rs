//! Processes that move: the migration machines of `holdfast-proto`, unchanged, of all nodes of a group, with what their daemons do for
//! them, step by step: they may die between two. Two processes have a connection with each other, all may have clients.
//!
//! A process's state is how often it has worked. The oracle looks after every event: no process runs twice, each has done what
//! it did wherever it was, one node speaks for a flow, the one that the record names, and epochs do not shrink. In the end every
//! process that lives runs at one node, with its flows and connections, and nothing of a move is left.

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

/// What may happen.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// What may happen to any group.
    pub group: Shared,
    /// Processes: two at least.
    pub processes: Span,
    /// With each request so often: an operator calls back soon what is asked for.
    pub cancel: f64,
    /// Somebody kills a process soon.
    pub kill: f64,
    /// The share of requests for a copy.
    pub copies: f64,
}

/// What is peculiar to migrations.
#[derive(Debug, Clone, PartialEq)]
pub struct Own {
    /// The node of each process at first.
    pub homes: Vec<usize>,
    /// The share of requests for a copy.
    pub copies: f64,
    /// What is broken on purpose.
    pub bug: Option<Bug>,
}

/// What happens.
pub type Config = group::Config<Own>;

/// Three to five nodes, with two or three processes that go round for two seconds.
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

/// What a seed makes of a setting.
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

/// Simulates with a seed: the same two give the same outcome, always. With `trace`, every event and what each machine says
/// becomes a line of it.
///
/// # Errors
/// What was not as it must be.
pub fn try_run(
    config: &Config,
    seed: u64,
    trace: Option<&mut Vec<String>>,
) -> Result<Outcome, Violation> {
    group::try_run::<World>(config, seed, trace)
}

/// The least of what a failing seed has with which it still fails. None: it comes right.
#[must_use]
pub fn shrink(setting: &Setting, seed: u64, bug: Option<Bug>) -> Option<group::Failure<Own>> {
    group::shrink::<World>(schedule(setting, seed, bug), seed)
}
