//! Settings of the server hunt.

use holdfast_wire::rserpool::Transport;
use std::time::Duration;

/// Known registrars, and the parameters of the hunt.
#[derive(Debug, Clone)]
pub struct ServerHuntConfig {
    /// Registrars known beforehand: SCTP, or TCP for pool users.
    pub registrars: Vec<Transport>,
    /// True if multicast announces are trusted (no). Any host on the segment can send one.
    pub trust_announces: bool,
    /// Most registrars tried at once (3, the limit of RFC 5352).
    pub parallel: usize,
    /// Longest time for one attempt before another registrar is tried (3 s): a silent registrar must not delay the live
    /// ones until the end of the round.
    pub attempt_timeout: Duration,
    /// T5-Serverhunt: longest time for the attempts of a round (10 s); doubles each time.
    pub timeout: Duration,
    /// RETRAN.max: upper limit of a round's time (60 s).
    pub timeout_max: Duration,
    /// Pause after a round in which every registrar was tried in vain (200 ms); doubles each time.
    pub pause: Duration,
    /// Upper limit of the pause (5 s): a registrar's return goes unnoticed during a pause.
    pub pause_max: Duration,
    /// T7-ENRPoutdate: life of an announce (5 s).
    pub announce_life: Duration,
}

impl ServerHuntConfig {
    /// Returns the defaults, with these registrars.
    pub fn new(registrars: Vec<Transport>) -> ServerHuntConfig {
        ServerHuntConfig {
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
