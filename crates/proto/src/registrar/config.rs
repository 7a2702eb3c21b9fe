//! What a registrar is told when it starts, and what an operator may change while it runs.

use super::access::Access;
use crate::life::LifeUnit;
use holdfast_wire::rserpool::{RegistrarId, SctpTransport, Transport};
use std::net::SocketAddr;
use std::time::Duration;

/// The fixed part of a registrar's configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// Its number: random, not 0, another at each start (RFC 5353 section 3.2.1).
    pub id: RegistrarId,
    /// Of its random choices: selections, the spread of keep-alives.
    pub seed: u64,
    /// Where its peers reach it.
    pub transport: SctpTransport,
    /// Registrars to ask at the start, in order of preference, each with all its addresses. None: it begins alone, or, if
    /// it listens to multicast, asks the first that it hears.
    pub mentors: Vec<Vec<SocketAddr>>,
    /// What ASAP announces say. Empty: that the datagram's source is the address (rsplib).
    pub announced: Vec<Transport>,
    /// What may change while it runs.
    pub settings: Settings,
}

/// Who goes on when two registrars want to take over the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakeoverRace {
    /// The one with the lower number: rsplib.
    LowerId,
    /// The one with the higher number: RFC 5353 section 3.5.1.
    HigherId,
}

/// What an operator may change while the registrar runs. [`Settings::default`] has the values in parentheses.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Who may do what (registering and resolving: everybody; being a registrar: the mentors only).
    pub access: Access,
    /// What one host may use.
    pub limits: Limits,
    /// The unit of a registration's life (milliseconds).
    pub life_unit: LifeUnit,
    /// Elements in an answer to a resolution that names no number: MaxHResItems (3).
    pub resolution_items: usize,
    /// Elements in an answer at most (64).
    pub resolution_items_max: usize,
    /// Time between two keep-alives to an element, give or take a half (30 s).
    pub keep_alive_interval: Duration,
    /// How long an element may take to answer one (5 s).
    pub keep_alive_timeout: Duration,
    /// Keep-alives name the element, as rsplib's do; those who go by the RFC discard them (yes).
    pub keep_alive_names_element: bool,
    /// Reports from different hosts that an element survives: MAX-BAD-PE-REPORT (3).
    pub bad_reports_max: usize,
    /// Time between an element's answer and the next question that a report causes, at least (1 s).
    pub report_interval: Duration,
    /// An element's addresses must be among its association's, and it must come back from one that it had (yes).
    pub addresses_checked: bool,
    /// What distances are rounded to, in milliseconds: DistanceStep (50).
    pub distance_step: u32,
    /// PEER-HEARTBEAT-CYCLE (30 s).
    pub heartbeat_cycle: Duration,
    /// MAX-TIME-LAST-HEARD (61 s).
    pub last_heard_max: Duration,
    /// MAX-TIME-NO-RESPONSE (5 s).
    pub no_response_max: Duration,
    /// Time until a refused or failed attempt to reach or ask a registrar is made again (2 s).
    pub retry: Duration,
    /// How long to listen for a mentor by multicast (5 s).
    pub mentor_hunt: Duration,
    /// Who wins a takeover's race (the lower number).
    pub takeover_race: TakeoverRace,
    /// Two registrars that were both told of an element within this time settle whose it is (1 s).
    pub race_window: Duration,
    /// How long a re-registration that changes nothing may wait for those that follow it, until peers are told of all of them at once; zero:
    /// not at all (1 s).
    pub refresh_delay: Duration,
    /// Largest block of a handle table, in bytes (16,384) and in elements (128).
    pub table_bytes_max: usize,
    /// See above.
    pub table_elements_max: usize,
    /// Elements that change in one turn at most where there may be more, before others are served: those of a registrar that was taken
    /// over, that a peer no longer has, or whose distance is another (2,048).
    pub turn_elements_max: usize,
    /// Handle tables sent at the same time (8).
    pub downloads_max: usize,
    /// ENRP by multicast is sent and believed (no). Even then it comes from allowed addresses only.
    pub enrp_multicast: bool,
    /// The period of ASAP announces, T6-Serverannounce; none: no announces (none).
    pub announce_cycle: Option<Duration>,
}

/// What one host, by its first address, may use; and all together.
#[derive(Debug, Clone)]
pub struct Limits {
    /// IPv6 addresses that begin with the same so many bits are one host: a network of 64 bits is one customer's (64).
    pub ipv6_host_bits: u8,
    /// Associations of one host (10,000).
    pub associations_per_host: usize,
    /// Elements of one host (100,000).
    pub elements_per_host: usize,
    /// Pools that one host's elements began and that are still there (10,000).
    pub pools_per_host: usize,
    /// ASAP messages a second of one host, averaged over a second (50,000). What is beyond is dropped; who sends ten
    /// seconds' worth of that without a second's rest loses the association.
    pub messages_per_second: u32,
    /// How long an association may last without a message that can be read (60 s).
    pub first_message: Duration,
    /// How long a registration waits for the transport to confirm addresses that the other side says are its own (2 s).
    pub confirmation: Duration,
    /// Malformed messages until an association is aborted (16).
    pub malformed: u32,
    /// Associations in all (100,000).
    pub associations: usize,
    /// Pools in all (1,000,000).
    pub pools: usize,
    /// Elements in all (4,000,000).
    pub elements: usize,
    /// Bytes of a registration (2,048).
    pub registration_bytes: usize,
    /// Registrars known (256).
    pub registrars: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            ipv6_host_bits: 64,
            associations_per_host: 10_000,
            elements_per_host: 100_000,
            pools_per_host: 10_000,
            messages_per_second: 50_000,
            first_message: Duration::from_secs(60),
            confirmation: Duration::from_secs(2),
            malformed: 16,
            associations: 100_000,
            pools: 1_000_000,
            elements: 4_000_000,
            registration_bytes: 2_048,
            registrars: 256,
        }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            access: Access::default(),
            limits: Limits::default(),
            life_unit: LifeUnit::default(),
            resolution_items: 3,
            resolution_items_max: 64,
            keep_alive_interval: Duration::from_secs(30),
            keep_alive_timeout: Duration::from_secs(5),
            keep_alive_names_element: true,
            bad_reports_max: 3,
            report_interval: Duration::from_secs(1),
            addresses_checked: true,
            distance_step: 50,
            heartbeat_cycle: Duration::from_secs(30),
            last_heard_max: Duration::from_secs(61),
            no_response_max: Duration::from_secs(5),
            retry: Duration::from_secs(2),
            mentor_hunt: Duration::from_secs(5),
            takeover_race: TakeoverRace::LowerId,
            race_window: Duration::from_secs(1),
            refresh_delay: Duration::from_secs(1),
            table_bytes_max: 16_384,
            table_elements_max: 128,
            turn_elements_max: 2_048,
            downloads_max: 8,
            enrp_multicast: false,
            announce_cycle: None,
        }
    }
}

impl Config {
    /// The defaults for a registrar without mentors that is reached at `transport`.
    pub fn new(id: RegistrarId, seed: u64, transport: SctpTransport) -> Config {
        Config {
            id,
            seed,
            transport,
            mentors: Vec::new(),
            announced: Vec::new(),
            settings: Settings::default(),
        }
    }
}
