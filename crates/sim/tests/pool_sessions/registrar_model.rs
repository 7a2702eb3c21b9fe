//! A model of registrars: they share one handlespace, as if always synchronised.

use crate::world::{Packet, World, WorldEvent};
use holdfast_sim::pools::node_numbers::NodeRole;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{
    CauseCode, ElementId, ErrorCause, PoolElement, PoolHandle, RegistrarId,
};
use std::collections::BTreeMap;
use std::time::Duration;

pub struct ModelEntry {
    pub element: PoolElement,
    pub owner: usize,
    /// Time of the last registration or acknowledged keep-alive.
    pub last_heard: Duration,
    pub expires: Duration,
}

pub struct ModelHandlespace {
    pub handle: PoolHandle,
    pub entries: BTreeMap<ElementId, ModelEntry>,
    pub next_element: usize,
    /// Number of elements in an answer.
    pub items_per_answer: usize,
}

impl ModelHandlespace {
    /// Returns the answer of registrar `index` to a message.
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
                        causes: vec![ErrorCause::from(CauseCode::NON_UNIQUE_ELEMENT_ID)],
                    });
                }
                let until = now + Duration::from_secs(element.registration_life as u64);
                let entry = ModelEntry {
                    element,
                    owner: index,
                    last_heard: now,
                    expires: until,
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
                    entry.last_heard = now;
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
                causes: vec![ErrorCause::from(CauseCode::UNKNOWN_POOL_HANDLE)],
            };
        }
        self.next_element += 1;
        let all: Vec<PoolElement> = self
            .entries
            .values()
            .map(|entry| entry.element.clone())
            .collect();
        let mut elements: Vec<PoolElement> = Vec::new();
        for step in 0..all.len().min(self.items_per_answer) {
            elements.push(all[(self.next_element + step) % all.len()].clone());
        }
        Message::HandleResolutionResponse {
            updates: false,
            handle,
            policy: Some(all[0].policy),
            elements,
            causes: Vec::new(),
        }
    }

    /// Removes elements that were silent for too long, or whose registration has expired.
    pub fn remove_expired(&mut self, now: Duration) {
        self.entries.retain(|_, entry| {
            entry.expires > now && now.saturating_sub(entry.last_heard) < Duration::from_secs(6)
        });
    }
}

pub fn id_of(index: usize) -> RegistrarId {
    RegistrarId(index as u32 + 1)
}

impl World {
    /// Acts as the registrars: keep-alives, takeover of elements of dead registrars, announces.
    pub fn run_registrars(&mut self) {
        let now = self.now;
        self.handlespace.remove_expired(now);
        let alive: Vec<usize> = (0..self.registrars)
            .filter(|index| self.lives(NodeRole::Registrar(*index)))
            .collect();
        let Some(&new_home) = alive.first() else {
            return;
        };
        let mut keep_alives = Vec::new();
        for (id, ModelEntry { owner, element, .. }) in &mut self.handlespace.entries {
            let is_taken_over = !alive.contains(owner);
            if is_taken_over {
                *owner = new_home;
            }
            keep_alives.push((*id, *owner, is_taken_over, element.user_transport.clone()));
        }
        for (id, owner, is_taken_over, transport) in keep_alives {
            let NodeRole::Element(element) = self.role_at(&transport) else {
                continue;
            };
            if is_taken_over {
                self.count("taken over");
            }
            let known = self.keep_alive_links.get(&(owner, element)).copied();
            let usable = known.filter(|association| {
                self.association(*association).is_open()
                    && self.is_live_end(*association, 0)
                    && self.is_live_end(*association, 1)
            });
            let registrar = NodeRole::Registrar(owner);
            let association = usable.unwrap_or_else(|| {
                let link = self.new_registrar_link();
                self.connect(registrar, link, &transport)
            });
            self.keep_alive_links.insert((owner, element), association);
            let message = Message::EndpointKeepAlive {
                home: is_taken_over,
                registrar: id_of(owner),
                handle: self.handlespace.handle.clone(),
                id: self.random.chance(0.5).then_some(id),
            };
            let link = self.association(association).data[0].link;
            self.send(registrar, link, Packet::asap(&message));
        }
        for registrar in alive {
            for node in self.boots.keys().copied().collect::<Vec<_>>() {
                // Datagrams may be lost, repeated or late.
                for _ in 0..[0, 1, 1, 2][self.random.below(4)] {
                    let after = Duration::from_micros(self.random.between(100, 400_000));
                    self.schedule(
                        after,
                        WorldEvent::Announce {
                            registrar,
                            to: node,
                        },
                    );
                }
            }
        }
    }
}
