//! Simulations described in text: see `docs/simulation.md`.

mod conductor_text;
mod group_scenario;
mod replication_scenario;
mod text;

pub use group_scenario::{GroupScenario, ShrunkFailure};

use crate::conductor::ChangingLoad;
use crate::pools::{ElementChoice, PoolAction, PoolRunConfig, Workload, ZoneConfig};
use crate::time::Time;
use conductor_text::{BalanceScenarioText, ConductorScenarioText, PolicyScenarioText};
use replication_scenario::ReplicationScenarioText;
use std::time::Duration;
use text::{
    ElementText, EventText, GroupScenarioText, KindName, KindText, LinkText,
    MembershipScenarioText, PoolScenarioText, WindowText, ZoneText,
};

/// A parsed scenario.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// A description for the user.
    pub about: String,
    /// The kind of simulation.
    pub kind: SimulationKind,
}

/// The kind of simulation.
#[derive(Debug, Clone)]
pub enum SimulationKind {
    /// Registrars, pool elements and pool users.
    Pools(Box<PoolScenario>),
    /// Nodes of a group, with handoffs, migrations, the group's own membership, conductors, or a replicated service.
    Group(GroupScenario),
    /// A large group without faults, whose conductors spread its load.
    Balance(BalanceScenario),
    /// A group without faults whose loads change all the time, with several policies.
    Policies(PolicyScenario),
}

/// A group without faults whose whole load is at a tenth of its nodes at first.
#[derive(Debug, Clone, Copy)]
pub struct BalanceScenario {
    /// Number of nodes.
    pub nodes: usize,
    /// Number of processes, as a mean of all nodes.
    pub processes_per_node: usize,
}

/// A group without faults whose loads change all the time, with each of the policies.
#[derive(Debug, Clone)]
pub struct PolicyScenario {
    /// Number of nodes.
    pub nodes: usize,
    /// Number of processes of each node at first.
    pub processes_per_node: usize,
    /// Loads, each of which is simulated alone.
    pub loads: Vec<ChangingLoad>,
}

/// Scenario of registrars, pool elements and pool users.
#[derive(Debug, Clone)]
pub struct PoolScenario {
    /// The simulation's configuration.
    pub config: PoolRunConfig,
    /// The names of its windows.
    pub windows: Vec<String>,
}

/// The scenarios built into the program: name and text.
pub const BUILT_IN: &[(&str, &str)] = &[
    ("lans", include_str!("../scenarios/lans.toml")),
    ("regions", include_str!("../scenarios/regions.toml")),
    ("trouble", include_str!("../scenarios/trouble.toml")),
    ("handoff", include_str!("../scenarios/handoff.toml")),
    ("rounds", include_str!("../scenarios/rounds.toml")),
    ("migration", include_str!("../scenarios/migration.toml")),
    ("storm", include_str!("../scenarios/storm.toml")),
    ("membership", include_str!("../scenarios/membership.toml")),
    (
        "membership-store",
        include_str!("../scenarios/membership-store.toml"),
    ),
    ("conductor", include_str!("../scenarios/conductor.toml")),
    ("balance", include_str!("../scenarios/balance.toml")),
    ("policies", include_str!("../scenarios/policies.toml")),
    ("replication", include_str!("../scenarios/replication.toml")),
];

