//! The load of this node, which the pool policies of services compare.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// File with the times of all processors.
const PROCESSOR_TIMES_FILE: &str = "/proc/stat";
/// Weight of the newest measurement in the mean, as a divisor.
const SMOOTHING_DIVISOR: f64 = 4.0;

/// Measures the load of this host: the mean of the last seconds.
#[derive(Debug)]
pub struct NodeLoad {
    /// None if the host hides its processor times.
    file: Option<File>,
    last_times: Option<ProcessorTimes>,
    /// Share of processor time in use; none before the second reading of the times.
    busy: Option<f64>,
}

/// Sums of the processors' times since boot, in clock ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessorTimes {
    total: u64,
    idle: u64,
}

impl NodeLoad {
    /// Opens the counters.
    pub fn new() -> Self {
        Self {
            file: File::open(PROCESSOR_TIMES_FILE).ok(),
            last_times: None,
            busy: None,
        }
    }

    /// Returns the load as a fraction of `u32::MAX`: the greater one of the share of processor time in use, as a mean
    /// over the last calls, and of the used part of the flow table. None before the load is known.
    pub fn measure(&mut self, flows: u32, capacity: u32) -> Option<u32> {
        if self.file.is_some() {
            self.update_busy();
            self.busy?;
        }
        let used = f64::from(flows) / f64::from(capacity.max(1));
        let load = self.busy.unwrap_or(0.0).max(used).clamp(0.0, 1.0);
        Some((load * f64::from(u32::MAX)) as u32)
    }

    fn update_busy(&mut self) {
        let Some(times) = self.read_times() else {
            return;
        };
        let Some(before) = self.last_times.replace(times) else {
            return;
        };
        let total = times.total.saturating_sub(before.total);
        let idle = times.idle.saturating_sub(before.idle).min(total);
        if total > 0 {
            let busy = 1.0 - idle as f64 / total as f64;
            let mean = self.busy.unwrap_or(busy);
            self.busy = Some(mean + (busy - mean) / SMOOTHING_DIVISOR);
        }
    }

    fn read_times(&self) -> Option<ProcessorTimes> {
        let mut text = [0; 512];
        let length = self.file.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(&text[..length]).ok()?;
        sum_of_times(text)
    }
}

/// Returns the sums of the first line: user, nice, system, idle, iowait and further times (proc_stat(5)).
fn sum_of_times(text: &str) -> Option<ProcessorTimes> {
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    let times = line.split_whitespace().map(str::parse::<u64>);
    let times = times.collect::<Result<Vec<u64>, _>>().ok()?;
    // Guest times, after the eighth, are part of the user's.
    let total = times
        .iter()
        .take(8)
        .fold(0, |sum: u64, time| sum.saturating_add(*time));
    let idle = times.get(3)?.saturating_add(*times.get(4)?);
    Some(ProcessorTimes { total, idle })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_the_first_line() {
        let text = "cpu  10 1 20 60 4 2 2 1 5 5\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        let times = ProcessorTimes {
            total: 100,
            idle: 64,
        };
        assert_eq!(sum_of_times(text), Some(times));
        for damaged in ["", "intr 5\n", "cpu  1 2 x 4 5\n", "cpu  1 2 3\n"] {
            assert_eq!(sum_of_times(damaged), None);
        }
    }

    #[test]
    fn used_flow_table_is_load_too() {
        let mut load = NodeLoad {
            file: None,
            last_times: None,
            busy: Some(0.25),
        };
        assert_eq!(load.measure(0, 100), Some(u32::MAX / 4));
        let three_quarters = (0.75 * f64::from(u32::MAX)) as u32;
        assert_eq!(load.measure(75, 100), Some(three_quarters));
        assert_eq!(load.measure(500, 100), Some(u32::MAX));
    }

    #[test]
    fn load_is_unknown_at_first() {
        let mut load = NodeLoad::new();
        let has_times = load.read_times().is_some();
        assert_eq!(load.measure(1, 2).is_none(), has_times);
    }
}
