//! The queue of messages to the daemon: adjacent entries of one kind are merged, entries too long for a message are
//! split.

use std::collections::VecDeque;

use super::Descriptor;
use crate::app::{DESCRIPTORS_MAX, HandOffItem, ReclaimItem, ToDaemon, split};
use crate::{Destination, FlowText};

/// One message with its descriptors.
pub(crate) struct Transmit {
    pub(crate) message: ToDaemon,
    pub(crate) descriptors: Vec<Descriptor>,
}

/// A queued entry, of any length.
enum Entry {
    Whole(ToDaemon),
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
        items: Vec<(HandOffItem, Option<Descriptor>)>,
    },
    Reclaim {
        items: Vec<(ReclaimItem, Option<Descriptor>)>,
    },
}

/// The queue. Order is kept.
#[derive(Default)]
pub(crate) struct Outbox {
    entries: VecDeque<Entry>,
    /// The messages of the first entry, after it is split.
    ready: VecDeque<Transmit>,
    batches: u64,
}

impl Outbox {
    /// Returns the next message.
    pub(crate) fn pop(&mut self) -> Option<Transmit> {
        while self.ready.is_empty() {
            let entry = self.entries.pop_front()?;
            self.cut(entry);
        }
        self.ready.pop_front()
    }

    /// Puts back a message that could not be sent.
    pub(crate) fn put_back(&mut self, transmit: Transmit) {
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
    pub(crate) fn whole(&mut self, message: ToDaemon) {
        self.entries.push_back(Entry::Whole(message));
    }

    pub(crate) fn accepted(&mut self, of: u32, new: impl IntoIterator<Item = FlowText>) {
        match self.entries.back_mut() {
            Some(Entry::Accepted { service, flows }) if *service == of => flows.extend(new),
            _ => self.entries.push_back(Entry::Accepted {
                service: of,
                flows: new.into_iter().collect(),
            }),
        }
    }

    pub(crate) fn closed(&mut self, flow: FlowText) {
        match self.entries.back_mut() {
            Some(Entry::Closed { flows }) => flows.push(flow),
            _ => self.entries.push_back(Entry::Closed { flows: vec![flow] }),
        }
    }

    pub(crate) fn declined(&mut self, flow: FlowText, why: &str) {
        match self.entries.back_mut() {
            Some(Entry::Declined { flows, reason }) if reason == why => flows.push(flow),
            _ => self.entries.push_back(Entry::Declined {
                flows: vec![flow],
                reason: why.to_owned(),
            }),
        }
    }

    pub(crate) fn received(&mut self, id: u64) {
        match self.entries.back_mut() {
            Some(Entry::Received { ids }) => ids.push(id),
            _ => self.entries.push_back(Entry::Received { ids: vec![id] }),
        }
    }

    pub(crate) fn hand_off(
        &mut self,
        to: &Destination,
        item: HandOffItem,
        descriptor: Option<Descriptor>,
    ) {
        match self.entries.back_mut() {
            Some(Entry::HandOff { destination, items }) if destination == to => {
                items.push((item, descriptor))
            }
            _ => self.entries.push_back(Entry::HandOff {
                destination: to.clone(),
                items: vec![(item, descriptor)],
            }),
        }
    }

    pub(crate) fn reclaim(&mut self, items: Vec<(ReclaimItem, Option<Descriptor>)>) {
        self.entries.push_back(Entry::Reclaim { items });
    }

    fn cut(&mut self, entry: Entry) {
        match entry {
            Entry::Whole(message) => self.push(message),
            Entry::Accepted { service, flows } => {
                split(flows, usize::MAX)
                    .into_iter()
                    .for_each(|flows| self.push(ToDaemon::Accepted { service, flows }));
            }
            Entry::Closed { flows } => {
                split(flows, usize::MAX)
                    .into_iter()
                    .for_each(|flows| self.push(ToDaemon::Closed { flows }));
            }
            Entry::Declined { flows, reason } => {
                split(flows, usize::MAX).into_iter().for_each(|flows| {
                    self.push(ToDaemon::Declined {
                        flows,
                        reason: reason.clone(),
                    })
                })
            }
            Entry::Received { ids } => {
                split(ids, usize::MAX)
                    .into_iter()
                    .for_each(|ids| self.push(ToDaemon::Received { ids }));
            }
            Entry::HandOff { destination, items } => self.cut_hand_off(&destination, items),
            Entry::Reclaim { items } => {
                let (items, mut descriptors): (Vec<_>, Vec<_>) = items.into_iter().unzip();
                for items in split(items, DESCRIPTORS_MAX) {
                    let descriptors = descriptors.drain(..items.len()).flatten().collect();
                    self.ready.push_back(Transmit {
                        message: ToDaemon::Reclaim { items },
                        descriptors,
                    });
                }
            }
        }
    }

    fn cut_hand_off(
        &mut self,
        destination: &Destination,
        items: Vec<(HandOffItem, Option<Descriptor>)>,
    ) {
        self.batches += 1;
        let (items, mut descriptors): (Vec<_>, Vec<_>) = items.into_iter().unzip();
        let mut runs = split(items, DESCRIPTORS_MAX).into_iter().peekable();
        while let Some(items) = runs.next() {
            let descriptors = descriptors.drain(..items.len()).flatten().collect();
            let message = ToDaemon::HandOff {
                batch: self.batches,
                to: destination.to.clone(),
                drain: destination.drain,
                items,
                last: runs.peek().is_none(),
            };
            self.ready.push_back(Transmit {
                message,
                descriptors,
            });
        }
    }

    fn push(&mut self, message: ToDaemon) {
        self.ready.push_back(Transmit {
            message,
            descriptors: Vec::new(),
        });
    }
}
