//! The probe: a connection that ping-pongs every millisecond and moves with the rest; its gap is defined in DESIGN.md
//! ("Moving a connection").

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::stats::Quantiles;
use crate::load::{Compared, HUNG, MESSAGE, fill};

/// Send time of a message, and time until its answer.
pub type Trip = (Instant, Duration);

/// Begin and end of a period.
pub type Span = (Instant, Instant);

/// Ping-pongs until the load is stopped. A missing answer counts as lost.
///
/// # Errors
/// A message cannot be sent.
pub fn ping_pong(mut stream: TcpStream, shared: &Compared) -> Result<Vec<Trip>> {
    stream.set_read_timeout(Some(HUNG))?;
    let mut trips = Vec::new();
    let mut next = Instant::now();
    let (mut message, mut answer) = ([0; MESSAGE], [0; MESSAGE]);
    for turn in 0.. {
        if shared.is_stopped() {
            break;
        }
        fill(&mut message, u64::MAX, turn);
        let sent = Instant::now();
        stream.write_all(&message)?;
        if stream.read_exact(&mut answer).is_err() {
            shared.lost();
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
const SETTLED: Duration = Duration::from_millis(200);

/// Gaps of the probe around moves and in control periods, microseconds.
#[derive(Debug, Clone, Default)]
pub struct Gaps {
    /// Longest round trip around each move, minus the median one.
    pub moves_us: Vec<f64>,
    /// Longest round trip in each period of equal length and load without a move, minus the median one.
    pub control_us: Vec<f64>,
}

impl Gaps {
    /// Computes the gaps of moves and of their control periods, see [`control`].
    #[must_use]
    pub fn of(trips: &[Trip], moves: impl IntoIterator<Item = Span>, control: &[Span]) -> Gaps {
        let moves = moves.into_iter().map(|span| gap_us(trips, span));
        Gaps {
            moves_us: moves.collect(),
            control_us: control.iter().map(|span| gap_us(trips, *span)).collect(),
        }
    }
}

/// Lets the load run for as long as a move took; returns that period.
#[must_use]
pub fn control((begin, end): Span) -> Span {
    std::thread::sleep(SETTLED);
    let since = Instant::now();
    std::thread::sleep(end.saturating_duration_since(begin));
    (since, Instant::now())
}

/// Returns the longest round trip that overlaps a period, minus the median one of all, in microseconds.
pub fn gap_us(trips: &[Trip], (begin, end): Span) -> f64 {
    let us = |duration: Duration| duration.as_secs_f64() * 1e6;
    let median = Quantiles::of(trips.iter().map(|(_, trip)| us(*trip)).collect()).median();
    let during = trips
        .iter()
        .filter(|(sent, trip)| *sent <= end && *sent + *trip >= begin);
    during.map(|(_, trip)| us(*trip)).fold(0.0, f64::max) - median
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gap_is_the_longest_trip_that_the_time_touches() {
        let begin = Instant::now();
        let ms = Duration::from_millis;
        let trips = [(0, 1), (2, 1), (4, 9), (14, 1), (20, 50)];
        let trips = trips.map(|(at, took)| (begin + ms(at), ms(took)));
        let gap = |from, to| gap_us(&trips, (begin + ms(from), begin + ms(to)));
        assert!((gap(12, 15) - 8_000.0).abs() < 1.0);
        assert!(gap(14, 16).abs() < 1.0);
    }
}
