//! Compression of memory, used where the link to the acceptor is slower than the compression.
//!
//! Three quantities are measured for each move: the link's rate (without the time that the acceptor works, which
//! compression does not shorten), the rate of compression here, and the compression ratio.

use std::time::{Duration, Instant};

use holdfast_checkpoint::image::MESSAGE_MAX;
use holdfast_wire::failure::{Failure, ProtocolViolation, Text};
use lz4_flex::block::{compress_prepend_size, decompress, uncompressed_size};

/// Bytes after which a rate is known.
const RATE_KNOWN_BYTES: f64 = (2 << 20) as f64;
/// Bytes after which older measurements count half.
const HALVING_BYTES: f64 = (32 << 20) as f64;
/// Number of uncompressed messages before compression is tried again.
const RETRY_MESSAGES: u32 = 32;

/// Rate at which bytes reach the acceptor while some are in transit. Excludes the time for which the acceptor works on
/// them.
#[derive(Debug, Default)]
pub(super) struct LinkRate {
    /// Start of the measured interval; `None` while nothing is in transit.
    measuring_since: Option<Instant>,
    bytes: f64,
    seconds: f64,
}

impl LinkRate {
    /// Records that bytes are sent.
    pub(super) fn on_send(&mut self, now: Instant) {
        self.measuring_since.get_or_insert(now);
    }

    /// Records that the acceptor has taken bytes after `busy` of work; `is_more_in_transit` says that others are in transit.
    pub(super) fn on_taken(
        &mut self,
        now: Instant,
        (bytes, busy): (usize, Duration),
        is_more_in_transit: bool,
    ) {
        let Some(since) = self.measuring_since else {
            return;
        };
        self.bytes += bytes as f64;
        let link_time = now.duration_since(since).saturating_sub(busy);
        self.seconds += link_time.as_secs_f64();
        self.measuring_since = is_more_in_transit.then_some(now);
        if self.bytes > HALVING_BYTES {
            self.bytes /= 2.0;
            self.seconds /= 2.0;
        }
    }

    /// Returns the rate in bytes/s, once enough bytes were taken.
    pub(super) fn bytes_per_s(&self) -> Option<f64> {
        (self.bytes >= RATE_KNOWN_BYTES).then(|| self.bytes / self.seconds.max(1e-9))
    }
}

/// Decides for each message whether to compress it.
#[derive(Debug, Default)]
pub(super) struct Compressor {
    /// Link rate in bytes/s before compression began, since compressed messages say little about the link.
    link_rate: Option<f64>,
    is_compressing: bool,
    /// Number of messages until the next attempt.
    messages_until_retry: u32,
}

impl Compressor {
    /// Returns the compressed message if compression makes it arrive sooner. `rate` is the link's, in bytes/s.
    pub(super) fn compress(&mut self, parts: &[&[u8]], rate: Option<f64>) -> Option<Vec<u8>> {
        if !self.is_compressing {
            self.link_rate = rate;
        }
        let rate = self.link_rate?;
        if self.messages_until_retry > 0 {
            self.messages_until_retry -= 1;
            return None;
        }
        let began = Instant::now();
        let message = parts.concat();
        let compressed = compress_prepend_size(&message);
        self.is_compressing = is_worthwhile(message.len(), compressed.len(), began.elapsed(), rate);
        if !self.is_compressing {
            self.messages_until_retry = RETRY_MESSAGES;
        }
        self.is_compressing.then_some(compressed)
    }
}

/// Returns true if sending the saved bytes would take longer than saving them took.
fn is_worthwhile(bytes: usize, compressed: usize, elapsed: Duration, rate: f64) -> bool {
    let saved = bytes.saturating_sub(compressed) as f64;
    saved > 0.0 && saved / rate > elapsed.as_secs_f64()
}

/// Decompresses a message with memory of a moving process.
pub(super) fn decompress_message(packed: &[u8]) -> Result<Vec<u8>, Failure> {
    let unreadable = |error: lz4_flex::block::DecompressError| {
        Failure::from(ProtocolViolation::MemoryUnreadable(Text::of(error)))
    };
    let (length, compressed) = uncompressed_size(packed).map_err(unreadable)?;
    if length > MESSAGE_MAX {
        return Err(ProtocolViolation::MemoryUnreadable("it is too long".into()).into());
    }
    decompress(compressed, length).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compression_is_worthwhile_on_slow_link() {
        let elapsed = Duration::from_millis(2);
        // 1 MiB that shrinks to a quarter: 786 kB are saved in 2 ms.
        assert!(is_worthwhile(1 << 20, 1 << 18, elapsed, 100e6));
        assert!(!is_worthwhile(1 << 20, 1 << 18, elapsed, 1e9));
        assert!(!is_worthwhile(1 << 20, 1 << 20, elapsed, 1e3));
        assert!(!is_worthwhile(1 << 20, (1 << 20) + 9, Duration::ZERO, 1e3));
    }

    #[test]
    fn rate_counts_only_time_in_transit() {
        let begin = Instant::now();
        let at = |millis: u64| begin + Duration::from_millis(millis);
        let mut link_rate = LinkRate::default();
        for second in 0..4 {
            link_rate.on_send(at(1_000 * second));
            assert_eq!(link_rate.bytes_per_s(), None);
            // Half a mebibyte in 10 ms and 3 ms of work, and then a long pause.
            let busy = Duration::from_millis(3);
            link_rate.on_taken(at(1_000 * second + 4), (1 << 18, Duration::ZERO), true);
            link_rate.on_taken(at(1_000 * second + 13), (1 << 18, busy), false);
        }
        let rate = link_rate.bytes_per_s().expect("a rate");
        assert!((rate / f64::from(1 << 19) - 100.0).abs() < 1e-6, "{rate}");
    }

    #[test]
    fn shrinking_message_is_compressed_and_restored() {
        let compressible = vec![7; 1 << 20];
        let mut compressor = Compressor::default();
        assert_eq!(
            compressor.compress(&[&compressible], None),
            None,
            "the link rate is unknown"
        );
        let compressed = compressor
            .compress(&[&compressible], Some(1.0))
            .expect("a slow way");
        assert!(compressed.len() < compressible.len() / 10);
        assert!(decompress_message(&compressed) == Ok(compressible.clone()));

        let mut state = 1_u64;
        let noise = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        });
        let noise: Vec<u8> = noise.take(1 << 16).collect();
        assert_eq!(compressor.compress(&[&noise], Some(1.0)), None);
        for _ in 0..RETRY_MESSAGES {
            assert_eq!(
                compressor.compress(&[&compressible], Some(1.0)),
                None,
                "not yet again"
            );
        }
        assert!(compressor.compress(&[&compressible], Some(1.0)).is_some());
    }

    #[test]
    fn malformed_or_oversized_message_is_refused() {
        assert!(decompress_message(&[]).is_err());
        let mut compressed = compress_prepend_size(&[1, 2, 3, 4]);
        compressed[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(
            decompress_message(&compressed).is_err_and(|why| why.to_string().contains("too long"))
        );
        compressed[..4].copy_from_slice(&2_u32.to_le_bytes());
        assert!(decompress_message(&compressed).is_err());
    }
}
