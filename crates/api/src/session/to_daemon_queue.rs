//! The queue of a program's messages to the daemon: adjacent entries of one kind are merged, entries too long for a
//! message are split.

use std::collections::VecDeque;

use super::SharedDescriptor;
use crate::app::{DESCRIPTORS_MAX, HandOffItem, ReclaimItem, ToDaemon, split};
use crate::{Destination, FlowText};

/// A message to the daemon, with its descriptors.
pub(crate) struct MessageToDaemon {
    pub(crate) message: ToDaemon,
    pub(crate) descriptors: Vec<SharedDescriptor>,
}

/// A queued entry, of any length.
enum QueueEntry {
    Single(ToDaemon),
    Accepted {
        service: u32,
        flows: Vec<FlowText>,
    },
    Closed {
        flows: Vec<FlowText>,
    },
    Declined {
        flows: Vec<FlowText>,
        reason: String,
    },
    Received {
        ids: Vec<u64>,
    },
    HandOff {
        destination: Destination,
        items: Vec<(HandOffItem, Option<SharedDescriptor>)>,
    },
    Reclaim {
        items: Vec<(ReclaimItem, Option<SharedDescriptor>)>,
    },
}

/// A session's queue of messages to the daemon. Order is kept.
#[derive(Default)]
pub(crate) struct ToDaemonQueue {
    entries: VecDeque<QueueEntry>,
    /// The messages of the first entry, after it is split.
    ready: VecDeque<MessageToDaemon>,
    last_batch: u64,
}

impl ToDaemonQueue {
    /// Returns the next message.
    pub(crate) fn pop(&mut self) -> Option<MessageToDaemon> {
        while self.ready.is_empty() {
            let entry = self.entries.pop_front()?;
            self.split_entry(entry);
        }
        self.ready.pop_front()
    }

    /// Puts back a message that could not be sent.
    pub(crate) fn put_back(&mut self, transmit: MessageToDaemon) {
        self.ready.push_front(transmit);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.entries.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.ready.clear();
    }

    /// Queues a message that is always short.
    pub(crate) fn push_single(&mut self, message: ToDaemon) {
        self.entries.push_back(QueueEntry::Single(message));
    }

    pub(crate) fn push_accepted(
        &mut self,
        accepting_service: u32,
        new_flows: impl IntoIterator<Item = FlowText>,
    ) {
        match self.entries.back_mut() {
            Some(QueueEntry::Accepted { service, flows }) if *service == accepting_service => {
                flows.extend(new_flows)
            }
            _ => self.entries.push_back(QueueEntry::Accepted {
                service: accepting_service,
                flows: new_flows.into_iter().collect(),
            }),
        }
    }

    pub(crate) fn push_closed(&mut self, flow: FlowText) {
        match self.entries.back_mut() {
            Some(QueueEntry::Closed { flows }) => flows.push(flow),
            _ => self
                .entries
                .push_back(QueueEntry::Closed { flows: vec![flow] }),
        }
    }

    pub(crate) fn push_declined(&mut self, flow: FlowText, decline_reason: &str) {
        match self.entries.back_mut() {
            Some(QueueEntry::Declined { flows, reason }) if reason == decline_reason => {
                flows.push(flow)
            }
            _ => self.entries.push_back(QueueEntry::Declined {
                flows: vec![flow],
                reason: decline_reason.to_owned(),
            }),
        }
    }

    pub(crate) fn push_received(&mut self, id: u64) {
        match self.entries.back_mut() {
            Some(QueueEntry::Received { ids }) => ids.push(id),
            _ => self
                .entries
                .push_back(QueueEntry::Received { ids: vec![id] }),
        }
    }

    pub(crate) fn push_hand_off(
        &mut self,
        to: &Destination,
        item: HandOffItem,
        descriptor: Option<SharedDescriptor>,
    ) {
        match self.entries.back_mut() {
            Some(QueueEntry::HandOff { destination, items }) if destination == to => {
                items.push((item, descriptor))
            }
            _ => self.entries.push_back(QueueEntry::HandOff {
                destination: to.clone(),
                items: vec![(item, descriptor)],
            }),
        }
    }

    pub(crate) fn push_reclaim(&mut self, items: Vec<(ReclaimItem, Option<SharedDescriptor>)>) {
        self.entries.push_back(QueueEntry::Reclaim { items });
    }

    fn split_entry(&mut self, entry: QueueEntry) {
        match entry {
            QueueEntry::Single(message) => self.push_ready(message),
            QueueEntry::Accepted { service, flows } => {
                split(flows, usize::MAX)
                    .into_iter()
                    .for_each(|flows| self.push_ready(ToDaemon::Accepted { service, flows }));
            }
            QueueEntry::Closed { flows } => {
                split(flows, usize::MAX)
                    .into_iter()
                    .for_each(|flows| self.push_ready(ToDaemon::Closed { flows }));
            }
            QueueEntry::Declined { flows, reason } => {
                split(flows, usize::MAX).into_iter().for_each(|flows| {
                    self.push_ready(ToDaemon::Declined {
                        flows,
                        reason: reason.clone(),
                    })
                })
            }
            QueueEntry::Received { ids } => {
                split(ids, usize::MAX)
                    .into_iter()
                    .for_each(|ids| self.push_ready(ToDaemon::Received { ids }));
            }
            QueueEntry::HandOff { destination, items } => self.split_hand_off(&destination, items),
            QueueEntry::Reclaim { items } => {
                let (items, mut descriptors): (Vec<_>, Vec<_>) = items.into_iter().unzip();
                for items in split(items, DESCRIPTORS_MAX) {
                    let descriptors = descriptors.drain(..items.len()).flatten().collect();
                    self.ready.push_back(MessageToDaemon {
                        message: ToDaemon::Reclaim { items },
                        descriptors,
                    });
                }
            }
        }
    }

    fn split_hand_off(
        &mut self,
        destination: &Destination,
        items: Vec<(HandOffItem, Option<SharedDescriptor>)>,
    ) {
        self.last_batch += 1;
        let (items, mut descriptors): (Vec<_>, Vec<_>) = items.into_iter().unzip();
        let mut runs = split(items, DESCRIPTORS_MAX).into_iter().peekable();
        while let Some(items) = runs.next() {
            let descriptors = descriptors.drain(..items.len()).flatten().collect();
            let message = ToDaemon::HandOff {
                batch: self.last_batch,
                to: destination.to.clone(),
                drain: destination.drain,
                items,
                last: runs.peek().is_none(),
            };
            self.ready.push_back(MessageToDaemon {
                message,
                descriptors,
            });
        }
    }

    fn push_ready(&mut self, message: ToDaemon) {
        self.ready.push_back(MessageToDaemon {
            message,
            descriptors: Vec::new(),
        });
    }
}
