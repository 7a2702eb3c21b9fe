//! What does happen.

use super::{Faults, id};
use crate::time::Time;
use std::fmt;

/// What a seed makes of a [`Setting`](super::Setting); `K` is what is peculiar to handoff or migration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config<K> {
    /// How many nodes there are.
    pub nodes: usize,
    /// The one that keeps the records.
    pub holder: usize,
    /// See [`Setting::flows`](super::Setting::flows).
    pub flows: usize,
    /// Whether channels lose, repeat and reorder single frames.
    pub hostile: bool,
    /// Whether commands fail.
    pub failing: bool,
    /// How often what fails of itself does.
    pub faults: Faults,
    /// What happens, and when.
    pub plan: Vec<(Time, Action)>,
    /// From then on nothing fails any more: daemons are back, channels mended.
    pub heals: Time,
    /// By then nothing may go on.
    pub rest: Time,
    /// What is peculiar to the kind.
    pub own: K,
}

/// Something that happens. Who does it to what is drawn from a `draw` of its own, so that it does not depend on what else happens
/// more than it must.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A node's daemon dies; what the kernel has stays.
    Crash(usize),
    /// It begins anew.
    Restart(usize),
    /// The channel between two nodes breaks, and is not made again.
    Cut(usize, usize),
    /// It is.
    Mend(usize, usize),
    /// An operator asks for a handoff or a migration.
    Request {
        /// Which.
        draw: u64,
    },
    /// An operator calls back what is asked for.
    Cancel,
    /// Server programs do something wherever they may.
    Work,
    /// A connection is closed.
    Close {
        /// Which.
        draw: u64,
    },
    /// A client connects.
    Open {
        /// Where.
        draw: u64,
    },
    /// A process is killed.
    Kill {
        /// Which.
        draw: u64,
    },
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Action::Crash(node) => write!(f, "the daemon of node {} dies", id(node)),
            Action::Restart(node) => write!(f, "the daemon of node {} begins anew", id(node)),
            Action::Cut(a, b) => write!(f, "nodes {} and {} are parted", id(a), id(b)),
            Action::Mend(a, b) => write!(f, "nodes {} and {} are joined again", id(a), id(b)),
            Action::Request { draw } => write!(f, "somebody asks for a move (draw {draw:x})"),
            Action::Cancel => write!(f, "moves are called back"),
            Action::Work => write!(f, "programs work"),
            Action::Close { draw } => write!(f, "a connection is closed (draw {draw:x})"),
            Action::Open { draw } => write!(f, "a client connects (draw {draw:x})"),
            Action::Kill { draw } => write!(f, "a process is killed (draw {draw:x})"),
        }
    }
}
