//! What a pool user is told when it starts.

use crate::hunt::HuntConfig;
use holdfast_wire::rserpool::{Policy, PoolElement, PoolHandle};
use std::time::Duration;

/// The settings of a [`super::PoolUser`]. [`Config::new`] has the defaults; each is documented at its field.
///
/// RFC 5352 "normally" waits 15 s for a registrar's answer, as long as which few users wait.
#[derive(Debug, Clone)]
pub struct Config {
    /// T1-ENRPrequest: how long a registrar may take to answer (3 s).
    pub answer_timeout: Duration,
    /// MAX-REQUEST-RETRANSMIT: how many more registrars are asked then (2). A request ends after so many times that, and one.
    pub retries_max: u32,
    /// stale_cache_value: how long an answer is used without asking again (5 s).
    pub fresh_for: Duration,
    /// How long an answer is used while asking again (60 s), and kept. A pool with open sessions is asked for again then.
    pub usable_for: Duration,
    /// How many elements to ask for, by rsplib's private parameter (none: as the registrar has it).
    pub items: Option<u32>,
    /// How long an element that was not reached is not chosen (1 s); it doubles each time in a row.
    pub avoid_for: Duration,
    /// The most that may become (30 s).
    pub avoid_max: Duration,
    /// How long a session's link may take to be made (2 s).
    pub connect_timeout: Duration,
    /// The pause of a session that finds no element (100 ms); it doubles each time in a row.
    pub pause: Duration,
    /// The most that may become (5 s).
    pub pause_max: Duration,
    /// How long a session without an element is kept up (60 s).
    pub give_up_after: Duration,
    /// Where registrars are.
    pub hunt: HuntConfig,
    /// From a good source of randomness.
    pub seed: [u8; 32],
}

impl Config {
    /// The defaults.
    pub fn new(hunt: HuntConfig, seed: [u8; 32]) -> Config {
        Config {
            answer_timeout: Duration::from_secs(3),
            retries_max: 2,
            fresh_for: Duration::from_secs(5),
            usable_for: Duration::from_secs(60),
            items: None,
            avoid_for: Duration::from_secs(1),
            avoid_max: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(2),
            pause: Duration::from_millis(100),
            pause_max: Duration::from_secs(5),
            give_up_after: Duration::from_secs(60),
            hunt,
            seed,
        }
    }
}

/// What a user that is a pool element too says of itself on control channels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnCard {
    /// Its own pool.
    pub handle: PoolHandle,
    /// That pool's policy.
    pub policy: Policy,
    /// Whom to fail over to, should this user fail.
    pub elements: Vec<PoolElement>,
}
