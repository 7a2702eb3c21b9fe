//! Networks: zones, and a link between every two of them.

use crate::random::Random;
use crate::time::Time;
use serde::Deserialize;
use smallvec::SmallVec;

/// One-way delay of a packet, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[expect(missing_docs, reason = "fields that say no more than their name")]
pub enum Delay {
    /// A fixed delay.
    Constant(f64),
    /// Uniformly distributed between the two.
    Uniform { least: f64, most: f64 },
    /// A minimum plus an exponentially distributed part.
    Exponential { least: f64, beyond: f64 },
    /// Normally distributed, but at least 0.
    Normal { mean: f64, deviation: f64 },
}

impl Delay {
    /// Draws the delay of one packet.
    pub fn draw(self, random: &mut Random) -> Time {
        Time::from_ms_f64(match self {
            Delay::Constant(always) => always,
            Delay::Uniform { least, most } => least + (most - least) * random.fraction(),
            Delay::Exponential { least, beyond } => least + random.exponential(beyond),
            Delay::Normal { mean, deviation } => random.normal(mean, deviation),
        })
    }

    /// Returns the mean.
    #[must_use]
    pub fn mean_ms(self) -> f64 {
        match self {
            Delay::Constant(always) => always,
            Delay::Uniform { least, most } => f64::midpoint(least, most),
            Delay::Exponential { least, beyond } => least + beyond,
            Delay::Normal { mean, .. } => mean,
        }
    }
}

/// Properties of a link in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Delay of each packet.
    pub delay: Delay,
    /// Rate in bits per second, for which packets wait; none: unlimited.
    #[serde(default)]
    pub rate: Option<f64>,
    /// Share of packets that are lost.
    #[serde(default)]
    pub loss: f64,
    /// Share of packets that arrive twice.
    #[serde(default)]
    pub duplicate: f64,
    /// Share of packets that are delayed by `reorder_ms` more, so that others overtake them.
    #[serde(default)]
    pub reorder: f64,
    /// Additional delay of reordered packets, in milliseconds.
    #[serde(default)]
    pub reorder_ms: f64,
}

impl Link {
    /// Returns a link with a fixed delay and no other effect.
    #[must_use]
    pub fn constant(delay_ms: f64) -> Link {
        Link {
            delay: Delay::Constant(delay_ms),
            rate: None,
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            reorder_ms: 0.0,
        }
    }
}

/// A link with its state.
#[derive(Debug)]
struct Line {
    link: Link,
    /// Time at which the rate admits the next packet.
    free: Time,
    cut: bool,
}

/// A place: all its hosts have the same distances to all others.
pub type Zone = u16;

/// Initial and maximum retransmission timeout (RFC 9260 section 16: RTO.Initial, RTO.Max).
const RETRANSMISSION: Time = Time(1_000_000_000);
const RETRANSMISSION_MAX: Time = Time(60_000_000_000);
/// Number of retransmissions before an association is given up (Association.Max.Retrans).
const RETRANSMISSIONS: u32 = 10;

/// Zones, and the links between them.
#[derive(Debug)]
pub struct Network {
    zones: usize,
    lines: Vec<Line>,
}

impl Network {
    /// Creates a network; `link` returns the link between two zones, or within one.
    pub fn new(zones: usize, mut link: impl FnMut(Zone, Zone) -> Link) -> Network {
        let count = u16::try_from(zones).unwrap_or(u16::MAX);
        let pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        let line = |(from, to)| Line {
            link: link(from, to),
            free: Time::ZERO,
            cut: false,
        };
        let lines = pairs.map(line).collect();
        Network { zones, lines }
    }

    fn line(&mut self, from: Zone, to: Zone) -> &mut Line {
        &mut self.lines[usize::from(from) * self.zones + usize::from(to)]
    }

    /// Separates two zones in both directions, or connects them again.
    pub fn set_cut(&mut self, a: Zone, b: Zone, cut: bool) {
        self.line(a, b).cut = cut;
        self.line(b, a).cut = cut;
    }

    /// Returns true if the zones are separated.
    pub fn is_cut(&mut self, a: Zone, b: Zone) -> bool {
        self.line(a, b).cut
    }

    /// Changes the properties of a link.
    pub fn set_link(&mut self, from: Zone, to: Zone, link: Link) {
        self.line(from, to).link = link;
    }

    /// Sets the loss of all links to 0.
    pub fn lose_nothing(&mut self) {
        for line in &mut self.lines {
            line.link.loss = 0.0;
        }
    }

    /// Returns the duration of a packet and its answer, without waiting and loss.
    pub fn round_trip(&mut self, random: &mut Random, (from, to): (Zone, Zone)) -> Time {
        let there = self.line(from, to).link.delay.draw(random);
        there + self.line(to, from).link.delay.draw(random)
    }

