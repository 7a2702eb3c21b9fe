//! Display of the running demonstration: lines, with a bar for each freeze.

use std::io::{Write, stderr};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::MigrateEvent;
use super::report::PAPER_FREEZE_MS;

/// Columns of a bar for the paper's freeze.
const BAR_COLUMNS: f64 = 40.0;

/// A display of [`MigrateEvent`]s on standard error, so that standard output is free for the report.
#[derive(Default)]
pub struct MigrateDisplay {
    started: Mutex<Option<Instant>>,
}

impl MigrateDisplay {
    /// Writes an event of the demonstration as a line on standard error.
    pub fn show(&self, event: &MigrateEvent) {
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        let since = started.get_or_insert_with(Instant::now).elapsed();
        let line = format!("[{:5.1} s] {}\n", since.as_secs_f64(), event_text(event));
        // A failed write must not stop the demonstration.
        let _ = stderr().lock().write_all(line.as_bytes());
    }
}

fn event_text(event: &MigrateEvent) -> String {
    match event {
        MigrateEvent::Step(what) => what.clone(),
        MigrateEvent::Moved(of, playing) => {
            let freeze_ms = of.freeze_us / 1e3;
            let columns = (freeze_ms / PAPER_FREEZE_MS * BAR_COLUMNS).round() as usize;
            format!(
                "{} to {}: frozen {freeze_ms:5.2} ms, {playing} players in the game  {}",
                of.from,
                of.to,
                "█".repeat(columns.clamp(1, 2 * BAR_COLUMNS as usize))
            )
        }
        MigrateEvent::Ended => "the players disconnect".to_owned(),
    }
}
