//! The configuration of a simulation of pools.

use super::{Invariants, PoolBug};
use crate::random::Random;
use crate::time::Time;
use crate::zone_network::LinkProperties;
use holdfast_proto::registrar::{RegistrarSettings, ResourceLimits};
use holdfast_wire::rserpool::Policy;
use std::time::Duration;

/// Registrars, elements and users of one pool, and the actions on them.
#[derive(Debug, Clone)]
pub struct PoolRunConfig {
    /// The zones: "Each LAN contains one PR and a variable amount of PEs and PUs" (paper 004 section 6.1).
    pub zones: Vec<ZoneConfig>,
    /// The one-way links between zones and within each: `links[from][to]`.
    pub links: Vec<Vec<LinkProperties>>,
    /// Slow elements: the last one of each group of this size has only this share of the capacity.
    pub slow: Option<(u32, f64)>,
    /// The rule for choosing an element.
    pub choice: ElementChoice,
    /// The users' requests.
    pub workload: Workload,
    /// Seed of the users' [`RequestGenerator`]. None: random requests of the run.
    pub requests: Option<u64>,
    /// Increase by one request of the load that an element reports, as a share of the whole.
    pub load_per_request: f64,
    /// Minimum interval between two reports of load.
    pub update_interval: Duration,
    /// Round trips before a user can send its request: 0 as in the paper's simulation, which has no handshakes; SCTP's
    /// handshake takes 1.
    pub setup_round_trips: u32,
    /// Processing time of a user's host for each request before it asks for an element.
    pub overhead: Time,
    /// Processing time of hosts for each request, from the selection of an element until it has the request, without
    /// network delays.
    pub delivery: Time,
    /// Settings of the registrars.
    pub registrar: RegistrarSettings,
    /// Time for which an association is kept although nothing arrives.
    pub association_timeout: Duration,
    /// Initial number of elements in each zone: [`PoolAction::Start`] starts the others. None: all elements.
    pub initial_elements: Option<Vec<u32>>,
    /// The planned actions with their times.
    pub plan: Vec<(Time, PoolAction)>,
    /// Time at which users start; before that, registrars connect and elements register.
    pub begin: Time,
    /// Duration of the users' requests: "the simulation runtime is 15 minutes".
    pub runtime: Time,
    /// Invariants to check; none: no checks.
    pub invariants: Option<Invariants>,
    /// The deliberate bug, if any.
    pub bug: Option<PoolBug>,
    /// Lifetime of an element's registration.
    pub registration_life: Duration,
    /// Intervals to report separately, counted from `begin`; none: the whole run.
    pub windows: Vec<(Time, Time)>,
}

/// A place with one registrar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZoneConfig {
    /// Maximum number of elements.
    pub elements: u32,
    /// Number of users.
    pub users: u32,
}

/// The rule for choosing an element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ElementChoice {
    /// The registrar selects the least used element (LU).
    LeastUsed,
    /// The least used, with a load added per millisecond of distance (paper 004 section 5.3).
    LeastUsedDpf(f64),
    /// The registrar selects the elements in turn (RR).
    RoundRobin,
    /// Users choose, of two elements drawn at random, the one with less latency.
    Latency(ObservationSharing),
    /// Users choose by the answers to probes.
    Probes {
        /// The users that share their observations.
        sharing: ObservationSharing,
        /// True if the probe's round trip time is added to the latency in the element's answer.
        with_round_trip: bool,
        /// Quantile of the answers above which an element is hot; 0: choose the one with the fewest requests in
        /// progress.
        hot_quantile: f64,
    },
}

/// The users that share their observations, if users choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ObservationSharing {
    /// All users of a zone, as behind one load balancer.
    Zone,
    /// No sharing: each user for itself.
    User,
}

impl ElementChoice {
    /// Returns the policy figures that an element reports.
    #[must_use]
    pub fn policy(self, load: f64) -> Policy {
        let share = |part: f64| (part * f64::from(u32::MAX)).round() as u32;
        let load = share(load);
        match self {
            ElementChoice::LeastUsed => Policy::LeastUsed { load },
            ElementChoice::LeastUsedDpf(dpf) => Policy::LeastUsedDpf {
                load,
                dpf: share(dpf),
                distance: 0,
            },
            ElementChoice::RoundRobin
            | ElementChoice::Latency(_)
            | ElementChoice::Probes { .. } => Policy::RoundRobin,
        }
    }

    /// Returns true if users choose for themselves.
    #[must_use]
    pub fn is_made_by_users(self) -> bool {
        matches!(
            self,
            ElementChoice::Latency(_) | ElementChoice::Probes { .. }
        )
    }
}

