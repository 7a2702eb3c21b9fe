//! Configuration of a registrar: its fixed part, and the settings that an operator may change at run time.

use super::permissions::OperationPermissions;
use crate::registration_life::LifeUnit;
use holdfast_wire::rserpool::{RegistrarId, SctpTransport, ServerInformation, Transport};
use std::net::SocketAddr;
use std::time::Duration;

/// The fixed part of a registrar's configuration.
#[derive(Debug, Clone)]
pub struct RegistrarMachineConfig {
    /// Number of the registrar: random, not 0, different at each start (RFC 5353 section 3.2.1).
    pub id: RegistrarId,
    /// Seed of the random choices: selections, the spread of keep-alives.
    pub seed: u64,
    /// Transport addresses at which peers reach the registrar.
    pub transport: SctpTransport,
    /// Mentor peers to ask at the start, in order of preference, each with all its addresses. If empty, the registrar
    /// begins alone, or, if it listens to multicast, asks the first registrar that it hears.
    pub mentors: Vec<Vec<SocketAddr>>,
    /// Transports in ASAP announces. If empty, receivers use the datagram's source address (rsplib).
    pub announced_transports: Vec<Transport>,
    /// Settings that may change at run time.
    pub settings: RegistrarSettings,
}

/// Winner when two registrars want to take over the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakeoverRaceWinner {
    /// The registrar with the lower number: rsplib.
    LowerId,
    /// The registrar with the higher number: RFC 5353 section 3.5.1.
    HigherId,
}

/// Settings that an operator may change at run time. [`RegistrarSettings::default`] has the values in parentheses.
#[derive(Debug, Clone)]
pub struct RegistrarSettings {
    /// Permissions (registering and resolving: everybody; being a registrar: the mentors only).
    pub access: OperationPermissions,
    /// Limits on the resources of one host, and of all together.
    pub limits: ResourceLimits,
    /// The unit of a registration's life (milliseconds).
    pub life_unit: LifeUnit,
    /// Number of elements in the answer to a resolution that names none: MaxHResItems (3).
    pub resolution_items: usize,
    /// Most elements in an answer (64).
    pub resolution_items_max: usize,
    /// Mean time between two keep-alives to an element, varied by up to a half (30 s).
    pub keep_alive_interval: Duration,
    /// Longest time for an element to answer a keep-alive (5 s).
    pub keep_alive_timeout: Duration,
    /// True if keep-alives name the element, as rsplib's do; elements that follow the RFC strictly discard them (yes).
    pub keep_alive_names_element: bool,
    /// Number of hosts that may report an element before the next report removes it: MAX-BAD-PE-REPORT (3).
    pub bad_reports_max: usize,
    /// Least time between an element's answer and the next keep-alive caused by a report (1 s).
    pub report_probe_interval: Duration,
    /// True if an element's addresses must be among its association's, and it must re-register from an address that it
    /// had (yes).
    pub check_addresses: bool,
    /// Rounding step of distances, in milliseconds: DistanceStep (50).
    pub distance_step: u32,
    /// Time between two heartbeats: PEER-HEARTBEAT-CYCLE (30 s).
    pub heartbeat_cycle: Duration,
    /// Longest silence of an active peer: MAX-TIME-LAST-HEARD (61 s).
    pub last_heard_max: Duration,
    /// Longest time for a registrar to respond: MAX-TIME-NO-RESPONSE (5 s).
    pub no_response_max: Duration,
    /// Time until a refused or failed attempt to reach or ask a registrar is repeated (2 s).
    pub retry_interval: Duration,
    /// Time to listen for a mentor by multicast (5 s).
    pub mentor_hunt_time: Duration,
    /// Winner of a takeover race (the lower number).
    pub takeover_race: TakeoverRaceWinner,
    /// Longest time since an element's registration here in which another registrar's claim counts as simultaneous, and
    /// is settled by asking the element (1 s).
    pub race_window: Duration,
    /// Longest delay of announcing a re-registration that changes nothing, so that one announcement covers several;
    /// zero for no delay (1 s).
    pub refresh_delay: Duration,
    /// Largest block of a handle table in bytes (16,384).
    pub table_bytes_max: usize,
    /// Largest block of a handle table in elements (128).
    pub table_elements_max: usize,
    /// Most elements to change in one turn before others are served (2,048): elements of a registrar that was taken
    /// over, elements missing from a peer's table, and elements with a changed distance.
    pub batch_elements_max: usize,
    /// Most handle tables sent at the same time (8).
    pub downloads_max: usize,
    /// True if ENRP by multicast is sent and accepted (no). Even then it is accepted from allowed addresses only.
    pub enrp_multicast: bool,
    /// Period of ASAP announces, T6-Serverannounce; none for no announces (none).
    pub announce_cycle: Option<Duration>,
}

