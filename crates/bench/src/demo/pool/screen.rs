//! Display of the running demonstration: a small live picture on a terminal, lines elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IsTerminal, Write, stderr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::PoolEvent;

/// Interval between pictures while there are only requests.
const REFRESH: Duration = Duration::from_millis(100);
/// Columns of the longest bar.
const BAR: u64 = 50;

/// A display of [`PoolEvent`]s from any thread, on standard error, so that standard output is free for the report.
pub struct PoolScreen {
    live: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    started: Option<Instant>,
    refreshed: Option<Instant>,
    hosts: Vec<String>,
    dead: BTreeSet<String>,
    served: BTreeMap<String, u64>,
    /// Lines of the picture on the terminal.
    drawn: usize,
}

impl PoolScreen {
    /// Creates a display: a live picture if standard error is a terminal and `plain` is false.
    pub fn new(plain: bool) -> PoolScreen {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        PoolScreen {
            live: !plain && !dumb && stderr().is_terminal(),
            state: Mutex::default(),
        }
    }

    /// Shows an event.
    pub fn show(&self, event: &PoolEvent) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let text = state.take(event, self.live);
        let mut out = stderr().lock();
        // A failed write must not stop the demonstration.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}

impl State {
    /// Applies an event; returns the text to write.
    fn take(&mut self, event: &PoolEvent, live: bool) -> String {
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
            PoolEvent::Retried(what) => Some(format!("tried in vain: {what}; another at once")),
            PoolEvent::Dead(host) => {
                self.dead.insert(host.clone());
                None
            }
            PoolEvent::Recovered(what, seconds) => Some(format!("{what}, {seconds:.2} s after")),
            PoolEvent::Ended => Some(self.counts()),
        };
        let line = line.map(|line| format!("[{:5.1} s] {line}\n", since.as_secs_f64()));
        if !live {
            return line.unwrap_or_default();
        }
        let due = self.refreshed.is_none_or(|at| at.elapsed() >= REFRESH);
        if line.is_none() && !due {
            return String::new();
        }
        self.refreshed = Some(Instant::now());
        let mut text = match self.drawn {
            0 => String::new(),
            lines => format!("\x1b[{lines}A\x1b[J"),
        };
        text += &line.unwrap_or_default();
        let picture = match event {
            PoolEvent::Ended => Vec::new(),
            _ => self.picture(),
        };
        self.drawn = picture.len();
        text + &picture.concat()
    }

    fn counts(&self) -> String {
        let counts = self.served.iter();
        let counts: Vec<String> = counts
            .map(|(host, count)| format!("{host} {count}"))
            .collect();
        format!("answers: {}", counts.join(", "))
    }

    fn picture(&self) -> Vec<String> {
        let most = self.served.values().copied().max().unwrap_or(0).max(1);
        let row = |host: &String| {
            let count = self.served.get(host).copied().unwrap_or(0);
            let bar = "█".repeat((count * BAR / most) as usize);
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
    fn without_a_terminal_there_are_lines_and_none_for_each_request() {
        let mut state = State::default();
        let mut take = |event: PoolEvent| state.take(&event, false);
        assert!(take(PoolEvent::Step("begin".into())).contains("begin\n"));
        assert_eq!(take(PoolEvent::Served("n3".into())), "");
        assert_eq!(take(PoolEvent::Served("n3".into())), "");
        assert!(take(PoolEvent::Ended).contains("answers: n3 2"));
    }

    #[test]
    fn a_picture_is_drawn_over_the_last_one() {
        let mut state = State::default();
        let hosts = vec!["n3".to_owned(), "n4".to_owned()];
        state.take(&PoolEvent::Elements(hosts), true);
        assert_eq!(state.drawn, 2);
        let text = state.take(&PoolEvent::Step("next".into()), true);
        assert!(text.starts_with("\x1b[2A\x1b[J["), "{text:?}");
    }
}
