//! Limits for number and length of log lines, so that unknown hosts cannot fill the log.

use std::cell::Cell;
use std::fmt::Display;
use std::time::{Duration, Instant};

const LINES_MAX: u32 = 20;
const WINDOW: Duration = Duration::from_secs(10);

/// Limit on lines of the log about one thing: 20 lines in 10 seconds.
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

/// Returns the text of a value that another host chose, cut and marked with an ellipsis if longer than `bytes_max` bytes.
pub fn shortened(value: &impl Display, bytes_max: usize) -> String {
    let mut text = value.to_string();
    if text.len() > bytes_max {
        let end = (0..=bytes_max).rfind(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(shortened(&"short", 5), "short");
        assert_eq!(shortened(&"longer", 5), "longe…");
        assert_eq!(shortened(&"aéé", 2), "a…");
        assert_eq!(shortened(&"é", 0), "…");
    }

    #[test]
    fn lines_are_limited_per_window() {
        let limit = LogLimit::default();
        let start = limit.window.get();
        let admitted = (0..100).filter(|_| limit.admits_at(start)).count();
        assert_eq!(admitted, LINES_MAX as usize);
        assert!(limit.admits_at(start + WINDOW));
    }
}
