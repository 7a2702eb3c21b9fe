//! The probe: a connection that ping-pongs every millisecond and moves with the rest. Its gap is the longest round
//! trip, minus the median one.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::connection_load::{HANG_TIMEOUT, MESSAGE_BYTES, VerifiedByteCounters, fill_message};
use crate::stats::Quantiles;

/// Send time of a message, and time until its answer.
pub type RoundTrip = (Instant, Duration);

/// Begin and end of a period.
pub type TimeSpan = (Instant, Instant);

/// Ping-pongs until the load is stopped. A missing answer counts as lost.
///
/// # Errors
/// A message cannot be sent.
pub fn ping_pong(mut stream: TcpStream, shared: &VerifiedByteCounters) -> Result<Vec<RoundTrip>> {
    stream.set_read_timeout(Some(HANG_TIMEOUT))?;
    let mut trips = Vec::new();
    let mut next = Instant::now();
    let (mut message, mut answer) = ([0; MESSAGE_BYTES], [0; MESSAGE_BYTES]);
    for turn in 0.. {
        if shared.is_stopped() {
            break;
        }
        fill_message(&mut message, u64::MAX, turn);
        let sent = Instant::now();
        stream.write_all(&message)?;
        if stream.read_exact(&mut answer).is_err() {
            shared.count_lost();
            break;
        }
        trips.push((sent, sent.elapsed()));
        shared.compare(&message, &answer);
        next = (next + Duration::from_millis(1)).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(trips)
}

/// Pause between a move and its control period: delays caused by the move are over by then.
const SETTLE_TIME: Duration = Duration::from_millis(200);

/// Gaps of the probe around moves and in control periods, microseconds.
#[derive(Debug, Clone, Default)]
pub struct ProbeGaps {
    /// Longest round trip around each move, minus the median one.
    pub moves_us: Vec<f64>,
    /// Longest round trip in each period of equal length and load without a move, minus the median one.
    pub control_us: Vec<f64>,
}

impl ProbeGaps {
    /// Computes the gaps of moves and of their control periods, see [`run_control_period`].
    #[must_use]
    pub fn from_round_trips(
        trips: &[RoundTrip],
        moves: impl IntoIterator<Item = TimeSpan>,
        control: &[TimeSpan],
    ) -> ProbeGaps {
        let moves = moves.into_iter().map(|span| added_delay_us(trips, span));
        ProbeGaps {
            moves_us: moves.collect(),
            control_us: control
                .iter()
                .map(|span| added_delay_us(trips, *span))
                .collect(),
        }
    }
}

/// Lets the load run for as long as a move took; returns that period.
#[must_use]
pub fn run_control_period((begin, end): TimeSpan) -> TimeSpan {
    std::thread::sleep(SETTLE_TIME);
    let since = Instant::now();
    std::thread::sleep(end.saturating_duration_since(begin));
    (since, Instant::now())
}

/// Returns the longest round trip that overlaps a period, minus the median one of all, in microseconds.
pub fn added_delay_us(trips: &[RoundTrip], (begin, end): TimeSpan) -> f64 {
    let us = |duration: Duration| duration.as_secs_f64() * 1e6;
    let median = Quantiles::new(trips.iter().map(|(_, trip)| us(*trip)).collect()).median();
    let during = trips
        .iter()
        .filter(|(sent, trip)| *sent <= end && *sent + *trip >= begin);
    during.map(|(_, trip)| us(*trip)).fold(0.0, f64::max) - median
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_is_longest_trip_overlapping_the_period() {
        let begin = Instant::now();
        let ms = Duration::from_millis;
        let trips = [(0, 1), (2, 1), (4, 9), (14, 1), (20, 50)];
        let trips = trips.map(|(at, took)| (begin + ms(at), ms(took)));
        let gap = |from, to| added_delay_us(&trips, (begin + ms(from), begin + ms(to)));
        assert!((gap(12, 15) - 8_000.0).abs() < 1.0);
        assert!(gap(14, 16).abs() < 1.0);
    }
}
