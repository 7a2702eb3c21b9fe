//! A model of registrars: they share one handlespace, as if always synchronised.

use crate::net::{Node, Packet};
use crate::world::{What, World};
use holdfast_proto::pool_element::Link;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{Cause, CauseCode, ElementId, PoolElement, PoolHandle, RegistrarId};
use std::collections::BTreeMap;
use std::time::Duration;

pub struct Entry {
    pub element: PoolElement,
    pub owner: usize,
    /// Time of the last registration or acknowledged keep-alive.
    pub seen: Duration,
    pub until: Duration,
}

pub struct Space {
    pub handle: PoolHandle,
    pub entries: BTreeMap<ElementId, Entry>,
    pub turn: usize,
    /// Number of elements in an answer.
    pub items: usize,
}

impl Space {
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

    /// Removes elements that were silent for too long, or whose registration has expired.
    pub fn upkeep(&mut self, now: Duration) {
        self.entries.retain(|_, entry| {
            entry.until > now && now.saturating_sub(entry.seen) < Duration::from_secs(6)
        });
    }
}

pub fn id_of(index: usize) -> RegistrarId {
    RegistrarId(index as u32 + 1)
}

impl World {
    /// Acts as the registrars: keep-alives, takeover of elements of dead registrars, announces.
    pub fn registrars_tick(&mut self) {
        let now = self.now;
        self.space.upkeep(now);
        let alive: Vec<usize> = (0..self.registrars)
            .filter(|index| self.is_alive(Node::Registrar(*index)))
            .collect();
        let Some(&heir) = alive.first() else { return };
        let mut calls = Vec::new();
        for (id, Entry { owner, element, .. }) in &mut self.space.entries {
            let taken = !alive.contains(owner);
            if taken {
                *owner = heir;
            }
            calls.push((*id, *owner, taken, Node::of(&element.user_transport)));
        }
        for (id, owner, taken, node) in calls {
            let Node::Element(element) = node else {
                continue;
            };
            if taken {
                self.count("taken over");
            }
            let known = self.monitors.get(&(owner, element)).copied();
            let usable = known.filter(|conn| {
                self.conns[*conn].open && self.live_end(*conn, 0) && self.live_end(*conn, 1)
            });
            let conn = usable.unwrap_or_else(|| {
                let link = Link::Ours(self.conns.len() as u64);
                self.connect(Node::Registrar(owner), link, &node.transport())
            });
            self.monitors.insert((owner, element), conn);
            let message = Message::EndpointKeepAlive {
                home: taken,
                registrar: id_of(owner),
                handle: self.space.handle.clone(),
                id: self.rng.percent(50).then_some(id),
            };
            let link = self.conns[conn].ends[0].link;
            self.send(Node::Registrar(owner), link, Packet::asap(&message));
        }
        for registrar in alive {
            for node in self.lives.keys().copied().collect::<Vec<_>>() {
                // Datagrams may be lost, repeated or late.
                for _ in 0..[0, 1, 1, 2][self.rng.index(4)] {
                    let after = Duration::from_micros(self.rng.range(100, 400_000));
                    self.at(
                        after,
                        What::Announce {
                            registrar,
                            to: node,
                        },
                    );
                }
            }
        }
    }
}
