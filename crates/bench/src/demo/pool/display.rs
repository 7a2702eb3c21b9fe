//! Display of the running demonstration: a small live picture on a terminal, lines elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IsTerminal, Write, stderr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::PoolEvent;

/// Interval between pictures while there are only requests.
const REFRESH_INTERVAL: Duration = Duration::from_millis(100);
/// Columns of the longest bar.
const BAR_COLUMNS: u64 = 50;

/// A display of [`PoolEvent`]s from any thread, on standard error, so that standard output is free for the report.
pub struct PoolDisplay {
    live: bool,
    state: Mutex<DisplayState>,
}

#[derive(Default)]
struct DisplayState {
    started: Option<Instant>,
    refreshed: Option<Instant>,
    hosts: Vec<String>,
    dead: BTreeSet<String>,
    served: BTreeMap<String, u64>,
    /// Number of lines of the picture drawn last, which the next one replaces.
    drawn_lines: usize,
}

impl PoolDisplay {
    /// Creates a display: a live picture if standard error is a terminal and `plain` is false.
    pub fn new(plain: bool) -> PoolDisplay {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        PoolDisplay {
            live: !plain && !dumb && stderr().is_terminal(),
            state: Mutex::default(),
        }
    }

    /// Shows an event of the demonstration on standard error.
    pub fn show(&self, event: &PoolEvent) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let text = state.apply(event, self.live);
        let mut out = stderr().lock();
        // A failed write must not stop the demonstration.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}

impl DisplayState {
    /// Applies an event; returns the text to write.
    fn apply(&mut self, event: &PoolEvent, live: bool) -> String {
        let since = self.started.get_or_insert_with(Instant::now).elapsed();
        let line = match event {
            PoolEvent::Step(what) => Some(what.clone()),
            PoolEvent::Elements(hosts) => {
                self.hosts.clone_from(hosts);
                Some(format!("in the pool: {}", hosts.join(", ")))
            }
            PoolEvent::Served(host) => {
                *self.served.entry(host.clone()).or_default() += 1;
                None
            }
            PoolEvent::Retried(what) => {
                Some(format!("attempt failed: {what}; trying another server"))
            }
            PoolEvent::ElementKilled(host) => {
                self.dead.insert(host.clone());
                None
            }
            PoolEvent::Recovered(what, seconds) => Some(format!("{what} after {seconds:.2} s")),
            PoolEvent::Ended => Some(self.counts_line()),
        };
        let line = line.map(|line| format!("[{:5.1} s] {line}\n", since.as_secs_f64()));
        if !live {
            return line.unwrap_or_default();
        }
        let due = self
            .refreshed
            .is_none_or(|at| at.elapsed() >= REFRESH_INTERVAL);
        if line.is_none() && !due {
            return String::new();
        }
        self.refreshed = Some(Instant::now());
        let mut text = match self.drawn_lines {
            0 => String::new(),
            lines => format!("\x1b[{lines}A\x1b[J"),
        };
        text += &line.unwrap_or_default();
        let picture = match event {
            PoolEvent::Ended => Vec::new(),
            _ => self.picture(),
        };
        self.drawn_lines = picture.len();
        text + &picture.concat()
    }

    fn counts_line(&self) -> String {
        let counts = self.served.iter();
        let counts: Vec<String> = counts
            .map(|(host, count)| format!("{host} {count}"))
            .collect();
        format!("answers: {}", counts.join(", "))
    }

    fn picture(&self) -> Vec<String> {
        let served_max = self.served.values().copied().max().unwrap_or(0).max(1);
        let row = |host: &String| {
            let count = self.served.get(host).copied().unwrap_or(0);
            let bar = "█".repeat((count * BAR_COLUMNS / served_max) as usize);
            match self.dead.contains(host) {
                true => format!("   \x1b[31m{host:>4} dead  {bar} {count}\x1b[0m\n"),
                false => format!("   {host:>4} nginx \x1b[32m{bar}\x1b[0m {count}\n"),
            }
        };
        self.hosts.iter().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_display_prints_lines_but_none_per_request() {
        let mut state = DisplayState::default();
        let mut take = |event: PoolEvent| state.apply(&event, false);
        assert!(take(PoolEvent::Step("begin".into())).contains("begin\n"));
        assert_eq!(take(PoolEvent::Served("n3".into())), "");
        assert_eq!(take(PoolEvent::Served("n3".into())), "");
        assert!(take(PoolEvent::Ended).contains("answers: n3 2"));
    }

    #[test]
    fn live_picture_overwrites_the_previous_one() {
        let mut state = DisplayState::default();
        let hosts = vec!["n3".to_owned(), "n4".to_owned()];
        state.apply(&PoolEvent::Elements(hosts), true);
        assert_eq!(state.drawn_lines, 2);
        let text = state.apply(&PoolEvent::Step("next".into()), true);
        assert!(text.starts_with("\x1b[2A\x1b[J["), "{text:?}");
    }
}
