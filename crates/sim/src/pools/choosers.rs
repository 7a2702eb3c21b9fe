//! Users that choose elements by their own observations instead of the registrars' selection.

use super::config::{Choice, Sharing};
use super::node::{self, Node};
use super::users::Letter;
use super::world::World;
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::choice::{ByLatency, ByProbes, Probing};
use holdfast_wire::rserpool::{ElementId, PoolElement};
use smallvec::SmallVec;
use std::time::Duration;

/// Time constant of the latency average (decay to 1/e), as in present load balancers.
const DECAY: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub(super) enum Chooser {
    Latency(ByLatency),
    Probes { probes: ByProbes, with_way: bool },
}

/// Returns the choosers of a world: one per zone or user, or none if the registrars choose.
pub(super) fn choosers(choice: Choice, zones: usize, users: usize) -> Vec<Chooser> {
    let (sharing, new): (Sharing, Chooser) = match choice {
        Choice::LeastUsed | Choice::LeastUsedDpf(_) | Choice::RoundRobin => return Vec::new(),
        Choice::Latency(sharing) => (sharing, Chooser::Latency(ByLatency::new(DECAY))),
        Choice::Probes {
            sharing,
            with_way,
            hot,
        } => {
            let probes = ByProbes::new(Probing {
                hot,
                ..Probing::default()
            });
            (sharing, Chooser::Probes { probes, with_way })
        }
    };
    let count = match sharing {
        Sharing::Zone => zones,
        Sharing::User => users,
    };
    vec![new; count]
}

impl World<'_> {
    fn chooser(&mut self, user: usize) -> Option<(&mut Chooser, &mut Random)> {
        let place = match self.config.choice {
            Choice::Latency(Sharing::Zone)
            | Choice::Probes {
                sharing: Sharing::Zone,
                ..
            } => usize::from(self.nodes.zone(self.nodes.user(user))),
            _ => user,
        };
        let chooser = self.choosers.get_mut(place)?;
        Some((chooser, &mut self.random))
    }

    /// Handles the pool's elements at a user that chooses for itself.
    pub(super) fn resolved(&mut self, user: usize, elements: &[PoolElement]) {
        let now = self.now.into();
        let ids: Vec<ElementId> = elements.iter().map(|element| element.id).collect();
        let Some((chooser, random)) = self.chooser(user) else {
            return;
        };
        let mut below = |end| random.below(end);
        let mut probed = SmallVec::new();
        let chosen = match chooser {
            Chooser::Latency(latency) => latency.choose(&ids, &mut below),
            Chooser::Probes { probes, .. } => {
                probed = probes.probe(&ids, &mut below);
                probes.choose(now, &ids, &mut below)
            }
        };
        for place in probed {
            self.probe(user, &elements[place], ids.len());
        }
        match chosen {
            Some(place) => {
                if let Some((Chooser::Latency(latency), _)) = self.chooser(user) {
                    latency.begin(ids[place]);
                }
                self.selected(user, &elements[place]);
            }
            None => self.again_later(user),
        }
    }

    fn probe(&mut self, user: usize, element: &PoolElement, elements: usize) {
        let from = self.nodes.user(user);
        if let Some(to) = node::node_of(&element.user_transport) {
            let probe = Letter::Probe {
                id: element.id,
                sent: self.now,
                elements: elements as u32,
            };
            self.post_if_possible(from, to, probe);
        }
    }

    /// Handles a probe at an element, which answers with its load.
    pub(super) fn probed(&mut self, element: usize, user: Node, probe: Letter) {
        let (Letter::Probe { id, sent, elements }, Some(_)) =
            (probe, &self.elements[element].machine)
        else {
            return;
        };
        let (in_flight, latency) = self.elements[element].served.report();
        // An element without measurements reports no latency, so that users try it.
        let answer = Letter::Probed {
            id,
            sent,
            elements,
            report: (in_flight, latency.unwrap_or_default()),
        };
        let from = self.nodes.element(element);
        self.post_if_possible(from, user, answer);
    }

    pub(super) fn probe_answered(&mut self, user: usize, answer: Letter) {
        let Letter::Probed {
            id,
            sent,
            elements,
            report: (in_flight, latency),
        } = answer
        else {
            return;
        };
        let now = self.now;
        if let Some((Chooser::Probes { probes, with_way }, _)) = self.chooser(user) {
            let way = match with_way {
                true => now.since(sent).into(),
                false => Duration::ZERO,
            };
            let report = (in_flight, Some(latency + way));
            probes.answered(now.into(), id, report, elements as usize);
        }
    }

    /// Records the end of a request, successful or not.
    pub(super) fn learn(&mut self, user: usize, id: ElementId, sent: Time, well: bool) {
        let now = self.now;
        if let Some((Chooser::Latency(latency), _)) = self.chooser(user) {
            let took = now.since(sent).into();
            match well {
                true => latency.end(now.into(), id, took),
                false => latency.failed(now.into(), id, took),
            }
        }
    }

    fn post_if_possible(&mut self, from: Node, to: Node, letter: Letter) {
        if let Some(arrival) = self.way_at(self.now, from, to) {
            let letter = super::world::Event::Letter { from, to, letter };
            self.queue.push(arrival, letter);
        }
    }
}
