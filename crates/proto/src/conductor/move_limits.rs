//! Limits on moves: of this node in a minute, and of each process.

use super::config::ConductorConfig;
use super::decision::ObstacleReason;
use super::load::Smoothed;
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{MovePurpose, OfferId, PAST_MOVES_MAX, PastMove, ProcessKey};
use holdfast_wire::failure::Failure;
use std::collections::{BTreeMap, VecDeque};

/// Duration of the window in which moves are counted.
const WINDOW: Duration = Duration::from_secs(60);
/// Most failed moves of a process from a drained node before the process counts as one that cannot move.
const DRAIN_FAILURES_MAX: u32 = 3;
/// Rest of a process of a drained node after a failed move.
const DRAIN_FAILURE_REST: Duration = Duration::from_secs(10);

/// The moves from and to this node in the last minute.
#[derive(Debug)]
pub(super) struct MoveRate {
    /// Donor, offer and time of each move, in the order of time.
    begun: VecDeque<(Option<(NodeId, OfferId)>, Duration)>,
}

impl MoveRate {
    /// Returns the rate of a daemon that has just started, and may have moved up to `max` processes before.
    pub fn at_start(now: Duration, max: usize) -> MoveRate {
        let begun = std::iter::repeat_n((None, now), max).collect();
        MoveRate { begun }
    }

    /// Counts a move that begins, or is known to have begun by now.
    pub fn count(&mut self, now: Duration, donor: NodeId, id: OfferId) {
        self.uncount(donor, id);
        self.begun.push_back((Some((donor, id)), now));
        while self
            .begun
            .front()
            .is_some_and(|(_, at)| now.saturating_sub(*at) > WINDOW)
        {
            self.begun.pop_front();
        }
    }

    /// Removes a move that did not begin.
    pub fn uncount(&mut self, donor: NodeId, id: OfferId) {
        self.begun.retain(|(known, _)| *known != Some((donor, id)));
    }

    /// Returns the number of moves in the last minute.
    pub fn moves(&self, now: Duration) -> usize {
        let recent = self.begun.iter().rev();
        recent
            .take_while(|(_, at)| now.saturating_sub(*at) <= WINDOW)
            .count()
    }
}

/// A process's past, as far as it bears on further moves.
#[derive(Debug, Clone, Default)]
pub(super) struct ProcessHistory {
    /// Earlier moves: the former node and the time, the latest last.
    moves: Vec<(NodeId, Duration)>,
    /// Load at the former node, until the first sample here.
    pub expected: Option<Smoothed>,
    /// Failed moves from this node: their number, the time of the last, and its failure.
    failed: Option<(u32, Duration, Failure)>,
    /// Time at which the process was last seen here or expected here.
    seen_at: Duration,
}

impl ProcessHistory {
    /// Returns the node that the process left last, if within `rest`.
    pub fn former_node(&self, now: Duration, rest: Duration) -> Option<NodeId> {
        let last = self.moves.last();
        let last = last.filter(|(_, at)| now.saturating_sub(*at) < rest);
        last.map(|(node, _)| *node)
    }
}

/// The histories of the processes here, and of processes that left or may arrive.
#[derive(Debug, Default)]
pub(super) struct ProcessHistories {
    known: BTreeMap<ProcessKey, ProcessHistory>,
    /// True if the past moves have changed since the daemon was told.
    pub is_changed: bool,
}

impl ProcessHistories {
    pub fn get(&self, process: ProcessKey) -> Option<&ProcessHistory> {
        self.known.get(&process)
    }

    /// Takes the past moves of a process.
    pub fn learn(&mut self, now: Duration, process: ProcessKey, past: &[PastMove]) {
        let history = self.known.entry(process).or_default();
        history.moves = past
            .iter()
            .map(|past| {
                // A move before the start of the clock counts from its start, so the process rests longer, not shorter.
                let age = Duration::from_secs(past.age_s.into());
                (past.from, now.saturating_sub(age))
            })
            .collect();
        let excess = history.moves.len().saturating_sub(PAST_MOVES_MAX);
        history.moves.drain(..excess);
        history.seen_at = now;
        self.is_changed = true;
    }

