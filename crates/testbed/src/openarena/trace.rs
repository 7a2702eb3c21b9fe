//! Events that a player saw of the server, over time.

use std::ops::RangeInclusive;
use std::time::Duration;

/// Least change of position that counts as a step.
const STEP_MIN: f32 = 1.0;

/// A snapshot that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotArrival {
    /// Arrival time since the epoch, by the machine's clock.
    pub at: Duration,
    /// The server's clock in the snapshot, milliseconds.
    pub server_time_ms: i32,
}

/// Events that a player saw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlayerTrace {
    /// Snapshots, in the order of arrival.
    pub arrivals: Vec<SnapshotArrival>,
    /// Messages of the server that never arrived whole: gaps in their numbers.
    pub lost_messages: u64,
    /// Datagrams of the server that arrived twice or too late.
    pub late_datagrams: u64,
    /// Datagrams that the server could not have sent.
    pub malformed: u64,
    /// Messages that the player has sent.
    pub sent: u64,
    /// Commands of the server that arrived, each once and in order.
    pub server_commands: u64,
    /// Own commands that the server has executed.
    pub commands_done: u64,
    /// Number of times that the player had moved since the snapshot before.
    pub steps: u64,
    /// Server time of the newest user command that the game has executed, milliseconds.
    pub command_time_ms: i32,
    position: [f32; 2],
}

impl PlayerTrace {
    /// Records the position of the player.
    pub fn record_position(&mut self, place: [f32; 2]) {
        let has_moved = |(new, old): (&f32, &f32)| (new - old).abs() >= STEP_MIN;
        if place.iter().zip(&self.position).any(has_moved) {
            self.steps += 1;
            self.position = place;
        }
    }

    /// Returns the times between snapshots, each with the arrival of its second snapshot, if that arrival is in the
    /// window.
    pub fn snapshot_gaps(
        &self,
        window: RangeInclusive<Duration>,
    ) -> impl Iterator<Item = (Duration, Duration)> {
        let pairs = self.arrivals.windows(2);
        pairs
            .map(|pair| (pair[1].at, pair[1].at.saturating_sub(pair[0].at)))
            .filter(move |(at, _)| window.contains(at))
    }

    /// Returns the longest time between two snapshots, if the second arrived in the window.
    #[must_use]
    pub fn longest_gap(&self, window: RangeInclusive<Duration>) -> Option<Duration> {
        self.snapshot_gaps(window).map(|(_, gap)| gap).max()
    }

    /// Returns the median time between snapshots.
    #[must_use]
    pub fn median_gap(&self, window: RangeInclusive<Duration>) -> Option<Duration> {
        let mut gaps: Vec<Duration> = self.snapshot_gaps(window).map(|(_, gap)| gap).collect();
        gaps.sort_unstable();
        gaps.get(gaps.len() / 2).copied()
    }

    /// Returns the difference between the longest time between two snapshots and the server's own interval: the value
    /// in Figure 4 of paper 002 ("the imposed delay compared to the expected packet transmission").
    #[must_use]
    pub fn added_delay(
        &self,
        window: RangeInclusive<Duration>,
        interval: Duration,
    ) -> Option<Duration> {
        let longest = self.longest_gap(window)?;
        Some(longest.saturating_sub(interval))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn added_delay_is_longest_gap_minus_interval() {
        let ms = Duration::from_millis;
        let mut trace = PlayerTrace::default();
        for at in [1000, 1050, 1100, 1178, 1200, 1250] {
            trace.arrivals.push(SnapshotArrival {
                at: ms(at),
                server_time_ms: 0,
            });
        }
        let everything = ms(0)..=ms(9000);
        assert_eq!(trace.added_delay(everything.clone(), ms(50)), Some(ms(28)));
        assert_eq!(trace.median_gap(everything), Some(ms(50)));
        // A gap that began before the window and ended in it belongs to the window.
        assert_eq!(trace.added_delay(ms(1150)..=ms(1180), ms(50)), Some(ms(28)));
        assert_eq!(trace.added_delay(ms(1200)..=ms(1300), ms(50)), Some(ms(0)));
        assert_eq!(trace.longest_gap(ms(2000)..=ms(3000)), None);
    }
}
