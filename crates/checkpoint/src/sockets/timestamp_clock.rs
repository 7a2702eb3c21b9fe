//! TCP clocks of connections that are restored while their originals are in use.

use holdfast_tcp_repair::TcpDynamicState;
use std::time::{Duration, Instant};

/// Setting of the clock of a connection that was restored before the freeze.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimestampClock {
    /// Time at which the state was taken, by the donor's clock, microseconds.
    at_us: u64,
    /// Lead of the clock over that state, microseconds.
    lead_us: u64,
    /// Latest time at which the clock was set.
    set_at: Instant,
}

/// Longest transit time of most messages. Clocks are set ahead by this time, so that the clocks of unchanged
/// connections need not be set again in the freeze. Clocks must not be late (RFC 7323 section 5.3), but need not be
/// exact.
const LEAD: Duration = Duration::from_millis(20);

impl TimestampClock {
    /// Sets the clock of a state that was received at `received_at`, and is restored next.
    pub fn set_ahead(
        at_us: u64,
        received_at: Instant,
        state: &mut TcpDynamicState,
    ) -> TimestampClock {
        let set_at = Instant::now();
        let lead = LEAD + set_at.saturating_duration_since(received_at);
        let lead_us = u64::try_from(lead.as_micros()).unwrap_or(0);
        state.advance_clock(lead_us);
        TimestampClock {
            at_us,
            lead_us,
            set_at,
        }
    }

    /// Records that the state was restored at this moment.
    pub fn restart(&mut self) {
        self.set_at = Instant::now();
    }

    /// Returns the least advance over the state with its lead, microseconds, if the clock is late.
    pub fn lag_us(&self, now_us: u64) -> Option<u64> {
        let wanted_us = now_us
            .saturating_sub(self.at_us)
            .saturating_sub(self.lead_us);
        let elapsed_us = u64::try_from(self.set_at.elapsed().as_micros()).unwrap_or(u64::MAX);
        (wanted_us > elapsed_us).then_some(wanted_us)
    }
}
