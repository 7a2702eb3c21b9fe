//! Networks: zones, and a link between every two of them.

use crate::random::Random;
use crate::time::Time;
use serde::Deserialize;
use smallvec::SmallVec;

/// One-way delay of a packet, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[expect(missing_docs, reason = "fields that say no more than their name")]
pub enum DelayDistribution {
    /// A fixed delay.
    Constant(f64),
    /// Uniformly distributed between the two.
    Uniform { least: f64, most: f64 },
    /// A minimum plus an exponentially distributed part.
    Exponential { least: f64, beyond: f64 },
    /// Normally distributed, but at least 0.
    Normal { mean: f64, deviation: f64 },
}

impl DelayDistribution {
    /// Draws the delay of one packet.
    pub fn draw(self, random: &mut Random) -> Time {
        Time::from_ms_f64(match self {
            DelayDistribution::Constant(always) => always,
            DelayDistribution::Uniform { least, most } => {
                least + (most - least) * random.fraction()
            }
            DelayDistribution::Exponential { least, beyond } => least + random.exponential(beyond),
            DelayDistribution::Normal { mean, deviation } => random.normal(mean, deviation),
        })
    }

    /// Returns the mean delay, in milliseconds.
    #[must_use]
    pub fn mean_ms(self) -> f64 {
        match self {
            DelayDistribution::Constant(always) => always,
            DelayDistribution::Uniform { least, most } => f64::midpoint(least, most),
            DelayDistribution::Exponential { least, beyond } => least + beyond,
            DelayDistribution::Normal { mean, .. } => mean,
        }
    }
}

/// Properties of a link in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkProperties {
    /// Delay of each packet.
    pub delay: DelayDistribution,
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

