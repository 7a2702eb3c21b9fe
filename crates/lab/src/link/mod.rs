//! The link: delay, jitter, rate, queue and loss of one direction. A sans-IO state machine: time is an argument.
//!
//! A packet that enters is lost with the configured probability, otherwise queued for the transmitter, or dropped
//! if that queue is full. The transmitter sends packets in sequence at the configured rate; each packet then travels
//! for the configured delay. Order is kept: jitter never lets a packet overtake another.
//!
//! The loss and jitter of the n-th packet depend on the seed and n alone: the same seed and number of packets give the
//! same losses.

mod link_program;
mod split_mix64;

use std::{collections::VecDeque, time::Duration};

use serde::{Deserialize, Serialize};

pub use link_program::{DirectionCounters, DuplexCounters};
pub(crate) use link_program::{LinkTask, SplicedLink, run};
use split_mix64::SplitMix64;

/// Properties of one direction of a link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkConfig {
    /// Time from the end of a packet's transmission to its arrival.
    pub delay: Duration,
    /// Maximum addition to the delay, uniformly distributed.
    pub jitter: Duration,
    /// Bits per second of Ethernet frames, from destination address to payload (no preamble, checksum or gap); none: no
    /// limit.
    pub rate_bits: Option<u64>,
    /// Maximum number of packets waiting for the transmitter, including the one being sent. Without a rate no packet
    /// waits.
    pub queue_packets: usize,
    /// The probability of loss in units of 2^-32, so that a file represents it exactly: 0 never, 2^32 always.
    pub loss: u64,
    /// Seed of the sequence of losses and jitter.
    pub seed: u64,
}

/// The [`LinkConfig::loss`] that loses every packet.
pub const LOSS_ALWAYS: u64 = 1 << 32;

/// Default length of the queue, in packets.
pub const QUEUE_PACKETS_DEFAULT: usize = 1000;

impl Default for LinkConfig {
    fn default() -> LinkConfig {
        LinkConfig {
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            rate_bits: None,
            queue_packets: QUEUE_PACKETS_DEFAULT,
            loss: 0,
            seed: 0,
        }
    }
}

/// Counters of one direction. `entered = lost + dropped + delivered + in_flight`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkCounters {
    /// Packets that entered.
    pub entered: u64,
    /// Packets lost by chance.
    pub lost: u64,
    /// Packets dropped because the queue was full.
    pub dropped: u64,
    /// Packets that left.
    pub delivered: u64,
    /// Bytes of the packets that left.
    pub delivered_bytes: u64,
    /// Packets that are queued or travelling.
    pub in_flight: u64,
}

impl std::iter::Sum for LinkCounters {
    fn sum<I: Iterator<Item = LinkCounters>>(each: I) -> LinkCounters {
        each.fold(LinkCounters::default(), |sum, one| LinkCounters {
            entered: sum.entered + one.entered,
            lost: sum.lost + one.lost,
            dropped: sum.dropped + one.dropped,
            delivered: sum.delivered + one.delivered,
            delivered_bytes: sum.delivered_bytes + one.delivered_bytes,
            in_flight: sum.in_flight + one.in_flight,
        })
    }
}

/// One direction of a link, with the packets inside it.
#[derive(Debug)]
pub struct EmulatedLink<P> {
    config: LinkConfig,
    random: SplitMix64,
    /// Time at which the transmitter becomes idle.
    transmitter_idle_at: Duration,
    /// Time at which each waiting packet's transmission ends.
    transmission_ends: VecDeque<Duration>,
    /// Travelling packets with their arrival times, which never decrease.
    in_flight: VecDeque<(Duration, P)>,
    counters: LinkCounters,
}

impl<P: AsRef<[u8]>> EmulatedLink<P> {
    /// Creates an empty link.
    #[must_use]
    pub fn new(config: LinkConfig) -> EmulatedLink<P> {
        EmulatedLink {
            random: SplitMix64::new(config.seed),
            config,
            transmitter_idle_at: Duration::ZERO,
            transmission_ends: VecDeque::new(),
            in_flight: VecDeque::new(),
            counters: LinkCounters::default(),
        }
    }

    /// Handles a packet that enters at `now`. Times must not decrease from call to call.
    pub fn handle_packet(&mut self, now: Duration, packet: P) {
        self.counters.entered += 1;
        // Draw both for every packet, so that the n-th packet's fate depends on n alone.
        let (loss_draw, jitter_draw) = (self.random.next_u32(), self.random.next_u32());
        if loss_draw < self.config.loss {
            self.counters.lost += 1;
            return;
        }
        while self
            .transmission_ends
            .front()
            .is_some_and(|end| *end <= now)
        {
            self.transmission_ends.pop_front();
        }
        if self.transmission_ends.len() >= self.config.queue_packets.max(1) {
            self.counters.dropped += 1;
            return;
        }
        let bytes = packet.as_ref().len();
        let sent_at = self.schedule_transmission(now, bytes);
        let arrives_at = sent_at + self.config.delay + self.jitter_from(jitter_draw);
        let last = self.in_flight.back().map_or(Duration::ZERO, |(at, _)| *at);
        self.in_flight.push_back((arrives_at.max(last), packet));
        self.counters.in_flight += 1;
    }

    /// Returns the next packet that has arrived by `now`; call until none.
    pub fn poll_packet(&mut self, now: Duration) -> Option<P> {
        if self.poll_timeout()? > now {
            return None;
        }
        let (_, packet) = self.in_flight.pop_front()?;
        self.counters.delivered += 1;
        self.counters.delivered_bytes += packet.as_ref().len() as u64;
        self.counters.in_flight -= 1;
        Some(packet)
    }

    /// Returns the time at which `poll_packet` has its next packet.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.in_flight.front().map(|(at, _)| *at)
    }

    /// Returns the counters of the link's packets.
    #[must_use]
    pub fn counters(&self) -> LinkCounters {
        self.counters
    }

    /// Passes the packet to the transmitter; returns the time at which its transmission ends.
    fn schedule_transmission(&mut self, now: Duration, bytes: usize) -> Duration {
        let Some(rate) = self.config.rate_bits else {
            return now;
        };
        let nanos = bytes as u128 * 8 * 1_000_000_000 / u128::from(rate.max(1));
        let duration = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.transmitter_idle_at = self.transmitter_idle_at.max(now) + duration;
        self.transmission_ends.push_back(self.transmitter_idle_at);
        self.transmitter_idle_at
    }

    fn jitter_from(&self, draw: u64) -> Duration {
        let nanos = self.config.jitter.as_nanos() * u128::from(draw) / u128::from(LOSS_ALWAYS);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests;
