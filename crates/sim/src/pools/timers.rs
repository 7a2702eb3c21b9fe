//! The state machines' timers.

use super::bug::PoolBug;
use super::node_numbers::{NodeNumber, NodeRole};
use super::world::{PoolWorld, PoolWorldEvent};
use crate::event_queue::FutureEvents;
use crate::time::Time;
use holdfast_proto::pool_element::PoolElement;
use holdfast_proto::registrar::Registrar;
use std::time::Duration;

/// Queues a state machine's next timer, unless an earlier one is queued, after which the timer is queried again.
#[inline]
pub(super) fn rearm(
    queue: &mut FutureEvents<PoolWorldEvent>,
    node: NodeNumber,
    wake: &mut Option<Time>,
    due: Option<Duration>,
) {
    let Some(due) = due else { return };
    let at = Time::from(due);
    if wake.is_none_or(|set| at < set) {
        *wake = Some(at);
        queue.push(at, PoolWorldEvent::Wake { node, at });
    }
}

impl PoolWorld<'_> {
    /// Fires a state machine's timer if it is due; returns true if it was.
    pub(super) fn fire_timer(&mut self, node: NodeNumber, at: Time) -> bool {
        let now: Duration = self.now.into();
        if let Some(bug) = self.config.bug
            && matches!(
                (bug, self.nodes.role(node)),
                (PoolBug::NoRegistrarTimers, NodeRole::Registrar(_))
                    | (PoolBug::NoElementTimers, NodeRole::Element(_))
                    | (PoolBug::NoUserTimers, NodeRole::User(_))
            )
        {
            return false;
        }
        match self.nodes.role(node) {
            NodeRole::Registrar(index) => {
                let registrar = &mut self.registrars[index];
                if registrar.wake != Some(at) {
                    return false;
                }
                registrar.wake = None;
                let due = registrar.machine.as_ref().and_then(Registrar::poll_timeout);
                let fires = due.is_some_and(|due| due <= now);
                match fires {
                    true => self.drive_registrar(index, |machine, now| machine.handle_timeout(now)),
                    false => rearm(&mut self.queue, node, &mut registrar.wake, due),
                }
                fires
            }
            NodeRole::Element(index) => {
                let element = &mut self.elements[index];
                if element.wake != Some(at) {
                    return false;
                }
                element.wake = None;
                let due = element.machine.as_ref().and_then(PoolElement::poll_timeout);
                let fires = due.is_some_and(|due| due <= now);
                match fires {
                    true => self.drive_element(index, |machine, now| machine.handle_timeout(now)),
                    false => rearm(&mut self.queue, node, &mut element.wake, due),
                }
                fires
            }
            NodeRole::User(index) => {
                let user = &mut self.users[index];
                if user.wake != Some(at) {
                    return false;
                }
                user.wake = None;
                let due = user.machine.poll_timeout();
                let fires = due.is_some_and(|due| due <= now);
                match fires {
                    true => self.drive_user(index, |machine, now| machine.handle_timeout(now)),
                    false => rearm(&mut self.queue, node, &mut user.wake, due),
                }
                fires
            }
        }
    }
}
