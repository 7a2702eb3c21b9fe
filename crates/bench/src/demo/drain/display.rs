//! Display of the running demonstration: lines, with the servers of all nodes after each change.

use std::io::{Write, stderr};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use holdfast_testbed::server_fleet::ServerKind;

use super::DrainEvent;

/// A display of [`DrainEvent`]s on standard error, so that standard output is free for the report.
#[derive(Default)]
pub struct DrainDisplay {
    started: Mutex<Option<Instant>>,
}

impl DrainDisplay {
    /// Writes an event of the demonstration as a line on standard error.
    pub fn show(&self, event: &DrainEvent) {
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        let since = started.get_or_insert_with(Instant::now).elapsed();
        let line = format!("[{:5.1} s] {}\n", since.as_secs_f64(), event_text(event));
        // A failed write must not stop the demonstration.
        let _ = stderr().lock().write_all(line.as_bytes());
    }
}

fn event_text(event: &DrainEvent) -> String {
    match event {
        DrainEvent::Step(what) => what.clone(),
        DrainEvent::Servers(nodes) => {
            let nodes = nodes.iter().map(|(node, kinds)| {
                let kinds: String = kinds.iter().copied().map(letter).collect();
                format!("{node} {kinds:<6}")
            });
            format!(
                "servers: {}",
                nodes.collect::<Vec<_>>().join(" ").trim_end()
            )
        }
        DrainEvent::Moved {
            server,
            from,
            to,
            freeze_ms,
        } => {
            let freeze = freeze_ms.map_or("?".to_owned(), |ms| format!("{ms:.1}"));
            format!("  {server:<12} {from} -> {to}, frozen {freeze} ms")
        }
        DrainEvent::Stayed {
            server,
            node,
            reason,
        } => format!("  {server:<12} stays at {node} for now: {reason}"),
        DrainEvent::Ended => "the clients have ended".to_owned(),
    }
}

/// Returns the letter that stands for a server of this kind.
fn letter(kind: ServerKind) -> char {
    let first = kind.name().chars().next();
    first.unwrap_or('?').to_ascii_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_shown_by_node_in_one_line() {
        let event = DrainEvent::Servers(vec![
            ("n1".to_owned(), Vec::new()),
            ("n2".to_owned(), vec![ServerKind::Redis, ServerKind::Nginx]),
        ]);
        assert_eq!(event_text(&event), "servers: n1        n2 RN");
        let event = DrainEvent::Moved {
            server: "redis-1".to_owned(),
            from: "n1".to_owned(),
            to: "n2".to_owned(),
            freeze_ms: Some(9.14),
        };
        assert_eq!(event_text(&event), "  redis-1      n1 -> n2, frozen 9.1 ms");
    }
}