impl LinkProperties {
    /// Returns a link with a fixed delay and no other effect.
    #[must_use]
    pub fn constant(delay_ms: f64) -> LinkProperties {
        LinkProperties {
            delay: DelayDistribution::Constant(delay_ms),
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
struct LinkState {
    link: LinkProperties,
    /// Time at which the rate admits the next packet.
    free_at: Time,
    is_cut: bool,
}

/// A place: all its hosts have the same distances to all others.
pub type Zone = u16;

/// Initial and maximum retransmission timeout (RFC 9260 section 16: RTO.Initial, RTO.Max).
const RTO_INITIAL: Time = Time(1_000_000_000);
const RTO_MAX: Time = Time(60_000_000_000);
/// Number of retransmissions before an association is given up (Association.Max.Retrans).
const RETRANSMISSIONS_MAX: u32 = 10;

/// Zones, and the links between them.
#[derive(Debug)]
pub struct Network {
    zones: usize,
    links: Vec<LinkState>,
}

impl Network {
    /// Creates a network; `link` returns the link between two zones, or within one.
    pub fn new(zones: usize, mut link: impl FnMut(Zone, Zone) -> LinkProperties) -> Network {
        let count = u16::try_from(zones).unwrap_or(u16::MAX);
        let pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        let line = |(from, to)| LinkState {
            link: link(from, to),
            free_at: Time::ZERO,
            is_cut: false,
        };
        let lines = pairs.map(line).collect();
        Network {
            zones,
            links: lines,
        }
    }

    fn link_state(&mut self, from: Zone, to: Zone) -> &mut LinkState {
        &mut self.links[usize::from(from) * self.zones + usize::from(to)]
    }

    /// Separates two zones in both directions, or connects them again.
    pub fn set_cut(&mut self, a: Zone, b: Zone, cut: bool) {
        self.link_state(a, b).is_cut = cut;
        self.link_state(b, a).is_cut = cut;
    }

    /// Returns true if the zones are separated.
    pub fn is_cut(&mut self, a: Zone, b: Zone) -> bool {
        self.link_state(a, b).is_cut
    }

    /// Changes the properties of a link.
    pub fn set_link(&mut self, from: Zone, to: Zone, link: LinkProperties) {
        self.link_state(from, to).link = link;
    }

    /// Sets the loss of all links to 0.
    pub fn clear_loss(&mut self) {
        for line in &mut self.links {
            line.link.loss = 0.0;
        }
    }

    /// Returns the duration of a packet and its answer, without waiting and loss.
    pub fn round_trip(&mut self, random: &mut Random, (from, to): (Zone, Zone)) -> Time {
        let forward_delay = self.link_state(from, to).link.delay.draw(random);
        forward_delay + self.link_state(to, from).link.delay.draw(random)
    }

    /// Returns a datagram's arrival times: none if lost, two if duplicated.
    pub fn send_datagram(
        &mut self,
        random: &mut Random,
        now: Time,
        (from, to): (Zone, Zone),
        bytes: usize,
    ) -> SmallVec<[Time; 2]> {
        let line = self.link_state(from, to);
        if line.is_cut {
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
    pub fn send_reliably(
        &mut self,
        random: &mut Random,
        now: Time,
        (from, to): (Zone, Zone),
        bytes: usize,
    ) -> Option<Time> {
        let line = self.link_state(from, to);
        if !line.is_cut
            && line.link.rate.is_none()
            && line.link.loss == 0.0
            && line.link.reorder == 0.0
        {
            return Some(now + line.link.delay.draw(random));
        }
        let (mut at, mut wait) = (now, RTO_INITIAL);
        for _ in 0..=RETRANSMISSIONS_MAX {
            if let Some(first) = self
                .send_datagram(random, at, (from, to), bytes)
                .into_iter()
                .min()
            {
                return Some(first);
            }
            at = at + wait;
            wait = (wait + wait).min(RTO_MAX);
        }
        None
    }
}

impl LinkState {
    /// Returns the time at which the last bit of a packet has been sent.
    fn send(&mut self, now: Time, bytes: usize) -> Time {
        let Some(rate) = self.link.rate else {
            return now;
        };
        let takes = Time::from_secs_f64(bytes as f64 * 8.0 / rate);
        self.free_at = self.free_at.max(now) + takes;
        self.free_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn single_link(link: LinkProperties) -> (Network, Random) {
        (Network::new(2, |_, _| link), Random::new(5))
    }

    const ZONES: (Zone, Zone) = (0, 1);

    #[test]
    fn rate_limit_queues_packets() {
        let rate = Some(8_000.0);
        let (mut net, mut random) = single_link(LinkProperties {
            rate,
            ..LinkProperties::constant(5.0)
        });
        let mut arrival = |now| net.send_datagram(&mut random, Time(now), ZONES, 10)[0].0;
        assert_eq!(arrival(0), 15_000_000);
        assert_eq!(arrival(0), 25_000_000);
        assert_eq!(arrival(90_000_000), 105_000_000);
    }

    #[test]
    fn loss_duplication_and_reordering_occur_at_their_rates() {
        let link = LinkProperties {
            loss: 0.25,
            duplicate: 0.5,
            reorder: 0.1,
            reorder_ms: 30.0,
            ..LinkProperties::constant(5.0)
        };
        let (mut net, mut random) = single_link(link);
        let (mut counts, mut late) = ([0; 3], 0);
        for _ in 0..10_000 {
            let arrivals = net.send_datagram(&mut random, Time::ZERO, ZONES, 100);
            counts[arrivals.len()] += 1;
            late += arrivals.iter().filter(|at| at.0 == 35_000_000).count();
        }
        // None arrives: 0.5 * 0.25 + 0.5 * 0.25². Two arrive: 0.5 * 0.75². Copies that arrive: 1.5 * 0.75.
        assert!((1_450..1_675).contains(&counts[0]), "{counts:?}");
        assert!((2_660..2_960).contains(&counts[2]), "{counts:?}");
        assert!((1_000..1_250).contains(&late), "{late}");
    }

    #[test]
    fn retransmissions_arrive_late_and_a_cut_blocks_all_packets() {
        let (mut net, mut random) = single_link(LinkProperties {
            loss: 0.5,
            ..LinkProperties::constant(5.0)
        });
        let arrivals: Vec<u64> = (0..1_000)
            .map(|_| {
                net.send_reliably(&mut random, Time::ZERO, ZONES, 100)
                    .unwrap_or_default()
                    .0
            })
            .collect();
        let after = |ms: u64| arrivals.iter().filter(|at| **at == ms * 1_000_000).count();
        assert!((440..560).contains(&after(5)) && (200..300).contains(&after(1_005)));
        net.set_cut(1, 0, true);
        assert!(
            net.is_cut(0, 1)
                && net
                    .send_reliably(&mut random, Time::ZERO, ZONES, 100)
                    .is_none()
        );
        assert!(
            net.send_reliably(&mut random, Time::ZERO, (0, 0), 100)
                .is_some()
        );
        net.set_cut(0, 1, false);
        assert!(
            net.send_reliably(&mut random, Time::ZERO, ZONES, 100)
                .is_some()
        );
    }
}
