//! Limit of the answers by UDP to each network of clients: the server must be no amplifier for packets with a forged
//! source (response rate limiting, ISC-TN-2012-1).
//!
//! The table has a fixed size. Networks that share a bucket share its rate; a client with a real address then still gets
//! answers by TCP.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::time::Duration;

/// Number of token buckets for clients' networks.
const BUCKETS: usize = 1 << 14;
/// One token in parts, so that tokens come at each millisecond.
const TOKEN: u32 = 1_000;

/// The network of a client: the first 24 bits of an IPv4 address, or the first 56 bits of an IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientPrefix(u64);

impl From<IpAddr> for ClientPrefix {
    fn from(address: IpAddr) -> ClientPrefix {
        match address.to_canonical() {
            IpAddr::V4(address) => ClientPrefix(u64::from(u32::from(address) >> 8)),
            IpAddr::V6(address) => {
                let start = (u128::from(address) >> 64) as u64;
                ClientPrefix(start & !0xff)
            }
        }
    }
}

/// Decision whether an answer goes out to a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// The answer may go out.
    Answer,
    /// A truncated answer, no longer than the query, tells a real client to ask by TCP.
    Truncate,
    /// The client gets no answer.
    Drop,
}

/// Token buckets of the clients' networks.
#[derive(Debug)]
pub struct ResponseLimit {
    rate_per_s: u32,
    seed: u64,
    buckets: Vec<Bucket>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    /// Thousandths of tokens.
    parts: u32,
    filled_at_ms: u32,
    /// True if the next refused answer is truncated instead of dropped.
    is_truncation_next: bool,
}

impl ResponseLimit {
    /// Returns a limit of `rate_per_s` answers per second, at most 4,000,000, to each network, with bursts of one
    /// second. `seed` must be secret, so that nobody can choose networks that share a bucket.
    pub fn new(rate_per_s: u32, seed: u64) -> ResponseLimit {
        let rate_per_s = rate_per_s.min(u32::MAX / TOKEN);
        let full = Bucket {
            parts: rate_per_s * TOKEN,
            filled_at_ms: 0,
            is_truncation_next: true,
        };
        ResponseLimit {
            rate_per_s,
            seed,
            buckets: vec![full; BUCKETS],
        }
    }

    /// Decides about the next answer to a client.
    pub(crate) fn admit(&mut self, now: Duration, client: IpAddr) -> Admission {
        let mut hasher = DefaultHasher::new();
        (self.seed, ClientPrefix::from(client)).hash(&mut hasher);
        let index = hasher.finish() as usize % BUCKETS;
        let full = self.rate_per_s * TOKEN;
        let bucket = &mut self.buckets[index];
        // Wraps around after 49 days, when a bucket may stay as full as it was for once.
        let now_ms = now.as_millis() as u32;
        let elapsed_ms = now_ms.wrapping_sub(bucket.filled_at_ms);
        bucket.filled_at_ms = now_ms;
        let gained = elapsed_ms.saturating_mul(self.rate_per_s);
        bucket.parts = bucket.parts.saturating_add(gained).min(full);
        if bucket.parts >= TOKEN {
            bucket.parts -= TOKEN;
            return Admission::Answer;
        }
        let is_truncated = bucket.is_truncation_next;
        bucket.is_truncation_next = !is_truncated;
        match is_truncated {
            true => Admission::Truncate,
            false => Admission::Drop,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_network_has_one_rate() {
        let mut limit = ResponseLimit::new(10, 1);
        for host in 0..10 {
            let host = client(&format!("192.0.2.{host}"));
            assert_eq!(limit.admit(Duration::ZERO, host), Admission::Answer);
        }
        let host = client("::ffff:192.0.2.200");
        assert_eq!(limit.admit(Duration::ZERO, host), Admission::Truncate);
        assert_eq!(limit.admit(Duration::ZERO, host), Admission::Drop);
        assert_eq!(limit.admit(Duration::ZERO, host), Admission::Truncate);
        let other = client("198.51.100.1");
        assert_eq!(limit.admit(Duration::ZERO, other), Admission::Answer);
        let later = Duration::from_millis(100);
        assert_eq!(limit.admit(later, host), Admission::Answer);
        assert_eq!(limit.admit(later, host), Admission::Drop);
    }

    #[test]
    fn silence_fills_the_bucket_and_no_more() {
        let mut limit = ResponseLimit::new(2, 1);
        let host = client("2001:db8::1");
        let later = Duration::from_secs(3_600);
        let answers = (0..10).filter(|_| limit.admit(later, host) == Admission::Answer);
        assert_eq!(answers.count(), 2);
    }

    #[test]
    fn prefix_has_24_or_56_bits() {
        let prefix = |text: &str| ClientPrefix::from(client(text));
        assert_eq!(prefix("192.0.2.1"), prefix("192.0.2.254"));
        assert_ne!(prefix("192.0.2.1"), prefix("192.0.3.1"));
        assert_eq!(prefix("2001:db8:0:1::1"), prefix("2001:db8:0:ff::1"));
        assert_ne!(prefix("2001:db8:0:1::1"), prefix("2001:db8:0:100::1"));
    }
}
