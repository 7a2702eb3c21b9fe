//! Actions of an acceptor's daemon, in steps.

use super::Bug;
use super::host::{Entry, State, Who, Written};
use super::world::World;
use holdfast_proto::migration::{Command, RecoveredRole, Results, Went};
use holdfast_wire::{Flow, MoveId};

impl World {
    pub(super) fn take(
        &mut self,
        node: usize,
        command: &Command,
        (step, last): (usize, bool),
        fails: bool,
    ) -> Option<Results> {
        let outcome = if fails {
            Err("no luck".to_owned())
        } else {
            Ok(())
        };
        let bug = self.bug;
        let host = &mut self.hosts[node];
        match command {
            Command::Examine { .. } => {
                let refusals = outcome.map_err(|why| vec![why]);
                Some(Results::Examined(refusals))
            }
            Command::Build { id, offer, .. } => {
                let role = RecoveredRole::Acceptor {
                    restored: None,
                    gone: false,
                };
                let hops = offer.hops;
                host.written.insert(*id, Written { hops, role });
                host.husks.insert(*id, None);
                Some(Results::Built(outcome))
            }
            Command::Arm { id, flows, .. } => {
                let held = flows.iter().map(|of| (of.flow, of.epoch + 1)).collect();
                let armed = outcome.and_then(|()| self.arm(node, *id, held));
                Some(Results::Armed(armed))
            }
            Command::Restore {
                id, flows, peers, ..
            } => {
                if let Some(written) = host.written.get_mut(id)
                    && let RecoveredRole::Acceptor { restored, .. } = &mut written.role
                {
                    *restored = Some((flows.clone(), peers.clone()));
                }
                if last && !fails {
                    host.husks.insert(*id, self.images.get(id).cloned());
                }
                last.then_some(Results::Restored(outcome))
            }
            Command::Go { .. } => self.go(node, command, step, fails),
            Command::Discard { id, .. } => {
                if bug != Some(Bug::DiscardLeaves) {
                    host.entries
                        .retain(|_, entry| entry.state != State::In || entry.id != Some(*id));
                }
                host.husks.remove(id);
                host.written.remove(id);
                Some(Results::Discarded)
            }
            other => unreachable!("an acceptor does {other:?}"),
        }
    }

    fn arm(&mut self, node: usize, id: MoveId, held: Vec<(Flow, u32)>) -> Result<(), String> {
        let host = &mut self.hosts[node];
        for (flow, epoch) in held {
            match host.entries.get(&flow).map(|entry| entry.state) {
                None | Some(State::Moved) => {}
                Some(State::In) if host.entries[&flow].id == Some(id) => {}
                other => return Err(format!("{flow} is {other:?}")),
            }
            let (state, id) = (State::In, Some(id));
            host.entries.insert(flow, Entry { state, epoch, id });
        }
        Ok(())
    }

    /// Activates the flows, then resumes the process, then stores that it runs.
    fn go(&mut self, node: usize, command: &Command, step: usize, fails: bool) -> Option<Results> {
        let Command::Go {
            id, flows, lost, ..
        } = command
        else {
            unreachable!("{command:?} as a go");
        };
        let host = &mut self.hosts[node];
        let role = host.written.get(id).map(|written| &written.role);
        let done = matches!(
            role,
            None | Some(RecoveredRole::Acceptor { gone: true, .. })
        );
        if done || fails {
            let failed = Err("try again".to_owned());
            return Some(Results::Gone(if done {
                Ok(Went::default())
            } else {
                failed
            }));
        }
        match step {
            0 => {
                for of in flows {
                    let held = host.entries.get(&of.flow);
                    if held.is_some_and(|entry| entry.state == State::In) {
                        host.set(of.flow, State::Owned, of.epoch);
                    }
                    self.core.dirty.push(of.flow);
                }
                host.entries
                    .retain(|_, entry| entry.state != State::In || entry.id != Some(*id));
                None
            }
            1 => {
                self.start(node, *id, lost);
                None
            }
            _ => {
                if let Some(written) = host.written.get_mut(id)
                    && let RecoveredRole::Acceptor { gone, .. } = &mut written.role
                {
                    *gone = true;
                }
                Some(Results::Gone(Ok(Went::default())))
            }
        }
    }

    /// Resumes the restored process, unless it runs already.
    pub(super) fn start(&mut self, node: usize, id: MoveId, lost: &[Flow]) {
        let host = &mut self.hosts[node];
        let Some(husk) = host.husks.remove(&id) else {
            return;
        };
        let Some(mut image) = husk else {
            return self.core.violated(format!("{id} runs empty"));
        };
        image.hops += 1;
        image.flows.retain(|flow| !lost.contains(flow));
        if matches!(image.who, Who::Copy(_)) {
            self.copies.insert(image.who);
        }
        host.make(image);
    }
}