/// The distribution of requests (paper 004 section 4).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Capacity of each element, in calculations per second.
    pub capacity: f64,
    /// Mean of the request sizes, which are negative exponential, in calculations.
    pub request_size: f64,
    /// Mean of the intervals between one user's requests, which are negative exponential, in seconds.
    pub request_interval: f64,
}

impl Workload {
    /// Returns the workload with the interval that equation 2 gives for a utilisation:
    /// `utilisation = ratio * (size / interval) / capacity`.
    #[must_use]
    pub fn for_utilisation(
        capacity: f64,
        request_size: f64,
        users_per_element: f64,
        utilisation: f64,
    ) -> Workload {
        Workload {
            capacity,
            request_size,
            request_interval: users_per_element * request_size / (capacity * utilisation),
        }
    }
}

/// One user's requests, identical in every run.
#[derive(Debug, Clone)]
pub struct RequestGenerator {
    workload: Workload,
    random: Random,
}

impl RequestGenerator {
    /// Returns the requests of the user with this number in a zone.
    #[must_use]
    pub fn new(workload: Workload, seed: u64, zone: u16, user: u32) -> RequestGenerator {
        let random = Random::new(seed << 32 | u64::from(zone) << 16 | u64::from(user));
        RequestGenerator { workload, random }
    }

    /// Returns the interval before the next request, and its size.
    pub fn draw(&mut self) -> (Time, f64) {
        let interval = self.random.exponential(self.workload.request_interval);
        let size = self.random.exponential(self.workload.request_size);
        (Time::from_secs_f64(interval), size)
    }
}

/// A planned action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolAction {
    /// An element deregisters and ends.
    Stop {
        /// Index of the element's zone.
        zone: u16,
        /// The element's index in the zone.
        element: u32,
    },
    /// An element starts, or restarts.
    Start {
        /// Index of the element's zone.
        zone: u16,
        /// The element's index in the zone.
        element: u32,
    },
    /// An element dies.
    Kill {
        /// Index of the element's zone.
        zone: u16,
        /// The element's index in the zone.
        element: u32,
    },
    /// A registrar dies.
    KillRegistrar(u16),
    /// A registrar restarts.
    StartRegistrar(u16),
    /// Two zones are separated.
    Cut(u16, u16),
    /// Two zones are connected again.
    Mend(u16, u16),
    /// All packet loss ends.
    EndLoss,
}

impl PoolRunConfig {
    /// Returns a config of uniform zones, with one-way delays in milliseconds: within each zone, and additionally
    /// between two.
    #[must_use]
    pub fn new(
        zones: Vec<ZoneConfig>,
        lan_ms: f64,
        wan_ms: f64,
        choice: ElementChoice,
        workload: Workload,
    ) -> PoolRunConfig {
        let count = zones.len();
        let one_way_ms = |from, to| if from == to { lan_ms } else { lan_ms + wan_ms };
        let row = |from| {
            (0..count)
                .map(|to| LinkProperties::constant(one_way_ms(from, to)))
                .collect()
        };
        PoolRunConfig {
            links: (0..count).map(row).collect(),
            zones,
            choice,
            workload,
            requests: None,
            slow: None,
            load_per_request: 0.01,
            update_interval: Duration::ZERO,
            setup_round_trips: 0,
            overhead: Time::ZERO,
            delivery: Time::ZERO,
            registrar: RegistrarSettings {
                resolution_items: 1,
                distance_step: 1,
                // Far more than a daemon would accept.
                limits: ResourceLimits {
                    associations: usize::MAX,
                    ..ResourceLimits::default()
                },
                ..RegistrarSettings::default()
            },
            association_timeout: Duration::from_secs(10),
            initial_elements: None,
            plan: Vec::new(),
            begin: Time::from_secs_f64(20.0),
            runtime: Time::from_secs_f64(900.0),
            invariants: None,
            bug: None,
            registration_life: Duration::from_secs(300),
            windows: Vec::new(),
        }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn elements(&self) -> u32 {
        self.zones.iter().map(|zone| zone.elements).sum()
    }

    /// Returns the capacity of the element with this index, in calculations per second.
    #[must_use]
    pub fn capacity(&self, element: u32) -> f64 {
        match self.slow {
            Some((each, share)) if (element + 1).is_multiple_of(each.max(1)) => {
                share * self.workload.capacity
            }
            _ => self.workload.capacity,
        }
    }

    /// Returns the number of users.
    #[must_use]
    pub fn users(&self) -> u32 {
        self.zones.iter().map(|zone| zone.users).sum()
    }
}
