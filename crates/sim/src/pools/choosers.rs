//! Users that choose elements by their own observations instead of the registrars' selection.

use super::config::{ElementChoice, ObservationSharing};
use super::node_numbers;
use super::users::UserMessage;
use super::world::PoolWorld;
use crate::associations::NodeNumber;
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::element_choice::{LatencyChooser, ProbeChooser, ProbeSettings};
use holdfast_wire::rserpool::{ElementId, PoolElement};
use smallvec::SmallVec;
use std::time::Duration;

/// Time constant of the latency average (decay to 1/e), as in present load balancers.
const DECAY: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub(super) enum UserChooser {
    Latency(LatencyChooser),
    Probes {
        probes: ProbeChooser,
        with_round_trip: bool,
    },
}

/// Returns the choosers of a world: one per zone or user, or none if the registrars choose.
pub(super) fn choosers(choice: ElementChoice, zones: usize, users: usize) -> Vec<UserChooser> {
    let (sharing, new): (ObservationSharing, UserChooser) = match choice {
        ElementChoice::LeastUsed | ElementChoice::LeastUsedDpf(_) | ElementChoice::RoundRobin => {
            return Vec::new();
        }
        ElementChoice::Latency(sharing) => {
            (sharing, UserChooser::Latency(LatencyChooser::new(DECAY)))
        }
        ElementChoice::Probes {
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
                UserChooser::Probes {
                    probes,
                    with_round_trip: with_way,
                },
            )
        }
    };
    let count = match sharing {
        ObservationSharing::Zone => zones,
        ObservationSharing::User => users,
    };
    vec![new; count]
}

impl PoolWorld<'_> {
    fn chooser(&mut self, user: usize) -> Option<(&mut UserChooser, &mut Random)> {
        let chooser_index = match self.config.choice {
            ElementChoice::Latency(ObservationSharing::Zone)
            | ElementChoice::Probes {
                sharing: ObservationSharing::Zone,
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
            UserChooser::Latency(latency) => latency.choose(&ids, &mut below),
            UserChooser::Probes { probes, .. } => {
                probed = probes.choose_probe_targets(&ids, &mut below);
                probes.choose(now, &ids, &mut below)
            }
        };
        for element_index in probed {
            self.probe(user, &elements[element_index], ids.len());
        }
        match chosen {
            Some(place) => {
                if let Some((UserChooser::Latency(latency), _)) = self.chooser(user) {
                    latency.begin_request(ids[place]);
                }
                self.on_selected(user, &elements[place]);
            }
            None => self.retry_later(user),
        }
    }

    fn probe(&mut self, user: usize, element: &PoolElement, elements: usize) {
        let from = self.nodes.user(user);
        if let Some(to) = node_numbers::node_of(&element.user_transport) {
            let probe = UserMessage::Probe {
                id: element.id,
                sent: self.now,
                elements: elements as u32,
            };
            self.send_if_reachable(from, to, probe);
        }
    }

    /// Handles a probe at an element, which answers with its load.
    pub(super) fn on_probe(&mut self, element: usize, user: NodeNumber, probe: UserMessage) {
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
            UserChooser::Probes {
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
        if let Some((UserChooser::Latency(latency), _)) = self.chooser(user) {
            let elapsed = now.since(sent).into();
            match succeeded {
                true => latency.end_request(now.into(), id, elapsed),
                false => latency.fail_request(now.into(), id, elapsed),
            }
        }
    }

    fn send_if_reachable(&mut self, from: NodeNumber, to: NodeNumber, letter: UserMessage) {
        if let Some(arrival) = self.arrival_of_request(self.now, from, to) {
            let letter = super::world::PoolWorldEvent::UserMessage { from, to, letter };
            self.queue.push(arrival, letter);
        }
    }
}
