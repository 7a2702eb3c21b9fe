//! Display of the running demonstration: a small live picture on a terminal, lines elsewhere.

use std::io::{IsTerminal, Write, stderr};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::report::median;
use super::{DemoEvent, HandoffResult};

/// Columns of the progress bar.
const BAR_COLUMNS: usize = 40;

/// A display of [`DemoEvent`]s from any thread, on standard error, so that standard output is free for the report.
pub struct DemoDisplay {
    live: bool,
    state: Mutex<DisplayState>,
}

#[derive(Default)]
struct DisplayState {
    started: Option<Instant>,
    flow: String,
    nodes: Vec<String>,
    owner: String,
    bytes: u64,
    total: u64,
    elapsed_s: f64,
    last_handoff: Option<HandoffResult>,
    freezes_us: Vec<f64>,
    note: Option<String>,
    /// Lines of the picture on the terminal.
    drawn_lines: usize,
}

impl DemoDisplay {
    /// Creates a display: a live picture if standard error is a terminal and `plain` is false.
    pub fn new(plain: bool) -> Self {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Self {
            live: !plain && !dumb && stderr().is_terminal(),
            state: Mutex::default(),
        }
    }

    /// Shows an event of the demonstration on standard error: in the picture, or as a line.
    pub fn show(&self, event: &DemoEvent) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.apply(event);
        let text = if self.live {
            state.picture(event)
        } else {
            state.event_line(event)
        };
        let mut out = stderr().lock();
        // A failed write must not stop the demonstration.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}

impl DisplayState {
    fn apply(&mut self, event: &DemoEvent) {
        self.started.get_or_insert_with(Instant::now);
        match event {
            DemoEvent::Step(_) => (self.bytes, self.elapsed_s) = (0, 0.0),
            DemoEvent::Connected { flow, owner, nodes } => {
                (self.flow, self.owner, self.nodes) = (flow.clone(), owner.clone(), nodes.clone());
                (self.last_handoff, self.note) = (None, None);
                self.freezes_us.clear();
            }
            DemoEvent::Progress {
                bytes,
                total,
                elapsed_s,
            } => {
                (self.bytes, self.total, self.elapsed_s) = (*bytes, *total, *elapsed_s);
            }
            DemoEvent::HandedOff(handoff) => {
                self.owner.clone_from(&handoff.to);
                self.freezes_us.extend(handoff.freeze_us);
                self.last_handoff = Some(handoff.clone());
                self.note = None;
            }
            DemoEvent::HandoffFailed { owner: at, reason } => {
                self.note = Some(format!(
                    "handoff failed, the connection stays at {at}: {reason}"
                ))
            }
            DemoEvent::Ended => {}
        }
    }

    /// Returns one line, or nothing.
    fn event_line(&self, event: &DemoEvent) -> String {
        let since = self
            .started
            .map_or(0.0, |started| started.elapsed().as_secs_f64());
        let text = match event {
            DemoEvent::Step(what) => what.clone(),
            DemoEvent::Connected { flow, owner, .. } => {
                format!("connected: {flow}, served by {owner}")
            }
            DemoEvent::HandedOff(handoff) => {
                let arrived = format!(
                    "{} of {}",
                    format_bytes(self.bytes),
                    format_bytes(self.total)
                );
                format!("{}   {arrived}", handoff_line(handoff))
            }
            DemoEvent::HandoffFailed { .. } => self.note.clone().unwrap_or_default(),
            DemoEvent::Ended => {
                format!(
                    "{} in {:.1} s, {:.0} MB/s",
                    format_bytes(self.bytes),
                    self.elapsed_s,
                    self.rate_mb_per_s()
                )
            }
            DemoEvent::Progress { .. } => return String::new(),
        };
        format!("[{since:5.1} s] {text}\n")
    }

    /// Returns the picture, drawn over the last one; steps become lines above it.
    fn picture(&mut self, event: &DemoEvent) -> String {
        let mut text = match self.drawn_lines {
            0 => String::new(),
            lines => format!("\x1b[{lines}A\x1b[J"),
        };
        self.drawn_lines = 0;
        if matches!(event, DemoEvent::Step(_) | DemoEvent::Ended) {
            return text + &self.event_line(event);
        }
        let lines = self.picture_lines();
        self.drawn_lines = lines.len();
        for line in lines {
            text += &line;
            text += "\n";
        }
        text
    }

    fn picture_lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if !self.nodes.is_empty() {
            let row = |draw: &dyn Fn(&str) -> String| -> String {
                self.nodes
                    .iter()
                    .map(|node| format!("   {}", draw(node)))
                    .collect()
            };
            let is_owner = |node: &str| node == self.owner;
            let bold = |on: bool, text: String| {
                if on {
                    format!("\x1b[1;32m{text}\x1b[0m")
                } else {
                    text
                }
            };
            lines.push(row(&|node| bold(is_owner(node), "┌──────────┐".into())));
            lines.push(row(&|node| bold(is_owner(node), format!("│{node:^10}│"))));
            let role = |node: &str| if is_owner(node) { "serves" } else { "" };
            lines.push(row(&|node| {
                bold(is_owner(node), format!("│{:^10}│", role(node)))
            }));
            lines.push(row(&|node| bold(is_owner(node), "└────┬─────┘".into())));
            lines.push(row(&|node| {
                if is_owner(node) {
                    "     │      ".into()
                } else {
                    " ".repeat(12)
                }
            }));
            lines.push(format!("   {}", self.flow));
        }
        let progress = if self.total == 0 {
            0.0
        } else {
            self.bytes as f64 / self.total as f64
        };
        let full = ((progress * BAR_COLUMNS as f64) as usize).min(BAR_COLUMNS);
        lines.push(format!(
            "   [{}{}] {:3.0} %  {} of {}  {:.0} MB/s",
            "█".repeat(full),
            "░".repeat(BAR_COLUMNS - full),
            progress * 100.0,
            format_bytes(self.bytes),
            format_bytes(self.total),
            self.rate_mb_per_s()
        ));
        if let Some(handoff) = &self.last_handoff {
            lines.push(format!("   {}", handoff_line(handoff)));
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
    fn rate_mb_per_s(&self) -> f64 {
        if self.elapsed_s > 0.0 {
            self.bytes as f64 / 1e6 / self.elapsed_s
        } else {
            0.0
        }
    }
}

fn handoff_line(handoff: &HandoffResult) -> String {
    let HandoffResult {
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
pub fn format_bytes(bytes: u64) -> String {
    match bytes {
        0x4000_0000.. => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
        _ => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
    }
}