/// The reason that a text is not a scenario.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The text is not TOML, or has unknown keys.
    #[error("{0}")]
    Text(#[from] toml::de::Error),
    /// There is no zone of that name.
    #[error("there is no zone `{0}`")]
    NoZone(String),
    /// The zone has no such element.
    #[error("zone `{zone}` has {elements} elements: there is none numbered {element}")]
    NoElement {
        /// Name of the zone.
        zone: String,
        /// The element's requested index in the zone.
        element: u32,
        /// Number of elements that the zone has.
        elements: u32,
    },
    /// The policy is not simulated.
    #[error("policy `{0}` is not simulated: use LU, LU-DPF, RR, latency or probes")]
    NoPolicy(String),
    /// A number is invalid.
    #[error("{0}")]
    Number(&'static str),
}

impl Scenario {
    /// Parses a scenario file (TOML).
    ///
    /// # Errors
    /// The defect of the text.
    pub fn parse(text: &str) -> Result<Scenario, ScenarioError> {
        let group = || toml::from_str::<GroupScenarioText>(text);
        let (group, about) = match toml::from_str::<KindText>(text)?.kind {
            KindName::Pools => return toml::from_str::<PoolScenarioText>(text)?.scenario(),
            KindName::Handoff => group().map(|text| (text.handoff_scenario(), text.about))?,
            KindName::Migration => group().map(|text| (text.migration_scenario(), text.about))?,
            KindName::Membership => {
                let text = toml::from_str::<MembershipScenarioText>(text)?;
                (text.membership(), text.about)
            }
            KindName::Conductor => {
                let text = toml::from_str::<ConductorScenarioText>(text)?;
                (text.conductor(), text.about)
            }
            KindName::Balance => {
                let text = toml::from_str::<BalanceScenarioText>(text)?;
                let kind = SimulationKind::Balance(text.balance()?);
                let about = text.about;
                return Ok(Scenario { about, kind });
            }
            KindName::Policies => {
                let mut text = toml::from_str::<PolicyScenarioText>(text)?;
                let about = std::mem::take(&mut text.about);
                let kind = SimulationKind::Policies(text.policies()?);
                return Ok(Scenario { about, kind });
            }
            KindName::Replication => {
                let text = toml::from_str::<ReplicationScenarioText>(text)?;
                (text.replication(), text.about)
            }
        };
        let kind = SimulationKind::Group(group?);
        Ok(Scenario { about, kind })
    }

    /// Returns the scenario of this name from [`BUILT_IN`].
    #[must_use]
    pub fn built_in(name: &str) -> Option<Result<Scenario, ScenarioError>> {
        let (_, text) = BUILT_IN.iter().find(|(known, _)| *known == name)?;
        Some(Scenario::parse(text))
    }
}

impl PoolScenarioText {
    fn scenario(self) -> Result<Scenario, ScenarioError> {
        let invalid = |what| Err(ScenarioError::Number(what));
        if self.zone.is_empty() {
            return invalid("there is no [[zone]]");
        }
        if !(self.capacity > 0.0 && self.request_size > 0.0 && self.runtime_s > 0.0) {
            return invalid("capacity, request_size and runtime_s must be above 0");
        }
        let zones = self.zone.iter().map(|zone| ZoneConfig {
            elements: zone.elements,
            users: zone.users,
        });
        let mut config = PoolRunConfig::new(
            zones.collect(),
            10.0,
            100.0,
            self.choice()?,
            self.workload()?,
        );
        config.load_per_request = self.load_per_request;
        config.update_interval = Duration::from_secs_f64(self.update_interval_ms.max(0.0) / 1e3);
        config.overhead = Time::from_ms_f64(self.overhead_ms);
        config.delivery = Time::from_ms_f64(self.delivery_ms);
        config.setup_round_trips = self.setup_round_trips;
        config.runtime = Time::from_secs_f64(self.runtime_s);
        if let Some(step) = self.distance_step_ms {
            config.registrar.distance_step = step;
        }
        let at_first = self
            .zone
            .iter()
            .map(|zone| zone.at_first.unwrap_or(zone.elements));
        config.initial_elements = Some(at_first.collect());
        self.links(&mut config)?;
        for event in &self.event {
            let at = Time::from_secs_f64(event.at_s);
            let actions = self.actions(event)?;
            config
                .plan
                .extend(actions.into_iter().map(|action| (at, action)));
        }
        let window = |window: &WindowText| [window.from_s, window.to_s].map(Time::from_secs_f64);
        config.windows = self
            .window
            .iter()
            .map(window)
            .map(|[from, to]| (from, to))
            .collect();
        let windows = self.window.into_iter().map(|window| window.name).collect();
        Ok(Scenario {
            about: self.about,
            kind: SimulationKind::Pools(Box::new(PoolScenario { config, windows })),
        })
    }

    fn choice(&self) -> Result<ElementChoice, ScenarioError> {
        match self.policy.as_str() {
            "LU" => Ok(ElementChoice::LeastUsed),
            "LU-DPF" => Ok(ElementChoice::LeastUsedDpf(self.dpf)),
            "RR" => Ok(ElementChoice::RoundRobin),
            "latency" => Ok(ElementChoice::Latency(self.sharing)),
            "probes" => Ok(ElementChoice::Probes {
                sharing: self.sharing,
                with_round_trip: self.probes_with_way,
                hot_quantile: self.probes_hot,
            }),
            other => Err(ScenarioError::NoPolicy(other.to_owned())),
        }
    }

    fn workload(&self) -> Result<Workload, ScenarioError> {
        let (capacity, request_size) = (self.capacity, self.request_size);
        match (self.utilisation, self.request_interval_s) {
            (Some(utilisation), None) if utilisation > 0.0 => {
                let initial_elements = |zone: &ZoneText| zone.at_first.unwrap_or(zone.elements);
                let elements: u32 = self.zone.iter().map(initial_elements).sum();
                let users: u32 = self.zone.iter().map(|zone| zone.users).sum();
                let ratio = f64::from(users) / f64::from(elements.max(1));
                Ok(Workload::for_utilisation(
                    capacity,
                    request_size,
                    ratio,
                    utilisation,
                ))
            }
            (None, Some(request_interval)) if request_interval > 0.0 => Ok(Workload {
                capacity,
                request_size,
                request_interval,
            }),
            _ => Err(ScenarioError::Number(
                "give either utilisation or request_interval_s, above 0",
            )),
        }
    }

    fn links(&self, config: &mut PoolRunConfig) -> Result<(), ScenarioError> {
        let count = self.zone.len();
        for (from, to) in (0..count).flat_map(|from| (0..count).map(move |to| (from, to))) {
            let link = if from == to {
                self.within
            } else {
                self.between
            };
            if let Some(link) = link {
                config.links[from][to] = link;
            }
        }
        for LinkText {
            zones: [a, b],
            link,
        } in &self.link
        {
            let [a, b] = [self.zone_index(a)?, self.zone_index(b)?].map(usize::from);
            config.links[a][b] = *link;
            config.links[b][a] = *link;
        }
        Ok(())
    }

    fn zone_index(&self, name: &str) -> Result<u16, ScenarioError> {
        let index = self.zone.iter().position(|zone| zone.name == name);
        let index = index.and_then(|index| u16::try_from(index).ok());
        index.ok_or_else(|| ScenarioError::NoZone(name.to_owned()))
    }

    fn element(&self, text: &ElementText) -> Result<(u16, u32), ScenarioError> {
        let zone = self.zone_index(&text.zone)?;
        let elements = self.zone[usize::from(zone)].elements;
        if text.element >= elements {
            return Err(ScenarioError::NoElement {
                zone: text.zone.clone(),
                element: text.element,
                elements,
            });
        }
        Ok((zone, text.element))
    }

    fn actions(&self, event: &EventText) -> Result<Vec<PoolAction>, ScenarioError> {
        let mut actions = Vec::new();
        for text in &event.stop {
            let (zone, element) = self.element(text)?;
            actions.push(PoolAction::Stop { zone, element });
        }
        for text in &event.start {
            let (zone, element) = self.element(text)?;
            actions.push(PoolAction::Start { zone, element });
        }
        for text in &event.kill {
            let (zone, element) = self.element(text)?;
            actions.push(PoolAction::Kill { zone, element });
        }
        if let Some(zone) = &event.kill_registrar {
            actions.push(PoolAction::KillRegistrar(self.zone_index(zone)?));
        }
        if let Some(zone) = &event.start_registrar {
            actions.push(PoolAction::StartRegistrar(self.zone_index(zone)?));
        }
        if let Some([a, b]) = &event.cut {
            actions.push(PoolAction::Cut(self.zone_index(a)?, self.zone_index(b)?));
        }
        if let Some([a, b]) = &event.mend {
            actions.push(PoolAction::Mend(self.zone_index(a)?, self.zone_index(b)?));
        }
        Ok(actions)
    }
}

#[cfg(test)]
mod tests;
