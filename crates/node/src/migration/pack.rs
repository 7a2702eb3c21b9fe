//! Compression of memory, used where the link to the acceptor is slower than the compression.
//!
//! Three quantities are measured for each move: the link's rate (without the time that the acceptor works, which
//! compression does not shorten), the rate of compression here, and the compression ratio.

use std::time::{Duration, Instant};

use holdfast_sys::process::image::MESSAGE_MAX;
use lz4_flex::block::{compress_prepend_size, decompress, uncompressed_size};

/// Bytes after which a rate is known.
const KNOWN_BYTES: f64 = (2 << 20) as f64;
/// Bytes after which older measurements count half.
const OLD_BYTES: f64 = (32 << 20) as f64;
/// Number of uncompressed messages before compression is tried again.
const AGAIN: u32 = 32;

/// Rate at which bytes reach the acceptor while some are in transit. Excludes the time for which the acceptor works on
/// them.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Start of the measured interval; `None` while nothing is in transit.
    since: Option<Instant>,
    bytes: f64,
    seconds: f64,
}

impl Pace {
    /// Records that bytes are sent.
    pub(super) fn sends(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// Records that the acceptor has taken bytes after `busy` of work; `more` says that others are in transit.
    pub(super) fn taken(&mut self, now: Instant, (bytes, busy): (usize, Duration), more: bool) {
        let Some(since) = self.since else { return };
        self.bytes += bytes as f64;
        let way = now.duration_since(since).saturating_sub(busy);
        self.seconds += way.as_secs_f64();
        self.since = more.then_some(now);
        if self.bytes > OLD_BYTES {
            self.bytes /= 2.0;
            self.seconds /= 2.0;
        }
    }

    /// Returns the rate in bytes/s, once enough bytes were taken.
    pub(super) fn rate(&self) -> Option<f64> {
        (self.bytes >= KNOWN_BYTES).then(|| self.bytes / self.seconds.max(1e-9))
    }
}

/// Decides for each message whether to compress it.
#[derive(Debug, Default)]
pub(super) struct Packer {
    /// Link rate in bytes/s before compression began, since compressed messages say little about the link.
    rate: Option<f64>,
    packing: bool,
    /// Number of messages until the next attempt.
    wait: u32,
}

impl Packer {
    /// Returns the compressed message if compression makes it arrive sooner. `rate` is the link's, in bytes/s.
    pub(super) fn pack(&mut self, parts: &[&[u8]], rate: Option<f64>) -> Option<Vec<u8>> {
        if !self.packing {
            self.rate = rate;
        }
        let rate = self.rate?;
        if self.wait > 0 {
            self.wait -= 1;
            return None;
        }
        let began = Instant::now();
        let message = parts.concat();
        let packed = compress_prepend_size(&message);
        self.packing = pays(message.len(), packed.len(), began.elapsed(), rate);
        if !self.packing {
            self.wait = AGAIN;
        }
        self.packing.then_some(packed)
    }
}

/// Returns true if sending the saved bytes would take longer than saving them took.
fn pays(bytes: usize, packed: usize, took: Duration, rate: f64) -> bool {
    let saved = bytes.saturating_sub(packed) as f64;
    saved > 0.0 && saved / rate > took.as_secs_f64()
}

/// Decompresses a message.
pub(super) fn unpack(packed: &[u8]) -> Result<Vec<u8>, String> {
    let wrong = |error: lz4_flex::block::DecompressError| format!("compressed memory: {error}");
    let (length, rest) = uncompressed_size(packed).map_err(wrong)?;
    if length > MESSAGE_MAX {
        return Err("compressed memory: it is too long".to_owned());
    }
    decompress(rest, length).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_pays_where_the_way_is_slower() {
        let took = Duration::from_millis(2);
        // 1 MiB that shrinks to a quarter: 786 kB are saved in 2 ms.
        assert!(pays(1 << 20, 1 << 18, took, 100e6));
        assert!(!pays(1 << 20, 1 << 18, took, 1e9));
        assert!(!pays(1 << 20, 1 << 20, took, 1e3));
        assert!(!pays(1 << 20, (1 << 20) + 9, Duration::ZERO, 1e3));
    }

    #[test]
    fn the_rate_is_that_while_something_is_on_its_way() {
        let begin = Instant::now();
        let at = |millis: u64| begin + Duration::from_millis(millis);
        let mut pace = Pace::default();
        for second in 0..4 {
            pace.sends(at(1_000 * second));
            assert_eq!(pace.rate(), None);
            // Half a mebibyte in 10 ms and 3 ms of work, and then a long pause.
            let busy = Duration::from_millis(3);
            pace.taken(at(1_000 * second + 4), (1 << 18, Duration::ZERO), true);
            pace.taken(at(1_000 * second + 13), (1 << 18, busy), false);
        }
        let rate = pace.rate().expect("a rate");
        assert!((rate / f64::from(1 << 19) - 100.0).abs() < 1e-6, "{rate}");
    }

    #[test]
    fn only_what_shrinks_is_packed_and_it_comes_out_again() {
        let even = vec![7; 1 << 20];
        let mut packer = Packer::default();
        assert_eq!(
            packer.pack(&[&even], None),
            None,
            "nothing is known of the way"
        );
        let packed = packer.pack(&[&even], Some(1.0)).expect("a slow way");
        assert!(packed.len() < even.len() / 10);
        assert!(unpack(&packed) == Ok(even.clone()));

        let mut state = 1_u64;
        let noise = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        });
        let noise: Vec<u8> = noise.take(1 << 16).collect();
        assert_eq!(packer.pack(&[&noise], Some(1.0)), None);
        for _ in 0..AGAIN {
            assert_eq!(packer.pack(&[&even], Some(1.0)), None, "not yet again");
        }
        assert!(packer.pack(&[&even], Some(1.0)).is_some());
    }

    #[test]
    fn what_is_malformed_or_too_long_is_refused() {
        assert!(unpack(&[]).is_err());
        let mut packed = compress_prepend_size(&[1, 2, 3, 4]);
        packed[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(unpack(&packed).is_err_and(|why| why.contains("too long")));
        packed[..4].copy_from_slice(&2_u32.to_le_bytes());
        assert!(unpack(&packed).is_err());
    }
}
