//! The acceptor's second half: the process is restored, committed at the holder, and only then runs.

use super::Migration;
use super::acceptor::Stage;
use super::asks::{Answers, AskPurpose, TRANSIT, of_process};
use super::command::{Command, FlowEpoch, Went};
use super::core::Purpose;
use super::donor::Stage::Removing;
use super::event::Event;
use core::time::Duration;
use holdfast_wire::migration::{FlowAt, MoveFrame, PeerConnections, TranslateStep};
use holdfast_wire::{Change, ChangeKind, Flow, MoveId, NodeId, Record};
use std::collections::BTreeMap;

impl Migration {
    /// Handles `Final`: the donor has sent everything.
    pub(super) fn final_arrived(
        &mut self,
        now: Duration,
        from: NodeId,
        id: MoveId,
        flows: Vec<FlowAt>,
        (peers, forwarded, bytes): (Vec<PeerConnections>, Vec<Flow>, u64),
    ) {
        let Some(taken) = self.acceptor.get_mut(&id) else {
            return self.refuse_unknown(from, id, "Final");
        };
        if id.donor != from || taken.stage != Stage::Waiting {
            return (self.core).ignored(from, "Final", "it does not fit the move");
        }
        if flows.iter().any(|flow| !taken.held.contains(&flow.flow)) {
            self.discard(id, "it has flows that were not announced");
            return self.say_never(id, "it has flows that were not announced");
        }
        taken.enter(now, Stage::Restoring);
        taken.flows = flows.clone();
        taken.peers = peers.clone();
        self.set_taken_deadline(id, None);
        self.core
            .command(Purpose::Restore(id), |token| Command::Restore {
                token,
                id,
                flows,
                peers,
                forwarded,
                bytes,
            });
    }

    pub(super) fn restored(&mut self, now: Duration, id: MoveId, result: Result<(), String>) {
        let Some(taken) = self.taken_in(id, Stage::Restoring) else {
            return;
        };
        if let Err(why) = result {
            let why = format!("it could not be restored: {why}");
            self.discard(id, &why);
            return self.say_never(id, &why);
        }
        taken.times.restore_us = taken.enter(now, Stage::Committing);
        // The flows are the ones diverted with the process: none was closed before the freeze, and none appeared late.
        if taken.arms == 1 && taken.flows.len() == taken.held.len() {
            let flows = taken.flows.len() as u32;
            let all = of_process(id, ChangeKind::CommitAll { flows }, TRANSIT);
            self.ask(now, vec![all], AskPurpose::CommitAll(id));
        } else {
            self.commit_each(now, id);
        }
    }

    fn commit_each(&mut self, now: Duration, id: MoveId) {
        if let Some(taken) = self.acceptor.get(&id) {
            let changes = changes(id, ChangeKind::Commit, &taken.flows);
            self.ask(now, changes, AskPurpose::Commit(id));
        }
    }

    /// Handles the holder's decision about the process and all its flows.
    pub(super) fn committed_all(&mut self, now: Duration, id: MoveId, answers: Answers) {
        let node = self.core.config.node;
        let Some(taken) = self.taken_in(id, Stage::Committing) else {
            return;
        };
        match answers.first() {
            Some(Ok(Some(process))) if process.is_owned_by(node) => {
                let flows = taken.flows.iter();
                let ours = |flow: &FlowAt| Record::owned(node, flow.epoch.saturating_add(TRANSIT));
                let records: Vec<_> = flows.map(|flow| Some(ours(flow))).collect();
                taken.committed_unnamed = taken.flows.clone();
                self.go(now, id, *process, records.into_iter());
            }
            // The holder does not know which flows were diverted together, or refuses; a second refusal is final.
            _ => self.commit_each(now, id),
        }
    }

    /// Handles the holder's decision about each record.
    pub(super) fn committed(&mut self, now: Duration, id: MoveId, answers: Answers) {
        let node = self.core.config.node;
        if self.taken_in(id, Stage::Committing).is_none() {
            return;
        }
        // A refused commit is not this node's, whatever the record says.
        let mut records = answers.into_iter().map(|answer| answer.ok().flatten());
        match records.next().flatten() {
            Some(record) if record.is_owned_by(node) => self.go(now, id, record, records),
            _ => {
                self.discard(id, "the holder did not commit it");
                self.say_never(id, "the holder did not commit it");
            }
        }
    }

    /// Runs the process that this node owns, and has its peers send to this node.
    pub(super) fn go(
        &mut self,
        now: Duration,
        id: MoveId,
        record: Record,
        records: impl Iterator<Item = Option<Record>>,
    ) {
        let node = self.core.config.node;
        let Some(taken) = self.acceptor.get_mut(&id) else {
            return;
        };
        taken.stage = Stage::Going;
        taken.epoch = record.epoch;
        for (FlowAt { flow, .. }, record) in taken.flows.iter().zip(records) {
            match record.filter(|record| record.is_owned_by(node)) {
                Some(record) => taken.ours.push((*flow, record.epoch)),
                None => taken.lost.push(*flow),
            }
        }
        self.command_go(id, 1);
        self.switch_peers(now, id);
    }

