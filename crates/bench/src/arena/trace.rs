//! What a player saw of the server, in the course of time.

use std::ops::RangeInclusive;
use std::time::Duration;

/// Looks where players were, once so often, to see whether they move.
const STEP: f32 = 1.0;

/// A snapshot that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// When: since the beginning of the epoch by the machine's clock.
    pub at: Duration,
    /// The server's clock in it, milliseconds.
    pub server_time_ms: i32,
}

/// What a player saw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Snapshots, in the order in which they came.
    pub arrivals: Vec<Arrival>,
    /// Server's messages that never came whole: gaps in their numbers.
    pub lost_in: u64,
    /// Server's datagrams that came twice or too late.
    pub late_in: u64,
    /// Datagrams that the server could not have sent.
    pub malformed: u64,
    /// Messages sent.
    pub sent: u64,
    /// Commands of the server's that came, each once and in order.
    pub server_commands: u64,
    /// Own commands that the server has carried out.
    pub commands_done: u64,
    /// How often the player was somewhere else than before.
    pub steps: u64,
    /// The newest user command that the game has carried out, by the server's clock.
    pub command_time_ms: i32,
    place: [f32; 2],
}

impl Trace {
    /// The player is there now.
    pub fn stands(&mut self, place: [f32; 2]) {
        let far = |(new, old): (&f32, &f32)| (new - old).abs() >= STEP;
        if place.iter().zip(&self.place).any(far) {
            self.steps += 1;
            self.place = place;
        }
    }

    /// Times between snapshots, each with the instant of the second, as far as that is in the window.
    pub fn gaps(
        &self,
        window: RangeInclusive<Duration>,
    ) -> impl Iterator<Item = (Duration, Duration)> {
        let pairs = self.arrivals.windows(2);
        pairs
            .map(|pair| (pair[1].at, pair[1].at.saturating_sub(pair[0].at)))
            .filter(move |(at, _)| window.contains(at))
    }

    /// The longest time between two snapshots, the second of which came in the window.
    #[must_use]
    pub fn longest_gap(&self, window: RangeInclusive<Duration>) -> Option<Duration> {
        self.gaps(window).map(|(_, gap)| gap).max()
    }

    /// The middle one of the times between snapshots.
    #[must_use]
    pub fn median_gap(&self, window: RangeInclusive<Duration>) -> Option<Duration> {
        let mut gaps: Vec<Duration> = self.gaps(window).map(|(_, gap)| gap).collect();
        gaps.sort_unstable();
        gaps.get(gaps.len() / 2).copied()
    }

    /// By how much the longest time between two snapshots is longer than the server's own interval: what Figure 4 of
    /// paper 002 shows ("the imposed delay compared to the expected packet transmission").
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
    fn delay_is_what_the_longest_gap_has_beyond_the_interval() {
        let ms = Duration::from_millis;
        let mut trace = Trace::default();
        for at in [1000, 1050, 1100, 1178, 1200, 1250] {
            trace.arrivals.push(Arrival {
                at: ms(at),
                server_time_ms: 0,
            });
        }
        let everything = ms(0)..=ms(9000);
        assert_eq!(trace.added_delay(everything.clone(), ms(50)), Some(ms(28)));
        assert_eq!(trace.median_gap(everything), Some(ms(50)));
        // The gap that began before the window and ended in it belongs to it.
        assert_eq!(trace.added_delay(ms(1150)..=ms(1180), ms(50)), Some(ms(28)));
        assert_eq!(trace.added_delay(ms(1200)..=ms(1300), ms(50)), Some(ms(0)));
        assert_eq!(trace.longest_gap(ms(2000)..=ms(3000)), None);
    }
}
