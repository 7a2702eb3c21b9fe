//! TCP clocks of connections that are restored while their originals are in use.

use crate::tcp_repair::TcpDynamic;
use std::time::{Duration, Instant};

/// Setting of the clock of a connection that was restored before the freeze.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Time at which the state was taken, by the donor's clock, microseconds.
    at_us: u64,
    /// Lead of the clock over that state, microseconds.
    lead_us: u64,
    /// Latest time at which the clock was set.
    set: Instant,
}

/// Longest transit time of most messages. Clocks are set ahead by this time, so that the clocks of unchanged
/// connections need not be set again in the freeze. Clocks must not be late (RFC 7323 section 5.3), but need not be
/// exact.
const LEAD: Duration = Duration::from_millis(20);

impl Clock {
    /// Sets the clock of a state that was received at `came`, and is restored next.
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

    /// Records that the state was restored at this moment.
    pub fn begin(&mut self) {
        self.set = Instant::now();
    }

    /// Returns the least advance over the state with its lead, microseconds, if the clock is late.
    pub fn lag_us(&self, now_us: u64) -> Option<u64> {
        let wanted = now_us
            .saturating_sub(self.at_us)
            .saturating_sub(self.lead_us);
        let shown = u64::try_from(self.set.elapsed().as_micros()).unwrap_or(u64::MAX);
        (wanted > shown).then_some(wanted)
    }
}
