//! Measurements of the channel to a peer.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Minimum duration of a measured stall. A shorter one says more about the scheduler than about the path.
const STALL_MIN: Duration = Duration::from_millis(5);

/// Measurements of the channel to one peer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PeerStats {
    /// True if the peer is connected in both directions.
    pub up: bool,
    /// Smoothed round trip of pings (an eighth of each new one); `None` before the first.
    pub round_trip: Option<Duration>,
    /// Round trip of the last ping.
    pub round_trip_last: Option<Duration>,
    /// Bytes/s that the path carried while the socket was full (smoothed, a quarter of each new one); `None` if it
    /// never was.
    pub bytes_per_second: Option<f64>,
    /// Bytes of frames that wait for the socket.
    pub queued_bytes: usize,
    /// Bytes sent since the daemon started, including TLS.
    pub sent_bytes: u64,
    /// Bytes received since the daemon started, including TLS.
    pub received_bytes: u64,
}

/// A smoothed value: each sample moves it by `1/WEIGHT` of the difference; the first sample is the initial value.
#[derive(Debug, Default)]
pub(super) struct SmoothedValue<const WEIGHT: u32>(Cell<Option<f64>>);

impl<const WEIGHT: u32> SmoothedValue<WEIGHT> {
    pub(super) fn sample(&self, value: f64) {
        let old = self.0.get().unwrap_or(value);
        self.0.set(Some(old + (value - old) / f64::from(WEIGHT)));
    }

    pub(super) fn get(&self) -> Option<f64> {
        self.0.get()
    }
}

/// Rate of the path, measured between the moments when the socket was full and when it was not.
#[derive(Debug, Default)]
pub(super) struct PathRate {
    measured_since: Cell<Option<(Instant, u64)>>,
    smoothed: SmoothedValue<4>,
}

impl PathRate {
    /// Records that the socket is full, after `sent` bytes in all.
    pub(super) fn on_stall(&self, sent: u64) {
        match self.measured_since.get() {
            None => self.measured_since.set(Some((Instant::now(), sent))),
            Some(_) => self.sample(sent),
        }
    }

    /// Records that no data waits, after `sent` bytes in all.
    pub(super) fn on_drained(&self, sent: u64) {
        if self.measured_since.get().is_some() {
            self.sample(sent);
            self.measured_since.set(None);
        }
    }

    fn sample(&self, sent: u64) {
        let Some((began, before)) = self.measured_since.get() else {
            return;
        };
        let elapsed = began.elapsed();
        if elapsed >= STALL_MIN {
            let bytes = sent.saturating_sub(before) as f64;
            self.smoothed.sample(bytes / elapsed.as_secs_f64());
            self.measured_since.set(Some((Instant::now(), sent)));
        }
    }

    pub(super) fn bytes_per_second(&self) -> Option<f64> {
        self.smoothed.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smoothing_starts_at_the_first_sample_and_follows() {
        let smoothed = SmoothedValue::<8>::default();
        assert_eq!(smoothed.get(), None);
        smoothed.sample(80.0);
        assert_eq!(smoothed.get(), Some(80.0));
        smoothed.sample(160.0);
        assert_eq!(smoothed.get(), Some(90.0));
    }

    #[test]
    fn a_rate_needs_a_stall() {
        let rate = PathRate::default();
        rate.on_drained(1_000_000);
        assert_eq!(rate.bytes_per_second(), None);
        rate.on_stall(1_000_000);
        std::thread::sleep(STALL_MIN);
        rate.on_drained(2_000_000);
        // At least 5 ms for a megabyte: at most 200 MB/s, however slow this machine is.
        let measured = rate.bytes_per_second().unwrap();
        assert!(measured > 0.0 && measured <= 200e6, "{measured}");
    }
}
