//! Resources used by each host: associations, elements, pools, messages a second.

use super::config::ResourceLimits;
use foldhash::fast::FixedState;
use holdfast_wire::rserpool::PoolHandle;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

/// Resources used by one host.
#[derive(Debug, Default)]
struct HostUsage {
    associations: usize,
    elements: usize,
    pools: usize,
    /// Token bucket: messages that the host may still send, in millionths, as of `filled`.
    tokens: u64,
    filled_at: Duration,
    /// Messages over the limit since the bucket was last full.
    excess_messages: u64,
}

const MESSAGE_TOKENS: u64 = 1_000_000;

/// Capacity of the bucket, as the time in which an empty one fills.
const BURST_TIME: Duration = Duration::from_secs(1);

/// Seconds' worth of messages over the limit until an association is aborted.
const EXCESS_SECONDS_MAX: u64 = 10;

/// Decision about a message of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageVerdict {
    Admitted,
    /// Dropped: the host sends too many.
    Dropped,
    /// Dropped, and the association is aborted: the host does not stop.
    Aborted,
}

impl ResourceLimits {
    /// Returns the host to which an address counts.
    #[inline]
    pub(super) fn host_of(&self, address: IpAddr) -> IpAddr {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let host_part_bits = 128 - u32::from(self.ipv6_host_bits.min(128));
                let mask = u128::MAX.checked_shl(host_part_bits).unwrap_or(0);
                Ipv6Addr::from_bits(address.to_bits() & mask).into()
            }
            address => address,
        }
    }
}

/// Resources of all hosts. The hashers are seeded, because other hosts choose addresses and handles.
#[derive(Debug)]
pub(super) struct HostQuotas {
    hosts: HashMap<IpAddr, HostUsage, FixedState>,
    /// Hosts that founded the pools with elements here.
    founders: HashMap<PoolHandle, IpAddr, FixedState>,
    /// Hosts without associations, with the times at which their buckets are full: a host that reconnects sooner has
    /// not rested.
    idle_hosts: VecDeque<(Duration, IpAddr)>,
}

impl HostQuotas {
    pub(super) fn new(seed: u64) -> HostQuotas {
        HostQuotas {
            hosts: HashMap::with_hasher(FixedState::with_seed(seed)),
            founders: HashMap::with_hasher(FixedState::with_seed(seed)),
            idle_hosts: VecDeque::new(),
        }
    }

    /// Adds an association; returns false if the host has too many.
    pub(super) fn add_association(
        &mut self,
        now: Duration,
        host: IpAddr,
        limits: &ResourceLimits,
    ) -> bool {
        self.remove_unused(now);
        let full = u64::from(limits.messages_per_second) * MESSAGE_TOKENS;
        let host = self.hosts.entry(host).or_insert_with(|| HostUsage {
            tokens: full,
            filled_at: now,
            ..HostUsage::default()
        });
        let admitted = host.associations < limits.associations_per_host;
        host.associations += usize::from(admitted);
        admitted
    }

    /// Counts the end of a host's association.
    pub(super) fn remove_association(&mut self, now: Duration, host: IpAddr) {
        self.remove_unused(now);
        if let Some(used) = self.hosts.get_mut(&host) {
            used.associations -= 1;
            if used.associations == 0 {
                self.idle_hosts.push_back((now + BURST_TIME, host));
            }
        }
    }

    fn remove_unused(&mut self, now: Duration) {
        let is_unused =
            |host: &HostUsage| host.associations == 0 && host.pools == 0 && host.elements == 0;
        while let Some(&(at, host)) = self.idle_hosts.front()
            && at <= now
        {
            self.idle_hosts.pop_front();
            if self.hosts.get(&host).is_some_and(is_unused) {
                self.hosts.remove(&host);
            }
        }
    }

    /// Counts a message of a host, and decides by the host's rate whether to drop it.
    #[inline]
    pub(super) fn count_message(
        &mut self,
        now: Duration,
        host: IpAddr,
        limits: &ResourceLimits,
    ) -> MessageVerdict {
        let Some(host) = self.hosts.get_mut(&host) else {
            return MessageVerdict::Dropped;
        };
        let rate = u64::from(limits.messages_per_second);
        let passed = now.saturating_sub(host.filled_at).min(BURST_TIME);
        host.filled_at = now;
        // Microseconds times messages a second are millionths of a message.
        let filled = host.tokens + passed.as_micros() as u64 * rate;
        let full = rate * MESSAGE_TOKENS;
        if filled >= full {
            host.excess_messages = 0;
        }
        host.tokens = filled.min(full);
        if host.tokens >= MESSAGE_TOKENS {
            host.tokens -= MESSAGE_TOKENS;
            return MessageVerdict::Admitted;
        }
        host.excess_messages += 1;
        match host.excess_messages % (rate * EXCESS_SECONDS_MAX).max(1) {
            0 => MessageVerdict::Aborted,
            _ => MessageVerdict::Dropped,
        }
    }

    /// Counts a new element of a host.
    pub(super) fn add_element(&mut self, host: IpAddr) {
        if let Some(host) = self.hosts.get_mut(&host) {
            host.elements += 1;
        }
    }

