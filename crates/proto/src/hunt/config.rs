//! Settings of the hunt.

use holdfast_wire::rserpool::Transport;
use std::time::Duration;

/// Where registrars are, and how they are sought.
#[derive(Debug, Clone)]
pub struct HuntConfig {
    /// Registrars that are known beforehand: SCTP, or TCP for pool users.
    pub registrars: Vec<Transport>,
    /// Whether announces by multicast are believed (no). Anybody on the segment can send one.
    pub trust_announces: bool,
    /// How many registrars are tried at once (3, the most that RFC 5352 allows).
    pub parallel: usize,
    /// How long one attempt may take before another registrar has its turn (3 s): one that is silent must not keep those that
    /// live waiting until the round ends.
    pub attempt_timeout: Duration,
    /// T5-Serverhunt: how long the attempts of a round may take (10 s); it doubles each time.
    pub timeout: Duration,
    /// RETRAN.max: the most that a round may become (60 s).
    pub timeout_max: Duration,
    /// The pause after a round in which every registrar was tried in vain (200 ms); it doubles each time.
    pub pause: Duration,
    /// The most that a pause may become (5 s): nobody notices during a pause that a registrar is back.
    pub pause_max: Duration,
    /// T7-ENRPoutdate: how long an announce is valid (5 s).
    pub announce_life: Duration,
}

impl HuntConfig {
    /// The defaults, with these registrars.
    pub fn new(registrars: Vec<Transport>) -> HuntConfig {
        HuntConfig {
            registrars,
            trust_announces: false,
            parallel: 3,
            attempt_timeout: Duration::from_secs(3),
            timeout: Duration::from_secs(10),
            timeout_max: Duration::from_secs(60),
            pause: Duration::from_millis(200),
            pause_max: Duration::from_secs(5),
            announce_life: Duration::from_secs(5),
        }
    }
}