    /// Returns a datagram's arrival times: none if lost, two if duplicated.
    pub fn datagram(
        &mut self,
        random: &mut Random,
        now: Time,
        (from, to): (Zone, Zone),
        bytes: usize,
    ) -> SmallVec<[Time; 2]> {
        let line = self.line(from, to);
        if line.cut {
            return SmallVec::new();
        }
        let sent = line.send(now, bytes);
        let link = line.link;
        let copies = 1 + usize::from(random.chance(link.duplicate));
        let mut arrivals = SmallVec::new();
        for _ in 0..copies {
            if random.chance(link.loss) {
                continue;
            }
            let mut arrival = sent + link.delay.draw(random);
            if random.chance(link.reorder) {
                arrival = arrival + Time::from_ms_f64(link.reorder_ms);
            }
            arrivals.push(arrival);
        }
        arrivals
    }

    /// Returns the arrival time of a message that is retransmitted until it arrives, as in an association; none if it
    /// never arrives, because the zones are separated or all transmissions are lost.
    #[inline]
    pub fn reliable(
        &mut self,
        random: &mut Random,
        now: Time,
        (from, to): (Zone, Zone),
        bytes: usize,
    ) -> Option<Time> {
        let line = self.line(from, to);
        if !line.cut
            && line.link.rate.is_none()
            && line.link.loss == 0.0
            && line.link.reorder == 0.0
        {
            return Some(now + line.link.delay.draw(random));
        }
        let (mut at, mut wait) = (now, RETRANSMISSION);
        for _ in 0..=RETRANSMISSIONS {
            if let Some(first) = self
                .datagram(random, at, (from, to), bytes)
                .into_iter()
                .min()
            {
                return Some(first);
            }
            at = at + wait;
            wait = (wait + wait).min(RETRANSMISSION_MAX);
        }
        None
    }
}

impl Line {
    /// Returns the time at which the last bit of a packet has been sent.
    fn send(&mut self, now: Time, bytes: usize) -> Time {
        let Some(rate) = self.link.rate else {
            return now;
        };
        let takes = Time::from_secs_f64(bytes as f64 * 8.0 / rate);
        self.free = self.free.max(now) + takes;
        self.free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(link: Link) -> (Network, Random) {
        (Network::new(2, |_, _| link), Random::new(5))
    }

    const WAY: (Zone, Zone) = (0, 1);

    #[test]
    fn a_rate_makes_packets_wait_for_each_other() {
        let rate = Some(8_000.0);
        let (mut net, mut random) = one(Link {
            rate,
            ..Link::constant(5.0)
        });
        let mut arrival = |now| net.datagram(&mut random, Time(now), WAY, 10)[0].0;
        assert_eq!(arrival(0), 15_000_000);
        assert_eq!(arrival(0), 25_000_000);
        assert_eq!(arrival(90_000_000), 105_000_000);
    }

    #[test]
    fn shares_are_lost_doubled_and_overtaken() {
        let link = Link {
            loss: 0.25,
            duplicate: 0.5,
            reorder: 0.1,
            reorder_ms: 30.0,
            ..Link::constant(5.0)
        };
        let (mut net, mut random) = one(link);
        let (mut counts, mut late) = ([0; 3], 0);
        for _ in 0..10_000 {
            let arrivals = net.datagram(&mut random, Time::ZERO, WAY, 100);
            counts[arrivals.len()] += 1;
            late += arrivals.iter().filter(|at| at.0 == 35_000_000).count();
        }
        // None arrives: 0.5 * 0.25 + 0.5 * 0.25². Two arrive: 0.5 * 0.75². Copies that arrive: 1.5 * 0.75.
        assert!((1_450..1_675).contains(&counts[0]), "{counts:?}");
        assert!((2_660..2_960).contains(&counts[2]), "{counts:?}");
        assert!((1_000..1_250).contains(&late), "{late}");
    }

    #[test]
    fn what_is_sent_again_arrives_late_and_nothing_crosses_a_cut() {
        let (mut net, mut random) = one(Link {
            loss: 0.5,
            ..Link::constant(5.0)
        });
        let arrivals: Vec<u64> = (0..1_000)
            .map(|_| {
                net.reliable(&mut random, Time::ZERO, WAY, 100)
                    .unwrap_or_default()
                    .0
            })
            .collect();
        let after = |ms: u64| arrivals.iter().filter(|at| **at == ms * 1_000_000).count();
        assert!((440..560).contains(&after(5)) && (200..300).contains(&after(1_005)));
        net.set_cut(1, 0, true);
        assert!(net.is_cut(0, 1) && net.reliable(&mut random, Time::ZERO, WAY, 100).is_none());
        assert!(net.reliable(&mut random, Time::ZERO, (0, 0), 100).is_some());
        net.set_cut(0, 1, false);
        assert!(net.reliable(&mut random, Time::ZERO, WAY, 100).is_some());
    }
}
