//! Display of the running demonstration: a small live picture on a terminal, lines elsewhere.

use std::io::{IsTerminal, Write, stderr};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::report::median;
use super::{Event, Handoff};

/// Columns of the progress bar.
const BAR: usize = 40;

/// A display of [`Event`]s from any thread, on standard error, so that standard output is free for the report.
pub struct Screen {
    live: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    started: Option<Instant>,
    flow: String,
    nodes: Vec<String>,
    owner: String,
    bytes: u64,
    total: u64,
    elapsed_s: f64,
    last: Option<Handoff>,
    freezes_us: Vec<f64>,
    note: Option<String>,
    /// Lines of the picture on the terminal.
    drawn: usize,
}

impl Screen {
    /// Creates a display: a live picture if standard error is a terminal and `plain` is false.
    pub fn new(plain: bool) -> Self {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Self {
            live: !plain && !dumb && stderr().is_terminal(),
            state: Mutex::default(),
        }
    }

    /// Shows an event.
    pub fn show(&self, event: &Event) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.take(event);
        let text = if self.live {
            state.picture(event)
        } else {
            state.line(event)
        };
        let mut out = stderr().lock();
        // A failed write must not stop the demonstration.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}

impl State {
    fn take(&mut self, event: &Event) {
        self.started.get_or_insert_with(Instant::now);
        match event {
            Event::Step(_) => (self.bytes, self.elapsed_s) = (0, 0.0),
            Event::Connected { flow, owner, nodes } => {
                (self.flow, self.owner, self.nodes) = (flow.clone(), owner.clone(), nodes.clone());
                (self.last, self.note) = (None, None);
                self.freezes_us.clear();
            }
            Event::Progress {
                bytes,
                total,
                elapsed_s,
            } => {
                (self.bytes, self.total, self.elapsed_s) = (*bytes, *total, *elapsed_s);
            }
            Event::Moved(handoff) => {
                self.owner.clone_from(&handoff.to);
                self.freezes_us.extend(handoff.freeze_us);
                self.last = Some(handoff.clone());
                self.note = None;
            }
            Event::Kept { at, reason } => self.note = Some(format!("stays at {at}: {reason}")),
            Event::Ended => {}
        }
    }

    /// Returns one line, or nothing.
    fn line(&self, event: &Event) -> String {
        let since = self
            .started
            .map_or(0.0, |started| started.elapsed().as_secs_f64());
        let text = match event {
            Event::Step(what) => what.clone(),
            Event::Connected { flow, owner, .. } => format!("connected: {flow}, served by {owner}"),
            Event::Moved(handoff) => {
                let arrived = format!("{} of {}", megabytes(self.bytes), megabytes(self.total));
                format!("{}   {arrived}", describe(handoff))
            }
            Event::Kept { .. } => self.note.clone().unwrap_or_default(),
            Event::Ended => {
                format!(
                    "{} in {:.1} s, {:.0} MB/s",
                    megabytes(self.bytes),
                    self.elapsed_s,
                    self.rate()
                )
            }
            Event::Progress { .. } => return String::new(),
        };
        format!("[{since:5.1} s] {text}\n")
    }

    /// Returns the picture, drawn over the last one; steps become lines above it.
    fn picture(&mut self, event: &Event) -> String {
        let mut text = match self.drawn {
            0 => String::new(),
            lines => format!("\x1b[{lines}A\x1b[J"),
        };
        self.drawn = 0;
        if matches!(event, Event::Step(_) | Event::Ended) {
            return text + &self.line(event);
        }
        let lines = self.lines();
        self.drawn = lines.len();
        for line in lines {
            text += &line;
            text += "\n";
        }
        text
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if !self.nodes.is_empty() {
            let row = |draw: &dyn Fn(&str) -> String| -> String {
                self.nodes
                    .iter()
                    .map(|node| format!("   {}", draw(node)))
                    .collect()
            };
            let serves = |node: &str| node == self.owner;
            let bold = |on: bool, text: String| {
                if on {
                    format!("\x1b[1;32m{text}\x1b[0m")
                } else {
                    text
                }
            };
            lines.push(row(&|node| bold(serves(node), "┌──────────┐".into())));
            lines.push(row(&|node| bold(serves(node), format!("│{node:^10}│"))));
            let role = |node: &str| if serves(node) { "serves" } else { "" };
            lines.push(row(&|node| {
                bold(serves(node), format!("│{:^10}│", role(node)))
            }));
            lines.push(row(&|node| bold(serves(node), "└────┬─────┘".into())));
            lines.push(row(&|node| {
                if serves(node) {
                    "     │      ".into()
                } else {
                    " ".repeat(12)
                }
            }));
            lines.push(format!("   {}", self.flow));
        }
        let done = if self.total == 0 {
            0.0
        } else {
            self.bytes as f64 / self.total as f64
        };
        let full = ((done * BAR as f64) as usize).min(BAR);
        lines.push(format!(
            "   [{}{}] {:3.0} %  {} of {}  {:.0} MB/s",
            "█".repeat(full),
            "░".repeat(BAR - full),
            done * 100.0,
            megabytes(self.bytes),
            megabytes(self.total),
            self.rate()
        ));
        if let Some(handoff) = &self.last {
            lines.push(format!("   {}", describe(handoff)));
            let longest = self.freezes_us.iter().copied().fold(0.0, f64::max);
            let middle = median(&self.freezes_us).unwrap_or(0.0);
            lines.push(format!(
                "   freezes: median {middle:.0} us, longest {longest:.0} us"
            ));
        }
        lines.extend(self.note.iter().map(|note| format!("   {note}")));
        lines
    }

    /// Returns the rate since the transfer began, MB/s.
    fn rate(&self) -> f64 {
        if self.elapsed_s > 0.0 {
            self.bytes as f64 / 1e6 / self.elapsed_s
        } else {
            0.0
        }
    }
}

fn describe(handoff: &Handoff) -> String {
    let Handoff {
        number,
        from,
        to,
        bytes_transferred,
        total_ms,
        ..
    } = handoff;
    let freeze = handoff
        .freeze_us
        .map_or("?".into(), |freeze| format!("{freeze:.0}"));
    format!(
        "handoff {number:>2}: {from} -> {to}   freeze {freeze:>5} us   {bytes_transferred:>7} bytes moved   done in {total_ms:.1} ms"
    )
}

/// Returns a number of bytes in MiB or GiB.
pub fn megabytes(bytes: u64) -> String {
    match bytes {
        0x4000_0000.. => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
        _ => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
    }
}
