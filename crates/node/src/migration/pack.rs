//! Memory is compressed where the way to the acceptor is slower than that.
//!
//! Measured, for each move anew: how fast the way is (what the acceptor itself does not count, which compression does not
//! make shorter), how fast memory is compressed here, and by how much.

use std::time::{Duration, Instant};

use holdfast_sys::process::image::MESSAGE_MAX;
use lz4_flex::block::{compress_prepend_size, decompress, uncompressed_size};

/// Bytes after which a rate is known.
const KNOWN_BYTES: f64 = (2 << 20) as f64;
/// Bytes after which what was measured before counts half.
const OLD_BYTES: f64 = (32 << 20) as f64;
/// Messages that are sent as they are before compression is tried again.
const AGAIN: u32 = 32;

/// How fast bytes go to the acceptor, while some are on their way: the time for which the acceptor works on them is not the
/// way's.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Since when the time counts; none while nothing is on its way.
    since: Option<Instant>,
    bytes: f64,
    seconds: f64,
}

impl Pace {
    /// Something is sent.
    pub(super) fn sends(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// So many bytes were taken, on which the acceptor worked for so long; `more` are on their way.
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

    /// Bytes a second, once enough were taken.
    pub(super) fn rate(&self) -> Option<f64> {
        (self.bytes >= KNOWN_BYTES).then(|| self.bytes / self.seconds.max(1e-9))
    }
}

/// Decides message by message.
#[derive(Debug, Default)]
pub(super) struct Packer {
    /// Of the way, as it was before compression began: what is packed says little of it.
    rate: Option<f64>,
    packing: bool,
    /// Messages until the next try.
    wait: u32,
}

impl Packer {
    /// A message in parts, compressed, if it is there sooner then. `rate` is that of the way, bytes a second.
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

/// Whether the bytes that are saved would take longer on their way than it took to save them.
fn pays(bytes: usize, packed: usize, took: Duration, rate: f64) -> bool {
    let saved = bytes.saturating_sub(packed) as f64;
    saved > 0.0 && saved / rate > took.as_secs_f64()
}

/// What was packed.
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
            // Half a mebibyte in 10 ms and 3 ms of work, and then nothing for long.
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
