//! What a pool element is told when it starts.

use crate::hunt::HuntConfig;
use crate::life::LifeUnit;
use holdfast_wire::rserpool::{Policy, PoolHandle, SctpTransport, Transport};
use std::time::Duration;

/// The settings of a [`super::PoolElement`]. [`Config::new`] has the defaults; each is documented at its field.
///
/// RFC 5352 "normally" waits 30 s for an answer to a registration; a registrar that hangs would keep an element out of
/// its pool for so long.
#[derive(Debug, Clone)]
pub struct Config {
    /// The pool.
    pub handle: PoolHandle,
    /// Where users reach the element. Its addresses are to be among those of the association with the registrar.
    pub user_transport: Transport,
    /// Where registrars reach the element: none (RFC 5352 section 3.1, the registrar takes the association's).
    pub asap_transport: Option<SctpTransport>,
    /// What the element first says of itself.
    pub policy: Policy,
    /// How long a registration holds (5 min); none for ever. At least a second.
    pub life: Option<Duration>,
    /// What it is counted in (milliseconds).
    pub life_unit: LifeUnit,
    /// T4-reregistration: the most time between registrations (10 min).
    pub reregistration_max: Duration,
    /// How long before its end a registration is renewed (20 s, at most half its life).
    pub life_margin: Duration,
    /// T2-registration and T3-deregistration: how long a registrar may take to answer (5 s).
    pub answer_timeout: Duration,
    /// MAX-REG-ATTEMPT: unanswered registrations before the daemon is told (2).
    pub attempts_max: u32,
    /// The least time between a registration and the next that only tells of a new policy (250 ms).
    pub update_interval: Duration,
    /// How long a deregistration may take, the hunt included (15 s).
    pub leave_timeout: Duration,
    /// Where registrars are.
    pub hunt: HuntConfig,
    /// From a good source of randomness: what the element's identifier is made from.
    pub seed: [u8; 32],
}

impl Config {
    /// The defaults, for an element of `handle` whose users reach it at `user_transport`.
    pub fn new(
        handle: PoolHandle,
        user_transport: Transport,
        policy: Policy,
        hunt: HuntConfig,
        seed: [u8; 32],
    ) -> Config {
        Config {
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
            leave_timeout: Duration::from_secs(15),
            hunt,
            seed,
        }
    }

    /// The life as it is on the wire.
    pub(super) fn life_on_wire(&self) -> i32 {
        self.life.map_or(-1, |life| self.life_unit.count(life))
    }

    /// From a registration until the next.
    pub(super) fn reregistration(&self) -> Duration {
        let Some(life) = self.life else {
            return self.reregistration_max;
        };
        let margin = self.life_margin.min(life / 2);
        self.reregistration_max.min(life - margin)
    }
}
