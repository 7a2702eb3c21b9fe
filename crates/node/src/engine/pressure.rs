//! Processor contention on this host, from `/proc/pressure/cpu`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

/// File with the time for which threads have waited for a processor.
const FILE: &str = "/proc/pressure/cpu";
/// Waiting share of the elapsed time above which the host has no spare capacity.
const HIGH: f64 = 0.25;

/// Reads the kernel's pressure counter at intervals.
#[derive(Debug)]
pub(super) struct Pressure {
    /// None if the kernel has no pressure information.
    file: Option<File>,
    seen: Option<(Instant, u64)>,
}

impl Pressure {
    pub(super) fn new() -> Self {
        Self {
            file: File::open(FILE).ok(),
            seen: None,
        }
    }

    /// Returns true if some thread waited for more than `HIGH` of the time since the last call.
    pub(super) fn is_high(&mut self) -> bool {
        let now = Instant::now();
        let Some(waited_us) = self.waited_us() else {
            return false;
        };
        let seen = self.seen.replace((now, waited_us));
        seen.is_some_and(|(since, before)| {
            let elapsed_us = now.duration_since(since).as_micros() as f64;
            waited_us.saturating_sub(before) as f64 > HIGH * elapsed_us
        })
    }

    fn waited_us(&self) -> Option<u64> {
        let mut text = [0; 256];
        let length = self.file.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(&text[..length]).ok()?;
        total_us(text)
    }
}

/// Returns the time in µs in which at least one thread has waited, since boot.
fn total_us(text: &str) -> Option<u64> {
    let some = text.lines().find(|line| line.starts_with("some "))?;
    some.rsplit_once("total=")?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_that_of_some_thread() {
        let text = "some avg10=0.97 avg60=11.78 avg300=11.64 total=257\n\
                    full avg10=0.00 avg60=0.00 avg300=0.00 total=3\n";
        assert_eq!(total_us(text), Some(257));
        assert_eq!(total_us("full total=3\n"), None);
    }
}
