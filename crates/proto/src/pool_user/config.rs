//! Configuration of a pool user.

use crate::server_hunt::ServerHuntConfig;
use holdfast_wire::rserpool::{Policy, PoolElement, PoolHandle};
use std::time::Duration;

/// The settings of a [`super::PoolUser`]. [`PoolUserConfig::new`] has the defaults; each is documented at its field.
///
/// RFC 5352 "normally" waits 15 s for a registrar's answer, longer than most users would.
#[derive(Debug, Clone)]
pub struct PoolUserConfig {
    /// T1-ENRPrequest: longest time for a registrar to answer (3 s).
    pub answer_timeout: Duration,
    /// MAX-REQUEST-RETRANSMIT: number of further registrars to ask (2). A request ends after the answer time of all of
    /// them and the first.
    pub retries_max: u32,
    /// stale_cache_value: time for which an answer is used without a new request (5 s).
    pub cache_fresh_for: Duration,
    /// Time for which an answer is kept, and used while a new request is open (60 s). A pool with open sessions is
    /// requested again at its end.
    pub cache_usable_for: Duration,
    /// Number of elements to request, by rsplib's private parameter (none: the registrar's default).
    pub items_requested: Option<u32>,
    /// Time for which an unreachable element is not selected (1 s); doubles each time in a row.
    pub unreachable_for: Duration,
    /// Upper limit of that time (30 s).
    pub unreachable_max: Duration,
    /// Longest time to establish a session's link (2 s).
    pub connect_timeout: Duration,
    /// Pause of a session that finds no element (100 ms); doubles each time in a row.
    pub retry_pause: Duration,
    /// Upper limit of the pause (5 s).
    pub retry_pause_max: Duration,
    /// Longest time to keep a session without an element (60 s).
    pub give_up_after: Duration,
    /// Settings of the server hunt.
    pub hunt: ServerHuntConfig,
    /// Seed of the random numbers, from a good source of randomness.
    pub seed: [u8; 32],
}

impl PoolUserConfig {
    /// Returns the default settings of a pool user.
    pub fn new(hunt: ServerHuntConfig, seed: [u8; 32]) -> PoolUserConfig {
        PoolUserConfig {
            answer_timeout: Duration::from_secs(3),
            retries_max: 2,
            cache_fresh_for: Duration::from_secs(5),
            cache_usable_for: Duration::from_secs(60),
            items_requested: None,
            unreachable_for: Duration::from_secs(1),
            unreachable_max: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(2),
            retry_pause: Duration::from_millis(100),
            retry_pause_max: Duration::from_secs(5),
            give_up_after: Duration::from_secs(60),
            hunt,
            seed,
        }
    }
}

/// Business card of a user that is a pool element too, for its control channels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnBusinessCard {
    /// Handle of its own pool.
    pub handle: PoolHandle,
    /// Policy of its own pool.
    pub policy: Policy,
    /// Elements to fail over to, should this user fail.
    pub elements: Vec<PoolElement>,
}