    pub(super) fn command_go(&mut self, id: MoveId, attempt: u32) {
        let Some(taken) = self.acceptor.get(&id) else {
            return;
        };
        let lost = taken.lost.clone();
        let ours = taken.ours.iter();
        let flows = ours.map(|&(flow, epoch)| FlowEpoch { flow, epoch });
        let flows = flows.collect();
        self.core
            .command(Purpose::Go(id, attempt), |token| Command::Go {
                token,
                id,
                flows,
                lost,
            });
    }

    pub(super) fn switch_peers(&mut self, now: Duration, id: MoveId) {
        let node = self.core.config.node;
        let Some(taken) = self.acceptor.get(&id) else {
            return;
        };
        let (hops, peers) = (taken.hops, taken.peers.clone());
        self.tell(now, id, (hops, node), TranslateStep::Switch, peers);
    }

    pub(super) fn went(
        &mut self,
        now: Duration,
        id: MoveId,
        attempt: u32,
        result: Result<Went, String>,
    ) {
        if self.taken_in(id, Stage::Going).is_none() {
            return;
        }
        let went = match result {
            Ok(went) => went,
            Err(_) if self.core.later(now, Purpose::Go(id, attempt), attempt) => return,
            Err(why) => {
                let command = "Go";
                self.core.event(Event::Failed { id, command, why });
                Went::default()
            }
        };
        let Some(taken) = self.acceptor.get_mut(&id) else {
            return;
        };
        taken.steps = went.steps;
        taken.times.commit_us = taken.enter(now.saturating_sub(went.ago), Stage::Gone);
        taken.wait = self.core.config.ask_retry_min;
        let flows = taken.ours.clone();
        let ours: BTreeMap<Flow, _> = flows.iter().copied().collect();
        // The donor waits for this frame, but no node for the rest.
        self.say_done(now, id);
        self.core
            .end_flows(id, &ours, |flow| !ours.contains_key(flow));
        self.core.event(Event::Accepted { id, flows });
    }

    /// Tells the donor that its process runs here, until the donor reports that nothing of it is left there.
    pub(super) fn say_done(&mut self, now: Duration, id: MoveId) {
        let max = self.core.config.ask_retry_max;
        let Some(taken) = self
            .taken_in(id, Stage::Gone)
            .filter(|taken| !taken.released)
        else {
            return;
        };
        let (result, times) = (Ok(taken.epoch), taken.times);
        let (ran_us, steps) = (taken.stayed(now), taken.steps.clone());
        let due = now + taken.wait;
        taken.wait = (taken.wait * 2).min(max);
        self.core.send(
            id.donor,
            id,
            MoveFrame::Done {
                result,
                times,
                ran_us,
                steps,
            },
        );
        self.set_taken_deadline(id, Some(due));
    }

    /// Repeats `Done` over a new channel to a donor.
    pub(super) fn say_all_done(&mut self, now: Duration, donor: NodeId) {
        let moves: Vec<MoveId> = self.acceptor.keys().copied().collect();
        for id in moves.into_iter().filter(|id| id.donor == donor) {
            self.say_done(now, id);
        }
    }

    pub(super) fn released_there(&mut self, now: Duration, from: NodeId, id: MoveId) {
        if id.donor != from {
            return (self.core).ignored(from, "Released", "the move is another's");
        }
        if let Some(taken) = self.taken_in(id, Stage::Gone) {
            taken.released = true;
            self.set_taken_deadline(id, None);
            self.forget_if_over(now, id);
        }
    }

    /// Removes the move's record once donor and peers have answered, since no node needs it any more.
    pub(super) fn forget_if_over(&mut self, now: Duration, id: MoveId) {
        if self.tells.keys().any(|(of, _)| *of == id) {
            return;
        }
        let Some(taken) = self
            .taken_in(id, Stage::Gone)
            .filter(|taken| taken.released)
        else {
            return;
        };
        taken.stage = Stage::Forgetting;
        // A holder that crashed after it decided about all flows may have written none of their records.
        let flows = std::mem::take(&mut taken.committed_unnamed);
        let mut changes: Vec<Change> = flows.iter().map(commit).collect();
        changes.push(of_process(id, ChangeKind::Remove, taken.epoch));
        self.ask(now, changes, AskPurpose::Remove(id));
    }

    /// Forgets the saved state of a move whose record is gone.
    pub(super) fn removed(&mut self, id: MoveId) {
        let given = self.given_in(id, Removing).is_some();
        if given || self.taken_in(id, Stage::Forgetting).is_some() {
            match given {
                true => drop(self.donor.remove(&id)),
                false => self.end_taken(id),
            }
            self.core
                .command(Purpose::Forget(id), |token| Command::Forget { token, id });
        }
    }
}

/// Returns a change of the process's record, and the same change of its flows' transits.
pub(super) fn changes(id: MoveId, kind: ChangeKind, flows: &[FlowAt]) -> Vec<Change> {
    let flows = flows.iter().map(|flow| Change {
        kind,
        ..commit(flow)
    });
    std::iter::once(of_process(id, kind, TRANSIT))
        .chain(flows)
        .collect()
}

/// Returns the commit of a single flow.
fn commit(flow: &FlowAt) -> Change {
    Change {
        flow: flow.flow,
        kind: ChangeKind::Commit,
        epoch: flow.epoch.saturating_add(1),
    }
}