    /// Counts a removed element of a host.
    pub(super) fn remove_element(&mut self, host: IpAddr) {
        self.release_resource(host, |used| &mut used.elements);
    }

    /// Counts the removal of a resource that can outlast a host's associations.
    fn release_resource(&mut self, host: IpAddr, resource: fn(&mut HostUsage) -> &mut usize) {
        if let Some(used) = self.hosts.get_mut(&host) {
            *resource(used) -= 1;
            if used.associations == 0 {
                self.idle_hosts
                    .push_back((used.filled_at + BURST_TIME, host));
            }
        }
    }

    /// Returns true if a host may have one more element.
    pub(super) fn admits_element(&self, host: IpAddr, limits: &ResourceLimits) -> bool {
        let host = self.hosts.get(&host);
        host.is_some_and(|host| host.elements < limits.elements_per_host)
    }

    /// Returns true if a host may found one more pool.
    pub(super) fn admits_pool(&self, host: IpAddr, limits: &ResourceLimits) -> bool {
        let host = self.hosts.get(&host);
        host.is_some_and(|host| host.pools < limits.pools_per_host)
    }

    /// Counts a pool founded by a host's element.
    pub(super) fn add_pool(&mut self, host: IpAddr, handle: PoolHandle) {
        if let Some(used) = self.hosts.get_mut(&host) {
            used.pools += 1;
            self.founders.insert(handle, host);
        }
    }

    /// Counts the end of a pool for the host that founded it.
    pub(super) fn remove_pool(&mut self, handle: &PoolHandle) {
        let Some(host) = self.founders.remove(handle) else {
            return;
        };
        self.release_resource(host, |used| &mut used.pools);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn ipv6_network_counts_as_one_host() {
        let mut limits = ResourceLimits::default();
        let host = |limits: &ResourceLimits, text| limits.host_of(at(text));
        let one = host(&limits, "2001:db8:0:1::1");
        assert_eq!(one, host(&limits, "2001:db8:0:1:ffff::2"));
        assert_ne!(one, host(&limits, "2001:db8:0:2::1"));
        assert_eq!(host(&limits, "::ffff:10.0.0.1"), at("10.0.0.1"));
        limits.ipv6_host_bits = 128;
        assert_eq!(host(&limits, "2001:db8::1"), at("2001:db8::1"));
        limits.ipv6_host_bits = 0;
        assert_eq!(host(&limits, "2001:db8::1"), at("::"));
    }

    /// A host that disconnects and reconnects has no new bucket.
    #[test]
    fn reconnecting_host_keeps_its_bucket() {
        let limits = ResourceLimits {
            messages_per_second: 5,
            ..ResourceLimits::default()
        };
        let (mut hosts, host) = (HostQuotas::new(1), at("10.0.0.1"));
        let mut admitted = 0;
        for _ in 0..10 {
            assert!(hosts.add_association(Duration::ZERO, host, &limits));
            let verdicts = (0..5).map(|_| hosts.count_message(Duration::ZERO, host, &limits));
            admitted += verdicts.filter(|v| *v == MessageVerdict::Admitted).count();
            hosts.remove_association(Duration::ZERO, host);
        }
        assert_eq!(admitted, 5);
        hosts.remove_unused(BURST_TIME);
        assert!(hosts.hosts.is_empty() && hosts.idle_hosts.is_empty());
    }

    #[test]
    fn persistent_flooder_is_aborted() {
        let limits = ResourceLimits {
            messages_per_second: 2,
            ..ResourceLimits::default()
        };
        let (mut hosts, host) = (HostQuotas::new(1), at("10.0.0.1"));
        assert!(hosts.add_association(Duration::ZERO, host, &limits));
        let mut send = |at: u64| hosts.count_message(Duration::from_secs(at), host, &limits);
        let first: Vec<_> = (0..22).map(|_| send(0)).collect();
        let aborted_at = first
            .iter()
            .position(|verdict| *verdict == MessageVerdict::Aborted);
        assert_eq!(aborted_at, Some(21));
        // After a rest the excess is forgotten.
        assert_eq!(send(1), MessageVerdict::Admitted);
        let later_verdicts: Vec<_> = (0..20).map(|_| send(1)).collect();
        assert!(!later_verdicts.contains(&MessageVerdict::Aborted));
    }

    #[test]
    fn pool_counts_for_founding_host_until_removed() {
        let limits = ResourceLimits {
            pools_per_host: 1,
            ..ResourceLimits::default()
        };
        let (mut hosts, host) = (HostQuotas::new(1), at("10.0.0.1"));
        assert!(hosts.add_association(Duration::ZERO, host, &limits));
        hosts.add_pool(host, "pool".into());
        assert!(!hosts.admits_pool(host, &limits));
        // The end of the host's association does not change that.
        hosts.remove_association(Duration::ZERO, host);
        assert!(hosts.add_association(BURST_TIME, host, &limits));
        assert!(!hosts.admits_pool(host, &limits));
        hosts.remove_pool(&"another".into());
        hosts.remove_pool(&"pool".into());
        assert!(hosts.admits_pool(host, &limits));
        hosts.remove_association(BURST_TIME, host);
        hosts.remove_unused(BURST_TIME * 2);
        assert!(hosts.hosts.is_empty() && hosts.idle_hosts.is_empty());
    }
}