    /// Records that a process comes from `donor`, with its load there.
    pub fn expect(&mut self, now: Duration, process: ProcessKey, donor: NodeId, load: Smoothed) {
        let history = self.known.entry(process).or_default();
        history.moves.push((donor, now));
        let excess = history.moves.len().saturating_sub(PAST_MOVES_MAX);
        history.moves.drain(..excess);
        history.expected = Some(load);
        history.seen_at = now;
        self.is_changed = true;
    }

    /// Forgets a process that did not come.
    pub fn forget(&mut self, process: ProcessKey) {
        self.known.remove(&process);
        self.is_changed = true;
    }

    /// Records a failed move from this node.
    pub fn fail(&mut self, now: Duration, process: ProcessKey, failure: Failure) {
        let history = self.known.entry(process).or_default();
        let count = history.failed.as_ref().map_or(0, |(count, ..)| *count);
        history.failed = Some((count.saturating_add(1), now, failure));
        history.seen_at = now;
    }

    /// Drops what no longer matters. `here` has the processes of this node in the order of their keys.
    pub fn expire(
        &mut self,
        now: Duration,
        config: &ConductorConfig,
        here: impl Iterator<Item = ProcessKey>,
    ) {
        let mut here = here.peekable();
        self.known.retain(|process, history| {
            while here.next_if(|key| key < process).is_some() {}
            if here.next_if_eq(process).is_some() {
                (history.seen_at, history.expected) = (now, None);
            }
            let window = config.process_moves_window;
            history
                .moves
                .retain(|(_, at)| now.saturating_sub(*at) < window);
            let rest = config.process_rest;
            let failed = history.failed.as_ref();
            if failed.is_some_and(|(_, at, _)| now.saturating_sub(*at) >= rest) {
                history.failed = None;
            }
            let is_empty =
                history.moves.is_empty() && history.failed.is_none() && history.expected.is_none();
            !is_empty && now.saturating_sub(history.seen_at) < config.process_rest
        });
    }

    /// Returns the past moves of a process as they travel with an offer.
    pub fn past_moves(&self, now: Duration, process: ProcessKey) -> Vec<PastMove> {
        let moves = self
            .known
            .get(&process)
            .map_or(&[][..], |history| &history.moves[..]);
        let past = |(from, at): &(NodeId, Duration)| PastMove {
            from: *from,
            age_s: u32::try_from(now.saturating_sub(*at).as_secs()).unwrap_or(u32::MAX),
        };
        moves.iter().map(past).collect()
    }

    /// Returns the past moves of all processes.
    pub fn all(&self, now: Duration) -> Vec<(ProcessKey, Vec<PastMove>)> {
        let moved = self
            .known
            .iter()
            .filter(|(_, history)| !history.moves.is_empty());
        moved
            .map(|(process, _)| (*process, self.past_moves(now, *process)))
            .collect()
    }

    /// Returns the reason in its past for which a process does not move now.
    pub fn obstacle(
        &self,
        now: Duration,
        process: ProcessKey,
        purpose: MovePurpose,
        config: &ConductorConfig,
    ) -> Option<ObstacleReason> {
        let history = self.known.get(&process)?;
        if let Some((count, at, failure)) = &history.failed {
            let since = now.saturating_sub(*at);
            let rests = match purpose {
                MovePurpose::Balance => since < config.process_rest,
                MovePurpose::Drain => *count >= DRAIN_FAILURES_MAX || since < DRAIN_FAILURE_REST,
            };
            if rests {
                return Some(ObstacleReason::Failed(failure.clone()));
            }
        }
        if purpose == MovePurpose::Drain {
            return None;
        }
        let (_, last) = history.moves.last()?;
        let since = now.saturating_sub(*last);
        if since < config.process_rest {
            return Some(ObstacleReason::MovedRecently(since));
        }
        let count = history.moves.len();
        (count >= config.process_moves_max).then_some(ObstacleReason::MovedOften(count))
    }

    /// Returns true if a process of a drained node may be tried again later, or has not been tried.
    pub fn may_leave_drained(&self, process: ProcessKey) -> bool {
        let failed = self
            .known
            .get(&process)
            .and_then(|history| history.failed.as_ref());
        failed.is_none_or(|(count, ..)| *count < DRAIN_FAILURES_MAX)
    }
}
