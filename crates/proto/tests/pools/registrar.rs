//! Registrars in a model: their handlespace is one, kept as if they were always synchronised.

use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{Cause, CauseCode, ElementId, PoolElement, PoolHandle, RegistrarId};
use std::collections::BTreeMap;
use std::time::Duration;

pub struct Entry {
    pub element: PoolElement,
    pub owner: usize,
    /// When it registered or acknowledged a keep-alive last.
    pub seen: Duration,
    pub until: Duration,
}

pub struct Space {
    pub handle: PoolHandle,
    pub entries: BTreeMap<ElementId, Entry>,
    pub turn: usize,
    /// How many elements an answer has.
    pub items: usize,
}

impl Space {
    /// What registrar `index` answers.
    pub fn answer(&mut self, now: Duration, index: usize, message: Message) -> Option<Message> {
        match message {
            Message::Registration { handle, element } => {
                let id = element.id;
                let other = self
                    .entries
                    .get(&id)
                    .is_some_and(|entry| entry.element.user_transport != element.user_transport);
                if other {
                    return Some(Message::RegistrationResponse {
                        rejected: true,
                        handle,
                        id,
                        causes: vec![Cause::from(CauseCode::NON_UNIQUE_ELEMENT_ID)],
                    });
                }
                let until = now + Duration::from_secs(element.registration_life as u64);
                let entry = Entry {
                    element,
                    owner: index,
                    seen: now,
                    until,
                };
                self.entries.insert(id, entry);
                Some(Message::RegistrationResponse {
                    rejected: false,
                    handle,
                    id,
                    causes: Vec::new(),
                })
            }
            Message::Deregistration { handle, id } => {
                self.entries.remove(&id);
                Some(Message::DeregistrationResponse {
                    handle,
                    id,
                    causes: Vec::new(),
                })
            }
            Message::HandleResolution { handle, .. } => Some(self.resolve(handle)),
            Message::EndpointKeepAliveAck { id, .. } => {
                if let Some(entry) = self.entries.get_mut(&id) {
                    entry.seen = now;
                }
                None
            }
            _ => None,
        }
    }

    fn resolve(&mut self, handle: PoolHandle) -> Message {
        if handle != self.handle || self.entries.is_empty() {
            return Message::HandleResolutionResponse {
                updates: false,
                handle,
                policy: None,
                elements: Vec::new(),
                causes: vec![Cause::from(CauseCode::UNKNOWN_POOL_HANDLE)],
            };
        }
        self.turn += 1;
        let all: Vec<PoolElement> = self
            .entries
            .values()
            .map(|entry| entry.element.clone())
            .collect();
        let mut elements: Vec<PoolElement> = Vec::new();
        for step in 0..all.len().min(self.items) {
            elements.push(all[(self.turn + step) % all.len()].clone());
        }
        Message::HandleResolutionResponse {
            updates: false,
            handle,
            policy: Some(all[0].policy),
            elements,
            causes: Vec::new(),
        }
    }

    /// Who is not seen any more, or has not registered anew, goes.
    pub fn upkeep(&mut self, now: Duration) {
        self.entries.retain(|_, entry| {
            entry.until > now && now.saturating_sub(entry.seen) < Duration::from_secs(6)
        });
    }
}

pub fn id(index: usize) -> RegistrarId {
    RegistrarId(index as u32 + 1)
}
