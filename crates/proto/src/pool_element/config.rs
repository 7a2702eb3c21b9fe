//! Configuration of a pool element.

use crate::registration_life::LifeUnit;
use crate::server_hunt::ServerHuntConfig;
use holdfast_wire::rserpool::{Policy, PoolHandle, SctpTransport, Transport};
use std::time::Duration;

/// The settings of a [`super::PoolElement`]. [`PoolElementConfig::new`] has the defaults; each is documented at its field.
///
/// RFC 5352 "normally" waits 30 s for an answer to a registration; a registrar that hangs would keep an element out of
/// its pool for all that time.
#[derive(Debug, Clone)]
pub struct PoolElementConfig {
    /// Handle of the pool.
    pub handle: PoolHandle,
    /// Transport at which users reach the element. Its addresses must be among the ones of the association with the
    /// registrar.
    pub user_transport: Transport,
    /// Transport at which registrars reach the element; by default none, and the registrar uses the association's
    /// (RFC 5352 section 3.1).
    pub asap_transport: Option<SctpTransport>,
    /// Initial policy values of the element.
    pub policy: Policy,
    /// Life of a registration (5 min), at least a second; none for an unlimited one.
    pub life: Option<Duration>,
    /// Unit of the life in messages (milliseconds).
    pub life_unit: LifeUnit,
    /// T4-reregistration: longest time between registrations (10 min).
    pub reregistration_max: Duration,
    /// Time before its end at which a registration is renewed (20 s, at most half its life).
    pub life_margin: Duration,
    /// T2-registration and T3-deregistration: longest time for a registrar to answer (5 s).
    pub answer_timeout: Duration,
    /// MAX-REG-ATTEMPT: number of unanswered registrations after which the daemon is informed (2).
    pub attempts_max: u32,
    /// Least time between a registration and another one that only updates the policy (250 ms).
    pub update_interval: Duration,
    /// Longest time for a deregistration, including the hunt (15 s).
    pub deregistration_timeout: Duration,
    /// Settings of the server hunt.
    pub hunt: ServerHuntConfig,
    /// Seed of the element's identifier, from a good source of randomness.
    pub seed: [u8; 32],
}

impl PoolElementConfig {
    /// Returns the defaults for an element of `handle` that users reach at `user_transport`.
    pub fn new(
        handle: PoolHandle,
        user_transport: Transport,
        policy: Policy,
        hunt: ServerHuntConfig,
        seed: [u8; 32],
    ) -> PoolElementConfig {
        PoolElementConfig {
            handle,
            user_transport,
            asap_transport: None,
            policy,
            life: Some(Duration::from_secs(300)),
            life_unit: LifeUnit::default(),
            reregistration_max: Duration::from_secs(600),
            life_margin: Duration::from_secs(20),
            answer_timeout: Duration::from_secs(5),
            attempts_max: 2,
            update_interval: Duration::from_millis(250),
            deregistration_timeout: Duration::from_secs(15),
            hunt,
            seed,
        }
    }

    /// Returns the life in its wire format.
    pub(super) fn encoded_life(&self) -> i32 {
        self.life.map_or(-1, |life| self.life_unit.encode(life))
    }

    /// Returns the time from a registration until the next.
    pub(super) fn reregistration_interval(&self) -> Duration {
        let Some(life) = self.life else {
            return self.reregistration_max;
        };
        let margin = self.life_margin.min(life / 2);
        self.reregistration_max.min(life - margin)
    }
}
