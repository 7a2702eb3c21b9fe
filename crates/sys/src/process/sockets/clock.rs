//! The TCP clocks of connections that are restored while their originals are in use.

use crate::tcp_repair::TcpDynamic;
use std::time::{Duration, Instant};

/// How a connection's clock was set ahead of the freeze.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// When its state was taken, by the donor's clock.
    at_us: u64,
    /// By how much it was set ahead of that state.
    lead_us: u64,
    /// When it was set at the latest.
    set: Instant,
}

/// What a message is mostly under way for at most. Clocks are set ahead by so much: then those of connections of which nothing
/// changed need not be set again in the freeze. That they are not late matters (RFC 7323 section 5.3), not that they are exact.
const LEAD: Duration = Duration::from_millis(20);

impl Clock {
    /// Sets the clock of a state that came at an instant, and is restored next.
    pub fn lead(at_us: u64, came: Instant, state: &mut TcpDynamic) -> Clock {
        let set = Instant::now();
        let lead = LEAD + set.saturating_duration_since(came);
        let lead_us = u64::try_from(lead.as_micros()).unwrap_or(0);
        state.advance(lead_us);
        Clock {
            at_us,
            lead_us,
            set,
        }
    }

    /// The state was restored.
    pub fn begin(&mut self) {
        self.set = Instant::now();
    }

    /// How much later than the state with its lead it is to be at least, if it is late.
    pub fn lag_us(&self, now_us: u64) -> Option<u64> {
        let wanted = now_us
            .saturating_sub(self.at_us)
            .saturating_sub(self.lead_us);
        let shown = u64::try_from(self.set.elapsed().as_micros()).unwrap_or(u64::MAX);
        (wanted > shown).then_some(wanted)
    }
}
