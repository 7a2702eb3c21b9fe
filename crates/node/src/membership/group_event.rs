//! Events of the group for the engine.

use std::collections::VecDeque;
use std::time::Instant;

use holdfast_proto::membership::RemovalCause;
use holdfast_proto::view::View;
use holdfast_wire::NodeId;
use holdfast_wire::group_data::GroupSettings;
use holdfast_wire::membership_frames::Member;
use tokio::sync::mpsc;

/// The lease as the kernel must have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelLease {
    /// End of the lease in nanoseconds of `CLOCK_BOOTTIME`; 0 for no lease.
    pub until_ns: u64,
    /// Epoch of this node's view.
    pub epoch: u64,
}

/// Tells the kernel this node's lease. Called on the driver's thread, and must not block.
pub type LeaseWriter = Box<dyn FnMut(KernelLease) + Send>;

/// An event of the group.
#[derive(Debug, Clone, PartialEq)]
pub enum GroupEvent {
    /// A newer view is in force, or the known server nodes have changed.
    View {
        /// The newest view of the group.
        view: View,
        /// This node's number.
        own: NodeId,
        /// All nodes that this node knows, itself included.
        members: Vec<Member>,
    },
    /// The group has other settings: services, and what else all nodes share.
    Settings {
        /// Version of the group data.
        version: u64,
        /// New settings of the group.
        settings: GroupSettings,
    },
    /// This node is contact node and serves until this time; none if it must stop serving at once. Comes with each
    /// renewal of the lease.
    Lease {
        /// End of this node's lease as contact node.
        until: Option<Instant>,
    },
    /// This node has joined the group with this number.
    Joined {
        /// Number of this node in the group.
        id: NodeId,
    },
    /// This node is outside the group.
    Removed {
        /// Reason why this node is outside the group.
        cause: RemovalCause,
        /// Contact node of the newest view that this node knows, which may be this node's own number.
        contact: NodeId,
    },
}

/// The events of the group, in order.
#[derive(Debug)]
pub struct GroupEvents {
    /// Events that were put back, the next one first.
    front: VecDeque<GroupEvent>,
    /// The newest [`GroupEvent::Settings`] that was returned.
    last_settings: Option<GroupEvent>,
    events: mpsc::UnboundedReceiver<GroupEvent>,
}

impl GroupEvents {
    pub(super) fn new(events: mpsc::UnboundedReceiver<GroupEvent>) -> GroupEvents {
        GroupEvents {
            front: VecDeque::new(),
            last_settings: None,
            events,
        }
    }

    /// Puts an event back in front of the others.
    pub fn put_back(&mut self, event: GroupEvent) {
        self.front.push_front(event);
    }

    /// Puts the newest settings in front of the other events, for an engine that begins anew: a node that joins again
    /// gets no event with settings that it knows.
    pub fn repeat_settings(&mut self) {
        if let Some(settings) = self.last_settings.take() {
            self.front.push_front(settings);
        }
    }

    /// Returns the next event. Dropping the future loses nothing.
    pub async fn recv(&mut self) -> GroupEvent {
        let event = match self.front.pop_front() {
            Some(event) => event,
            None => match self.events.recv().await {
                Some(event) => event,
                // The driver ends only with the daemon.
                None => std::future::pending().await,
            },
        };
        self.note_settings(&event);
        event
    }

    /// Returns the next event, if one waits.
    pub fn try_recv(&mut self) -> Option<GroupEvent> {
        let front = self.front.pop_front();
        let event = front.or_else(|| self.events.try_recv().ok())?;
        self.note_settings(&event);
        Some(event)
    }

    fn note_settings(&mut self, event: &GroupEvent) {
        if matches!(event, GroupEvent::Settings { .. }) {
            self.last_settings = Some(event.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(version: u64) -> GroupEvent {
        let settings = GroupSettings::default();
        GroupEvent::Settings { version, settings }
    }

    #[test]
    fn newest_settings_are_repeated_before_other_events() {
        let (sender, events) = mpsc::unbounded_channel();
        let mut events = GroupEvents::new(events);
        events.repeat_settings();
        assert_eq!(events.try_recv(), None);
        for version in [1, 2] {
            sender.send(settings(version)).unwrap();
        }
        let joined = GroupEvent::Joined { id: NodeId(7) };
        sender.send(joined.clone()).unwrap();
        while events.try_recv() != Some(joined.clone()) {}
        events.put_back(joined.clone());
        events.repeat_settings();
        assert_eq!(events.try_recv(), Some(settings(2)));
        assert_eq!(events.try_recv(), Some(joined));
        assert_eq!(events.try_recv(), None);
    }
}
