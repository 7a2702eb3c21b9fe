//! The state machines' timers.

use super::bug::PoolBug;
use super::node_numbers::NodeRole;
use super::world::{PoolWorld, PoolWorldEvent};
use crate::associations::NodeNumber;
use crate::machine_timer::MachineTimer;
use crate::time::Time;
use holdfast_proto::pool_element::PoolElement;
use holdfast_proto::registrar::Registrar;
use std::time::Duration;

impl PoolWorld<'_> {
    /// Queues the next wake-up of a state machine, if one is needed.
    #[inline]
    pub(super) fn arm_timer(&mut self, role: NodeRole) {
        let due = self.due(role);
        if let Some(at) = self.timer(role).arm(due) {
            let node = self.nodes.number(role);
            self.queue.push(at, PoolWorldEvent::Wake { node, at });
        }
    }

    /// Fires a state machine's timer if it is due; returns true if it was.
    pub(super) fn fire_timer(&mut self, node: NodeNumber, at: Time) -> bool {
        let role = self.nodes.role(node);
        if let Some(bug) = self.config.bug
            && matches!(
                (bug, role),
                (PoolBug::NoRegistrarTimers, NodeRole::Registrar(_))
                    | (PoolBug::NoElementTimers, NodeRole::Element(_))
                    | (PoolBug::NoUserTimers, NodeRole::User(_))
            )
        {
            return false;
        }
        if !self.timer(role).take(at) {
            return false;
        }
        let now: Duration = self.now.into();
        if self.due(role).is_none_or(|due| due > now) {
            self.arm_timer(role);
            return false;
        }
        match role {
            NodeRole::Registrar(index) => {
                self.drive_registrar(index, |machine, now| machine.handle_timeout(now));
            }
            NodeRole::Element(index) => {
                self.drive_element(index, |machine, now| machine.handle_timeout(now));
            }
            NodeRole::User(index) => {
                self.drive_user(index, |machine, now| machine.handle_timeout(now));
            }
        }
        true
    }

    #[inline]
    fn timer(&mut self, role: NodeRole) -> &mut MachineTimer {
        match role {
            NodeRole::Registrar(index) => &mut self.registrars[index].timer,
            NodeRole::Element(index) => &mut self.elements[index].timer,
            NodeRole::User(index) => &mut self.users[index].timer,
        }
    }

    /// Returns the time at which a state machine's next timer is due.
    #[inline]
    fn due(&self, role: NodeRole) -> Option<Duration> {
        match role {
            NodeRole::Registrar(index) => {
                let machine = self.registrars[index].machine.as_ref();
                machine.and_then(Registrar::poll_timeout)
            }
            NodeRole::Element(index) => {
                let machine = self.elements[index].machine.as_ref();
                machine.and_then(PoolElement::poll_timeout)
            }
            NodeRole::User(index) => self.users[index].machine.poll_timeout(),
        }
    }
}
