//! Processor contention on this host, from `/proc/pressure/cpu`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

/// File with the time for which threads have waited for a processor.
const PRESSURE_FILE: &str = "/proc/pressure/cpu";
/// Waiting share of the elapsed time above which the host has no spare capacity.
const HIGH_SHARE: f64 = 0.25;

/// Reads the kernel's pressure counter at intervals.
#[derive(Debug)]
pub struct CpuPressure {
    /// None if the kernel has no pressure information.
    file: Option<File>,
    last_reading: Option<(Instant, u64)>,
}

impl CpuPressure {
    /// Opens the kernel's counter of the time that threads wait for a processor.
    pub fn new() -> Self {
        Self {
            file: File::open(PRESSURE_FILE).ok(),
            last_reading: None,
        }
    }

    /// Returns true if some thread waited for more than `HIGH_SHARE` of the time since the last call.
    pub fn is_high(&mut self) -> bool {
        let now = Instant::now();
        let Some(waited_us) = self.waited_us() else {
            return false;
        };
        let previous = self.last_reading.replace((now, waited_us));
        previous.is_some_and(|(since, before)| {
            let elapsed_us = now.duration_since(since).as_micros() as f64;
            waited_us.saturating_sub(before) as f64 > HIGH_SHARE * elapsed_us
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
    let some_line = text.lines().find(|line| line.starts_with("some "))?;
    some_line.rsplit_once("total=")?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_is_read_from_some_line() {
        let text = "some avg10=0.97 avg60=11.78 avg300=11.64 total=257\n\
                    full avg10=0.00 avg60=0.00 avg300=0.00 total=3\n";
        assert_eq!(total_us(text), Some(257));
        assert_eq!(total_us("full total=3\n"), None);
    }
}
