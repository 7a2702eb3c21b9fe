//! Counts of wrong tokens by source, so that nobody can keep a node busy with guesses.

use core::time::Duration;
use std::collections::BTreeMap;
use std::net::IpAddr;

use super::EnrolmentConfig;

/// Most sources that are counted one by one; further ones count in the total alone.
const SOURCES_MAX: usize = 1_024;
/// Bits of an IPv6 address that stand for one source, since a host may have all addresses of such a prefix.
const IPV6_PREFIX_BITS: u32 = 64;

/// Wrong tokens of the current window.
#[derive(Debug)]
pub(super) struct WrongTokens {
    window: Duration,
    per_source_max: u32,
    total_max: u32,
    window_start: Duration,
    total: u32,
    by_source: BTreeMap<IpAddr, u32>,
}

impl WrongTokens {
    pub(super) fn new(config: &EnrolmentConfig) -> WrongTokens {
        WrongTokens {
            window: config.wrong_window,
            per_source_max: config.wrong_per_source_max,
            total_max: config.wrong_total_max,
            window_start: Duration::ZERO,
            total: 0,
            by_source: BTreeMap::new(),
        }
    }

    /// Returns true if `source` has wrong tokens left.
    pub(super) fn admits(&mut self, now: Duration, source: IpAddr) -> bool {
        // A clock that was set back begins a new window too.
        let is_inside = now >= self.window_start && now < self.window_start + self.window;
        if !is_inside {
            self.window_start = now;
            self.total = 0;
            self.by_source.clear();
        }
        let count = self
            .by_source
            .get(&source_key(source))
            .copied()
            .unwrap_or(0);
        count < self.per_source_max && self.total < self.total_max
    }

    /// Counts a wrong token, after [`WrongTokens::admits`].
    pub(super) fn add(&mut self, now: Duration, source: IpAddr) {
        if self.total == 0 {
            self.window_start = now;
        }
        self.total += 1;
        let source = source_key(source);
        if self.by_source.len() < SOURCES_MAX || self.by_source.contains_key(&source) {
            *self.by_source.entry(source).or_default() += 1;
        }
    }
}

fn source_key(source: IpAddr) -> IpAddr {
    match source.to_canonical() {
        IpAddr::V6(address) => {
            let mask = u128::MAX << (u128::BITS - IPV6_PREFIX_BITS);
            IpAddr::V6((u128::from(address) & mask).into())
        }
        v4 => v4,
    }
}