/// Limits on the resources of one host, identified by its first address, and of all together.
#[derive(Debug, Clone)]
pub struct ResourceLimits {
    /// Length of the prefix that makes IPv6 addresses one host (64): a network of 64 bits belongs to one customer.
    pub ipv6_host_bits: u8,
    /// Associations per host (10,000).
    pub associations_per_host: usize,
    /// Elements per host (100,000).
    pub elements_per_host: usize,
    /// Existing pools founded by elements of one host (10,000).
    pub pools_per_host: usize,
    /// ASAP messages a second per host, averaged over a second (50,000). Further messages are dropped; a host that
    /// sends ten seconds' worth of further messages without a second's rest loses the association.
    pub messages_per_second: u32,
    /// Longest time that an association may last without a well-formed message (60 s).
    pub first_message_timeout: Duration,
    /// Longest time that a registration waits for the transport to confirm addresses claimed by the other side (2 s).
    pub confirmation_timeout: Duration,
    /// Malformed messages until an association is aborted (16).
    pub malformed_max: u32,
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

impl Default for ResourceLimits {
    fn default() -> ResourceLimits {
        ResourceLimits {
            ipv6_host_bits: 64,
            associations_per_host: 10_000,
            elements_per_host: 100_000,
            pools_per_host: 10_000,
            messages_per_second: 50_000,
            first_message_timeout: Duration::from_secs(60),
            confirmation_timeout: Duration::from_secs(2),
            malformed_max: 16,
            associations: 100_000,
            pools: 1_000_000,
            elements: 4_000_000,
            registration_bytes: 2_048,
            registrars: 256,
        }
    }
}

impl Default for RegistrarSettings {
    fn default() -> RegistrarSettings {
        RegistrarSettings {
            access: OperationPermissions::default(),
            limits: ResourceLimits::default(),
            life_unit: LifeUnit::default(),
            resolution_items: 3,
            resolution_items_max: 64,
            keep_alive_interval: Duration::from_secs(30),
            keep_alive_timeout: Duration::from_secs(5),
            keep_alive_names_element: true,
            bad_reports_max: 3,
            report_probe_interval: Duration::from_secs(1),
            check_addresses: true,
            distance_step: 50,
            heartbeat_cycle: Duration::from_secs(30),
            last_heard_max: Duration::from_secs(61),
            no_response_max: Duration::from_secs(5),
            retry_interval: Duration::from_secs(2),
            mentor_hunt_time: Duration::from_secs(5),
            takeover_race: TakeoverRaceWinner::LowerId,
            race_window: Duration::from_secs(1),
            refresh_delay: Duration::from_secs(1),
            table_bytes_max: 16_384,
            table_elements_max: 128,
            batch_elements_max: 2_048,
            downloads_max: 8,
            enrp_multicast: false,
            announce_cycle: None,
        }
    }
}

impl RegistrarSettings {
    /// Returns the highest number of elements in the answer to a resolution.
    #[inline]
    pub(super) fn answer_elements_max(&self, requested: Option<u32>) -> usize {
        let items = requested.map_or(self.resolution_items, |items| items as usize);
        items.min(self.resolution_items_max)
    }
}

impl RegistrarMachineConfig {
    /// Returns the registrar's description of itself.
    pub(super) fn own_information(&self) -> ServerInformation {
        ServerInformation {
            id: self.id,
            transport: self.transport.clone(),
        }
    }

    /// Returns true if this registrar wins the race for a takeover.
    pub(super) fn wins_takeover_race(&self, other: RegistrarId) -> bool {
        match self.settings.takeover_race {
            TakeoverRaceWinner::LowerId => self.id < other,
            TakeoverRaceWinner::HigherId => self.id > other,
        }
    }

    /// Returns the defaults for a registrar without mentors that is reached at `transport`.
    pub fn new(id: RegistrarId, seed: u64, transport: SctpTransport) -> RegistrarMachineConfig {
        RegistrarMachineConfig {
            id,
            seed,
            transport,
            mentors: Vec::new(),
            announced_transports: Vec::new(),
            settings: RegistrarSettings::default(),
        }
    }
}
