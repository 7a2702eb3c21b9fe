//! Rate limit for log lines, so that unknown hosts cannot fill the log.

use std::cell::Cell;
use std::time::{Duration, Instant};

const LINES_MAX: u32 = 20;
const WINDOW: Duration = Duration::from_secs(10);

/// Admits 20 lines in 10 seconds.
#[derive(Debug)]
pub struct LogLimit {
    window: Cell<Instant>,
    lines: Cell<u32>,
}

impl Default for LogLimit {
    fn default() -> Self {
        LogLimit {
            window: Cell::new(Instant::now()),
            lines: Cell::new(0),
        }
    }
}

impl LogLimit {
    /// Returns true if one more line may be written.
    pub fn admits(&self) -> bool {
        self.admits_at(Instant::now())
    }

    fn admits_at(&self, now: Instant) -> bool {
        if now.duration_since(self.window.get()) >= WINDOW {
            self.window.set(now);
            self.lines.set(0);
        }
        self.lines.set(self.lines.get().saturating_add(1));
        self.lines.get() <= LINES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_limited_per_window() {
        let limit = LogLimit::default();
        let start = limit.window.get();
        let admitted = (0..100).filter(|_| limit.admits_at(start)).count();
        assert_eq!(admitted, LINES_MAX as usize);
        assert!(limit.admits_at(start + WINDOW));
    }
}
