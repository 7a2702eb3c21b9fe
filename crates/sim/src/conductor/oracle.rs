//! The invariants of a balanced group.

use crate::time::Time;
use std::collections::{BTreeMap, VecDeque};

/// Most moves from and to a node in a minute.
pub(super) const MOVES_PER_MINUTE_MAX: usize = 6;
/// The same limit where a node is drained.
pub(super) const DRAIN_MOVES_PER_MINUTE_MAX: usize = 60;
/// Rest of both nodes after a move.
pub(super) const CALM_DOWN: Time = Time::from_micros(5_000_000);
/// Rest of a process that has moved.
pub(super) const PROCESS_REST: Time = Time::from_micros(600_000_000);
/// Most moves of one process to even out loads in [`PROCESS_MOVES_WINDOW`].
pub(super) const PROCESS_MOVES_MAX: usize = 2;
/// Time after which a move of a process no longer counts. Runs with faults are shorter; measurements are longer by a minute,
/// and in this minute a third move is right.
const PROCESS_MOVES_WINDOW: Time = Time::from_micros(3_600_000_000);
/// Time after which an accepted or offered process is settled, whatever frames were lost.
pub(super) const SETTLED_AFTER: Time = Time::from_micros(60_000_000);
/// Tolerance of the predicted loads, in percent points: noise, and changes within the smoothing time.
const PREDICTION_TOLERANCE: f64 = 3.0;

/// Longest time from the acceptance of an offer, from which a process rests, to the beginning of the move.
const ACCEPTANCE: Time = Time::from_micros(1_000_000);
const MINUTE: Time = Time::from_micros(60_000_000);

/// The beginning of a move.
#[derive(Debug, Clone, Copy)]
pub(super) struct Beginning {
    pub(super) at: Time,
    pub(super) donor: usize,
    pub(super) acceptor: usize,
    pub(super) process: usize,
    /// True if the donor is being drained.
    pub(super) is_drain: bool,
    /// True if the operator pinned the process.
    pub(super) is_pinned: bool,
    /// True if the process runs at the donor and is not moving.
    pub(super) is_here: bool,
    /// True if the donor or the acceptor takes part in another move.
    pub(super) is_busy: bool,
    /// True if the acceptor runs a process with the same anti-affinity label.
    pub(super) breaks_label: bool,
    /// True if the acceptor has no memory for the process.
    pub(super) is_full: bool,
    /// True if the acceptor's machine has accepted the offer.
    pub(super) is_accepted: bool,
    /// Mean loads of the donor before the move and of the acceptor after it, in percent points; none if loads change.
    pub(super) loads: Option<(f64, f64)>,
}

/// The past of all moves.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    /// Times of the moves of each node.
    begun: BTreeMap<usize, VecDeque<Time>>,
    /// Time of each node's last move's end.
    ended: BTreeMap<usize, Time>,
    /// The moves of each process.
    moved: BTreeMap<usize, Vec<Beginning>>,
    /// Number of moves that brought a process back to its former node within its rest.
    pub(super) undone: u64,
}

impl Oracle {
    /// Checks a move that begins. Rules about predictions hold only for policies that predict.
    pub(super) fn on_begin(&mut self, begin: &Beginning, predicts: bool) -> Result<(), String> {
        let Beginning {
            at: now,
            donor,
            acceptor,
            process,
            ..
        } = *begin;
        let what = format!("p{process} from n{} to n{}", donor + 1, acceptor + 1);
        let broken = [
            (
                !begin.is_here,
                "a process moves that is not there or moves already",
            ),
            (begin.is_busy, "a node takes part in two moves"),
            (begin.is_pinned, "a pinned process moves"),
            (
                begin.breaks_label,
                "a process joins one that it must be apart from",
            ),
            (begin.is_full, "a process moves to a node without room"),
            (
                !begin.is_accepted,
                "a move begins that the acceptor has not accepted",
            ),
        ];
        if let Some((_, rule)) = broken.iter().find(|(is_broken, _)| *is_broken) {
            return Err(format!("{rule}: {what}"));
        }
        let limit = match begin.is_drain {
            true => DRAIN_MOVES_PER_MINUTE_MAX,
            false => MOVES_PER_MINUTE_MAX,
        };
        for node in [donor, acceptor] {
            let begun = self.begun.entry(node).or_default();
            begun.push_back(now);
            while begun.front().is_some_and(|at| now.since(*at) >= MINUTE) {
                begun.pop_front();
            }
            if begun.len() > limit {
                let count = begun.len();
                return Err(format!(
                    "{count} moves of n{} in a minute: {what}",
                    node + 1
                ));
            }
            let ended = self.ended.get(&node).copied();
            if !begin.is_drain && ended.is_some_and(|ended| now.since(ended) < CALM_DOWN) {
                return Err(format!("n{} does not calm down: {what}", node + 1));
            }
        }
        if begin.is_drain || !predicts {
            return Ok(());
        }
        let past = self.moved.get(&process).map_or(&[][..], |past| &past[..]);
        if past
            .iter()
            .any(|past| now.since(past.at) + ACCEPTANCE < PROCESS_REST)
        {
            return Err(format!("a process moves again within its rest: {what}"));
        }
        let counts = |past: &&Beginning| {
            !past.is_drain && now.since(past.at) + ACCEPTANCE < PROCESS_MOVES_WINDOW
        };
        if past.iter().filter(counts).count() >= PROCESS_MOVES_MAX {
            return Err(format!(
                "a process moves more than {PROCESS_MOVES_MAX} times in an hour: {what}"
            ));
        }
        if let Some((before, after)) = begin.loads
            && after > before + PREDICTION_TOLERANCE
        {
            return Err(format!(
                "the acceptor is at {after:.1} % after the move, the donor was at {before:.1} %: {what}"
            ));
        }
        Ok(())
    }

    /// Returns true if the limits let a node that takes part in no move take part in one.
    pub(super) fn may_move(&self, now: Time, node: usize) -> bool {
        let ended = self.ended.get(&node);
        let begun = self.begun.get(&node).into_iter().flatten();
        let recent = begun.filter(|at| now.since(**at) < MINUTE).count();
        ended.is_none_or(|ended| now.since(*ended) >= CALM_DOWN) && recent < MOVES_PER_MINUTE_MAX
    }

    /// Records the end of a move; `is_moved` is false if the process stayed.
    pub(super) fn on_end(&mut self, now: Time, begin: &Beginning, is_moved: bool) {
        for node in [begin.donor, begin.acceptor] {
            self.ended.insert(node, now);
        }
        if is_moved {
            let past = self.moved.entry(begin.process).or_default();
            let undoes = past.last().is_some_and(|last| {
                last.donor == begin.acceptor && now.since(last.at) < PROCESS_REST
            });
            self.undone += u64::from(undoes);
            past.push(*begin);
        }
    }

    /// Returns the time of a process's last move.
    pub(super) fn last_move(&self, process: usize) -> Option<Time> {
        let past = self.moved.get(&process)?;
        past.last().map(|last| last.at)
    }

    /// Returns the number of a process's moves.
    pub(super) fn moves(&self, process: usize) -> usize {
        self.moved.get(&process).map_or(0, Vec::len)
    }
}
