//! What is simulated.

use super::{Bug, Demands};
use crate::net::Link;
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::registrar::{Limits, Settings};
use holdfast_wire::rserpool::Policy;
use std::time::Duration;

/// Registrars, elements and users of one pool, and what happens to them.
#[derive(Debug, Clone)]
pub struct Config {
    /// Places: "Each LAN contains one PR and a variable amount of PEs and PUs" (paper 004 section 6.1).
    pub zones: Vec<Zone>,
    /// What is between two zones, one way, and within each: `links[from][to]`.
    pub links: Vec<Vec<Link>>,
    /// Of each so many elements the last has only this share of the capacity.
    pub slow: Option<(u32, f64)>,
    /// How an element is chosen.
    pub choice: Choice,
    /// What users ask for.
    pub workload: Workload,
    /// Whose requests users make: those of [`Requests`] with this seed. None: whatever the run draws.
    pub requests: Option<u64>,
    /// By how much one request raises the load that an element reports, as a share of the whole.
    pub load_per_request: f64,
    /// The least time between two reports of load.
    pub update_interval: Duration,
    /// Round trips before a user's request may be sent: 0 as in the paper's simulation, which has no handshakes; SCTP's takes 1.
    pub setup_round_trips: u32,
    /// What a user's host takes for each request before it asks for an element.
    pub overhead: Time,
    /// What hosts take for each request from an element's being named to its having the request, beside what the network takes.
    pub delivery: Time,
    /// What the registrars are told.
    pub registrar: Settings,
    /// How long an association is kept when nothing arrives.
    pub association_timeout: Duration,
    /// Elements beyond this many of each zone are not there at first: [`Action::Start`] brings them. None: all are there.
    pub elements_at_first: Option<Vec<u32>>,
    /// What happens, and when.
    pub plan: Vec<(Time, Action)>,
    /// When users begin; until then registrars meet and elements register.
    pub begin: Time,
    /// How long they go on: "the simulation runtime is 15 minutes".
    pub runtime: Time,
    /// What must be so; none: nobody looks.
    pub demands: Option<Demands>,
    /// What is broken on purpose.
    pub bug: Option<Bug>,
    /// How long an element's registration holds.
    pub life: Duration,
    /// Times to be told of apart, counted from `begin`; none: all of it.
    pub windows: Vec<(Time, Time)>,
}

/// A place with one registrar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zone {
    /// Elements that there may be.
    pub elements: u32,
    /// Users.
    pub users: u32,
}

/// How an element is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Choice {
    /// The least used.
    LeastUsed,
    /// The least used, a millisecond of distance counting as so much load (paper 004 section 5.3).
    LeastUsedDpf(f64),
    /// One after the other.
    RoundRobin,
    /// Users choose: of two elements drawn by chance the one of less latency.
    Latency(Sharing),
    /// Users choose: by the answers to probes.
    Probes {
        /// Who learns together.
        sharing: Sharing,
        /// Whether the probe's round trip is added to the latency that the element answered.
        with_way: bool,
        /// Beyond which share of the answers an element is hot; 0: the one with the fewest requests in flight is chosen.
        hot: f64,
    },
}

/// Who learns together, where users choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// All users of a zone, as behind one balancer.
    Zone,
    /// Each for itself.
    User,
}

impl Choice {
    /// What an element says of itself.
    #[must_use]
    pub fn policy(self, load: f64) -> Policy {
        let share = |part: f64| (part * f64::from(u32::MAX)).round() as u32;
        let load = share(load);
        match self {
            Choice::LeastUsed => Policy::LeastUsed { load },
            Choice::LeastUsedDpf(dpf) => Policy::LeastUsedDpf {
                load,
                dpf: share(dpf),
                distance: 0,
            },
            Choice::RoundRobin | Choice::Latency(_) | Choice::Probes { .. } => Policy::RoundRobin,
        }
    }

    /// Whether users choose for themselves.
    #[must_use]
    pub fn is_users(self) -> bool {
        matches!(self, Choice::Latency(_) | Choice::Probes { .. })
    }
}

/// The requests (paper 004 section 4).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Of each element, calculations a second.
    pub capacity: f64,
    /// The mean of the sizes, which are negative exponential, in calculations.
    pub request_size: f64,
    /// The mean of the times between one user's requests, which are negative exponential, in seconds.
    pub request_interval: f64,
}

impl Workload {
    /// With the interval that equation 2 gives for a utilisation:
    /// `utilisation = ratio * (size / interval) / capacity`.
    #[must_use]
    pub fn of_utilisation(
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

/// One user's requests, the same in each run.
#[derive(Debug, Clone)]
pub struct Requests {
    workload: Workload,
    random: Random,
}

impl Requests {
    /// Those of the user with this number in a zone.
    #[must_use]
    pub fn new(workload: Workload, seed: u64, zone: u16, user: u32) -> Requests {
        let random = Random::new(seed << 32 | u64::from(zone) << 16 | u64::from(user));
        Requests { workload, random }
    }

    /// How long after the one before the next is made, and its size.
    pub fn draw(&mut self) -> (Time, f64) {
        let interval = self.random.exponential(self.workload.request_interval);
        let size = self.random.exponential(self.workload.request_size);
        (Time::from_secs_f64(interval), size)
    }
}

/// Something that happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The elements with these places in a zone leave the pool in good order and end.
    Stop {
        /// Where.
        zone: u16,
        /// Which.
        element: u32,
    },
    /// They are there (again).
    Start {
        /// Where.
        zone: u16,
        /// Which.
        element: u32,
    },
    /// An element dies.
    Kill {
        /// Where.
        zone: u16,
        /// Which.
        element: u32,
    },
    /// A registrar dies.
    KillRegistrar(u16),
    /// It begins anew.
    StartRegistrar(u16),
    /// Two zones are parted.
    Cut(u16, u16),
    /// They are joined again.
    Mend(u16, u16),
    /// No packet is lost any more.
    Reliable,
}

impl Config {
    /// Zones alike, with so much delay within each and so much more between any two; milliseconds, one way.
    #[must_use]
    pub fn new(
        zones: Vec<Zone>,
        lan_ms: f64,
        wan_ms: f64,
        choice: Choice,
        workload: Workload,
    ) -> Config {
        let count = zones.len();
        let way = |from, to| if from == to { lan_ms } else { lan_ms + wan_ms };
        let row = |from| (0..count).map(|to| Link::constant(way(from, to))).collect();
        Config {
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
            registrar: Settings {
                resolution_items: 1,
                distance_step: 1,
                // Many more than a daemon would take.
                limits: Limits {
                    associations: usize::MAX,
                    ..Limits::default()
                },
                ..Settings::default()
            },
            association_timeout: Duration::from_secs(10),
            elements_at_first: None,
            plan: Vec::new(),
            begin: Time::from_secs_f64(20.0),
            runtime: Time::from_secs_f64(900.0),
            demands: None,
            bug: None,
            life: Duration::from_secs(300),
            windows: Vec::new(),
        }
    }

    /// All elements.
    #[must_use]
    pub fn elements(&self) -> u32 {
        self.zones.iter().map(|zone| zone.elements).sum()
    }

    /// Calculations a second of the element with this place among all.
    #[must_use]
    pub fn capacity(&self, element: u32) -> f64 {
        match self.slow {
            Some((each, share)) if (element + 1).is_multiple_of(each.max(1)) => {
                share * self.workload.capacity
            }
            _ => self.workload.capacity,
        }
    }

    /// All users.
    #[must_use]
    pub fn users(&self) -> u32 {
        self.zones.iter().map(|zone| zone.users).sum()
    }
}
