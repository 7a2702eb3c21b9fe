//! Users that choose elements by their own observations instead of the registrars' selection.

use super::config::{Choice, Sharing};
use super::node::{self, Node};
use super::users::UserMessage;
use super::world::World;
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::choice::{LatencyChooser, ProbeChooser, ProbeSettings};
use holdfast_wire::rserpool::{ElementId, PoolElement};
use smallvec::SmallVec;
use std::time::Duration;

/// Time constant of the latency average (decay to 1/e), as in present load balancers.
const DECAY: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub(super) enum Chooser {
    Latency(LatencyChooser),
    Probes {
        probes: ProbeChooser,
        with_round_trip: bool,
    },
}

/// Returns the choosers of a world: one per zone or user, or none if the registrars choose.
pub(super) fn choosers(choice: Choice, zones: usize, users: usize) -> Vec<Chooser> {
    let (sharing, new): (Sharing, Chooser) = match choice {
        Choice::LeastUsed | Choice::LeastUsedDpf(_) | Choice::RoundRobin => return Vec::new(),
        Choice::Latency(sharing) => (sharing, Chooser::Latency(LatencyChooser::new(DECAY))),
        Choice::Probes {
            sharing,
            with_round_trip: with_way,
            hot_quantile: hot,
        } => {
            let probes = ProbeChooser::new(ProbeSettings {
                hot_quantile: hot,
                ..ProbeSettings::default()
            });
            (
                sharing,
                Chooser::Probes {
                    probes,
                    with_round_trip: with_way,
                },
            )
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
        let chooser_index = match self.config.choice {
            Choice::Latency(Sharing::Zone)
            | Choice::Probes {
                sharing: Sharing::Zone,
                ..
            } => usize::from(self.nodes.zone(self.nodes.user(user))),
            _ => user,
        };
        let chooser = self.choosers.get_mut(chooser_index)?;
        Some((chooser, &mut self.random))
    }

    /// Handles the pool's elements at a user that chooses for itself.
    pub(super) fn on_resolved(&mut self, user: usize, elements: &[PoolElement]) {
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
                probed = probes.choose_probe_targets(&ids, &mut below);
                probes.choose(now, &ids, &mut below)
            }
        };
        for element_index in probed {
            self.probe(user, &elements[element_index], ids.len());
        }
        match chosen {
            Some(place) => {
                if let Some((Chooser::Latency(latency), _)) = self.chooser(user) {
                    latency.begin(ids[place]);
                }
                self.on_selected(user, &elements[place]);
            }
            None => self.retry_later(user),
        }
    }

    fn probe(&mut self, user: usize, element: &PoolElement, elements: usize) {
        let from = self.nodes.user(user);
        if let Some(to) = node::node_of(&element.user_transport) {
            let probe = UserMessage::Probe {
                id: element.id,
                sent: self.now,
                elements: elements as u32,
            };
            self.send_if_reachable(from, to, probe);
        }
    }

    /// Handles a probe at an element, which answers with its load.
    pub(super) fn on_probe(&mut self, element: usize, user: Node, probe: UserMessage) {
        let (UserMessage::Probe { id, sent, elements }, Some(_)) =
            (probe, &self.elements[element].machine)
        else {
            return;
        };
        let (in_flight, latency) = self.elements[element].served.probe_report();
        // An element without measurements reports no latency, so that users try it.
        let answer = UserMessage::ProbeAnswer {
            id,
            sent,
            elements,
            report: (in_flight, latency.unwrap_or_default()),
        };
        let from = self.nodes.element(element);
        self.send_if_reachable(from, user, answer);
    }

    pub(super) fn on_probe_answer(&mut self, user: usize, answer: UserMessage) {
        let UserMessage::ProbeAnswer {
            id,
            sent,
            elements,
            report: (in_flight, latency),
        } = answer
        else {
            return;
        };
        let now = self.now;
        if let Some((
            Chooser::Probes {
                probes,
                with_round_trip: with_way,
            },
            _,
        )) = self.chooser(user)
        {
            let round_trip = match with_way {
                true => now.since(sent).into(),
                false => Duration::ZERO,
            };
            let report = (in_flight, Some(latency + round_trip));
            probes.record_answer(now.into(), id, report, elements as usize);
        }
    }

    /// Records the end of a request, successful or not.
    pub(super) fn record_latency(
        &mut self,
        user: usize,
        id: ElementId,
        sent: Time,
        succeeded: bool,
    ) {
        let now = self.now;
        if let Some((Chooser::Latency(latency), _)) = self.chooser(user) {
            let elapsed = now.since(sent).into();
            match succeeded {
                true => latency.end(now.into(), id, elapsed),
                false => latency.fail(now.into(), id, elapsed),
            }
        }
    }

    fn send_if_reachable(&mut self, from: Node, to: Node, letter: UserMessage) {
        if let Some(arrival) = self.arrival_of_request(self.now, from, to) {
            let letter = super::world::Event::UserMessage { from, to, letter };
            self.queue.push(arrival, letter);
        }
    }
}
